"""Tiles for each architecture: a table, read when a call is traced. Nothing is measured.

Each entry compiles without spilled registers, which tests check. Which of several is fastest was measured on Hopper,
of Ampere's too, whose code runs there.
"""

from typing import Literal, NamedTuple

import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from pallas_ce.head import HeadSpec


class Config(NamedTuple):
    """How the kernel is launched.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        window: entries of H that are loaded at a time.
        warps: of a program.
        stages: how many windows are under way.
        descriptors: whether tensor descriptors load them, and programs work on many tiles; else pointers.
        group: row blocks of a band of tiles.
        stores: whether a descriptor stores a tile, too, from shared memory of its size.
    """

    rows: int
    columns: int
    window: int
    warps: int = 8
    stages: int = 3
    descriptors: bool = False
    group: int = 8
    stores: bool = True


Use = Literal["forward", "stash", "dlogits"]

# Registers that `some` has room for.
_SOME = 6


class Entry(NamedTuple):
    """The tiles of an architecture; registers limit them.

    Attributes:
        room: registers for options and statistics, as `launch` counts them, that the next three have beside plain cross
            entropy's.
        forward: for statistics.
        stash: for statistics and the exponentials.
        dlogits: for dlogits.
        some: for any of them with a little more, or where loads are narrow.
        many: for every other call.
        pointers: where tensor descriptors cannot read the arrays.
    """

    room: int
    forward: Config
    stash: Config
    dlogits: Config
    some: Config
    many: Config
    pointers: Config


_SMALL_POINTERS = Config(64, 128, 64)
_SMALL = Config(64, 128, 64, stages=4, descriptors=True)
_SQUARE_POINTERS = Config(128, 128, 64)
_SQUARE = Config(128, 128, 64, stages=4, descriptors=True)
_WIDE_POINTERS = Config(128, 256, 64, group=16)
_WIDE = _WIDE_POINTERS._replace(descriptors=True)
_TALL = Config(256, 128, 64, descriptors=True)

_AMPERE = Entry(1, _WIDE_POINTERS, _WIDE_POINTERS, _WIDE_POINTERS, _SQUARE_POINTERS, _SMALL_POINTERS, _SMALL_POINTERS)
_HOPPER = Entry(3, _WIDE, _TALL, _WIDE, _SQUARE, _SMALL, _SMALL_POINTERS)
_SHALLOW = Config(128, 128, 64, descriptors=True)
_BLACKWELL = Entry(3, _SHALLOW, _SHALLOW, _SHALLOW, _SMALL, _SMALL, _SMALL_POINTERS)

# By compute capability, for 16-bit operands.
NARROW: dict[int, Entry] = {
    80: _AMPERE,
    86: _AMPERE,
    89: _AMPERE,
    90: _HOPPER,
    100: _BLACKWELL,
    103: _BLACKWELL,
    120: _AMPERE,
    121: _AMPERE,
}

# For float32 operands on tensor cores, once or in three passes: windows are half as long, and by pointers one entry
# serves all architectures.
_TF32_SMALL_POINTERS = Config(128, 64, 32)
_TF32_SMALL = Config(128, 64, 32, descriptors=True)
_TF32_SQUARE_POINTERS = Config(128, 128, 32)
_TF32_SQUARE = Config(128, 128, 32, descriptors=True)
_TF32_WIDE = Config(128, 256, 32, descriptors=True, group=16)
# A stored tile of float32 would take the shared memory of a window.
_TF32_TALL = Config(256, 128, 32, descriptors=True, stores=False)


def _one(config: Config, many: Config, pointers: Config) -> Entry:
    return Entry(_SOME, config, config, config, config, many, pointers)


_TF32 = _one(_TF32_SQUARE_POINTERS, _TF32_SMALL_POINTERS, _TF32_SMALL_POINTERS)
_TF32_NEWER = _one(_TF32_SQUARE, _TF32_SMALL, _TF32_SMALL_POINTERS)
_TF32_HOPPER = _TF32_NEWER._replace(room=3, forward=_TF32_WIDE, stash=_TF32_TALL)
_THREE_PASSES = _one(_TF32_SMALL_POINTERS, _TF32_SMALL_POINTERS, _TF32_SMALL_POINTERS)

# And in full float32: not by tensor cores, so that tiles need not be large.
_EXACT = Config(64, 64, 32, stages=2)
_EXACT_MANY = Config(64, 32, 32, warps=4, stages=2)
WIDE = Entry(1, _EXACT, _EXACT, _EXACT, _EXACT_MANY, _EXACT_MANY, _EXACT_MANY)

# Beside TF32.
_PRECISIONS = {
    Precision.HIGHEST: "ieee",
    DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
    DotAlgorithmPreset.F32_F32_F32: "ieee",
}

# For gradient products of 16-bit operands, where that was found faster than XLA's and the copies that those need. The
# rows of every tile of dlogits are whole windows: a product goes on to the end of one, and reads what was written.
PRODUCTS: dict[int, Config] = {90: _WIDE}

# What tensor descriptors read and write: rows that are multiples of this long.
_ROW_BYTES = 16


def precision(spec: HeadSpec) -> str | None:
    """How the kernel multiplies, in Triton's words; None where it cannot as the head wants it.

    Operands of 16 bits are multiplied as they are: TF32 has all of their bits.
    """
    own = spec.dtype.itemsize == 2 and spec.precision == Precision.DEFAULT
    return "tf32" if own or spec.tf32 else _PRECISIONS.get(spec.precision)


def config_for(spec: HeadSpec, capability: int | None, use: Use, taken: int = 0, step: int = 0) -> Config:
    """The tiles for a head and a pass. Any do where the device is not known: the call is traced again when it is.

    Args:
        spec: the head.
        capability: of the device.
        use: the pass.
        taken: registers that options and statistics take beside plain cross entropy.
        step: parts of the vocabulary begin at multiples of this number of columns; 0 where there is one part.
    """
    entry = _entry(spec, capability or 80)
    length = spec.hidden_size if spec.vocab_axis == 0 else spec.weight_rows
    lengths = (spec.hidden_size, length, step * spec.vocab_axis)
    readable = all(described(size, spec.dtype) for size in lengths)
    if not readable and entry.forward.descriptors:
        return entry.pointers
    if taken <= entry.room and readable:
        found: Config = getattr(entry, use)
        return found
    return entry.some if taken <= _SOME else entry.many


def product_for(spec: HeadSpec, capability: int | None, columns: int) -> Config | None:
    """The tiles of the products of `columns` columns' dlogits, read and written in place; None: XLA makes them."""
    found = PRODUCTS.get(capability or 0)
    if found is None or spec.dtype.itemsize > 2:
        return None
    whole = columns == spec.vocab_size or columns % max(found.rows, found.columns) == 0
    readable = all(described(size, spec.dtype) for size in (columns, spec.hidden_size, spec.weight_rows))
    return found if whole and readable else None


def described(length: int, dtype: np.dtype) -> bool:
    """Whether a tensor descriptor can stand for rows of `length` entries."""
    return length * dtype.itemsize % _ROW_BYTES == 0


def narrowest(spec: HeadSpec, capability: int | None) -> int:
    """The least columns of a tile."""
    return _entry(spec, capability or 80).many.columns


def _entry(spec: HeadSpec, capability: int) -> Entry:
    descriptors = capability // 10 in (9, 10)
    match precision(spec):
        case "ieee":
            return WIDE
        case "tf32x3":
            return _TF32_NEWER if descriptors else _THREE_PASSES
        case _ if spec.dtype.itemsize > 2:
            return _TF32 if not descriptors else _TF32_HOPPER if capability == 90 else _TF32_NEWER
    return NARROW.get(capability, _AMPERE)
