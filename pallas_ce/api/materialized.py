"""Losses and log-probabilities of logits that the caller holds; `cross_entropy` is fused with its gradient."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_ce.api import checks, linear_cross_entropy, row_statistics, specs
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.head_options import StoredOptions, computed_by
from pallas_ce.api.problem import Options, Problem
from pallas_ce.backends.protocol import Implementation
from pallas_ce.head import NO_WEIGHT
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.statistics.cross_entropy import safe_inverse
from pallas_ce.statistics.logits import present


@computed_by(linear_cross_entropy.compute)
def cross_entropy(logits: ArrayLike, labels: ArrayLike, **options: Unpack[StoredOptions]) -> tuple[Problem]:
    r"""Cross entropy of given `logits` with `labels`, its gradient made in the same pass and in the logits' place.

    For a row z of `softcap(logits)` with label t, token weight w, class weights c (1 each by default), smoothing α and
    z-loss factor β, exactly as in `linear_cross_entropy`:

        loss = w·[ (1-α)·c_t·(lse - z_t) + α/V·Σ_v c_v·(lse - z_v) ]  +  w·β·lse²,     lse = log Σ_v exp z_v

    which without weights is `lse - (1-α)·z_t - α·mean(z) + β·lse²`, and has the gradient
    `(p - (1-α)·onehot(t) - α/V + 2β·lse·p) / normalizer`.

    When a scalar reduction is differentiated, the gradient of each block of rows is written over the block's logits
    while they are in the cache. The buffer itself is reused where the logits are not needed afterwards: an intermediate
    of a jitted step, or an argument in `donate_argnums` whose gradient is an output; otherwise XLA copies it once. An
    upstream scalar other than the constant 1 multiplies that gradient, which bfloat16 and float16 logits then round a
    second time. Where the hidden states are at hand, `linear_cross_entropy` needs no logits at all.

    Args:
        logits: `[..., V']` bfloat16, float16, float32 or float64; any leading shape, zero tokens and V' = 0 included.
        labels: `[...]`, any integer dtype, unsigned included. Labels outside `[0, vocab_size)` count as ignored.
        ignore_index: tokens with this label have loss 0 and gradient 0; it may lie inside the vocabulary.
        reduction: "mean", "sum", or "none" for `[...]`, which keeps the logits for its backward.
        normalizer: scalar for the mean, may be traced; by default `Σ w·c_t`, and `Σ w` for the z part.

    Returns:
        The loss, float32 (float64 for float64): `[]`, or `[...]` for "none"; 0.0 when no token counts. With
        `return_metrics`, the pair `(loss, Metrics)`. The gradient has the logits' dtype.

    Raises:
        ValueError: shapes or values that do not fit, a named implementation that cannot serve.
        TypeError: dtypes that do not fit; `validate_labels` on traced labels.
        NotImplementedError: when differentiated twice or in forward mode.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import cross_entropy
        >>> logits = jnp.zeros((2, 3, 4))                                  # [batch, time, V]
        >>> labels = jnp.array([[0, 1, 2], [3, -100, -100]])
        >>> step = jax.jit(jax.value_and_grad(cross_entropy), donate_argnums=0)
        >>> loss, d_logits = step(logits, labels)                          # d_logits in the logits' buffer
        >>> print(loss, d_logits[1, 0])
        1.3862944 [ 0.0625  0.0625  0.0625 -0.1875]
        >>> print(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, -100]), reduction="none"))
        [1.3862944 0.       ]

    References:
        z-loss: "PaLM: Scaling Language Modeling with Pathways", section 5. Smoothing: "Rethinking the Inception
        Architecture for Computer Vision", section 7.
    """
    return (_read(logits, labels, **options),)


@computed_by(linear_cross_entropy.compute)
def chunked_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, chunk_size: int = 0, **options: Unpack[StoredOptions]
) -> tuple[Problem]:
    """`cross_entropy`, with a bound on the number of rows that are worked on at a time.

    `cross_entropy` has the same loss and gradient, and takes as many rows at a time as suit the cache. A smaller chunk
    lowers the temporary memory.

    Args:
        logits: `[..., V']`.
        labels: `[...]` integers.
        chunk_size: the most rows at a time; 0 means 4096.

    Returns:
        What `cross_entropy` returns.

    Raises:
        ValueError: a negative `chunk_size`, and what `cross_entropy` raises.
        TypeError: as `cross_entropy`.
        NotImplementedError: when differentiated twice or in forward mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce import chunked_cross_entropy
        >>> print(chunked_cross_entropy(jnp.zeros((6, 4)), jnp.arange(6) % 4, chunk_size=4))
        1.3862944
    """
    chunk = checks.integer("chunk_size", chunk_size, "a positive int, or 0 for 4096", 0) or 4096
    return (_read(logits, labels, chunk=chunk, **options),)


def mean_squared_lse(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    ignore_index: int | None = -100,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
) -> jax.Array:
    """The z-loss's regulariser by itself, `Σ lse² / count` over the tokens that count; 0.0 when none does.

    For losses that have no `z_loss` of their own; those that have one need no second pass over the logits.

    Args:
        logits: `[..., V]` bfloat16, float16, float32 or float64.
        labels: `[...]` integers; they only say which tokens count.
        ignore_index: tokens with this label do not count, nor do those whose label lies outside `[0, V)`.
        logit_softcap: see `cross_entropy`.
        vocab_size: V, where the logits are padded.

    Returns:
        Array: `[]`, float32 (float64 for float64); differentiable once.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice or in forward mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_ce import mean_squared_lse
        >>> print(mean_squared_lse(jnp.ones((2, 1)), jnp.array([0, -100])))
        1.0
    """
    problem = _read(logits, labels, ignore_index=ignore_index, logit_softcap=logit_softcap, vocab_size=vocab_size)
    return _mean_squared_lse(problem)


@program(by_row=lambda problem: False)
def _mean_squared_lse(problem: Problem) -> jax.Array:
    operands = Operands(*problem.rows_that_count())
    lse = evaluate.statistics(Call(problem.how, frozenset({"lse"})), operands)["lse"]
    return jnp.sum(lse * lse) * safe_inverse(jnp.sum(present(operands.mask), dtype=lse.dtype))


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
        NotImplementedError: when differentiated twice or in forward mode.

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
    logits, index = checks.array("logits", logits), checks.integers("index", index)
    leading = logits.shape[:-1]
    if index.shape[: len(leading)] != leading or index.ndim > logits.ndim:
        raise ValueError(
            f"index has shape {index.shape}; logits' leading shape {leading} is needed, or that and an axis of K "
            "entries"
        )
    none = index.size == 0
    labels = jnp.zeros(leading, jnp.int32) if none else index
    problem = _read(logits, labels, ignore_index=None, several=True, implementation=implementation)
    if none:
        return jnp.zeros(index.shape, problem.spec.accumulator)
    return row_statistics.compute_log_probs(("log_prob",), problem)


def _read(
    logits: Any,
    labels: Any,
    *,
    ignore_index: int | None = -100,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    validate_labels: bool = False,
    several: bool = False,
    implementation: Implementation | None = None,
    chunk: int | None = None,
    **of_loss: Any,
) -> Problem:
    """The logits as hidden states of a head of `NO_WEIGHT`; `chunk` is the most rows of a block."""
    logits, ignore_index = checks.array("logits", logits), checks.ignored(ignore_index)
    spec, leading, of = specs.logits_spec(logits, vocab_size, logit_softcap), logits.shape[:-1], "logits'"
    problem = Problem(
        hidden=logits,
        weight=NO_WEIGHT,
        labels=checks.labels(labels, leading, spec.vocab_size, ignore_index, validate_labels, of, several),
        options=Options(**of_loss).checked(leading, spec.vocab_size, of),
        spec=spec,
        ignore_index=ignore_index,
        implementation=implementation,
        scratch_bytes=None if chunk is None else chunk * spec.weight_rows * spec.accumulator.itemsize,
    )
    return problem.decided(task="logits")
