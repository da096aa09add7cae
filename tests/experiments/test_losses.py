"""Training with a loss that the configuration names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.lm import config as configs
from experiments.lm.config import OF_LOSS, OPTIONS, TrainConfig, UsageError, merge
from experiments.lm.model.objective import fused, objective
from experiments.lm.model.transformer import LanguageModel
from experiments.lm.records import curve, read_records
from pallas_ce import LossConfig, loss_names

Train = Callable[..., Any]
RECIPE = Path(configs.__file__).parents[1] / "configs" / "muon_chunked_z_loss.toml"


def _losses(run: Path, head: str, kind: str = "train") -> list[float]:
    return list(curve(list(read_records(run / "metrics.jsonl")), kind, head).values())


@pytest.mark.nightly
def test_the_reference_recipe_trains(train: Train, tmp_path: Path) -> None:
    """Muon, chunked cross entropy and z-loss together, from the file that ships."""
    finished = train("--config", str(RECIPE), out=tmp_path / "run", steps=30)
    assert finished.code == 0, finished.err
    losses = _losses(tmp_path / "run", "logits")
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.5
    stored = LossConfig.from_toml(tmp_path / "run" / "config.toml")
    assert stored == LossConfig.from_toml(RECIPE) == LossConfig("chunked_cross_entropy", 4096, 1e-4)
    assert train("--resume", out=tmp_path / "run", steps=30).code == 0


@pytest.mark.nightly
def test_every_loss_trains_alike_and_validates_without_its_regularisers(train: Train, tmp_path: Path) -> None:
    options = {"z-loss-weight": 1e-2, "label-smoothing": 0.1}
    runs = {}
    for name, head in (("fused_linear_cross_entropy", "fused"), ("cross_entropy", "logits")):
        assert train(out=tmp_path / name, **{"loss-fn": name}, **options).code == 0
        runs[name] = (_losses(tmp_path / name, head), _losses(tmp_path / name, head, "validation"))
    (fused, fused_validation), (logits, logits_validation) = runs.values()
    np.testing.assert_allclose(fused, logits, atol=1e-4)
    np.testing.assert_allclose(fused_validation, logits_validation, atol=1e-4)
    assert fused_validation[-1] < fused[-1] - 0.1  # at a log-sum-exp of 5 or more the z part alone is 0.25


@pytest.mark.parametrize("name", ["cross_entropy", "chunked_cross_entropy"])
def test_the_padding_of_a_split_vocabulary_has_no_part_in_a_smoothed_loss(name: str) -> None:
    config = TrainConfig(
        vocab_size=257, width=16, layers=1, attention_heads=2, mlp_width=32, mesh="tensor=3", label_smoothing=0.1,
        z_loss_weight=1e-2, loss_fn=name, logit_softcap=2.0,
    )  # fmt: skip
    model = LanguageModel(config, 0, rngs=nnx.Rngs(0))
    rows = jax.random.randint(jax.random.key(1), (2, 9), 1, 257)
    assert model.head.kernel is not None
    assert model.head.kernel.shape == (16, 258)
    np.testing.assert_allclose(objective(config, "logits")(model, rows), fused(model, rows), rtol=1e-5)


def test_the_choices_of_the_command_are_the_losses_that_the_library_has_registered() -> None:
    assert set(OPTIONS["loss_fn"].metadata["choices"]) <= set(loss_names())
    assert set(OF_LOSS) == set(LossConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    "changes", [{"loss_fn": "cross_entropy"}, {"z_loss_weight": 0.1}, {"label_smoothing": 0.1}, {"logit_softcap": 9.0}]
)
def test_the_plain_loss_takes_no_options(changes: dict[str, Any]) -> None:
    for head in ("both", "canonical"):
        with pytest.raises(UsageError, match=f"head is '{head}', which trains the plain cross entropy"):
            merge(TrainConfig(head=head), changes, "test")
