"""Tiles for each architecture: a table, read when a call is traced. Nothing is measured.

Each entry compiles without spilled registers, which tests check. Which of several is fastest was measured on Hopper,
of Ampere's too, whose code runs there.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from pallas_ce.head import HeadSpec


class Config(NamedTuple):
    """How the kernel is launched."""

    rows: int  # of a tile
    columns: int
    window: int  # entries of H that are loaded at a time
    warps: int = 8  # of a program
    stages: int = 3  # how many windows are under way
    descriptors: bool = False  # whether tensor descriptors load them, and programs work on many tiles; else pointers
    group: int = 8  # row blocks of a band of tiles
    stores: bool = True  # whether a descriptor stores a tile, too, from shared memory of its size

    def tiles(self, rows: int, columns: int) -> int:
        """How many it takes."""
        return -(-rows // self.rows) * -(-columns // self.columns)


Use = Literal["forward", "stash", "dlogits", "logits"]


class Choice(NamedTuple):
    """A config and the calls that it serves; an architecture has a list of them, and the first that serves is taken."""

    config: Config
    # Registers for options and statistics, as `launch` counts them, beside plain cross entropy's.
    room: float = math.inf
    uses: tuple[Use, ...] | None = None  # the passes; None: all
    aligned: bool = True  # whether operands' rows must begin where tensor descriptors and wide loads can read


Choices = tuple[Choice, ...]

_SMALL_POINTERS = Config(64, 128, 64)
_SMALL = Config(64, 128, 64, stages=4, descriptors=True)
_SQUARE_POINTERS = Config(128, 128, 64)
_SQUARE = Config(128, 128, 64, stages=4, descriptors=True)
_WIDE_POINTERS = Config(128, 256, 64, group=16)
_WIDE = _WIDE_POINTERS._replace(descriptors=True)
_TALL = Config(256, 128, 64, descriptors=True)

_UNALIGNED = Choice(_SMALL_POINTERS, aligned=False)
_AMPERE = (Choice(_WIDE_POINTERS, 1), Choice(_SQUARE_POINTERS, 6, aligned=False), _UNALIGNED)
_HOPPER = (
    Choice(_WIDE, 3, ("forward", "dlogits", "logits")),
    Choice(_TALL, 3, ("stash",)),
    Choice(_SQUARE, 6),
    Choice(_SMALL),
    _UNALIGNED,
)
_BLACKWELL = (Choice(Config(128, 128, 64, descriptors=True), 3), Choice(_SMALL), _UNALIGNED)

# By compute capability, for 16-bit operands.
NARROW: dict[int, Choices] = {
    80: _AMPERE,
    86: _AMPERE,
    89: _AMPERE,
    90: _HOPPER,
    100: _BLACKWELL,
    103: _BLACKWELL,
    120: _AMPERE,
    121: _AMPERE,
}

# For float32 operands on tensor cores, once or in three passes: windows are half as long, and by pointers one list
# serves all architectures. A stored tile of float32 would take the shared memory of a window.
_THREE_PASSES = (Choice(Config(128, 64, 32), aligned=False),)
_TF32 = (Choice(Config(128, 128, 32), 6, aligned=False), *_THREE_PASSES)
_TF32_NEWER = (
    Choice(Config(128, 128, 32, descriptors=True), 6),
    Choice(Config(128, 64, 32, descriptors=True)),
    *_THREE_PASSES,
)
_TF32_HOPPER = (
    Choice(Config(128, 256, 32, descriptors=True, group=16), 3, ("forward",)),
    Choice(Config(256, 128, 32, descriptors=True, stores=False), 3, ("stash",)),
    *_TF32_NEWER,
)

# And in full float32: not by tensor cores, so that tiles need not be large.
_EXACT = (Choice(Config(64, 64, 32, stages=2), 1), Choice(Config(64, 32, 32, warps=4, stages=2), aligned=False))

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

    Options and statistics have `taken` registers beside plain cross entropy's. Parts of the vocabulary begin at
    multiples of `step` columns; 0 where there is one part.
    """
    length = spec.hidden_size if spec.vocab_axis == 0 else spec.weight_rows
    lengths = (spec.hidden_size, length, step * spec.vocab_axis)
    aligned = all(described(size, spec.dtype) for size in lengths)
    for choice in choices(spec, capability):
        serves = choice.uses is None or use in choice.uses
        if serves and taken <= choice.room and (aligned or not choice.aligned):
            return choice.config
    raise AssertionError("the last choice serves every call")


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


def choices(spec: HeadSpec, capability: int | None) -> Choices:
    """The table's list for a head and a device."""
    capability = capability or 80
    descriptors = capability // 10 in (9, 10)
    match precision(spec):
        case "ieee":
            return _EXACT
        case "tf32x3":
            return _TF32_NEWER if descriptors else _THREE_PASSES
        case _ if spec.dtype.itemsize > 2:
            return _TF32 if not descriptors else _TF32_HOPPER if capability == 90 else _TF32_NEWER
    return NARROW.get(capability, _AMPERE)
