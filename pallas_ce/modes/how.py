"""How a call will be carried out: implementation, backward mode, block sizes, and the reason for each choice."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends import select
from pallas_ce.backends.protocol import IMPLEMENTATIONS, Backend, Backward, Mode, Plan
from pallas_ce.head import PLAIN, BatchSpec, HeadSpec
from pallas_ce.parallel.partitioning import known_device
from pallas_ce.parallel.shards import Local, Shards, psum
from pallas_ce.streaming.budget import MOST_SCRATCH_BYTES, budget, default_bytes
from pallas_ce.streaming.gradient_products import PerInput

# Below this many rows a block, in_forward's products run far below the machine's rate and recompute is faster.
_USEFUL_ROWS = 64


class WeightSum(NamedTuple):
    """In_forward's sum for the weight over several blocks of rows, as far as a single block does without."""

    bytes: int = 0  # what it takes beside the gradient
    spare: int = 0  # of these, where the gradient will be when all blocks are done
    worth: int = 0  # what blocks may take besides, by default
    bits: tuple[int, int] | None = None  # where it is the gradient itself, what that lacks: `Backend.weight_bits`


_NO_SUM = WeightSum()


# A loss or statistics of a streamed head, or of logits that the caller holds; largest logits; a divergence.
Task = Literal["head", "logits", "top_k", "pair"]


@dataclasses.dataclass(frozen=True)
class How:
    """How a call is carried out; static and hashable, whatever the reasons, which are for `explain`."""

    implementation: str  # a backend's name, or "reference"
    mode: Mode | None  # None for the reference, which has JAX's own differentiation, and without derivatives
    scratch_bytes: int | None  # the caller's bound, or None for the default
    shards: Shards | None = None  # how the call is split inside a `shard_map`; None outside
    certain: bool | None = None  # see `select.select`: None where no other implementation may carry out any of it
    platform: str | None = None  # the one that is known to be lowered for, by JAX's name; None: the process's
    task: Task = "head"
    implementation_reason: str = dataclasses.field(default="", compare=False)
    mode_reason: str = dataclasses.field(default="", compare=False)

    @property
    def backend(self) -> Backend:
        """The backend itself; not for "reference", which is none."""
        return select.load(self.implementation).on(self.platform)

    def variants(self, local: Local) -> tuple["How", ...]:
        """How a device's share of the call is carried out: one way, or one for CUDA and one for other platforms.

        Results of both have the same types: mode, dtypes and kept arrays depend on no backend.
        """
        if self.certain is None:
            return (self,)
        chosen = dataclasses.replace(self, certain=None)
        instead = dataclasses.replace(chosen, implementation=select.EVERYWHERE)
        head, tokens = local.head, local.rows.batch.hidden.shape[0]
        if WORK[self.task].share(chosen, head.spec, tokens, None if head.valid_columns is None else head.spec):
            return (instead,)
        # The second of two variants is for devices without CUDA.
        return (chosen,) if self.certain else (chosen, dataclasses.replace(instead, platform="cpu"))

    def total(self, rows: jax.Array) -> jax.Array:
        """A sum over rows as this call means it, from that over this device's rows."""
        return rows if self.shards is None else self.shards.total(rows)

    def divisor(self, rows: jax.Array) -> jax.Array:
        """The same sum where it divides each row's share of a total: the devices' shares of its derivative add up."""
        return rows if self.shards is None else psum(rows, self.shards.common)

    def block_sizes(self, spec: HeadSpec, tokens: int, mode: Mode | None, weight_sum: WeightSum = _NO_SUM) -> Plan:
        """Block sizes of a pass.

        A single block may by default take what the weight's sum over several takes. Several may take, whatever the
        caller's bound, what of the sum is spare. Neither adds to the largest amount in use.
        """
        backend, entries = self.backend, tokens * spec.vocab_size
        least, what = backend.minimum_scratch(spec, mode), f"one row of this head in the {mode or 'forward'} pass"
        if weight_sum.bytes and self.scratch_bytes is None:
            default, by_entry = backend.default_scratch(spec, mode, alone=True)
            bound = budget(None, least, by_entry * entries, what, default + weight_sum.bytes)
            alone = backend.plan(spec, tokens, mode, bound)
            if alone.rows >= tokens:
                return alone
        default, by_entry = backend.default_scratch(spec, mode)
        bound = budget(self.scratch_bytes, least, by_entry * entries, what, default + weight_sum.worth)
        return backend.plan(spec, tokens, mode, bound, weight_sum.spare)

    def hidden_sum_dtype(self, spec: HeadSpec, dtype: np.dtype, needs_grad: PerInput[bool], split: bool) -> np.dtype:
        """The dtype of the sum for hidden states of `dtype`.

        In_forward writes each row once, and rounds it at once, unless more is to be made of it first, or the backward
        of a `shard_map` adds up several devices' shares.
        """
        once = self.mode == "in_forward" and self.shards is None and not (split or needs_grad.logit_scale)
        return kept_dtype(spec, dtype) if once else spec.accumulator

    def accumulator_bytes(
        self,
        spec: HeadSpec,
        tokens: int,
        needs_grad: PerInput[bool],
        hidden_dtype: np.dtype,
        weight_sum: WeightSum,
        plan: Plan,
    ) -> int:
        """Bytes of the sums that live beside the gradients; recompute finishes the weight's tile by tile."""
        wide, size, needed = spec.accumulator.itemsize, spec.hidden_size, spec.needed_products(needs_grad)
        of_weight = weight_sum.bytes * (plan.rows < tokens) if weight_sum.bytes else spec.weight_rows * size * wide
        numbers = spec.weight_rows * (needed.bias + needed.vocab_scale + spec.rank * needed.up)
        numbers += spec.rank * (tokens * needed.down + size * needs_grad.down)
        of_rows = tokens * size * needed.hidden * hidden_dtype.itemsize
        return numbers * wide + of_rows + of_weight * (self.mode == "in_forward" and needed.weight)

    def weight_sum(
        self, spec: HeadSpec, weight_dtype: np.dtype, needs_grad: PerInput[bool], *, given: bool = False
    ) -> WeightSum:
        """What in_forward adds up the weight's gradient in; see `block_sizes`. If `given`, no gradient is beside it."""
        beside = given or kept_dtype(spec, weight_dtype) != spec.accumulator
        worth_more, _ = self.backend.default_scratch(spec, "in_forward", alone=True)
        if not (beside and worth_more and needs_grad.weight) or self.mode != "in_forward":
            return _NO_SUM
        wide = spec.weight_rows * spec.hidden_size * spec.accumulator.itemsize
        if given:  # blocks may by default take what a gradient would
            return WeightSum(wide, worth=wide // 2)
        if (bits := self.backend.weight_bits(spec)) is None:
            return WeightSum(wide, wide // 2)
        # A large sum costs much to read for each block, and beside a small one there is room.
        taken = math.prod(bits) * weight_dtype.itemsize
        room = MOST_SCRATCH_BYTES - taken - default_bytes(spec.vocab_size)
        return WeightSum(taken, worth=max(taken // 4, room), bits=bits)


def kept_dtype(spec: HeadSpec, dtype: np.dtype) -> np.dtype:
    """The dtype in which in_forward's sum for weight or hidden states of `dtype` waits for the upstream scalar.

    In bfloat16, for bfloat16: half the memory, and for a scalar that is a power of two, 1 above all, the
    same bits. Not in float16, where a sum that an upstream loss scale is to lift would underflow before.
    """
    return np.dtype(jnp.bfloat16) if dtype == jnp.bfloat16 else spec.accumulator


def refusal_of_logits(
    implementation: str, spec: HeadSpec, rows: int | None = None, several: bool = False
) -> str | None:
    """Why kernels for materialized logits cannot serve these, as the end of a sentence; None where they can.

    `rows` is their number, if known; with `several` each has several targets.
    """
    kernels = select.load(implementation).materialized
    if kernels is None:
        return None
    one_each = "its kernels read one index for each row, and index holds several; use 'xla'"
    return one_each if several else kernels.refusal(spec, rows)


def _share_of_head(how: How, spec: HeadSpec, _: int, padded_share: HeadSpec | None) -> str | None:
    if padded_share is not None and (why := how.backend.refusal(padded_share, padded_share=True)):
        return why
    least = max(how.backend.minimum_scratch(spec, mode) for mode in (None, how.mode))
    if how.scratch_bytes is not None and least > how.scratch_bytes:
        mode = how.mode or "forward"
        return f"scratch_bytes={how.scratch_bytes} is less than the {least} bytes of one row in mode {mode}"
    return None


def refusal_of_pair(implementation: str, heads: tuple[HeadSpec, HeadSpec], scratch_bytes: int | None) -> str | None:
    """Why an implementation cannot serve a student's head and a teacher's, as the end of a sentence; None: it can."""
    backend = select.load(implementation)
    if backend.pairs is None:
        return None
    if why := next(filter(None, map(backend.refusal, heads)), None):
        return why
    least = backend.pairs.minimum_scratch(heads)
    if scratch_bytes is not None and scratch_bytes < least:
        return f"scratch_bytes={scratch_bytes} is less than the {least} bytes of one row; use 'xla'"
    return None


class Work(NamedTuple):
    """What depends on a call's task."""

    serving: tuple[str, ...] = IMPLEMENTATIONS  # the implementations that there are for it
    otherwise: str = ""  # the end of the error for another one
    # `(name, spec, rows)` to why an implementation cannot serve the call; None where it can.
    refusal: Callable[[str, HeadSpec, BatchSpec], str | None] = lambda name, *head: select.load(name).refusal(*head)
    # `(how, spec, tokens, padded_share)` to why not a device's share, whose rows are known only there.
    share: Callable[[How, HeadSpec, int, HeadSpec | None], str | None] = lambda *_: None
    split: bool = False  # whether it is split inside a `shard_map`
    # For losses by row, and for a sum; None: by what the scratch holds.
    modes: tuple[Mode | None, Mode | None] | None = (None, None)


WORK: dict[Task, Work] = {
    "head": Work(share=_share_of_head, split=True, modes=None),
    "logits": Work(
        ("xla", "mosaic_gpu"),
        "does not serve materialized logits: choose 'xla' or 'mosaic_gpu'",
        lambda name, spec, rows: refusal_of_logits(name, spec, several=rows.targets is not None),
        lambda how, spec, tokens, _: refusal_of_logits(how.implementation, spec, tokens),
        modes=("recompute", "in_forward"),
    ),
    "top_k": Work(
        ("xla", "mosaic_gpu"),
        "has no top-k: use 'xla', or jax.lax.top_k of materialized logits",
        lambda name, spec, _: select.load(name).refusal(spec),  # rows are tempered after the kernels
    ),
    "pair": Work(
        ("triton", "xla", "reference"),
        "does not serve distillation; choose from 'triton', 'xla', 'reference' or None",
        split=True,
        modes=("recompute", "recompute"),
    ),
}


def implementation_of_pair(implementation: str | None) -> str | None:
    """The implementation of two heads where one head is given that: None where it serves no two."""
    return implementation if implementation in WORK["pair"].serving else None


def decide(
    spec: HeadSpec,
    tokens: int,
    arrays: Any,
    *,
    task: Task = "head",
    scalar_loss: bool = False,
    rows: BatchSpec = PLAIN,
    backward: Backward = "auto",
    implementation: str | None = None,
    scratch_bytes: int | None = None,
    shards: Shards | None = None,
    checked: bool = False,
    padded_share: HeadSpec | None = None,
    teacher: HeadSpec | None = None,
) -> How:
    """Chooses for `tokens` rows of a head, or of logits.

    The mode is one for all platforms, or forward and backward would not fit: the arrays kept between them depend on it.
    It is the one that suits the backend for the GPU, as that is where a default is chosen for speed; if another that
    may be needed cannot do it within `scratch_bytes`, that other one does everything. So None is never refused what
    its most general backend can do.

    `arrays` may know their device, and are `checked` if they vary over axes of a `shard_map` with `check_vma=True`. The
    `padded_share` is the head that a device works on, where a padded vocabulary is known to be split otherwise. The
    `teacher` is the other head of a pair.

    Raises:
        ValueError: the named implementation, mode or budget cannot serve the call.
    """
    work = WORK[task]
    lacking = set(IMPLEMENTATIONS).difference(work.serving)
    if implementation in lacking:
        raise ValueError(f"implementation={implementation!r} {work.otherwise}")

    def refusal(name: str) -> str | None:
        if name in lacking:
            return f"it {work.otherwise}"
        if (spec.scaled_entries or (teacher and teacher.scaled_entries)) and select.for_cuda(name):
            return "its kernels know no scale for each vocabulary entry; use 'xla'"
        if teacher is not None:
            return refusal_of_pair(name, (spec, teacher), scratch_bytes)
        return work.refusal(name, spec, rows)

    def slower(name: str) -> str | None:
        backend = select.load(name)
        if teacher is not None:
            return backend.slower(spec) or backend.slower(teacher)
        return backend.slower(spec, rows.targets or 0, tokens) if work.modes is None else None

    name, reason, certain = select.select(
        implementation,
        refusal,
        arrays,
        checked=checked or (shards is not None and shards.typed),
        slower=slower,
    )
    if name == "reference":
        if backward != "auto":
            raise ValueError(
                f"backward={backward!r} does not apply to implementation='reference', which differentiates "
                "materialised logits; leave backward='auto'"
            )
        if shards is not None and (shards.vocabulary or shards.common):
            raise ValueError("implementation='reference' does not know mesh_axes; leave implementation=None")
        mode_reason = "JAX differentiates the materialised logits"
        return How(name, None, None, implementation_reason=reason, mode_reason=mode_reason)
    if work.modes is not None:
        mode = work.modes[scalar_loss]
        return How(name, mode, scratch_bytes, shards, certain, task=task, implementation_reason=reason)
    tokens = max(tokens, 1)
    with known_device(arrays) as device:
        platform = None if device is None else device.platform

    def by(name: str, certain: bool | None, reason: str) -> How:
        how = How(name, None, scratch_bytes, shards, certain, platform, implementation_reason=reason)
        mode, mode_reason = _mode(how, spec, tokens, scalar_loss, backward)
        return dataclasses.replace(how, mode=mode, mode_reason=mode_reason)

    how = by(name, certain, reason)
    if certain is not None:
        share, other = (spec, tokens, padded_share), select.EVERYWHERE
        if why := _share_of_head(how, *share):
            reason = f"not {name}: {why}"
        elif why := _share_of_head(dataclasses.replace(how, implementation=other), *share):
            reason = f"{other}, which may have to serve parts of this call, could not do as {name} would: {why}"
        if why:
            how = by(other, None, reason)
    for needed in (None, how.mode):
        how.block_sizes(spec, tokens, needed)  # raises where the budget is too small
    return how


def _mode(how: How, spec: HeadSpec, tokens: int, scalar_loss: bool, backward: Backward) -> tuple[Mode, str]:
    if backward != "auto":
        return backward, "asked for by name"
    if not scalar_loss:
        return "recompute", "each row has a cotangent of its own, known only in the backward"
    useful = min(-(-tokens // 4), _USEFUL_ROWS)
    rows = 0
    if how.scratch_bytes is None or how.scratch_bytes >= how.backend.minimum_scratch(spec, "in_forward"):
        plan = how.block_sizes(spec, tokens, "in_forward")
        if plan.slower is not None:
            return "recompute", plan.slower
        rows = plan.rows
    if rows >= useful:
        return "in_forward", "a scalar loss: three products instead of four, within the scratch budget"
    return "recompute", f"the scratch budget holds {rows} rows of logits, fewer than the {useful} that in_forward needs"
