"""Which tiles a kernel takes, and why: the user's table of measurements, then the shipped one, then the rule.

Tables are read when a program is traced; nothing is measured then. The user's is the file that the environment variable
`PALLAS_CE_TUNING` names, or else `pallas_ce/<GPU model>.json` in `$XDG_CACHE_HOME` (`~/.cache`), where
`python -m pallas_ce.tune` leaves it. One that cannot be used is named in a warning and left out.
"""

import functools
import os
import warnings
from pathlib import Path
from typing import NamedTuple

from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu.schedule import config
from pallas_ce.backends.mosaic_gpu.schedule.config import Config, Kernel
from pallas_ce.backends.mosaic_gpu.tuning import tables
from pallas_ce.head import HeadSpec

VARIABLE = "PALLAS_CE_TUNING"
SHIPPED = Path(__file__).parent / "tuned"

# Tables hold kernels of a plain loss. With more vectors by row, or options, registers decide, which the rule knows.
_PLAIN_VECTORS = 2


class Choice(NamedTuple):
    """Tiles, and where they come from in words."""

    config: Config
    source: str


def tiles_for(kernel: Kernel, spec: HeadSpec, rows: int, columns: int, vectors: int, options: int) -> Choice:
    """Tiles for `rows` × `columns` logits.

    Args:
        kernel: which one.
        spec: the head.
        rows: rows of a block.
        columns: vocabulary entries.
        vectors: how many statistics or coefficients the kernel keeps by row.
        options: how many of bias, scale, soft cap and given u the head has.
    """
    device = targets.cuda_kind()
    if device is not None and vectors <= _PLAIN_VECTORS and options == 0:
        key = tables.Shape(kernel, rows, columns, spec.hidden_size, spec.vocab_axis).nearest
        for source, table in _tables(device, user_path(device), VARIABLE in os.environ):
            if key in table.entries:
                return Choice(table.entries[key].config, source)
    return Choice(config.rule(kernel, rows, columns, vectors, options), "the default rule")


def user_path(device: str) -> Path:
    """Where the user's table for a GPU model is."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    root = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pallas_ce" / tables.file_name(device)


@functools.lru_cache(maxsize=16)
def _tables(device: str, path: Path, named: bool) -> tuple[tuple[str, tables.Table], ...]:
    """The tables for a GPU model with their descriptions, the user's first; read once a process."""
    found = []
    try:
        found.append((f"the user's table {path}", tables.load(path, device)))
    except FileNotFoundError:
        if named:
            warnings.warn(f"the tuning table {path}, which {VARIABLE} names, does not exist", stacklevel=2)
    except tables.TableError as error:
        warnings.warn(str(error), stacklevel=2)
    shipped = SHIPPED / tables.file_name(device)
    if shipped.is_file():
        found.append((f"the table shipped for {device}", tables.load(shipped, device)))
    return tuple(found)
