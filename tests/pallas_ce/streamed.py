"""What the tests of streamed operations share: logits stored whole, as the reference; and how much work was done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.head import Batch, Head
from pallas_ce.streaming.tiles import Tile


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


def stored_divergence(arrays: dict[str, Any], divergence: str, beta: float, temperature: Any, o: dict[str, Any]) -> Any:
    """Each row's divergence, from stored logits; in float64, for JAX to differentiate."""

    def log_softmax(side: str) -> Any:
        z = arrays[side + "hidden"] @ arrays[side + "weight"][: o.get("vocab_size")].T
        if side + "bias" in arrays:
            z = z + arrays[side + "bias"][: o.get("vocab_size")]
        z = z * arrays.get(side + "logit_scale", 1.0)
        cap = o.get(side + "logit_softcap")
        z = z if cap is None else cap * jnp.tanh(z / cap)
        return jax.nn.log_softmax(z / jnp.reshape(jnp.asarray(temperature, z.dtype), (-1, 1)))

    log_p, log_q = log_softmax(""), log_softmax("teacher_")

    def kl(x: Any, y: Any) -> Any:
        return (jnp.exp(x) * (x - y)).sum(1)

    if divergence == "jsd":
        log_m = jnp.log(beta * jnp.exp(log_q) + (1 - beta) * jnp.exp(log_p))
        return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    return kl(log_q, log_p) if divergence == "forward_kl" else kl(log_p, log_q)


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
