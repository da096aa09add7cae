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
from pallas_ce.backends.select import Default
from pallas_ce.head import PLAIN, BatchSpec, HeadSpec
from pallas_ce.parallel.partitioning import known_device
from pallas_ce.parallel.shards import Local, Shards
from pallas_ce.streaming.budget import DEFAULT_SCRATCH_BYTES, budget
from pallas_ce.streaming.gradient_products import PerInput

# The default scratch at most, and by vocabulary entry: a wider vocabulary needs more for a block of as many rows. The
# default doubles where rows should be many and are kept twice as wide: as operands, or in in_forward's stash.
_MOST_SCRATCH_BYTES = 2 * DEFAULT_SCRATCH_BYTES
_BYTES_PER_ENTRY = 4096

# Rows of a block that every backend has whole tiles of.
_WHOLE_ROWS = 256

# Below this many rows a block, in_forward's products run far below the machine's rate and recompute is faster.
_USEFUL_ROWS = 64


class WeightSum(NamedTuple):
    """In_forward's sum for the weight over several blocks of rows, as far as a single block does without."""

    bytes: int = 0  # what it takes beside the gradient
    spare: int = 0  # of these, where the gradient will be when all blocks are done
    narrow: bool = False  # whether it is the gradient itself, and the bits that this lacks: `Backend.weight_bits`
    given: bool = False  # whether the caller gave it, so that no gradient is made beside it


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
    default: Default | None = None  # what else may carry it out; None for one asked for by name, or the only one
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
        if self.default is None:
            return (self,)
        chosen = dataclasses.replace(self, default=None)
        instead = dataclasses.replace(chosen, implementation=self.default.instead)
        head, tokens = local.head, local.rows.batch.hidden.shape[0]
        if WORK[self.task].share(chosen, head.spec, tokens, None if head.valid_columns is None else head.spec):
            return (instead,)
        # The second of two variants is for devices without CUDA.
        return (chosen,) if self.default.certain else (chosen, dataclasses.replace(instead, platform="cpu"))

    def total(self, rows: jax.Array) -> jax.Array:
        """A sum over rows as this call means it, from that over this device's rows."""
        return rows if self.shards is None else self.shards.total(rows)

    def block_sizes(self, spec: HeadSpec, tokens: int, mode: Mode | None, weight_sum: WeightSum = _NO_SUM) -> Plan:
        """Block sizes of a pass.

        A single block may by default take what the weight's sum over several takes. Several may take, whatever the
        caller's bound, what of the sum is spare. Neither adds to the largest amount in use. Where the sum is given,
        blocks may by default take what a gradient beside it would.
        """
        backend, does, wide = self.backend, self.backend.capabilities, spec.dtype.itemsize > 2
        least, what = backend.minimum_scratch(spec, mode), f"one row of this head in the {mode or 'forward'} pass"
        logits = tokens * spec.vocab_size * spec.accumulator.itemsize
        default = min(max(DEFAULT_SCRATCH_BYTES, _BYTES_PER_ENTRY * spec.vocab_size), _MOST_SCRATCH_BYTES)
        if does.large_blocks and wide:
            default *= 2
        if weight_sum.bytes and self.scratch_bytes is None:
            # The logits of all rows, and where those are the stash, tiles beside them.
            times = 2 if does.wide_stash else 1
            bound = budget(None, least, times * logits, what, default + weight_sum.bytes)
            alone = backend.plan(spec, tokens, mode, bound, 0)
            if alone.rows >= tokens:
                return alone
        if does.wide_stash and not wide and mode == "in_forward":
            default *= 2
        spare = weight_sum.spare
        if weight_sum.given:
            default, spare = default + spare, 0
        if weight_sum.narrow:  # a large sum costs much to read for each block, and beside a small one there is room
            default = max(default + weight_sum.bytes // 4, _MOST_SCRATCH_BYTES - weight_sum.bytes)
        bound = budget(self.scratch_bytes, least, logits, what, default)
        return backend.plan(spec, tokens, mode, bound, spare)

    def weight_sum(
        self, spec: HeadSpec, weight_dtype: np.dtype, needs_grad: PerInput[bool], *, given: bool = False
    ) -> WeightSum:
        """What in_forward adds up the weight's gradient in; see `block_sizes`."""
        rounded = kept_dtype(spec, weight_dtype) != spec.accumulator
        if not needs_grad.weight or not self.backend.capabilities.large_blocks:
            return WeightSum(given=given)
        numbers = spec.weight_rows * spec.hidden_size
        if rounded and not given and (bits := self.backend.weight_bits(spec, _WHOLE_ROWS)) is not None:
            return WeightSum(math.prod(bits) * weight_dtype.itemsize, narrow=True)
        wide = numbers * spec.accumulator.itemsize if rounded or given else 0
        return WeightSum(wide, wide // 2, given=given)


def kept_dtype(spec: HeadSpec, dtype: np.dtype) -> np.dtype:
    """The dtype in which in_forward's sum for weight or hidden states of `dtype` waits for the upstream scalar.

    In bfloat16, for bfloat16: half the memory, and for a scalar that is a power of two, 1 above all, the
    same bits. Not in float16, where a sum that an upstream loss scale is to lift would underflow before.
    """
    return np.dtype(jnp.bfloat16) if dtype == jnp.bfloat16 else spec.accumulator


def refusal_of_logits(
    implementation: str, spec: HeadSpec, rows: int | None = None, several: bool = False
) -> str | None:
    """Why an implementation cannot serve materialized logits, as the end of a sentence; None where it can.

    `rows` is their number, if known; with `several` each has several targets.
    """
    backend = select.load(implementation)
    if backend.materialized is None:
        return "it has no kernels for materialized logits" if backend.capabilities.cuda_only else None
    one_each = "its kernels read one index for each row, and index holds several; use 'xla'"
    return one_each if several else backend.materialized.refusal(spec, rows)


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
        return "it has no kernels for two heads" if backend.capabilities.cuda_only else None
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
    default: str | None = None  # the implementation without a name; None: the fastest for the device


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
        # Rows are tempered after the kernels.
        lambda name, spec, _: "it has no top-k" if name == "triton" else select.load(name).refusal(spec),
    ),
    "pair": Work(
        ("triton", "xla", "reference"),
        "does not serve distillation; choose from 'triton', 'xla', 'reference' or None",
        split=True,
        modes=("recompute", "recompute"),
        default="xla",
    ),
}


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
    if implementation in IMPLEMENTATIONS and implementation not in work.serving:
        raise ValueError(f"implementation={implementation!r} {work.otherwise}")

    def refusal(name: str) -> str | None:
        if spec.scaled_entries and select.load(name).capabilities.cuda_only:
            return "its kernels know no scale for each vocabulary entry; use 'xla'"
        return (
            work.refusal(name, spec, rows) if teacher is None else refusal_of_pair(name, (spec, teacher), scratch_bytes)
        )

    name, reason, default = select.select(
        work.default if implementation is None else implementation,
        refusal,
        arrays,
        checked=checked or (shards is not None and shards.typed),
        slower=lambda name: select.load(name).slower(spec) if work.modes is None else None,
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
        return How(name, mode, scratch_bytes, shards, default, task=task, implementation_reason=reason)
    tokens = max(tokens, 1)
    with known_device(arrays) as device:
        platform = None if device is None else device.platform

    def by(name: str, default: Default | None, reason: str) -> How:
        how = How(name, None, scratch_bytes, shards, default, platform, implementation_reason=reason)
        mode, mode_reason = _mode(how, spec, tokens, scalar_loss, backward)
        return dataclasses.replace(how, mode=mode, mode_reason=mode_reason)

    how = by(name, default, reason)
    if default is not None:
        share, other = (spec, tokens, padded_share), default.instead
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
