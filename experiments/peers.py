"""Other libraries' losses on a GPU, in PyTorch, beside bare matrix products: `python -m experiments.peers`.

Each peer that is installed is checked against float32 first, then timed over the paper's grid; one that is missing,
fails or is wrong is left out with the reason, in the output and in the result file. It is a command of its own because
two frameworks in one process would share the GPU's memory; every command times the bare products of its own process,
and ratios to those are what is compared.
"""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.gpu.peers import PEERS
from experiments.gpu.points import GRID
from experiments.gpu.results import FOLDER, Budget, ResultError, Results, run_points


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=None, help="begin no point that may end later")
    parser.add_argument("--again", action="store_true", help="measure points that the file already holds")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the results")
    options = parser.parse_args(words)
    try:
        import torch
    except ImportError:
        print("peers are measured in PyTorch, which is missing: pip install 'pallas-ce[torch]'", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU, and peers are only measured on one", file=sys.stderr)
        return 2
    from experiments.gpu import torch_timing

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

    try:
        results = Results(options.out / "peers.json", "python -m experiments.peers", machine, options.again)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    left = run_points(
        GRID,
        lambda shape: f"{shape[0]}x{shape[1]}",
        lambda shape: torch_timing.measure(shape, chosen, options.rounds),
        results,
        Budget(None if options.minutes is None else 60 * options.minutes, time.monotonic),
        told,
    )
    if left:
        print(f"time is up with {left} points left; run the same command again to go on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
