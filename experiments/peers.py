"""Other libraries' losses on a GPU, in PyTorch, beside bare matrix products: `python -m experiments.peers`.

Each peer that is installed is checked against float32 first, then timed over the paper's grid and at published heads,
in turn with our programs on the same arrays; one that is missing, fails or is wrong is left out with the reason, in the
output and in the result file. Those named by `--peers`, as need be where they cannot be installed beside each other,
have a result file of their own.
"""

import functools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from experiments.bench.peers import PEERS, torch_missing
from experiments.bench.points import SECTIONS
from experiments.bench.results import ResultFile, add_options, describe, run, versions
from experiments.command_line import parser_of


def result_file(peers: Sequence[str] | None, measure: Any) -> ResultFile:
    """Grid and heads measured by `measure(shape)`; peers that are named have a file of their own."""
    chosen = [] if peers is None else ["--peers", *peers]
    command = shlex.join(["python", "-m", "experiments.peers", *chosen])
    ours = {**SECTIONS["grid"], **SECTIONS["heads"]}
    points = {name: functools.partial(measure, point.shape) for name, point in ours.items()}
    return ResultFile(re.sub(r"\W+", "_", "_".join(["peers", *chosen[1:]])), command, points)


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes as it goes; returns the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in PEERS], default=None)
    add_options(parser)
    options = parser.parse_args(words)
    if reason := torch_missing(True, ", and peers are only measured on one"):
        print(reason, file=sys.stderr)
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is PyTorch's, too
    from experiments.bench import torch_timing

    chosen = [peer for peer in PEERS if options.peers is None or peer.name in options.peers]
    for peer in chosen:
        if reason := peer.missing():
            print(f"{peer.name}: left out, {reason}")
    packages = versions(sorted({peer.package for peer in PEERS} | {"triton"}))
    machine = describe() | {"clock": "launches", "rounds": options.rounds} | packages

    def shown(_: str, record: dict[str, Any]) -> str:
        ratios = {name: round(r["ratio"], 3) for name, r in record["results"].items() if "ratio" in r}
        return "".join([str(ratios), *(f"; {peer} left out, {reason}" for peer, reason in record["left_out"].items())])

    measure = functools.partial(torch_timing.measure, peers=chosen, rounds=options.rounds)
    return run([result_file(options.peers, measure)], machine, shown, options)


if __name__ == "__main__":
    sys.exit(main())
