"""Measures the kernels' tiles on this GPU and keeps the fastest: `python -m pallas_ce.backends.mosaic_gpu.tune`.

The table is left where every later program of this user finds it (see `tuning`); `--out` writes another, say for a
colleague. Classes of shapes that the table already holds are skipped unless `--again` is given, so an interrupted or
timed-out run goes on where it stopped. Tuning all default shapes takes a quarter of an hour.
"""

import argparse
import concurrent.futures
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, stash_kernel
from pallas_ce.backends.mosaic_gpu.schedule.config import Config, Kernel, device_kind, device_refusal
from pallas_ce.backends.mosaic_gpu.tuning import candidates, tables, tuning
from pallas_ce.backends.mosaic_gpu.tuning.candidates import Case, Times
from pallas_ce.backends.protocol import Mode
from pallas_ce.dispatch.settings import Settings
from pallas_ce.head import Head, HeadSpec, NeedsGrad
from pallas_ce.parallel.shards import Shards
from pallas_ce.statistics.gradient import Coefficients

SHAPES = tuple((n, v, 4096) for n in (1024, 4096, 8192, 16384, 32768) for v in (32768, 65536, 131072, 262144))
_NAMES = frozenset({"lse"})
_MODES: dict[Kernel, Mode | None] = {"forward": None, "stash": "in_forward", "dlogits": "recompute"}

_LAUNCHES = 20


def cases(shapes: Sequence[tuple[int, int, int]], kernels: Sequence[Kernel], vocab_axis: int) -> list[Case]:
    """The kernels at the sizes of blocks in which calls of these shapes `(N, V, H)` work; one for each class."""
    found: dict[tables.ShapeClass, Case] = {}
    for n, v, h in shapes:
        spec = HeadSpec(h, v, v, vocab_axis, np.dtype(jnp.bfloat16), None)
        for kernel in kernels:
            settings, mode = Settings("mosaic_gpu", None, None), _MODES[kernel]
            sums = settings.sum_bytes(spec, spec.dtype, NeedsGrad(weight=True), Shards()) if mode == "in_forward" else 0
            plan = settings.plan(spec, n, mode, sums)
            case = Case(kernel, spec, plan.rows, plan.columns)
            found.setdefault(case.shape_class, case)
    return list(found.values())


def program(case: Case, config: Config) -> Callable[..., Any]:
    """The case as a function of hidden states, weight and a vector by row near the lse."""

    def run(hidden: jax.Array, weight: jax.Array, by_row: jax.Array) -> Any:
        head = Head(weight, None, None, None, _sliced(case))
        if case.kernel == "forward":
            return forward_kernel.statistics(head, hidden, _NAMES, config)
        if case.kernel == "stash":
            partial, exponentials = stash_kernel.stash(head, hidden, by_row, _NAMES, config)
            return partial, _defined(case, exponentials)
        stored = dlogits_kernel.dlogits(head, hidden, by_row, Coefficients(jnp.ones_like(by_row)), config)
        return _defined(case, stored)

    return run


def arrays(case: Case) -> tuple[jax.Array, ...]:
    """Normal random operands, as the multiplier's power depends on its data, for logits of standard deviation 1."""
    keys = jax.random.split(jax.random.key(0), 2)
    h, spec = case.spec.hidden_size, _sliced(case)
    hidden = jax.random.normal(keys[0], (case.rows, h), spec.dtype)
    shape = (case.columns, h) if spec.vocab_axis == 0 else (h, case.columns)
    weight = jax.random.normal(keys[1], shape, spec.dtype) * jnp.asarray(h**-0.5, spec.dtype)
    return hidden, weight, jnp.full(case.rows, jnp.log(case.columns) + 0.5, jnp.float32)


def _defined(case: Case, stored: jax.Array | None) -> jax.Array:
    """Without the padding, whose contents are undefined; no copy where there is none."""
    assert stored is not None
    return stored[: case.rows, : case.columns]


def _sliced(case: Case) -> HeadSpec:
    spec = case.spec
    return HeadSpec(spec.hidden_size, case.columns, case.columns, spec.vocab_axis, spec.dtype, None)


class OnDevice:
    """Times candidates with the GPU's own clock, in turn with the rule's tiles, after checking their results."""

    def __init__(self, launches: int) -> None:
        self.launches = launches
        self._case: Case | None = None
        self._arrays: tuple[jax.Array, ...] = ()
        self._ready: dict[Config, concurrent.futures.Future[Any]] = {}

    def __call__(self, case: Case, config: Config) -> Times | str:
        """See `candidates.Measure`."""
        if case != self._case:
            self._load(case)
        try:
            ready = self._ready.get(config)
            compiled = ready.result() if ready else _compiled(case, config, self._arrays)
            if not compiled(*self._arrays):
                return "its results differ from those of the default tiles"
        except jax.errors.JaxRuntimeError as error:
            return f"it does not run: {str(error).splitlines()[0][:200]}"
        return _in_turn(compiled, self._arrays, self.launches)

    def _load(self, case: Case) -> None:
        """Prepares the operands, and the first candidates at once: compiling takes longer than measuring."""
        self._arrays = ()  # two cases may not fit at once
        self._case, self._arrays = case, arrays(case)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self._ready = {
                config: pool.submit(_compiled, case, config, self._arrays)
                for config in candidates.first_candidates(case.kernel)
            }


def _compiled(case: Case, config: Config, given: tuple[jax.Array, ...]) -> Any:
    """Launches the candidate and then the rule; returns whether their results agree."""

    def run(*given: jax.Array) -> jax.Array:
        found = program(case, config)(*given)
        found, given = jax.lax.optimization_barrier((found, given))
        return _agree(found, program(case, case.rule)(*given))

    return jax.jit(run).lower(*given).compile()


@jax.jit
def _agree(a: Any, b: Any) -> jax.Array:
    """Whether two results are the same but for the rounding of sums and of 16-bit numbers."""

    def close(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.all(jnp.abs(x - y) <= 1e-5 + 2.0**-7 * jnp.abs(y))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(close, a, b))))


def _in_turn(compiled: Any, arguments: tuple[jax.Array, ...], launches: int) -> Times:
    """Medians of launches that alternate: clocks drift by several per cent in a tenth of a second, and for both alike.

    The first half of them, while the clocks settle, does not count.
    """
    from jax.experimental.mosaic.gpu import profiler

    measure: Any = profiler.measure
    _, by_launch = measure(compiled, aggregate=False, iterations=2 * launches)(*arguments)
    own = [[1e3 * ms for name, ms in kernels if "pallas_ce" in name] for kernels in by_launch[launches:]]
    candidate, rule = map(statistics.median, zip(*own, strict=True))
    return Times(candidate, rule)


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
        from tqdm import tqdm
    except ImportError:
        print("the tuner's progress bar needs tqdm: pip install 'pallas-ce[experiments]'", file=sys.stderr)
        return 2
    device = device_kind()
    if device is None or (refusal := device_refusal()):
        print(f"tuning needs a GPU of the kernels' kind: {refusal if device else 'JAX finds none'}", file=sys.stderr)
        return 2
    path = options.out or tuning.user_path(device)
    try:
        table = tables.load(path, device)
    except FileNotFoundError:
        table = tables.Table(device)
    except tables.TableError as error:
        print(error, file=sys.stderr)
        return 2
    table.made = {
        "command": _command(sys.argv[1:] if words is None else words),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    try:
        tables.save(path, table)  # rather now than after the first measurement
    except OSError as error:
        print(f"the table {path} cannot be written: {error}; choose another with --out", file=sys.stderr)
        return 2
    needs_grad = cases(options.shape or SHAPES, options.kernels, options.vocab_axis)
    needs_grad = [case for case in needs_grad if options.again or case.shape_class not in table.entries]
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    total = sum(candidates.number_of_candidates(case.kernel) for case in needs_grad)
    with tqdm(total=total, unit="candidate", dynamic_ncols=True) as bar:

        def tried(case: Case, config: Config, result: Times | str) -> None:
            bar.set_description(f"{case.kernel} {case.rows}x{case.columns}")
            bar.update()
            if isinstance(result, str):
                bar.write(f"left out {config}: {result}")

        try:
            left = candidates.tune(
                needs_grad,
                table,
                OnDevice(options.launches),
                functools.partial(tables.save, path),
                tried,
                lambda: end is None or time.monotonic() < end,
            )
        except KeyboardInterrupt:
            left = sum(case.shape_class not in table.entries for case in needs_grad)
    print(f"{path}: {len(table.entries)} classes of shapes" + (f", {left} left for the next run" if left else ""))
    return 0


def _command(words: Sequence[str]) -> str:
    """The command as it may be repeated elsewhere: without the path."""
    told = list(words)
    while "--out" in told:
        place = told.index("--out")
        del told[place : place + 2]
    return " ".join(["python -m pallas_ce.backends.mosaic_gpu.tune", *told])


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
