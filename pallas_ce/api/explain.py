"""`explain`: what a call will do, before it is made."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax

from pallas_ce.api import checks
from pallas_ce.api.checks import ArrayLike
from pallas_ce.api.head_options import WeightOptions, documented
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import LowRank, WeightLike, read_weight
from pallas_ce.backends.protocol import Backward, Implementation, Launch, Mode
from pallas_ce.parallel.partitioning import known_device, share
from pallas_ce.statistics.cross_entropy import Reduction
from pallas_ce.streaming.gradient_products import INPUTS, NO_GRADIENT, PerInput


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
        lines = [
            ("implementation", f"{self.implementation}: {self.implementation_reason}"),
            ("backward", f"{self.backward or 'none'}: {self.backward_reason}"),
            ("on each device", self.parallelism),
            ("products", f"{self.gemms} (2·N·H·V operations each)"),
            ("tiles", tiles),
            *(("kernel", f"{x.kernel}: tiles of {x.tile_rows} x {x.tile_columns}") for x in self.launches),
            ("scratch", _mib(self.scratch_bytes)),
            ("weight's copy", _mib(self.weight_copy_bytes) if self.weight_copy_bytes else ""),
            ("accumulators", _mib(self.accumulator_bytes)),
            ("gradients", _mib(self.gradient_bytes)),
            ("predicted peak", f"{_mib(self.peak_bytes)} (with stored float32 logits: {_mib(self.stored_bytes)})"),
        ]
        if other := self.alternative:
            words = f"{other.backward}, {other.implementation}: {other.gemms} products"
            lines.append(("alternative", f"{words}, predicted peak {_mib(other.peak_bytes)}"))
        return "\n".join(f"{name:16}{words}" for name, words in lines if words)


@documented
def explain(
    hidden: ArrayLike | jax.ShapeDtypeStruct,
    weight: WeightLike | jax.ShapeDtypeStruct,
    labels: ArrayLike | jax.ShapeDtypeStruct | None = None,
    *,
    bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
    vocab_scale: ArrayLike | jax.ShapeDtypeStruct | None = None,
    logit_softcap: float | None = None,
    temperature: ArrayLike | jax.ShapeDtypeStruct = 1.0,
    reduction: Reduction = "mean",
    backward: Backward = "auto",
    implementation: Implementation | None = None,
    differentiate: Sequence[str] = INPUTS,
    **options: Unpack[WeightOptions],
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
        vocab_scale: likewise.
        logit_softcap: the cap of the logits.
        temperature: as in `linear_row_statistics`; an array only by its shape and dtype, as above.
        reduction: "mean", "sum" or "none"; "none" also describes `linear_row_statistics`.
        precision: how operands are multiplied; one that the kernels do not know keeps them out.
        backward: "auto", "recompute" or "in_forward".
        implementation: "xla", "mosaic_gpu", "triton", "reference" or None.
        differentiate: which of "hidden", "weight", "bias", "vocab_scale", "logit_scale" and, of a `LowRank`, "up" and
            "down" are differentiated; () describes evaluation.

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
    differentiate = checks.sequence_of_names("differentiate", differentiate)
    if unknown := [name for name in differentiate if name not in INPUTS]:
        raise ValueError(f"differentiate names {unknown}, which are unknown; choose from {INPUTS}")
    logit_scale = options.pop("logit_scale", 1.0)
    given: dict[str, Any] = {"bias": bias, "vocab_scale": vocab_scale, "temperature": temperature}
    given["logit_scale"] = logit_scale
    shapes = {n: _described(n, x) for n, x in given.items() if hasattr(x, "shape") and not checks.is_plain(x)}
    named: dict[str, Any] = {"logit_softcap": logit_softcap, "reduction": reduction, "backward": backward, **options}
    problem: Problem = jax.eval_shape(
        functools.partial(Problem.read, implementation=implementation, several=True, **given, **named),
        _described("hidden", hidden),
        read_weight(weight, _described) if isinstance(weight, LowRank) else _described("weight", weight),
        None if labels is None else _described("labels", labels),
        **shapes,
    )
    exists = {name for name in INPUTS if getattr(problem, name) is not None}
    if checks.is_known(logit_scale, 1.0):  # a number as temperature makes one, which has no gradient
        exists.discard("logit_scale")
    needs_grad = NO_GRADIENT._replace(**{name: name in exists for name in differentiate})
    arrays = hidden, weight.weight if isinstance(weight, LowRank) else weight, labels
    told = _explained(problem, arrays, needs_grad)
    if told.backward is None or problem.options.by_row:
        return told
    other: Mode = "recompute" if told.backward == "in_forward" else "in_forward"
    problem = dataclasses.replace(problem, options=dataclasses.replace(problem.options, backward=other))
    try:
        return dataclasses.replace(told, alternative=_explained(problem, arrays, needs_grad))
    except ValueError:  # it does not fit
        return told


def _explained(problem: Problem, arrays: tuple[Any, Any, Any], needs_grad: PerInput[bool]) -> Explanation:
    """Of a problem of shapes; `arrays` are the caller's hidden states, weight and labels, which may know their mesh."""
    part = share(*arrays, problem.spec)
    how = problem.decided(arrays=arrays[:2], padded_share=part.spec if part.padded else None).how
    spec, tokens, wide = part.spec, part.tokens, part.spec.accumulator.itemsize
    differentiated, needed = any(needs_grad), spec.needed_products(needs_grad)
    mode = how.mode if differentiated else None
    logits = tokens * spec.vocab_size * wide
    parts = {"hidden": part.hidden, "weight": part.weight}
    asked = {name: getattr(problem, name) for name, flag in vars(needs_grad).items() if flag}
    gradients = sum(x.size * x.dtype.itemsize // parts.get(name, 1) for name, x in asked.items() if x.ndim)
    told = functools.partial(
        Explanation,
        how.implementation,
        how.implementation_reason,
        mode,
        how.mode_reason if differentiated or how.mode is None else "nothing is differentiated",
        gemms=1 + needed.hidden + (needed.weight or needed.vocab_scale) + (mode == "recompute"),
        gradient_bytes=gradients,
        logits_bytes=logits,
        stored_bytes=(2 if differentiated else 1) * logits + gradients,
    )
    if how.mode is None:  # logits, probabilities and their gradient, as plain differentiation keeps them
        kept = (3 if differentiated else 2) * logits
        return told(rows=None, columns=None, scratch_bytes=kept, accumulator_bytes=0, peak_bytes=kept + gradients)
    weight_sum = how.weight_sum(spec, problem.weight.dtype, needs_grad)
    passes: tuple[Mode | None, ...] = (None, mode) if mode == "recompute" else (mode,)
    options = sum(x is not None for x in (problem.bias, problem.logit_scale, spec.softcap))
    describe = how.backend.describe
    with known_device(arrays[:2]):
        plans = [how.block_sizes(spec, max(tokens, 1), needed, weight_sum) for needed in passes]
        made = zip(passes, plans, strict=True)
        launches = tuple(describe(spec, options, needed, plan.rows) for needed, plan in made if describe)
    plan = plans[-1]
    scratch = max(plan.scratch_bytes for plan in plans) + part.gathered_bytes
    of_hidden = how.hidden_sum_dtype(spec, problem.hidden.dtype, needs_grad, bool(part.words))
    sums = how.accumulator_bytes(spec, tokens, needs_grad, of_hidden, weight_sum, plan)
    if weight_sum.bytes:  # and a device's share of a gradient that the devices hold in parts
        sums += part.gathered_bytes
    # A weight that is gathered is rounded before.
    copied = 0 if part.gathered_bytes else how.backend.copy_bytes(spec, problem.weight.dtype)
    # Statistics, coefficients, order: a few numbers each; and for each further target.
    by_row = (16 + 8 * (problem.batch_spec.targets or 0)) * tokens * wide
    return told(
        rows=plan.rows,
        columns=plan.columns,
        scratch_bytes=scratch,
        accumulator_bytes=sums,
        peak_bytes=scratch + copied + sums + gradients + by_row,
        weight_copy_bytes=copied,
        launches=launches,
        parallelism=part.words,
    )


def _described(name: str, given: Any) -> jax.ShapeDtypeStruct:
    checks.no_tensor(name, given)
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        raise TypeError(f"{name} is a {type(given).__name__}; it must be an array or a jax.ShapeDtypeStruct")
    return jax.ShapeDtypeStruct(given.shape, jax.dtypes.canonicalize_dtype(given.dtype))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
