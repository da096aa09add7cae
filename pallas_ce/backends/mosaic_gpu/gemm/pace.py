"""Keeps the thread blocks of a long launch together, so that the L2 cache serves a tile to all that read it.

Thread blocks that walk through one part of the vocabulary read the same tiles, each when it gets there. Nothing makes
them get there at one time: they drift apart, in a long launch until a tile is no longer in the cache when the last of
them reads it, and is read from memory again. So each counts its steps in one number in memory. One that is ahead of the
mean sleeps before it loads on, about as long as it is ahead.

It is a hint: none sleeps long, whatever the others do, so that a thread block that has no multiprocessor yet keeps
nobody from going on. What is computed, and in which order it is added up, does not depend on it.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jax.interpreters import mlir
from jaxlib.mlir.dialects import arith, llvm

# Pipeline stages from one count to the next, 8 us of a tile of 128 by 192, and counts that one may be ahead.
EVERY = 16
AHEAD = 3

# What one count of one thread block among an H200's 132 is in time, and the longest sleep.
_COUNT_NANOSECONDS = 64
_LONGEST_NANOSECONDS = 4000

# A branch would have the assembler serialise the products of the other warpgroups.
_CODE = f"""
{{
.reg .pred counts, early;
.reg .s32 counted, ahead;
setp.ne.s32 counts, $2, 0;
@counts red.relaxed.gpu.global.add.u32 [$0], 1;
ld.relaxed.gpu.global.u32 counted, [$0];
sub.s32 ahead, $1, counted;
setp.gt.s32 early, ahead, 0;
mul.lo.s32 ahead, ahead, {_COUNT_NANOSECONDS};
min.s32 ahead, ahead, {_LONGEST_NANOSECONDS};
@early nanosleep.u32 ahead;
}}
"""


def keep(counted: Any, least: jax.Array) -> None:
    """Counts one more in `counted [1]` int32, and has the warpgroup sleep a little if that is less than `least []`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def sleep(_: Any, counted: Any, least: Any) -> None:
        one_thread = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        counts = arith.extui(mlir.ir.IntegerType.get_signless(32), one_thread)
        operands = [utils.memref_ptr(counted), least.registers.item(), counts]
        llvm.inline_asm(mlir.ir.Type.parse("!llvm.void"), operands, _CODE, "l,r,r", has_side_effects=True)

    sleep(counted, least)
