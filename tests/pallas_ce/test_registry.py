"""Losses picked from a configuration."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import LossConfig, build_loss_fn, linear_cross_entropy, loss_names, register_loss
from pallas_ce.objectives import registry
from tests.pallas_ce.checks import assert_close

HIDDEN, WEIGHT = (jnp.asarray(np.random.default_rng(n).normal(size=(*n, 5)), jnp.float32) for n in ((2, 7), (11,)))
LABELS = jnp.array([[0, 3, 10, -100, 11, 2, -1], [5, 5, -100, 7, 1, 0, 4]])
BUILT_IN = ("cross_entropy", "chunked_cross_entropy", "fused_linear_cross_entropy")


@pytest.fixture(autouse=True)
def _registry_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def _called(config: Any, hidden: Any, weight: Any, labels: Any = LABELS) -> Any:
    loss_fn = build_loss_fn(config)
    of_head = registry._REGISTRY[config["loss_fn"]][1] == "hidden"
    return loss_fn(hidden, weight, labels) if of_head else loss_fn(hidden @ weight.T, labels)


def _plain(hidden: Any, weight: Any, **options: Any) -> Any:
    return linear_cross_entropy(hidden, weight, LABELS, implementation="reference", **options)


# Of a configuration, and the same of the function.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"z_loss_weight": 0.1, "label_smoothing": 0.2}, {"z_loss": 0.1, "label_smoothing": 0.2}),
    ({"ce_chunk_size": 3}, {}),
    ({"logit_softcap": 2.0}, {"logit_softcap": 2.0}),
]


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("options", "plain"), OPTIONS)
def test_every_built_in_loss_is_the_same_mean_over_the_labels_that_count(name: str, options: Any, plain: Any) -> None:
    got = jax.value_and_grad(lambda h, w: _called({"loss_fn": name, **options}, h, w), (0, 1))(HIDDEN, WEIGHT)
    want = jax.value_and_grad(lambda h, w: _plain(h, w, **plain), (0, 1))(HIDDEN, WEIGHT)
    assert_close(got, want, 1e-5, floor=1e-6)


@pytest.mark.parametrize("name", ["mine", *BUILT_IN])
def test_a_weight_of_zero_adds_no_work(name: str) -> None:
    register_loss("mine", lambda logits, labels: jnp.mean(logits))

    def program(weight: dict[str, float]) -> str:
        return str(jax.make_jaxpr(lambda h: _called({"loss_fn": name, **weight}, h, WEIGHT))(HIDDEN))

    assert program({"z_loss_weight": 0.0}) == program({})
    assert len(program({"z_loss_weight": 0.1})) > len(program({}))


def test_a_toml_file_is_read_by_its_train_section(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 3\n[train]\nloss_fn = "chunked_cross_entropy"\nz_loss_weight = 1\n', encoding="utf-8")
    config = LossConfig.from_toml(path)
    assert config == LossConfig("chunked_cross_entropy", 0, 1.0, 0.0)
    logits = HIDDEN @ WEIGHT.T
    assert build_loss_fn(str(path))(logits, LABELS) == build_loss_fn(config)(logits, LABELS)
    path.write_text("steps = 3\n", encoding="utf-8")
    assert LossConfig.from_toml(path) == LossConfig()


UNKNOWN_KEY = (
    r"\[train\] of .*run.toml has the unknown key 'z_loss'; known keys: loss_fn, ce_chunk_size, z_loss_weight,"
)
# Contents of a file, in its section [train] or by themselves, and their error.
IN_TRAIN: list[tuple[str, type[Exception], str]] = [
    ("z_loss = 0.1", ValueError, UNKNOWN_KEY),
    ("z_loss_weight = 'x'", TypeError, r"run.toml: z_loss_weight='x' must be of type float"),
    ("ce_chunk_size = 1.5", TypeError, "ce_chunk_size=1.5 must be of type int"),
    ("ce_chunk_size = -1", ValueError, "run.toml: ce_chunk_size=-1 must be a positive int, or 0 for 4096"),
    ("z_loss_weight = -1.0", ValueError, "z_loss_weight=-1.0 must be a finite number, at least 0"),
    ("logit_softcap = -1.0", ValueError, "logit_softcap=-1.0 must be a finite number, at least 0"),
    ("label_smoothing = 2.0", ValueError, "label_smoothing=2.0 must be between 0 and 1"),
    ("loss_fn = 'ce'", ValueError, "loss_fn='ce' is unknown; registered are cross_entropy, chunked_cross"),
    ("z_loss_weight = 1" + 400 * "0", ValueError, "z_loss_weight=1000.*… must be a finite number, at least 0"),
]
WHOLE: list[tuple[str, type[Exception], str]] = [
    ("train = 3", ValueError, r"\[train\] of .*run.toml is 3; it must be a section"),
    ("[train", ValueError, "run.toml cannot be read as TOML: Expected"),
    ("z_loss_weight = 0.1", ValueError, r"run.toml sets z_loss_weight outside its section \[train\]; move it there"),
    ("[trian]\nloss_fn = 'x'", ValueError, r"run.toml sets loss_fn in its section \[trian\] and has no"),
    ("a = " + 5000 * "[" + 5000 * "]", ValueError, "run.toml cannot be read as TOML: "),
]


@pytest.mark.parametrize(
    ("text", "kind", "message"), [*((f"[train]\n{text}", *row) for text, *row in IN_TRAIN), *WHOLE], ids=range(14)
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, kind: Any, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(kind, match=message):
        build_loss_fn(path)


def test_values_that_cannot_be_printed_are_refused_all_the_same() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TypeError, match="z_loss_weight=<list> must be of type float"):
        build_loss_fn({"z_loss_weight": deep})
    with pytest.raises(ValueError, match="z_loss_weight=<int> must be a finite number"):
        build_loss_fn({"z_loss_weight": 10**5000})


# Names, losses and ways to call them that cannot be registered.
NOT_REGISTERED: list[tuple[str, Any, Any, type[Exception], str]] = [
    ("cross_entropy", jnp.mean, "logits", ValueError, "name='cross_entropy' is taken; registered are cross_entropy, c"),
    ("mine", 3, "logits", TypeError, "loss_fn=3 must be a function of logits, labels"),
    ("mine", jnp.mean, "both", ValueError, "takes='both' is unknown; choose from 'logits', 'hidden'"),
    ("mine", lambda labels, logits: 0.0, "logits", TypeError,
     r"takes labels, logits; with takes='logits' it is called \(logits, lab"),
    ("mine", lambda weight, hidden, labels: 0.0, "hidden", TypeError,
     r"takes weight, hidden, labels; with takes='hidden'"),
    ("mine", lambda hidden, weight, labels: 0.0, "logits", TypeError,
     r"cannot be called \(logits, labels\).*missing .*'labels'"),
    ("mine", lambda logits, labels: 0.0, "hidden", TypeError,
     r"cannot be called \(hidden, weight, labels\).*too many"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loss_fn", "takes", "kind", "message"), NOT_REGISTERED)
def test_registering_needs_a_new_name_a_function_and_a_known_call(
    name: str, loss_fn: Any, takes: Any, kind: Any, message: str
) -> None:
    with pytest.raises(kind, match=message):
        register_loss(name, loss_fn, takes=takes)
    assert loss_names()[:3] == BUILT_IN


@pytest.mark.parametrize("options", [{"bias": jnp.arange(11.0) / 3}, {"vocab_size": 5}, {"ignore_index": 5}, {}])
def test_the_z_loss_is_added_to_a_users_loss_of_the_labels_and_the_head_of_the_call(options: Any) -> None:
    register_loss("hidden", lambda hidden, weight, labels, **options: jnp.mean(hidden @ weight.T), takes="hidden")
    register_loss("logits", lambda logits, labels, **options: jnp.mean(logits))

    def want(hidden: Any, weight: Any) -> Any:
        logits = (hidden @ weight.T + options.get("bias", 0))[..., : options.get("vocab_size")]
        counts = (LABELS >= 0) & (logits.shape[-1] > LABELS) & (options.get("ignore_index", -100) != LABELS)
        z_loss = jnp.where(counts, jax.nn.logsumexp(logits, -1) ** 2, 0).sum() / counts.sum()
        return jnp.mean(hidden @ weight.T) + 0.5 * z_loss

    exact = jax.value_and_grad(want, (0, 1))(HIDDEN, WEIGHT)
    for takes in ("hidden",) if "bias" in options else ("hidden", "logits"):

        def loss(hidden: Any, weight: Any, takes: str = takes) -> Any:
            loss_fn = build_loss_fn({"loss_fn": takes, "z_loss_weight": 0.5})
            given = {"weight": weight} if takes == "hidden" else {}
            return loss_fn(hidden if given else hidden @ weight.T, labels=LABELS, **given, **options)

        assert_close(jax.value_and_grad(loss, (0, 1))(HIDDEN, WEIGHT), exact, 1e-5, floor=2e-6)


def test_what_the_z_loss_or_a_users_loss_would_not_honour_is_refused() -> None:
    register_loss("mine", lambda logits, labels, **options: jnp.mean(logits))
    loss_fn = build_loss_fn({"loss_fn": "mine", "z_loss_weight": 0.5})
    with pytest.raises(ValueError, match=r"token_weights at a call of a registered loss with z_loss_weight=0\.5"):
        loss_fn(HIDDEN, LABELS, token_weights=1.0)
    register_loss("by_row", lambda logits, labels: logits.sum(-1))
    with pytest.raises(ValueError, match=r"loss_fn='by_row' returned the shape \(2, 7\); a registered"):
        build_loss_fn({"loss_fn": "by_row", "z_loss_weight": 0.5})(HIDDEN, LABELS)
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1 is not read by loss_fn='mine'"):
        build_loss_fn({"loss_fn": "mine", "label_smoothing": 0.1})
    with pytest.raises(ValueError, match=r"logit_softcap=30\.0 is not read by loss_fn='mine'"):
        build_loss_fn({"loss_fn": "mine", "logit_softcap": 30.0})


def test_a_document_with_a_train_section_is_a_configuration_and_types_are_checked_wherever_they_come_from() -> None:
    document = {"steps": 3, "train": {"loss_fn": "chunked_cross_entropy", "z_loss_weight": np.float32(0.5)}}
    assert LossConfig.from_mapping(document) == LossConfig("chunked_cross_entropy", z_loss_weight=np.float32(0.5))
    with pytest.raises(TypeError, match="z_loss_weight='1' must be of type float"):
        LossConfig(z_loss_weight="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config=None must be a LossConfig, a mapping or the path"):
        build_loss_fn(None)  # type: ignore[arg-type]
