"""`selective_log_softmax`: log-probabilities of a few entries of each row of logits."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks as arguments
from pallas_ce.api.checks import ArrayLike
from pallas_ce.backends.protocol import Implementation
from pallas_ce.modes import materialized as mode
from pallas_ce.parallel.explicit_axes import program
from pallas_ce.statistics import labels as label_rule
from pallas_ce.streaming.rows import flat_rows


def selective_log_softmax(
    logits: ArrayLike, index: ArrayLike, *, implementation: Implementation | None = None
) -> jax.Array:
    r"""`log_softmax(logits)` in float32, at `index` only: `z_i - lse` for each row z, `lse = log Σ_v exp z_v`.

    It equals the log-softmax of the logits in float32 followed by a gather, also for bfloat16 logits, but takes no
    memory of the logits' size: float32 exists for a block of rows at a time. Its gradient, `g_i·(onehot(i) - p)`, has
    the logits' dtype, is rounded once, and takes the logits' place where they are not needed any more.

    Args:
        logits: `[..., V]` bfloat16, float16, float32 or float64.
        index: `[...]` or `[..., K]`, any integer dtype: the entries to read of each row. One outside `[0, V)` gets 0,
            and no gradient.
        implementation: "xla" (any platform), "mosaic_gpu" (Hopper GPUs, one entry of each row; see `cross_entropy`), or
            None: that one in programs for a Hopper GPU where it can, else "xla".

    Returns:
        Array: the shape of `index`, float32 (float64 for float64); differentiable once, in reverse mode.

    Raises:
        ValueError: shapes that do not fit; an implementation that cannot serve the call.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import selective_log_softmax
        >>> logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [3.0, 3.0, 2.0]]))
        >>> print(jnp.exp(selective_log_softmax(logits, jnp.array([2, 0]))))
        [0.625 0.375]
        >>> print(jnp.exp(selective_log_softmax(logits, jnp.array([[2, 0], [0, 1]]))))
        [[0.625 0.125]
         [0.375 0.375]]

    References:
        The function of that name in TRL, and "Reducing VRAM Footprint in PPO and GRPO Using Selective Log-Softmax".
    """
    logits = arguments.array("logits", logits)
    spec = arguments.logits_spec(logits, None, None)
    index = index if isinstance(index, np.ndarray) else arguments.array("index", index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"index has dtype {index.dtype}; it must be an integer one")
    leading = logits.shape[:-1]
    if index.shape[: len(leading)] != leading or index.ndim > logits.ndim:
        raise ValueError(
            f"index has shape {index.shape}; logits' leading shape {leading} is needed, or that and an axis of K "
            "entries"
        )
    settings = mode.decide(spec, logits, implementation, several=index.ndim == logits.ndim)
    return _selective_log_softmax(settings, logits, label_rule.as_array(index))


@program(static=1)
def _selective_log_softmax(settings: mode.MaterializedSettings, logits: jax.Array, index: jax.Array) -> jax.Array:
    spec = settings.spec
    if logits.size == 0 or index.size == 0:
        return jnp.zeros(index.shape, spec.accumulator)
    logits, ids = flat_rows(logits.shape[:-1], (logits, label_rule.canonical(index, spec.vocab_size)))
    by_row = (ids != label_rule.NO_TARGET).reshape(ids.shape[0], -1).any(axis=1)
    log_prob = frozenset({"log_prob"})
    found = mode.row_statistics(settings, log_prob, logits, None, ids, by_row)
    return found["log_prob"].reshape(index.shape)
