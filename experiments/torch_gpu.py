"""What PyTorch callers pay on a GPU beyond the same call in JAX: `python -m experiments.torch_gpu`.

Kinds of points, all but the last for each backward mode, written to `torch_gpu.json` one by one; run the command again
to go on:

    host    time until a call returns, of several in a row while the device is busy, at a tiny and a usual size
    device  time of forward and backward, in turn in one process
    done    time from an idle device until forward and backward are done, of few rows, beside PyTorch's own loss
    memory  of a process by the driver's count, one process for each caller
    given   bandwidth of losses of stored logits, forward and backward, by that of a copy
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

from experiments.bench.command import dry, parsed
from experiments.bench.peers import torch_missing
from experiments.bench.programs import Shape
from experiments.bench.results import Record, ResultFile, add_options, describe, run
from experiments.bench.summary import GIVEN_SHARE, HOST_RATIO, RATIOS, host_ratio
from experiments.command_line import parser_of, positive

_TINY, _SMALL, _USUAL = (256, 256, 64), (4096, 32768, 4096), (8192, 131072, 4096)
_FEW_ROWS = (1024, 151936, 1024)


def points(implementation: str, device: str, rounds: int, calls: int) -> dict[str, Callable[[], Record]]:
    """All points, cheap ones first; on a CPU the sizes are those of a dry run."""
    from experiments.bench import bridge, torch_materialized

    def sizes(shape: Shape) -> Shape:
        return dry(shape) if device == "cpu" else shape

    found: dict[str, Callable[[], Record]] = {
        f"given {n}x{v}": functools.partial(torch_materialized.measure, sizes((n, v, 0)), device, rounds)
        for n, v in ((8192, 131072), (16384, 32768))
    }
    kinds: list[tuple[str, tuple[Shape, ...], Callable[..., Record]]] = [
        ("host", (_TINY, _SMALL), functools.partial(bridge.host_time, calls=calls)),
        ("device", (_SMALL, _USUAL), functools.partial(bridge.device_time, rounds=rounds)),
        ("done", (_FEW_ROWS,), functools.partial(bridge.until_done, rounds=rounds)),
        ("memory", (_USUAL,), bridge.memory),
    ]
    for kind, shapes, measure in kinds:
        for shape, mode in itertools.product(shapes, ("in_forward", "recompute")):
            setting = bridge.Setting(implementation, mode, device)
            name = f"{kind} {'x'.join(map(str, shape))} {mode}"
            found[name] = functools.partial(measure, sizes(shape), setting=setting)
    return found


def shown(name: str, record: Record) -> str:
    """A point's figures beside what is asked for."""
    if overhead := record.get("overhead_us"):
        figures = [
            f"{key} {host_ratio(record, key):.2f} of the native call's (asked: {HOST_RATIO[key]}), {us:.0f} us more"
            for key, us in overhead.items()
        ]
        figures += [f"{key} {us:.0f} us" for key, us in record["exchange_us"].items()]
    elif "ratio" in record:
        _, other, asked = RATIOS[name.split()[0]]
        figures = [f"{record['ratio']:.3f} of {other} (asked: {asked})"]
    else:
        figures = [f"share of the copy's bandwidth (asked: {GIVEN_SHARE} where logits are overwritten)"]
    for key, result in record["results"].items():
        figures.append(f"{key} " + ", ".join(f"{unit} {x:.4g}" for unit, x in result.items() if unit != "samples"))
    return "; ".join(figures)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes as it goes; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--implementation", default=None, help='of the loss; "mosaic_gpu" if not given')
    add_options(parser, "times that each device time is taken")
    parser.add_argument("--calls", type=positive, default=100, help="calls whose host time is taken")
    options = parsed(parser, words)
    if reason := torch_missing(not options.dry_run, "; --dry-run shows on a CPU that the command works"):
        print(reason, file=sys.stderr)
        return 2
    import torch

    import torch_bridge  # before JAX starts, which leaves the device's memory to both  # noqa: F401

    implementation = options.implementation or ("xla" if options.dry_run else "mosaic_gpu")
    facts = {"torch": torch.__version__, "implementation": implementation}
    made = points(implementation, "cpu" if options.dry_run else "cuda", options.rounds, options.calls)
    return run(
        [ResultFile("torch_gpu", "python -m experiments.torch_gpu", made)],
        describe() | facts | {"rounds": options.rounds, "calls": options.calls},
        shown,
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
