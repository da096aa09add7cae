"""`linear_row_statistics`: the statistics themselves, for any loss written on top of them."""

from collections.abc import Sequence
from typing import Any

from pallas_ce.api.checks import ArrayLike, DTypeLike, check_statistics
from pallas_ce.api.inputs import CheckedCall, read_head
from pallas_ce.api.low_rank import WeightLike
from pallas_ce.api.precision import PrecisionLike
from pallas_ce.backends.protocol import Implementation
from pallas_ce.dispatch.settings import Settings
from pallas_ce.gradient_products import PerInput
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Call, Known, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics.row import RowStatistics, from_primitives, primitive_names


def linear_row_statistics(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike | None = None,
    *,
    statistics: Sequence[str] = ("lse", "target_logit"),
    row_mask: ArrayLike | None = None,
    logit_weights: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    vocab_axis: int = 0,
    vocab_size: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: ArrayLike = 1.0,
    temperature: ArrayLike = 1.0,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
    implementation: Implementation | None = None,
    scratch_bytes: int | None = None,
    mesh_axes: MeshAxes | None = None,
) -> RowStatistics:
    r"""Statistics of each row of `logits = softcap(logit_scale · (hidden·weight + bias)) / temperature`, not stored.

    Differentiable in `hidden`, `weight`, `bias` and `logit_scale`, in reverse mode, once, with any cotangents: a loss
    written in plain JAX on top of the statistics trains. The backward recomputes tiles of the logits (`2·N·H·V`
    operations) beside its two products; the forward keeps O(N) numbers.

    Args:
        hidden: `[..., H]` bfloat16, float16, float32 or float64; N rows in all, zero rows included.
        weight: `[V', H]` (`vocab_axis=0`) or `[H, V']` (`vocab_axis=1`), floating. `explain` tells where a copy is
            made; none is transposed.
        labels: `[...]`, any integer dtype; needed for `target_logit` and `log_prob`. No label is special here: one
            outside `[0, vocab_size)` has `target_logit` 0. `[..., K]`: K targets for each row.
        statistics: names of the statistics to return, out of `RowStatistics`' fields. Others cost nothing.
        row_mask: `[...]` bool; rows where it is False hold 0, have gradients of exactly 0, and their work is skipped.
        logit_weights: `[V]`, the u of `mean_logit = Σ_v u_v·z_v`; 1/V each by default. A constant: it gets no gradient.
        bias: `[V']`.
        vocab_axis: the weight's vocabulary axis.
        vocab_size: V; entries of the weight from there on are padding: no statistics, zero gradients. Default V'.
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None. A Python number.
        logit_scale: scalar, may be traced and differentiated.
        temperature: positive; a number, an array `[]` or one `[...]` of a temperature for each row. Divides the capped
            logits; a constant, it gets no gradient. A number is folded into cap and scale and costs nothing.
        dtype: compute dtype of the products' operands; by default the inputs' common one. Products and statistics
            accumulate in float32 (float64 for float64).
        precision: how float32 operands are multiplied, as in `jax.lax.dot_general`: a name ("tensorfloat32",
            "BF16_BF16_F32_X3", ...), a `jax.lax.Precision` or a `jax.lax.DotAlgorithmPreset`, for the products of
            forward and backward alike. None: what `jax.default_matmul_precision` says where that is set, else full
            float32 (a GPU's own default is TF32). 16-bit operands need none, as their products are exact. JAX raises
            an error where the platform does not have the algorithm.
        implementation: "xla" (any platform), "reference" (materialised logits), "mosaic_gpu" (kernels for Hopper GPUs,
            bfloat16 and float16), "triton" (a kernel for NVIDIA GPUs from Ampere on; float32 too), or None: in programs
            for a GPU the kernels that are for it, where they can serve the call, else "xla"; `explain` tells which and
            why, and whether they have run on such a GPU.
        scratch_bytes: bound on the memory of tiles; by default 4 KiB for each vocabulary entry but at least 512 MiB and
            at most 1 GiB (twice that for float32 operands on an accelerator), and never more than the logits would take
            (but at least 1 MiB).
        mesh_axes: inside a `shard_map`, how the arrays are split over its axes; see `MeshAxes`. Outside it is not
            needed: under `jit` the arrays' own shardings are read.

    Returns:
        RowStatistics: fields `[...]`, float32 (float64 for float64; `argmax` int32), None where not asked for; with K
            targets, `target_logit` and `log_prob` are `[..., K]`.

    Raises:
        ValueError: shapes that do not fit, unknown names, a budget too small for one row.
        TypeError: dtypes that do not fit.
        NotImplementedError: when differentiated twice.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_row_statistics
        >>> hidden, weight = jnp.ones((2, 3)), jnp.zeros((4, 3))
        >>> found = linear_row_statistics(hidden, weight, jnp.array([0, 3]), statistics=("log_prob", "entropy"))
        >>> print(found.log_prob, found.entropy)
        [-1.3862944 -1.3862944] [1.3862944 1.3862944]
        >>> def entropy_bonus(hidden):
        ...     return linear_row_statistics(hidden, weight, statistics=("entropy",)).entropy.sum()
        >>> jax.grad(entropy_bonus)(hidden).shape
        (2, 3)

    References:
        "From Projection to Prediction: Beyond Logits for Scalable Language Models", Algorithms 1 and 2.
    """
    return compute(*read(**locals()))


# What `compute` and `keep` take.
Checked = tuple[Settings, tuple[str, ...], CheckedCall]


def read(*, statistics: Sequence[str], **head: Any) -> Checked:
    """Checks the arguments of `linear_row_statistics`."""
    call = read_head(**head, several=True)
    return call.settings(), check_statistics(statistics, call.labels), call


@program(static=2)
def compute(settings: Settings, names: tuple[str, ...], call: CheckedCall, known: Known | None = None) -> RowStatistics:
    """The statistics. `known`: what `keep` has found for the same call."""
    operands = Operands(*call.rows(), call.row_mask, known=known)
    return from_primitives(evaluate.statistics(Call(settings, primitive_names(names)), operands), names)


def keep(settings: Settings, names: tuple[str, ...], call: CheckedCall, needs_grad: PerInput[bool]) -> Known | None:
    """What `compute` takes as `known`."""
    return evaluate.keep(Call(settings, primitive_names(names)), Operands(*call.rows(), call.row_mask), needs_grad)
