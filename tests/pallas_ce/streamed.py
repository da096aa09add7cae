"""What the tests of streamed operations share: logits stored whole, as the reference; and how much work was done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.head import Batch, Head
from pallas_ce.streaming.tiles import Tile
from tests.pallas_ce import plain
from tests.pallas_ce.checks import assert_close, with_gradients


def exact_head(seed: int, n: int, h: int, v: int, closed: float = 0.0) -> dict[str, Any]:
    """Hidden states, weight and bias of small whole numbers, with many equal logits; a share of -inf biases."""
    rng = np.random.default_rng(seed)
    bias = np.where(rng.random(v) < closed, -np.inf, 0.0).astype(np.float32)
    return {
        "hidden": rng.integers(-1, 2, (n, h)).astype(np.float32),
        "weight": rng.integers(-1, 2, (v, h)).astype(np.float32),
        "bias": bias,
    }


def two_heads(seed: int, n: int, h: int, v: int, scale: float = 1.0, teacher_h: int = 7) -> dict[str, np.ndarray]:
    """Random hidden states and weights of a student and a teacher."""
    rng = np.random.default_rng(seed)
    shapes = {"hidden": (n, h), "weight": (v, h), "teacher_hidden": (n, teacher_h), "teacher_weight": (v, teacher_h)}
    scales = {"weight": scale / np.sqrt(h), "teacher_weight": scale / np.sqrt(teacher_h)}
    return {k: (rng.normal(size=s) * scales.get(k, 1.0)).astype(np.float32) for k, s in shapes.items()}


def stored_logits(hidden: Any, weight: Any, bias: Any = None, scale: Any = 1.0, **options: Any) -> np.ndarray:
    """Capped logits `[N, V]` of a weight `[V', H]`, in the inputs' dtype."""
    v, cap = options.get("vocab_size") or weight.shape[0], options.get("logit_softcap")
    z = scale * (hidden @ weight[:v].T + (0 if bias is None else bias[:v]))
    return z if cap is None else cap * np.tanh(z / cap)


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Of rows, in float64."""
    z = np.asarray(z, np.float64)
    shifted = z - z.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def assert_top_k(found: Any, z: np.ndarray, k: int, temperature: Any, mask: Any, unit: float, cap: float = 0.0) -> None:
    """The k largest of each row that `mask` counts: NaN first, then the lowest of equal ids; errors in units of `z`."""
    counts = np.ones((len(z), 1), bool) if mask is None else mask[:, None]
    ids = np.lexsort((np.broadcast_to(np.arange(z.shape[1]), z.shape), np.where(np.isnan(z), 0, -z), ~np.isnan(z)))
    ids = ids[:, :k]
    with np.errstate(invalid="ignore"):
        log_probs = log_softmax(z / np.reshape(temperature, (-1, 1)))
    logits, log_probs = np.take_along_axis(z, ids, 1), np.take_along_axis(log_probs, ids, 1)
    log_probs = np.where(np.isneginf(logits), -np.inf, log_probs)
    np.testing.assert_array_equal(found.ids, np.where(counts, ids, -1))
    np.testing.assert_allclose(found.logits, np.where(counts, logits, 0), rtol=8 * unit, atol=cap)
    infinite = ~(z.max(1) < np.inf)  # or NaN: nothing finite may be said of them
    wanted = np.where(counts, log_probs, 0)[~infinite]
    np.testing.assert_allclose(np.asarray(found.log_probs)[~infinite], wanted, rtol=64 * unit, atol=16 * unit)
    assert not np.isfinite(np.asarray(found.log_probs)[infinite & counts[:, 0]]).any()


def stored_divergence(arrays: dict[str, Any], divergence: str, beta: float, temperature: Any, o: dict[str, Any]) -> Any:
    """Each row's divergence, from stored logits."""
    by_row = jnp.broadcast_to(jnp.asarray(temperature, float), arrays["hidden"].shape[:1])
    z, y = (
        plain.logits(
            arrays | {"temperature": by_row}, slice(None), o.get("vocab_size"), o.get(f"{side}logit_softcap"), side
        )
        for side in ("", "teacher_")
    )
    return plain.divergence(divergence, beta, z, y, plain.FORMS["logsumexp"])


def assert_distills(
    ours: Callable[..., Any], theirs: Callable[..., Any], arrays: dict[str, np.ndarray], cotangent: Any
) -> None:
    """A divergence and the student's gradients are the definition's in float64; the teacher has none."""

    def weighted(found: Any) -> Any:
        return jnp.sum(found * cotangent)

    with jax.enable_x64(True):
        want, gradients = with_gradients(theirs, {k: x.astype(np.float64) for k, x in arrays.items()}, weighted)
    got, found = with_gradients(ours, arrays, weighted)
    # The terms of a row are log-probabilities times probabilities; a divergence is a small difference of such sums.
    assert_close(got, want, 1e-5, floor=2e-6)
    student = {k: g for k, g in gradients.items() if not k.startswith("teacher_")}
    assert_close({k: found[k] for k in student}, student, 1e-5, floor=2e-6)
    assert all(np.all(np.asarray(g) == 0) for k, g in found.items() if k.startswith("teacher_"))


@contextmanager
def counted_rows(monkeypatch: Any) -> Iterator[list[int]]:
    """The number of rows of each tile of logits that is computed at run time, as it is computed."""
    seen: list[int] = []
    plain = Head.tile_logits

    def counting(self: Head, batch: Batch, tile: Tile) -> jax.Array:
        rows = batch.hidden.shape[0]
        jax.debug.callback(lambda: seen.append(rows))
        return plain(self, batch, tile)

    with monkeypatch.context() as patched:
        patched.setattr(Head, "tile_logits", counting)
        jax.clear_caches()
        yield seen
    jax.clear_caches()


def no_stored_logits(function: Any, n: int, v: int, limit: int, *shapes: tuple[tuple[int, ...], Any]) -> None:
    """Fails where the compiled program has an array of rows × vocabulary, or more temporary memory than `limit`."""
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
    text = compiled.as_text()
    assert f"[{n},{v}]" not in text
    assert f"[{v},{n}]" not in text
    assert str(n * v) not in text
    assert compiled.memory_analysis().temp_size_in_bytes <= limit
