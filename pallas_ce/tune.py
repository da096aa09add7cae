"""Measures the Hopper kernels' tiles on this GPU and keeps the fastest: `python -m pallas_ce.tune`.

The table is left where every later program of this user finds it; `--out` writes another, say for a colleague. Classes
of shapes that the table already holds are skipped unless `--again` is given, so an interrupted or timed-out run goes on
where it stopped. Tuning all default shapes takes a quarter of an hour.
"""

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_ce.api.explain import explain
from pallas_ce.backends.device import cuda_kind
from pallas_ce.backends.mosaic_gpu.schedule.config import Config, Kernel, device_refusal
from pallas_ce.backends.mosaic_gpu.tuning import measure, tables, tuning
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, Shape

SHAPES = tuple((n, v, 4096) for n in (1024, 4096, 8192, 16384, 32768) for v in (32768, 65536, 131072, 262144))
_CALLS: dict[Kernel, dict[str, Any]] = {
    "forward": {"differentiate": ()},
    "stash": {"backward": "in_forward"},
    "dlogits": {"backward": "recompute"},
}
_LAUNCHES = 20


def blocks_of(shapes: Sequence[tuple[int, int, int]], kernels: Sequence[Kernel], vocab_axis: int) -> list[Shape]:
    """The kernels at the sizes of blocks in which calls of these shapes `(N, V, H)` work; one for each class."""
    found: dict[Shape, Shape] = {}
    for n, v, h in shapes:
        hidden = jax.ShapeDtypeStruct((n, h), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((v, h) if vocab_axis == 0 else (h, v), jnp.bfloat16)
        for kernel in kernels:
            told = explain(hidden, weight, vocab_axis=vocab_axis, implementation="mosaic_gpu", **_CALLS[kernel])
            assert told.rows
            assert told.columns
            shape = Shape(kernel, told.rows, told.columns, h, vocab_axis)
            found.setdefault(shape.nearest, shape)
    return list(found.values())


def tune(path: Path, table: tables.Table, wanted: list[Shape], launches: int, minutes: float | None) -> int:
    """Fills the table with the shapes' classes, saved one by one; returns how many are left when time runs out."""
    from tqdm import tqdm

    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    left = len(wanted)
    total = sum(measure.number_of_measurements(shape.kernel) for shape in wanted)
    with (
        tqdm(total=total, unit="candidate", dynamic_ncols=True) as bar,
        contextlib.suppress(KeyboardInterrupt, TimeoutError),
    ):
        for shape in wanted:
            on_device = measure.on_device(shape, launches)
            bar.set_description(f"{shape.kernel} {shape.rows}x{shape.vocab_size}")

            def measured(config: Config, on_device: measure.Measure = on_device) -> Entry | str:
                if time.monotonic() >= end:
                    raise TimeoutError
                if isinstance(result := on_device(config), str):
                    bar.write(f"left out {config}: {result}")
                bar.update()
                return result

            if entry := measure.best_of(shape, measured):
                tables.add(path, table, {shape.nearest: entry})
            left -= 1
    return left


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=_shape, action="append", metavar="N,V,H", help="tokens, vocabulary, width")
    parser.add_argument("--kernels", nargs="+", choices=get_args(Kernel), default=list(get_args(Kernel)))
    parser.add_argument("--vocab-axis", type=int, choices=(0, 1), default=0, help="1 for weights [H, V]")
    parser.add_argument("--launches", type=int, default=_LAUNCHES, help="of each candidate that count")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long; run again to go on")
    parser.add_argument("--again", action="store_true", help="measure classes that the table already holds")
    parser.add_argument("--out", type=Path, default=None, help="the table to write; by default this user's")
    options = parser.parse_args(words)
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return _failed("the tuner's progress bar needs tqdm: pip install 'pallas-ce[experiments]'")
    device = cuda_kind()
    if device is None or (refusal := device_refusal()):
        return _failed(f"tuning needs a GPU of the kernels' kind: {refusal if device else 'JAX finds none'}")
    path = options.out or tuning.user_path(device)
    try:
        table = tables.load(path, device)
    except FileNotFoundError:
        table = tables.Table(device)
    except tables.TableError as error:
        return _failed(str(error))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    table.made = {"jax": jax.__version__, "launches": options.launches, "date": date}
    try:
        tables.add(path, table, {})  # rather now than after the first measurement
    except OSError as error:
        return _failed(f"the table {path} cannot be written: {error}; choose another with --out")
    wanted = blocks_of(options.shape or SHAPES, options.kernels, options.vocab_axis)
    wanted = [shape for shape in wanted if options.again or shape.nearest not in table.entries]
    left = tune(path, table, wanted, options.launches, options.minutes)
    print(f"{path}: {len(table.entries)} classes of shapes" + (f", {left} left for the next run" if left else ""))
    return 0


def _failed(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _shape(text: str) -> tuple[int, int, int]:
    try:
        n, v, h = (int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers N,V,H: 8192,131072,4096") from None
    if min(n, v, h) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each of N,V,H must be at least 1")
    return n, v, h


if __name__ == "__main__":
    sys.exit(main())
