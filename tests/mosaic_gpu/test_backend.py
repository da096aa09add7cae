"""Losses and gradients by the kernels under the GPU interpreter: the table of `kernel_cases.py`, and other losses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ce.backends.mosaic_gpu
from pallas_ce import linear_loss, linear_row_statistics
from pallas_ce.backends.mosaic_gpu import plans
from pallas_ce.backends.mosaic_gpu.kernels import operands
from pallas_ce.backends.protocol import Plan
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.modes import forward
from pallas_ce.streaming.rows import Rows
from tests.pallas_ce.kernel_cases import BFLOAT16, CASES, EACH, check, nightly_but_for, uneven
from tests.pallas_ce.problems import make

# One case of each kind; `make test-all` runs all of them.
QUICK = [
    ("every option, transposed", "recompute"),
    ("float16 in blocks", "in_forward"),
    ("products by kernels in blocks", "in_forward"),
    ("blocks and tiles, transposed", "recompute"),
    ("a weighted shard", "in_forward"),
    ("a term under a cap", "recompute"),
    ("narrow sums", "in_forward"),
    ("wider tiles", "statistics"),
]


@pytest.mark.parametrize(("name", "mode"), nightly_but_for(QUICK, EACH))
@pytest.mark.usefixtures("interpreted")
def test_the_loss_and_its_gradients(name: str, mode: Any, tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(**CASES[name].config)
    check(CASES[name], "mosaic_gpu", mode, monkeypatch)


LABELS = np.arange(40) * 7 % 192
SOME = np.where(np.arange(40) % 3, LABELS, -100)
SEVERAL = np.stack([SOME, np.roll(SOME, 1), SOME], axis=1)  # some of them equal or ignored
# An entry that is replaced is larger than any exponential beside it can be, or these count for nothing.
FACTORS = np.tile(np.float32([1.0, -1e-6, 1e-36, 0.0]), 10)


def mixture(s: Any) -> jax.Array:
    """A loss of no meaning that reads every statistic."""
    probabilities = s.sum_sq_probs - 0.2 * s.entropy + 0.1 * s.varentropy
    return jnp.square(s.lse - s.target_logit + 0.3 * s.mean_logit + 0.1 * s.max_logit + probabilities)


def squares(s: Any) -> jax.Array:
    """The square of an exponential leaves float32's range at half the distance at which the exponential does."""
    return s.sum_sq_probs + s.lse


def lopsided(s: Any, factor: jax.Array) -> jax.Array:
    return factor * s.lse - s.target_logit


def of_several(s: Any, labels: jax.Array) -> jax.Array:
    return -jnp.where(labels >= 0, s.log_prob * jnp.arange(1, 4), 0.0).sum(axis=1)


# A row's loss, labels and inputs, options, the mode, the dtype, and how many roundings an error may have.
LOSSES: list[tuple[Any, tuple[Any, ...], dict[str, Any], str, Any, float]] = [
    (mixture, (LABELS,), {"logit_weights": uneven(1.0)}, "recompute", jnp.bfloat16, 3),
    (mixture, (LABELS,), {"logit_weights": uneven(1.0)}, "in_forward", jnp.bfloat16, 3),
    (of_several, (SEVERAL, SEVERAL), {}, "recompute", jnp.bfloat16, 2),
    (of_several, (SEVERAL, SEVERAL), {}, "in_forward", jnp.float16, 2.5),
    (squares, (LABELS,), {"bias": uneven(50.0)}, "in_forward", jnp.bfloat16, 4),
    (squares, (None,), {"bias": uneven(150.0)}, "in_forward", jnp.bfloat16, 4),
    (squares, (LABELS,), {"bias": uneven(-50.0)}, "in_forward", jnp.bfloat16, 4),
    (lopsided, (LABELS, FACTORS), {}, "in_forward", jnp.bfloat16, 2),
    (lopsided, (LABELS, FACTORS), {"bias": uneven(30.0)}, "in_forward", jnp.float16, 2.5),
]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("loss", "labels", "options", "mode", "dtype", "roundings"), LOSSES)
@pytest.mark.parametrize("config", [{"columns": 128, "piece": 64, "row_group": 1}, {}], ids=["wide tiles", "tiles"])
def test_losses_of_statistics(
    loss: Any, labels: Any, options: Any, mode: str, dtype: Any, roundings: float, config: Any, tiles: Any,
    interpreted: Any,
) -> None:  # fmt: skip
    """Beside the reference, which gets the same numbers in float32; errors relative to the largest gradient."""
    tiles(**config)
    keys = jax.random.split(jax.random.key(5))
    head = jax.random.normal(keys[0], (40, 64), dtype), jax.random.normal(keys[1], (192, 64), dtype) * dtype(0.3)

    def run(how: Any, mode: Any, *head: jax.Array) -> Any:
        given: Any = {"implementation": how, "backward": mode, **options}
        return jax.value_and_grad(lambda *head: linear_loss(loss, *head, *labels, **given), (0, 1))(*head)

    want, exact = run("reference", "auto", *(x.astype(jnp.float32) for x in head))
    got, gradients = interpreted(lambda *head: run("mosaic_gpu", mode, *head))(*head)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for found, right in zip(gradients, exact, strict=True):
        assert found.dtype == dtype
        bound = roundings * jnp.finfo(dtype).eps / 2 * np.abs(right).max() + 1e-6
        assert np.abs(found.astype(jnp.float32) - right).max() <= bound


def test_the_last_of_several_blocks_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch, interpreted: Any) -> None:
    """Statistics without a mask, whose blocks do not end where the rows do."""
    plan = Plan(128, 256, 2**20, 320, True)
    monkeypatch.setattr(plans, "recompute", lambda *given: plan)
    p, factors = make(5, 200, 256, 320), np.arange(200, dtype=np.float32)
    head = p.arrays["hidden"].astype(BFLOAT16), p.arrays["weight"].astype(BFLOAT16)

    def gradients(how: Any, *head: Any) -> Any:
        def weighted(*head: Any) -> jax.Array:
            return jnp.sum(factors * linear_row_statistics(*head, statistics=("lse",), implementation=how).lse)

        return jax.grad(weighted, (0, 1))(*head)

    found = interpreted(functools.partial(gradients, "mosaic_gpu"))(*head)
    for got, want in zip(found, gradients("reference", *head), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.02 * np.abs(want).max())


def test_a_shard_of_padding_only_leaves_nothing(interpreted: Any) -> None:
    backend, plan = pallas_ce.backends.mosaic_gpu.BACKEND, Plan(64, 208, 2**20, 208)
    spec = HeadSpec(64, 208, 208, 0, BFLOAT16, None, whole_vocab_size=500)
    names = frozenset({"lse", "target_logit", "max_logit"})

    def run(hidden: jax.Array, weight: jax.Array) -> Any:
        head, batch = Head(weight, None, None, None, spec, jnp.int32(0)), Batch(hidden, jnp.full(64, -1, jnp.int32))
        block = Rows.counted(None).blocks(64, 64).block(0)
        return backend.statistics(head, batch, names, plan), *backend.stash(head, batch, names, plan, block)

    forward, partial, stash = interpreted(run)(jnp.ones((64, 64), BFLOAT16), jnp.ones((208, 64), BFLOAT16))
    for found in (forward, partial):
        assert np.all(np.isneginf(found.max))
        assert not np.any(found.sum_exp)
    assert not np.any(stash.exponentials[:, :208])


def test_rows_that_do_not_count_are_skipped_block_by_block(monkeypatch: pytest.MonkeyPatch, interpreted: Any) -> None:
    monkeypatch.setattr(forward, "_GATHERED_BYTES", 0)
    monkeypatch.setattr(forward, "_GATHERED_STEP", 32)
    p, counts = make(5, 150, 64, 208), np.random.default_rng(0).random(150) < 0.3
    head = p.arrays["hidden"].astype(BFLOAT16), p.arrays["weight"].astype(BFLOAT16)

    def entropies(how: Any) -> Any:
        given = {"row_mask": counts, "statistics": ("entropy",), "implementation": how}
        return jax.jit(lambda *x: linear_row_statistics(*x, **given).entropy)(*head)

    np.testing.assert_allclose(entropies("mosaic_gpu"), entropies("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "taken"), [(656, 648, 656), (656, 656, 656), (1000, 600, 768), (648, 601, 648), (56, 50, 56)]
)
def test_more_than_a_little_padding_is_not_worked_on_for_nothing(rows: int, vocabulary: int, taken: int) -> None:
    assert operands.padded_spec(HeadSpec(256, rows, vocabulary, 0, BFLOAT16, None)).vocab_size == taken
