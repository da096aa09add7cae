import dataclasses
from pathlib import Path

import pytest

from experiments.lm import config as configs
from experiments.lm.config import TrainConfig, check, default_config, merge, read_toml, refuse_changes, to_toml
from experiments.lm.errors import UsageError
from pallas_ce import LossConfig

SHIPPED = sorted((Path(configs.__file__).parents[1] / "configs").glob("*.toml"))


def test_a_stored_configuration_reads_back_as_it_was_except_for_its_folder(tmp_path: Path) -> None:
    changes = {"steps": 7, "learning_rate": 2e-3, "tie_embeddings": True, "optimizer": "muon", "z_loss_weight": 1e-4}
    config = TrainConfig(data='a "quoted" path\\with ü', loss_fn="cross_entropy", out="x", **changes)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert merge(TrainConfig(), read_toml(path), "test") == dataclasses.replace(config, out="")
    assert LossConfig.from_toml(path) == LossConfig("cross_entropy", 0, 1e-4)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_shipped_configurations_are_valid_on_every_backend(path: Path, backend: str) -> None:
    check(merge(default_config(backend), read_toml(path), str(path)))


def test_defaults_are_valid_and_larger_on_an_accelerator() -> None:
    cpu, gpu = default_config("cpu"), default_config("gpu")
    check(cpu)
    check(gpu)
    assert (cpu.vocab_size, cpu.dtype) == (16384, "float32")
    assert (gpu.vocab_size, gpu.dtype) == (32768, "bfloat16")
    assert gpu.width > cpu.width


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"steps": 1.5}, "int"),
        ({"steps": True}, "int"),
        ({"remat": 1}, "bool"),
        ({"learning_rate": "x"}, "float"),
        ({"learning_rate": False}, "float"),
        ({"data": 3}, "str"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(values: dict[str, object], kind: str) -> None:
    with pytest.raises(UsageError, match=f"must be of type {kind}"):
        merge(TrainConfig(), values, "test")


def test_an_integer_is_taken_for_a_float() -> None:
    assert merge(TrainConfig(), {"clip_norm": 2}, "test").clip_norm == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 256}, "vocab_size is 256; it must be at least 257"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be a finite number"),
        ({"warmup": 1.0}, "warmup is 1.0; it must be below 1"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0; it must be below 1"),
        ({"final_learning_rate": 1.5}, "final_learning_rate is 1.5; it must be at most 1"),
        ({"seed": 2**31}, "seed is 2147483648; it must be at most 2147483647"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of float32, bfloat16"),
        ({"width": 9, "attention_heads": 3}, "width / attention_heads is 9 / 3 = 3, which is odd"),
    ],
)
def test_impossible_values_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    config = merge(TrainConfig(), changes, "test")
    with pytest.raises(UsageError) as error:
        check(config)
    assert message in str(error.value)


def test_a_resumed_run_may_move_its_folders_but_not_change_its_numbers() -> None:
    stored = dataclasses.asdict(TrainConfig())
    refuse_changes(stored, TrainConfig(out="elsewhere", cache_dir="x", validate_every=3, checkpoint_every=2), "run")
    with pytest.raises(UsageError, match=r"run was made with seed = 0, but now seed = 1"):
        refuse_changes(stored, TrainConfig(seed=1), "run")


def test_a_run_from_before_an_option_was_made_with_its_default():
    stored = dataclasses.asdict(TrainConfig())
    del stored["logit_softcap"]
    refuse_changes(stored, TrainConfig(), "run")
    with pytest.raises(UsageError, match=r"logit_softcap = 0.0, but now logit_softcap = 30.0"):
        refuse_changes(stored, TrainConfig(logit_softcap=30.0), "run")
