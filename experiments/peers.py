"""Other libraries' losses on a GPU, in PyTorch, beside bare matrix products: `python -m experiments.peers`.

Each peer that is installed is checked against float32 first, then timed over the paper's grid; one that is missing,
fails or is wrong is left out with the reason, in the output and in the result file. It is a command of its own because
two frameworks in one process would share the GPU's memory; every command times the bare products of its own process,
and ratios to those are what is compared. Those named by `--peers`, as need be where they cannot be installed beside
each other, have a result file of their own.
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from experiments.bench import command
from experiments.bench.peers import PEERS
from experiments.bench.points import GRID


def versions() -> dict[str, str]:
    """Of the peers' distributions that are installed."""
    found = {}
    for package in sorted({peer.package for peer in PEERS} | {"triton"}):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes as it goes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in PEERS], default=None)
    command.add_options(parser)
    options = parser.parse_args(words)
    if reason := command.without_torch(True, ", and peers are only measured on one"):
        print(reason, file=sys.stderr)
        return 2
    import torch

    from experiments.bench import torch_timing

    chosen = [peer for peer in PEERS if options.peers is None or peer.name in options.peers]
    for peer in chosen:
        if reason := peer.missing():
            print(f"{peer.name}: left out, {reason}")
    machine = {
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "rounds": options.rounds,
        **versions(),
    }

    def told(name: str, record: dict[str, Any]) -> None:
        shown = {k: round(r["ratio"], 3) for k, r in record["results"].items() if "ratio" in r}
        print(f"peers {name}: {shown}", flush=True)
        for peer, reason in record["left_out"].items():
            print(f"peers {name}: {peer} left out, {reason}", flush=True)

    return command.run_file(
        "peers",
        machine,
        GRID,
        lambda shape: f"{shape[0]}x{shape[1]}",
        lambda shape: torch_timing.measure(shape, chosen, options.rounds),
        told,
        options,
        ("--peers", *options.peers) if options.peers else (),
    )


if __name__ == "__main__":
    sys.exit(main())
