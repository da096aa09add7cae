"""Tiles for each architecture: a table, read when a call is traced. Nothing is measured.

Each entry compiles without spilled registers, which tests check. Which of several is fastest was measured on an H200
only, through PyTorch: tensor descriptors with 128×256 tiles.
"""

from typing import Literal, NamedTuple

import jax
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
    """

    rows: int
    columns: int
    window: int
    warps: int = 8
    stages: int = 3
    descriptors: bool = False
    group: int = 8


Use = Literal["forward", "stash", "dlogits", "many"]


class Entry(NamedTuple):
    """What an architecture takes.

    Attributes:
        forward: for the statistics of the plain cross entropy.
        stash: for those and the logits.
        dlogits: for the plain cross entropy's.
        many: for every other call, which keeps more numbers in registers.
        pointers: where tensor descriptors cannot read the arrays.
    """

    forward: Config
    stash: Config
    dlogits: Config
    many: Config
    pointers: Config


_POINTERS = Config(128, 128, 64)
_LARGE = Config(128, 256, 64, descriptors=True)
_SQUARE = Config(128, 128, 64, stages=4, descriptors=True)
_SMALL = Config(128, 64, 64, stages=4, descriptors=True)
_SMALL_POINTERS = Config(128, 64, 64)

_AMPERE = Entry(_POINTERS, _POINTERS, _POINTERS, _SMALL_POINTERS, _SMALL_POINTERS)
_HOPPER = Entry(_LARGE, _SQUARE, _LARGE, _SMALL, _SMALL_POINTERS)
_BLACKWELL = Entry(_SQUARE, _SQUARE, _SQUARE, _SMALL, _SMALL_POINTERS)

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

# For float32 operands, which are multiplied in full float32: not by tensor cores, so that tiles need not be large.
_EXACT = Config(64, 64, 32, stages=2)
_EXACT_MANY = Config(64, 32, 32, warps=4, stages=2)
WIDE = Entry(_EXACT, _EXACT, _EXACT, _EXACT_MANY, _EXACT_MANY)

# JAX's names for it; what a GPU is quickest at is TF32.
_PRECISIONS = {
    Precision.DEFAULT: "tf32",
    Precision.HIGH: "tf32",
    Precision.HIGHEST: "ieee",
    DotAlgorithmPreset.TF32_TF32_F32: "tf32",
    DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
    DotAlgorithmPreset.F32_F32_F32: "ieee",
}

# What tensor descriptors read: rows that are multiples of this long.
_ROW_BYTES = 16

# Multiprocessors where the device does not tell.
_PROGRAMS = 132


def precision(spec: HeadSpec) -> str | None:
    """How the kernel multiplies, in Triton's words; None where it cannot as the head wants it."""
    return _PRECISIONS.get(spec.precision) if spec.dtype.itemsize > 2 or spec.precision == Precision.DEFAULT else None


def served(capability: int) -> bool:
    """Whether the table has the architecture."""
    return capability in NARROW


def config_for(spec: HeadSpec, capability: int | None, use: Use, step: int = 0) -> Config:
    """The tiles for a head, of which parts begin at multiples of `step` columns, if there are several.

    Where the device is not known yet, the program is traced again for it: then any do.
    """
    entry = WIDE if spec.dtype.itemsize > 2 else NARROW.get(capability or 80, _AMPERE)
    length = spec.hidden_size if spec.vocab_axis == 0 else spec.weight_rows
    aligned = (spec.hidden_size, length, step * spec.vocab_axis)
    found: Config = getattr(entry, use)
    readable = all(size * spec.dtype.itemsize % _ROW_BYTES == 0 for size in aligned)
    return found if readable or not found.descriptors else entry.pointers


def multiprocessors() -> int:
    """Those of the GPU that is traced for."""
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return int(device.num_cores)
    try:
        return int(jax.local_devices(backend="cuda")[0].core_count)
    except RuntimeError:
        return _PROGRAMS
