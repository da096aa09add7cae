"""`explain`: what a call will do, before it is made."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api import checks as arguments
from pallas_ce.api import inputs, low_rank, specs
from pallas_ce.api.checks import ArrayLike, DTypeLike
from pallas_ce.api.low_rank import LowRank, WeightLike
from pallas_ce.api.precision import PrecisionLike
from pallas_ce.backends.protocol import Backward, Description, Implementation, Launch, Mode
from pallas_ce.dispatch.settings import WeightSum, decide
from pallas_ce.gradient_products import PerInput, needed_products
from pallas_ce.head import HeadSpec
from pallas_ce.parallel.partitioning import share
from pallas_ce.parallel.shards import Shards
from pallas_ce.parallel.target import known_device
from pallas_ce.statistics.cross_entropy import Reduction

_DIFFERENTIABLE = ("hidden", "weight", "bias", "logit_scale", "up", "down")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call is carried out. `print` it for a summary.

    Attributes:
        implementation: the backend's name.
        implementation_reason: why that one and not another, and whether it was never run on such a device.
        backward: the backward mode, or None without differentiation or for "reference".
        backward_reason: why that one.
        gemms: matrix products of `2·N·H·V` operations in forward and backward together, without a low-rank term's.
        rows: rows of a block; None for "reference".
        columns: vocabulary columns of a tile; None for "reference".
        scratch_bytes: memory of blocks and tiles at their largest.
        accumulator_bytes: float32 sums that live beside the gradients while these are made, or from the forward to the
            backward.
        gradient_bytes: the gradients returned.
        peak_bytes: predicted peak beside the inputs: these three, the numbers kept for each token, and a weight's copy.
        logits_bytes: what float32 logits would take.
        stored_bytes: what a program that stores them takes at its peak, to compare with `peak_bytes`: the logits, where
            anything is differentiated their gradient, and the gradients returned.
        weight_copy_bytes: a copy of the weight that the kernels read, where it has another dtype than the operands; 0
            where none is made.
        launches: the kernels that make each block's logits, with their tiles; none for "xla" and "reference".
        parallelism: how the call is split, where the arrays are sharded; bytes are then of one device.
        alternative: the same call in the other backward mode; None where there is none to choose: without
            differentiation, for losses by row, for "reference", and where it does not fit `scratch_bytes`.
    """

    implementation: str
    implementation_reason: str
    backward: str | None
    backward_reason: str
    gemms: int
    rows: int | None
    columns: int | None
    scratch_bytes: int
    accumulator_bytes: int
    gradient_bytes: int
    peak_bytes: int
    logits_bytes: int
    stored_bytes: int
    weight_copy_bytes: int = 0
    launches: tuple[Launch, ...] = ()
    parallelism: str = ""
    alternative: "Explanation | None" = None

    def __str__(self) -> str:
        tiles = "materialised logits" if self.rows is None else f"blocks of {self.rows} rows x {self.columns} columns"
        return "\n".join(
            [
                f"implementation  {self.implementation}: {self.implementation_reason}",
                f"backward        {self.backward or 'none'}: {self.backward_reason}",
                *([f"on each device  {self.parallelism}"] if self.parallelism else []),
                f"products        {self.gemms} (2·N·H·V operations each)",
                f"tiles           {tiles}",
                *map(_launch, self.launches),
                f"scratch         {_mib(self.scratch_bytes)}",
                *([f"weight's copy   {_mib(self.weight_copy_bytes)}"] if self.weight_copy_bytes else []),
                f"accumulators    {_mib(self.accumulator_bytes)}",
                f"gradients       {_mib(self.gradient_bytes)}",
                f"predicted peak  {_mib(self.peak_bytes)} (with stored float32 logits: {_mib(self.stored_bytes)})",
                *([f"alternative     {self.alternative._in_short()}"] if self.alternative else []),
            ]
        )

    def _in_short(self) -> str:
        mode = f"{self.backward}, {self.implementation}: {self.gemms} products"
        return f"{mode}, predicted peak {_mib(self.peak_bytes)}"


def explain(
    hidden: ArrayLike | jax.ShapeDtypeStruct,
    weight: WeightLike | jax.ShapeDtypeStruct,
    labels: ArrayLike | jax.ShapeDtypeStruct | None = None,
    *,
    bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
    vocab_axis: int = 0,
    vocab_size: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: ArrayLike = 1.0,
    temperature: ArrayLike | jax.ShapeDtypeStruct = 1.0,
    reduction: Reduction = "mean",
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
    backward: Backward = "auto",
    implementation: Implementation | None = None,
    scratch_bytes: int | None = None,
    differentiate: Sequence[str] = _DIFFERENTIABLE,
) -> Explanation:
    """Tells which implementation and backward mode a call takes and why, its products, tiles and memory.

    Beside these stand what the other backward mode would take, and the peak of a program that stores the logits.

    Without a name, a program for the devices of the arrays' mesh or of the ambient one, even if it is only compiled for
    them. Without such a mesh, a program for the process's GPU, or its CPU where it has none.

    Args:
        hidden: `[..., H]`, an array or a `jax.ShapeDtypeStruct`: only shape, dtype and sharding are read, nothing is
            computed.
        weight: `[V', H]` or `[H, V']`, or a `LowRank`, likewise.
        labels: `[...]` or `[..., K]` integers, likewise, or None: K of them for each row are not served by every
            implementation.
        bias: `[V']`, likewise, or None.
        vocab_axis: as in `linear_cross_entropy`, like all that follow.
        vocab_size: V, where the weight is padded.
        logit_softcap: the cap of the logits.
        logit_scale: their scale.
        temperature: as in `linear_row_statistics`; an array only by its shape and dtype, as above.
        reduction: "mean", "sum" or "none"; "none" also describes `linear_row_statistics`.
        dtype: compute dtype.
        precision: how operands are multiplied; one that the kernels do not know keeps them out.
        backward: "auto", "recompute" or "in_forward".
        implementation: "xla", "mosaic_gpu", "triton", "reference" or None.
        scratch_bytes: bound on scratch memory.
        differentiate: which of "hidden", "weight", "bias", "logit_scale" and, of a `LowRank`, "up" and "down" are
            differentiated; () describes evaluation.

    Returns:
        Explanation: see there.

    Raises:
        ValueError: as the call itself would.
        TypeError: likewise.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import explain
        >>> hidden = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
        >>> weight = jax.ShapeDtypeStruct((131072, 4096), jnp.bfloat16)
        >>> told = explain(hidden, weight, implementation="xla")
        >>> told.backward, told.gemms, told.peak_bytes < told.logits_bytes
        ('in_forward', 3, True)
        >>> told.alternative.backward, told.alternative.gemms, told.alternative.peak_bytes < told.peak_bytes
        ('recompute', 4, True)
        >>> explain(hidden, weight, reduction="none").gemms
        4
    """
    given = locals()
    told = _explain(**given)
    other = {"in_forward": "recompute", "recompute": "in_forward"}.get(told.backward or "")
    if other is None or reduction == "none":
        return told
    try:
        return dataclasses.replace(told, alternative=_explain(**given | {"backward": other}))
    except ValueError:  # it does not fit
        return told


def _explain(
    *,
    hidden: Any,
    weight: Any,
    labels: Any | None,
    bias: Any | None,
    vocab_axis: int,
    vocab_size: int | None,
    logit_softcap: float | None,
    logit_scale: Any,
    temperature: Any,
    reduction: Reduction,
    dtype: Any | None,
    precision: PrecisionLike | None,
    backward: Backward,
    implementation: Implementation | None,
    scratch_bytes: int | None,
    differentiate: Sequence[str],
) -> Explanation:
    arguments.check_reduction(reduction, None, backward)
    arguments.scalar("logit_scale", logit_scale)
    arrays = (hidden, weight.weight if isinstance(weight, LowRank) else weight)
    hidden, of_weight = _described("hidden", hidden), low_rank.read(weight, _described)
    weight, up, down = of_weight.weight, of_weight.up, of_weight.down
    bias = None if bias is None else _described("bias", bias)
    spec = specs.head_spec(
        hidden, weight, bias, vocab_axis, vocab_size, dtype, precision, logit_softcap, up=up, down=down
    )
    leading, of_labels = hidden.shape[:-1], labels
    if labels is not None:
        labels = _described("labels", labels)
        arguments.check_labels(labels, leading, several=True)
    temperature = arguments.temperature(temperature, leading)
    rows = inputs.batch_spec(leading, labels, None if isinstance(temperature, float) else temperature)
    differentiate = arguments.sequence_of_names("differentiate", differentiate)
    if unknown := [name for name in differentiate if name not in _DIFFERENTIABLE]:
        raise ValueError(f"differentiate names {unknown}, which are unknown; choose from {_DIFFERENTIABLE}")
    scaled = not arguments.is_known(logit_scale, 1.0)
    exists = {"hidden": True, "weight": True, "bias": bias is not None, "logit_scale": scaled}
    exists |= {"up": up is not None, "down": down is not None}
    needs_grad = PerInput(**{name: there and name in differentiate for name, there in exists.items()})
    differentiated, needed = any(needs_grad), needed_products(needs_grad, spec.rank)
    part = share(*arrays, of_labels, spec)
    how = decide(
        spec,
        math.prod(leading),
        arrays,
        scalar_loss=reduction != "none",
        rows=rows,
        backward=backward,
        implementation=implementation,
        scratch_bytes=arguments.check_scratch_bytes(scratch_bytes),
        padded_share=part.spec if part.padded else None,
    )
    tokens, spec, alone = part.tokens, part.spec, not part.words
    logits = tokens * spec.vocab_size * spec.accumulator.itemsize
    sizes: tuple[tuple[Any, bool, int], ...] = (
        (hidden, needs_grad.hidden, part.hidden),
        (weight, needs_grad.weight, part.weight),
        (bias, needs_grad.bias, 1),
        (up, needs_grad.up, 1),
        (down, needs_grad.down, 1),
    )
    gradients = sum(x.size * jnp.dtype(x.dtype).itemsize // n for x, flag, n in sizes if flag and x is not None)
    told = Explanation(
        how.implementation,
        how.implementation_reason,
        how.mode if differentiated else None,
        how.mode_reason if differentiated else "nothing is differentiated",
        gemms=1 + needed.hidden + needed.weight,
        rows=None,
        columns=None,
        # Logits, probabilities and their gradient, as plain differentiation keeps them.
        scratch_bytes=(3 if differentiated else 2) * logits,
        accumulator_bytes=0,
        gradient_bytes=gradients,
        peak_bytes=(3 if differentiated else 2) * logits + gradients,
        logits_bytes=logits,
        stored_bytes=(2 if differentiated else 1) * logits + gradients,
    )
    if how.mode is None:
        return dataclasses.replace(told, backward_reason=how.mode_reason)
    mode = how.mode if differentiated else None
    passes: tuple[Mode | None, ...] = (None, "recompute") if mode == "recompute" else (mode,)
    weight_sum = WeightSum()
    if mode == "in_forward" and alone:
        weight_sum = how.weight_sum(spec, np.dtype(of_weight.weight.dtype), needs_grad, Shards())
    scaled = scaled or (isinstance(temperature, float) and temperature != 1.0)
    describe = how.backend.describe or (lambda *_: Description())
    with known_device(arrays):
        plans = [how.block_sizes(spec, max(tokens, 1), needed, weight_sum) for needed in passes]
        options = sum([bias is not None, scaled, logit_softcap is not None])
        described = [describe(spec, options, *needed) for needed in zip(passes, plans, strict=True)]
    plan = plans[-1]
    scratch = max(plan.scratch_bytes for plan in plans) + part.gathered_bytes
    rounded = mode == "in_forward" and alone and not needs_grad.logit_scale
    of_hidden = how.kept_dtype(spec, np.dtype(hidden.dtype)) if rounded else spec.accumulator
    of_weight_sum = spec.weight_rows * spec.hidden_size * spec.accumulator.itemsize
    if weight_sum.bytes:
        of_weight_sum = 0 if plan.rows >= tokens else weight_sum.bytes
    accumulators = _accumulator_bytes(spec, tokens, mode, needs_grad.down, needed, of_hidden, of_weight_sum)
    copied = 0  # a weight that is gathered is rounded before
    if how.backend.capabilities.casts_whole and weight.dtype != spec.dtype and not part.gathered_bytes:
        copied = spec.weight_rows * spec.hidden_size * spec.dtype.itemsize
    # Statistics, coefficients, order: a few numbers each; and for each further target.
    row_bytes = (16 + 8 * (rows.targets or 0)) * tokens * spec.accumulator.itemsize
    return dataclasses.replace(
        told,
        gemms=told.gemms + (mode == "recompute"),
        rows=plan.rows,
        columns=plan.columns,
        scratch_bytes=scratch,
        accumulator_bytes=accumulators,
        peak_bytes=scratch + copied + accumulators + gradients + row_bytes,
        weight_copy_bytes=copied,
        launches=tuple(launch for of_pass in described for launch in of_pass.launches),
        parallelism=part.words,
    )


def _described(name: str, given: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype as the call itself would see them: without the 64-bit mode, float64 arrays become float32."""
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        raise TypeError(f"{name} is a {type(given).__name__}; it must be an array or a jax.ShapeDtypeStruct")
    narrowed = given.dtype == jnp.float64 and not jax.config.read("jax_enable_x64")
    return jax.ShapeDtypeStruct(given.shape, jnp.float32 if narrowed else given.dtype)


def _accumulator_bytes(
    spec: HeadSpec, tokens: int, mode: str | None, down: bool, needed: PerInput[bool], of_hidden: Any, of_weight: int
) -> int:
    """In_forward sums both gradients, recompute only hidden's, in its own dtype, and bias's."""
    if mode is None:
        return 0
    elements = spec.weight_rows * (needed.bias + spec.rank * needed.up)
    elements += spec.rank * (tokens * needed.down + spec.hidden_size * down)
    hidden = tokens * spec.hidden_size * needed.hidden * of_hidden.itemsize
    return elements * spec.accumulator.itemsize + hidden + of_weight * (mode == "in_forward" and needed.weight)


def _launch(launch: Launch) -> str:
    return f"kernel          {launch.kernel}: tiles of {launch.tile_rows} x {launch.tile_columns}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
