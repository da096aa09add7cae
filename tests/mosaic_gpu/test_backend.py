"""Losses and gradients through the backend, in both backward modes, under the GPU interpreter."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce.backends.mosaic_gpu
from pallas_ce import linear_cross_entropy, linear_log_probs, linear_loss, linear_row_statistics
from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu import recomputation
from pallas_ce.backends.mosaic_gpu.kernels import operands
from pallas_ce.backends.mosaic_gpu.schedule import plans
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.modes import forward
from pallas_ce.parallel.shards import Shards
from pallas_ce.streaming.rows import Rows

MODES = ["recompute", "in_forward"]
TOLERANCE = {jnp.bfloat16: 8e-3, jnp.float16: 1.2e-3}


pytestmark = pytest.mark.usefixtures("small_backend")


def arrays(n: int, h: int, v: int, axis: int = 0, dtype: Any = jnp.bfloat16, **more: Any) -> dict[str, jax.Array]:
    k = jax.random.split(jax.random.key(5), 3)
    weight = jax.random.normal(k[1], (v, h), dtype) * jnp.asarray(0.3, dtype)
    return {"hidden": jax.random.normal(k[0], (n, h), dtype), "weight": weight if axis == 0 else weight.T, **more}


def labels_of(n: int, v: int) -> jax.Array:
    return jax.random.randint(jax.random.key(6), (n,), 0, v).at[0].set(-100)


def squared_mixture(s: Any) -> jax.Array:
    """A loss of no meaning that reads every statistic."""
    mixture = (
        s.lse
        - s.target_logit
        + 0.3 * s.mean_logit
        - 0.2 * s.entropy
        + s.sum_sq_probs
        + 0.1 * s.max_logit
        + 0.1 * s.varentropy
    )
    return jnp.square(mixture)


def check(
    interpreted: Callable[..., Any], loss: Callable[..., Any], given: dict[str, jax.Array], mode: str, tolerance: float
) -> None:
    """Value and gradients against the reference implementation, which gets the same numbers in float32."""
    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    want = jax.value_and_grad(lambda given: loss(given, "reference", "auto"))(wide)
    got = interpreted(jax.value_and_grad(lambda given: loss(given, "mosaic_gpu", mode)))(given)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for name, x in given.items():
        g, w = np.asarray(got[1][name], np.float32), np.asarray(want[1][name])
        assert got[1][name].dtype == x.dtype
        assert np.abs(g - w).max() <= tolerance * np.abs(w).max(), name


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [0, 1])
def test_plain_cross_entropy(mode: str, axis: int, interpreted: Callable[..., Any]) -> None:
    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        return linear_cross_entropy(
            **given, labels=labels_of(70, 208), vocab_axis=axis, implementation=implementation, backward=backward
        )

    check(interpreted, loss, arrays(70, 64, 208, axis), mode, TOLERANCE[jnp.bfloat16])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_single_class_has_neither_loss_nor_gradient(mode: Any, axis: int, interpreted: Callable[..., Any]) -> None:
    given, labels = arrays(40, 64, 1, axis), labels_of(40, 1)

    def loss(given: dict[str, jax.Array]) -> jax.Array:
        return linear_cross_entropy(**given, labels=labels, vocab_axis=axis, implementation="mosaic_gpu", backward=mode)

    value, gradients = interpreted(jax.value_and_grad(loss))(given)
    assert abs(value) <= 1e-6
    assert all(np.max(np.abs(np.asarray(g, np.float32))) <= 1e-6 for g in gradients.values())


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("blocks", "ignored"), [(1, 0.0), (3, -1), (3, 0.0), (3, 0.6), (3, 1.0)])
def test_products_by_kernels_in_one_block_and_in_several(
    axis: int, dtype: Any, blocks: int, ignored: float, interpreted: Callable[..., Any]
) -> None:
    """Ignored rows hold nan: none is read, not even where whole blocks are ignored. A row is ignored but for -1."""
    n = 384
    given = arrays(n, 256, 272, axis, dtype)
    labels = jnp.where(jax.random.uniform(jax.random.key(8), (n,)) < ignored, -100, labels_of(n, 272))
    if ignored < 0:
        labels = jnp.maximum(labels, 0)
    scratch = 2**23 if blocks == 1 else 3 * 2**17

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        hidden = jnp.where((labels < 0)[:, None], jnp.nan if implementation == "mosaic_gpu" else 0, given["hidden"])
        return linear_cross_entropy(
            hidden.astype(given["hidden"].dtype), given["weight"], labels, vocab_axis=axis, normalizer=n,
            implementation=implementation, backward=backward, scratch_bytes=scratch,
        )  # fmt: skip

    spec = HeadSpec(256, 272, 272, axis, np.dtype(dtype), None)
    plan = pallas_ce.backends.mosaic_gpu.BACKEND.plan(spec, n, "in_forward", scratch)
    assert -(-n // plan.rows) == blocks
    assert plan.skips_rows
    check(interpreted, loss, given, "in_forward", TOLERANCE[dtype])


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("n", "rows", "columns", "ignored"),
    [(384, 384, 576, None), (384, 384, 256, 0.6), (640, 256, 256, None), (640, 256, 256, 0.6), (640, 256, 256, 1.0)],
)
def test_recomputed_tiles_are_worked_on_in_place(
    axis: int,
    n: int,
    rows: int,
    columns: int,
    ignored: float | None,
    monkeypatch: pytest.MonkeyPatch,
    interpreted: Callable[..., Any],
) -> None:
    """One tile or several, the last of them narrower; likewise blocks of rows. Ignored rows hold nan: none is read."""
    v = 576
    spec = HeadSpec(256, v, v, axis, np.dtype(jnp.bfloat16), None)
    assert recomputation.in_place(spec, rows, columns)
    plan = Plan(rows, columns, 2**20, v, skips_rows=True)
    monkeypatch.setattr(plans, "recompute", lambda *given: plan)
    bias = jax.random.normal(jax.random.key(2), (v,))
    given = arrays(n, 256, v, axis, bias=bias, logit_scale=jnp.float32(0.7))
    labels = jnp.where(jax.random.uniform(jax.random.key(8), (n,)) < (ignored or 0), -100, labels_of(n, v))
    labels = jnp.maximum(labels, 0) if ignored is None else labels

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        hidden = jnp.where((labels < 0)[:, None], jnp.nan if implementation == "mosaic_gpu" else 0, given["hidden"])
        given = {**given, "hidden": hidden.astype(given["hidden"].dtype)}
        return linear_cross_entropy(
            **given, labels=labels, vocab_axis=axis, normalizer=n, ignore_index=None if ignored is None else -100,
            label_smoothing=0.1, implementation=implementation, backward=backward,
        )  # fmt: skip

    check(interpreted, loss, given, "recompute", TOLERANCE[jnp.bfloat16])


@pytest.fixture
def as_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of the vocabulary is known at run time only, as it is to the shards of a padded one."""
    original = Shards.enter

    def enter(self: Shards, rows: Any, head: Head) -> Any:
        rows, head = original(self, rows, head)
        return rows, head.with_padding()

    monkeypatch.setattr(Shards, "enter", enter)


@pytest.mark.nightly(keep=3)
@pytest.mark.usefixtures("as_shard")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", ["plain", "all", "weights"])
def test_shards_of_a_padded_vocabulary(
    mode: str, axis: int, options: str, monkeypatch: pytest.MonkeyPatch, interpreted: Callable[..., Any]
) -> None:
    """Padding begins inside a tile, and the last tiles hold nothing else; in recompute, of three tiles in place."""
    n, h, v, rows = (320, 256, 290, 576) if options == "plain" else (70, 64, 100, 208)
    monkeypatch.setattr(
        plans, "recompute", lambda spec, tokens, _: Plan(tokens, min(256, spec.vocab_size), 2**20, spec.vocab_size)
    )
    more = {} if options == "plain" else {"bias": jax.random.normal(jax.random.key(2), (rows,))}
    given = arrays(n, h, rows, axis, **more)
    weights = {"class_weights": jnp.linspace(0.5, 2, v)} if options == "weights" else {}

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        others = {} if options == "plain" else {"label_smoothing": 0.2, "z_loss": 1e-2, "logit_softcap": 8.0}
        return linear_cross_entropy(
            **given, labels=labels_of(n, v), vocab_axis=axis, vocab_size=v, implementation=implementation,
            backward=backward, **weights, **others,
        )  # fmt: skip

    check(interpreted, loss, given, mode, TOLERANCE[jnp.bfloat16])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "class_weights": np.linspace(0.5, 2, 648)}])
def test_a_little_padding_is_worked_on_as_vocabulary(
    mode: str, options: dict[str, Any], interpreted: Callable[..., Any]
) -> None:
    """So that no part of weight or stored logits is copied; with more padding it would be worked on for nothing."""

    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        labels = labels_of(70, 648)
        return linear_cross_entropy(
            **given, labels=labels, vocab_size=648, implementation=implementation, backward=backward, **options
        )

    given = arrays(70, 256, 656)
    check(interpreted, loss, given, mode, TOLERANCE[jnp.bfloat16])
    gradient = jax.grad(lambda given: loss(given, "mosaic_gpu", mode))
    assert not np.any(interpreted(gradient)(given)["weight"][648:])
    spec = HeadSpec(256, 656, 648, 0, np.dtype(jnp.bfloat16), None)
    for rows, vocabulary, taken in ((656, 648, True), (656, 656, False), (656, 600, False), (649, 648, False)):
        changed = dataclasses.replace(spec, weight_rows=rows, vocab_size=vocabulary)
        assert (operands.padded_spec(changed) != changed) == taken


def test_a_shard_of_padding_only_leaves_nothing(interpreted: Callable[..., Any]) -> None:
    backend, given = pallas_ce.backends.mosaic_gpu.BACKEND, arrays(64, 64, 208)
    spec = HeadSpec(64, 208, 208, 0, np.dtype(jnp.bfloat16), None, whole_vocab_size=500)
    names, plan = frozenset({"lse", "target_logit", "max_logit"}), Plan(64, 208, 2**20, 208)

    def run(hidden: jax.Array, weight: jax.Array) -> Any:
        head = Head(weight, None, None, None, spec, jnp.int32(0))
        batch = Batch(hidden, jnp.full(64, -1, jnp.int32))
        block = Rows.counted(None).blocks(64, 64).block(0)
        found = backend.statistics(head, batch, names, plan), backend.stash(head, batch, names, plan, block)
        return found[0], *found[1]

    forward, partial, stash = interpreted(run)(given["hidden"], given["weight"])
    for found in (forward, partial):
        assert np.all(np.isneginf(found.max))
        assert not np.any(found.sum_exp)
    assert int(stash.bad_rows) == 0
    assert not np.any(stash.exponentials[:, :208])


def test_float16_far_from_the_likely_entries(interpreted: Callable[..., Any]) -> None:
    """Entries whose exponentials float16 cannot hold still have a gradient, which depends on their logits."""
    given = arrays(70, 64, 208, dtype=jnp.float16)
    given["weight"] = given["weight"] * jnp.float16(12)

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        return linear_cross_entropy(
            **given, labels=labels_of(70, 208), logit_softcap=20.0, label_smoothing=0.3,
            implementation=implementation, backward=backward,
        )  # fmt: skip

    check(interpreted, loss, given, "in_forward", TOLERANCE[jnp.float16])


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rows_that_do_not_count_are_skipped_block_by_block(
    share: float, monkeypatch: pytest.MonkeyPatch, interpreted: Callable[..., Any]
) -> None:
    monkeypatch.setattr(forward, "_GATHERED_BYTES", 0)
    monkeypatch.setattr(forward, "_LEAST_GATHERED_ROWS", 32)
    given = arrays(150, 64, 208)
    mask = jax.random.uniform(jax.random.key(7), (150,)) <= share
    assert bool(mask.all()) == (share == 1.0)

    def statistics(given: dict[str, jax.Array], implementation: Any) -> Any:
        return linear_row_statistics(
            **given, labels=labels_of(150, 208), row_mask=mask, statistics=("lse", "entropy", "argmax"),
            implementation=implementation,
        )  # fmt: skip

    got, want = interpreted(lambda given: statistics(given, "mosaic_gpu"))(given), statistics(given, "reference")
    np.testing.assert_array_equal(got.argmax, want.argmax)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.entropy, want.entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("axis", "h", "v"), [(0, 64, 213), (1, 72, 213)])
def test_every_option_and_ragged_sizes(mode: str, axis: int, h: int, v: int, interpreted: Callable[..., Any]) -> None:
    given = arrays(70, h, v, axis, bias=jax.random.normal(jax.random.key(1), (v,)), logit_scale=jnp.float32(1.3))

    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        return linear_cross_entropy(
            **given,
            labels=labels_of(70, 201),
            vocab_axis=axis,
            vocab_size=201,
            logit_softcap=5.0,
            label_smoothing=0.1,
            z_loss=1e-3,
            implementation=implementation,
            backward=backward,
        )

    check(interpreted, loss, given, mode, TOLERANCE[jnp.bfloat16])


@pytest.mark.parametrize("mode", MODES)
def test_the_tail_of_a_vocabulary_that_is_no_multiple(mode: str, interpreted: Callable[..., Any]) -> None:
    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        labels = labels_of(40, 133).at[1].set(132)
        return linear_cross_entropy(**given, labels=labels, implementation=implementation, backward=backward)

    check(interpreted, loss, arrays(40, 64, 133), mode, TOLERANCE[jnp.bfloat16])


@pytest.mark.parametrize("mode", MODES)
def test_float16_and_blocks_within_a_small_budget(mode: str, interpreted: Callable[..., Any]) -> None:
    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        budget = None if implementation == "reference" else 60_000
        return linear_cross_entropy(
            **given, labels=labels_of(80, 204), scratch_bytes=budget, implementation=implementation, backward=backward
        )

    check(interpreted, loss, arrays(80, 64, 204, dtype=jnp.float16), mode, TOLERANCE[jnp.float16])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("dtype", "height"), [(jnp.bfloat16, 30.0), (jnp.bfloat16, 150.0), (jnp.bfloat16, -200.0), (jnp.float16, 30.0)]
)
def test_columns_that_the_guess_of_the_lse_misses(dtype: Any, height: float, interpreted: Callable[..., Any]) -> None:
    # 192 columns are sampled at multiples of 3; column 100 is not among them, all others are raised where height < 0.
    bias = (
        jnp.zeros(192).at[100].set(height) if height > 0 else jnp.full(192, height).at[jnp.arange(1, 192, 3)].set(0.0)
    )

    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        return linear_cross_entropy(
            **given, bias=bias, labels=labels_of(40, 192), implementation=implementation, backward=backward
        )

    check(interpreted, loss, arrays(40, 64, 192, dtype=dtype), "in_forward", TOLERANCE[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_every_statistic(mode: str, interpreted: Callable[..., Any]) -> None:
    u = jax.random.normal(jax.random.key(2), (208,))

    def loss(given: dict[str, jax.Array], implementation: str, backward: str) -> jax.Array:
        return linear_loss(
            squared_mixture,
            **given,
            labels=labels_of(70, 208).at[0].set(3),
            logit_weights=u,
            implementation=implementation,
            backward=backward,
        )

    check(interpreted, loss, arrays(70, 64, 208), mode, 1.5 * TOLERANCE[jnp.bfloat16])


def test_a_number_as_temperature_is_folded_into_cap_and_scale(interpreted: Callable[..., Any]) -> None:
    def loss(given: dict[str, jax.Array], implementation: Any, backward: str) -> jax.Array:
        found = linear_log_probs(
            **given, labels=labels_of(40, 208), temperature=0.7, logit_softcap=5.0, return_entropy=True,
            implementation=implementation,
        )  # fmt: skip
        return jnp.mean(found.log_probs + 0.1 * found.entropy)

    check(interpreted, loss, arrays(40, 64, 208), "recompute", TOLERANCE[jnp.bfloat16])


def test_without_interpreter_and_without_gpu_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {**arrays(8, 64, 64), "labels": labels_of(8, 64), "implementation": "mosaic_gpu"}
    for local, why in ((None, "this process has no CUDA device"), ("NVIDIA H200", "the arrays lie on a CPU")):
        monkeypatch.setattr(targets, "local_cuda", lambda local=local: local)
        with pytest.raises(
            ValueError, match=f"'mosaic_gpu' cannot serve this call: its kernels are for .*, and {why}; use 'x"
        ):
            linear_cross_entropy(**given)
