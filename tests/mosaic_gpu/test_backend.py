"""Losses and gradients through the backend, in both backward modes, under the GPU interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce.backends.mosaic_gpu
from pallas_ce import linear_cross_entropy, linear_log_probs, linear_loss, linear_row_statistics
from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu import plans, recomputation
from pallas_ce.backends.mosaic_gpu.kernels import operands
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.modes import forward
from pallas_ce.parallel.shards import Shards
from pallas_ce.streaming.rows import Rows

MODES = ["recompute", "in_forward"]
TOLERANCE = {"bfloat16": 8e-3, "float16": 1.2e-3}
BFLOAT16 = np.dtype(jnp.bfloat16)

pytestmark = pytest.mark.usefixtures("small_backend")


def arrays(n: int, h: int, v: int, axis: int = 0, dtype: Any = BFLOAT16, **more: Any) -> dict[str, jax.Array]:
    k = jax.random.split(jax.random.key(5), 3)
    weight = jax.random.normal(k[1], (v, h), dtype) * jnp.asarray(0.3, dtype)
    return {"hidden": jax.random.normal(k[0], (n, h), dtype), "weight": weight if axis == 0 else weight.T, **more}


def bias_of(v: int) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (v,))


def labels_of(n: int, v: int, ignored: float | None = 0.0) -> jax.Array:
    """The last class is among them; the first row is ignored, and that share of the others; with None no row is."""
    labels = jax.random.randint(jax.random.key(6), (n,), 0, v).at[1].set(v - 1)
    drawn = jax.random.uniform(jax.random.key(8), (n,)).at[0].set(-1)
    return labels if ignored is None else jnp.where((drawn < ignored), -100, labels)


def cross_entropy(labels: jax.Array, **options: Any) -> Any:
    """The loss of a dictionary of arrays. Ignored rows hold nan where the kernels compute: none is read."""

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        kernels = implementation == "mosaic_gpu"
        ignored = jnp.asarray(jnp.nan if kernels else 0, given["hidden"].dtype)
        chosen = {**given, "hidden": jnp.where((labels < 0)[:, None], ignored, given["hidden"]), **options}
        chosen |= {} if kernels else {"scratch_bytes": None}
        return linear_cross_entropy(**chosen, labels=labels, implementation=implementation, backward=backward)

    return loss


def check(interpreted: Any, loss: Any, given: dict[str, jax.Array], mode: str, factor: float = 1.0) -> Any:
    """Value and gradients against the reference, which gets the same numbers in float32; returns the gradients."""
    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    want = jax.value_and_grad(lambda given: loss(given, "reference", "auto"))(wide)
    got = interpreted(jax.value_and_grad(lambda given: loss(given, "mosaic_gpu", mode)))(given)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    tolerance = factor * TOLERANCE[str(given["hidden"].dtype)]
    for name, x in given.items():
        g, w = np.asarray(got[1][name], np.float32), np.asarray(want[1][name])
        assert got[1][name].dtype == x.dtype
        assert np.abs(g - w).max() <= tolerance * np.abs(w).max() + 1e-6, name
    return got[1]


EVERY_OPTION = {"vocab_size": 201, "logit_softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3}
OF_CLASSES = {"label_smoothing": 0.2, "class_weights": np.linspace(0.5, 2, 648)}

# Arguments of `arrays`, and options.
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((70, 64, 208), {}),
    "transposed": ((70, 64, 208, 1), {}),
    "one class, which has neither loss nor gradient": ((40, 64, 1), {}),
    "one class, transposed": ((40, 64, 1, 1), {}),
    "a vocabulary that is no multiple, transposed": ((40, 64, 133, 1), {}),
    "float16, in blocks": ((80, 64, 208, 0, jnp.float16), {"scratch_bytes": 60_000}),
    "every option": ((70, 64, 213), EVERY_OPTION),
    "every option, transposed": ((70, 72, 213, 1), EVERY_OPTION),
    "a little padding, which is worked on as vocabulary": ((70, 256, 656), {"vocab_size": 648}),
    "a little padding, weighted": ((70, 256, 656), {"vocab_size": 648, **OF_CLASSES}),
}


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_and_its_gradients(mode: str, name: str, interpreted: Any) -> None:
    sizes, options = CASES[name]
    axis, size = (*sizes, 0)[3], options.get("vocab_size", sizes[2])
    further = {"bias": bias_of(213), "logit_scale": jnp.float32(1.3)} if options is EVERY_OPTION else {}
    loss = cross_entropy(labels_of(sizes[0], size), vocab_axis=axis, **options)
    gradients = check(interpreted, loss, arrays(*sizes, **further), mode)
    assert not np.any(jnp.moveaxis(gradients["weight"], axis, 0)[size:])


def test_more_than_a_little_padding_is_not_worked_on_for_nothing() -> None:
    for rows, vocabulary, taken in ((656, 648, True), (656, 656, False), (656, 600, False), (649, 648, False)):
        spec = HeadSpec(256, rows, vocabulary, 0, BFLOAT16, None)
        assert (operands.padded_spec(spec) != spec) == taken


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("blocks", "ignored"), [(1, 0.0), (3, None), (3, 0.0), (3, 0.6), (3, 1.0)])
def test_products_by_kernels_in_one_block_and_in_several(
    axis: int, dtype: Any, blocks: int, ignored: float | None, interpreted: Any
) -> None:
    """Not even where whole blocks are ignored is one of their rows read."""
    n, v, scratch = 384, 272, 2**23 if blocks == 1 else 3 * 2**17
    spec = HeadSpec(256, v, v, axis, np.dtype(dtype), None)
    plan = pallas_ce.backends.mosaic_gpu.BACKEND.plan(spec, n, "in_forward", scratch)
    assert -(-n // plan.rows) == blocks
    assert plan.skips_rows
    loss = cross_entropy(labels_of(n, v, ignored), vocab_axis=axis, normalizer=n, scratch_bytes=scratch)
    check(interpreted, loss, arrays(n, 256, v, axis, dtype), "in_forward")


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("n", "rows", "columns", "ignored"),
    [(384, 384, 576, None), (384, 384, 256, 0.6), (640, 256, 256, None), (640, 256, 256, 0.6), (640, 256, 256, 1.0)],
)
def test_recomputed_tiles_are_worked_on_in_place(
    axis: int, n: int, rows: int, columns: int, ignored: float | None, monkeypatch: Any, interpreted: Any
) -> None:
    """One tile or several, the last of them narrower; likewise blocks of rows."""
    v = 576
    assert recomputation.in_place(HeadSpec(256, v, v, axis, BFLOAT16, None), rows, columns)
    monkeypatch.setattr(plans, "recompute", lambda *given: Plan(rows, columns, 2**20, v, skips_rows=True))
    given = arrays(n, 256, v, axis, bias=bias_of(v), logit_scale=jnp.float32(0.7))
    options = {"normalizer": n, "label_smoothing": 0.1, "ignore_index": None if ignored is None else -100}
    check(interpreted, cross_entropy(labels_of(n, v, ignored), vocab_axis=axis, **options), given, "recompute")


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
@pytest.mark.parametrize("name", ["plain", "all", "weights"])
def test_shards_of_a_padded_vocabulary(
    mode: str, axis: int, name: str, monkeypatch: pytest.MonkeyPatch, interpreted: Any
) -> None:
    """Padding begins inside a tile, and the last tiles hold nothing else; in recompute, of three tiles in place."""
    n, h, v, rows = (320, 256, 290, 576) if name == "plain" else (70, 64, 100, 208)
    monkeypatch.setattr(
        plans, "recompute", lambda spec, tokens, _: Plan(tokens, min(256, spec.vocab_size), 2**20, spec.vocab_size)
    )
    more, options = {}, {}
    if name != "plain":
        more, options = {"bias": bias_of(rows)}, {"label_smoothing": 0.2, "z_loss": 1e-2, "logit_softcap": 8.0}
    if name == "weights":
        options["class_weights"] = jnp.linspace(0.5, 2, v)
    loss = cross_entropy(labels_of(n, v), vocab_axis=axis, vocab_size=v, **options)
    check(interpreted, loss, arrays(n, h, rows, axis, **more), mode)


def test_a_shard_of_padding_only_leaves_nothing(interpreted: Any) -> None:
    backend, given = pallas_ce.backends.mosaic_gpu.BACKEND, arrays(64, 64, 208)
    spec = HeadSpec(64, 208, 208, 0, BFLOAT16, None, whole_vocab_size=500)
    names, plan = frozenset({"lse", "target_logit", "max_logit"}), Plan(64, 208, 2**20, 208)

    def run(hidden: jax.Array, weight: jax.Array) -> Any:
        head = Head(weight, None, None, None, spec, jnp.int32(0))
        batch = Batch(hidden, jnp.full(64, -1, jnp.int32))
        block = Rows.counted(None).blocks(64, 64).block(0)
        return backend.statistics(head, batch, names, plan), *backend.stash(head, batch, names, plan, block)

    forward, partial, stash = interpreted(run)(given["hidden"], given["weight"])
    for found in (forward, partial):
        assert np.all(np.isneginf(found.max))
        assert not np.any(found.sum_exp)
    assert not np.any(stash.exponentials[:, :208])


@pytest.mark.parametrize(("dtype", "cap"), [(jnp.float16, 20.0), (jnp.bfloat16, 30.0)])
def test_entries_far_from_the_likely_ones(dtype: Any, cap: float, interpreted: Any) -> None:
    """Entries whose exponentials are hardly or not at all in range still have a gradient that depends on their logits.

    Of capped logits these are as far below a likely target as can be.
    """
    given = arrays(70, 64, 208, dtype=dtype)
    labels = jnp.argmax(given["hidden"] @ given["weight"].T, axis=1)
    given["weight"] = given["weight"] * jnp.asarray(24, dtype)
    check(interpreted, cross_entropy(labels, logit_softcap=cap, label_smoothing=0.3), given, "in_forward")


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rows_that_do_not_count_are_skipped_block_by_block(
    share: float, monkeypatch: pytest.MonkeyPatch, interpreted: Any
) -> None:
    monkeypatch.setattr(forward, "_GATHERED_BYTES", 0)
    monkeypatch.setattr(forward, "_GATHERED_STEP", 32)
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
@pytest.mark.parametrize(
    ("dtype", "height", "label_smoothing"),
    [
        (jnp.bfloat16, 30.0, 0.0),
        (jnp.bfloat16, 150.0, 0.0),
        (jnp.bfloat16, -200.0, 0.0),
        (jnp.float16, 30.0, 0.0),
        (jnp.bfloat16, -200.0, 0.1),
        (jnp.float16, -200.0, 0.0),
        (jnp.float16, -200.0, 0.1),
    ],
)
def test_rows_whose_lse_is_far_from_what_it_is_taken_for(
    dtype: Any, height: float, label_smoothing: float, interpreted: Any
) -> None:
    """Of 192 columns float16 samples multiples of 3: column 100 is not among them, or all that are not are far above.

    So are they above most targets. A single high column is its row's lse, which is right then even without sums that
    are.
    """
    loss = cross_entropy(labels_of(40, 192), bias=uneven(height), label_smoothing=label_smoothing)
    check(interpreted, loss, arrays(40, 64, 192, dtype=dtype), "in_forward")


def uneven(height: float) -> jax.Array:
    """A bias for 192 columns: one that is no multiple of 3 is so high, or all multiples of 3 are so low, and others."""
    raised = jnp.zeros(192).at[100].set(height)
    return raised if height > 0 else jnp.full(192, height).at[jnp.arange(1, 192, 3)].set(0.0)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("height", [30.0, 50.0, 150.0, -30.0, -50.0])
def test_squares_of_probabilities_from_a_distant_reference(height: float, labelled: bool, interpreted: Any) -> None:
    """The square of an exponential leaves float32's range at half the distance at which the exponential does.

    A rounded exponential near its row's sum has three times its error in this gradient.
    """
    labels = labels_of(40, 192, None) if labelled else None

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        arrays = (given["hidden"], given["weight"], labels)
        options = {"bias": uneven(height), "implementation": implementation, "backward": backward}
        return linear_loss(lambda row: row.sum_sq_probs + row.lse, *arrays, **options)

    check(interpreted, loss, arrays(40, 64, 192), "in_forward", factor=2.0)


def lopsided(row: Any, factor: jax.Array) -> jax.Array:
    return factor * row.lse - row.target_logit


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("height", [0.0, 30.0])
def test_targets_that_weigh_more_than_all_probabilities(height: float, dtype: Any, interpreted: Any) -> None:
    """The entry that is replaced is larger than any exponential beside it can be, or these count for nothing."""
    factor = jnp.tile(jnp.asarray([1.0, -1e-6, 1e-36, 0.0]), 10)
    bias = jnp.zeros(192).at[100].set(height)

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        arrays = (given["hidden"], given["weight"], labels_of(40, 192), factor)
        return linear_loss(lopsided, *arrays, bias=bias, implementation=implementation, backward=backward)

    check(interpreted, loss, arrays(40, 64, 192, dtype=dtype), "in_forward")


def squared_mixture(s: Any) -> jax.Array:
    """A loss of no meaning that reads every statistic."""
    probabilities = s.sum_sq_probs - 0.2 * s.entropy + 0.1 * s.varentropy
    return jnp.square(s.lse - s.target_logit + 0.3 * s.mean_logit + 0.1 * s.max_logit + probabilities)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_every_statistic(mode: str, interpreted: Any) -> None:
    options = {"labels": labels_of(70, 208, None), "logit_weights": bias_of(208)}

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        return linear_loss(squared_mixture, **given, **options, implementation=implementation, backward=backward)

    check(interpreted, loss, arrays(70, 64, 208), mode, factor=1.5)


def weighted_targets(row: Any, labels: jax.Array) -> jax.Array:
    return -jnp.where(labels >= 0, row.log_prob * jnp.arange(1, 4), 0.0).sum(axis=1)


@pytest.mark.parametrize(("mode", "dtype"), [("recompute", jnp.bfloat16), ("in_forward", jnp.float16)])
def test_k_labels_a_row_some_of_them_equal_or_ignored(mode: str, dtype: Any, interpreted: Any) -> None:
    first = labels_of(70, 208, 0.3)
    labels = jnp.stack([first, jnp.roll(first, 1), first], axis=1)

    def loss(given: dict[str, jax.Array], implementation: Any, backward: Any) -> jax.Array:
        arrays = (given["hidden"], given["weight"], labels, labels)
        return linear_loss(weighted_targets, *arrays, implementation=implementation, backward=backward)

    check(interpreted, loss, arrays(70, 64, 208, dtype=dtype), mode)


def test_a_number_as_temperature_is_folded_into_cap_and_scale(interpreted: Any) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "logit_softcap": 5.0, "return_entropy": True}

    def loss(given: dict[str, jax.Array], implementation: Any, backward: str) -> jax.Array:
        found = linear_log_probs(**given, labels=labels_of(40, 208), implementation=implementation, **options)
        return jnp.mean(found.log_probs + 0.1 * found.entropy)

    check(interpreted, loss, arrays(40, 64, 208), "recompute")


def test_without_interpreter_and_without_gpu_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {**arrays(8, 64, 64), "labels": labels_of(8, 64), "implementation": "mosaic_gpu"}
    for local, why in ((None, "this process has no CUDA device"), ("NVIDIA H200", "the arrays lie on a CPU")):
        monkeypatch.setattr(targets, "local_cuda", lambda local=local: local)
        refusal = f"'mosaic_gpu' cannot serve this call: its kernels are for .*, and {why}; use 'x"
        with pytest.raises(ValueError, match=refusal):
            linear_cross_entropy(**given)
