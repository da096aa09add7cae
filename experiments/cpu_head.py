"""Time and temporary memory of the head on a CPU, ours beside stored logits: `python -m experiments.cpu_head`.

Forward and backward at N 2048, H 512, V 32768 in float32. Prints ratios to the canonical loss of the same process and
writes them, with the machine and versions, to `experiments/results/cpu_head.json`.
"""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from experiments.bench.programs import Program, both, inputs, of_logits, ours
from experiments.bench.results import describe
from experiments.bench.timing import back_to_back, compiled_in_turn
from experiments.command_line import command, parser_of, positive, write_record

RESULTS = Path(__file__).parent / "results" / "cpu_head.json"


def contenders() -> dict[str, Program]:
    """The losses compared, canonical first."""
    return {
        "canonical": lambda hidden, weight, labels: of_logits(hidden @ weight.T, labels),
        "in_forward": ours("xla", backward="in_forward"),
        "recompute": ours("xla", backward="recompute"),
    }


def measure(tokens: int, width: int, vocabulary: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds and temporary MiB of each contender's loss and gradients, and their ratios to the canonical's."""
    programs = {name: both(loss) for name, loss in contenders().items()}
    data = inputs(tokens, vocabulary, width, jnp.float32)
    found = compiled_in_turn(programs, dict.fromkeys(programs, data), repeats, back_to_back)
    base = found["canonical"]
    return {
        name: {
            "seconds": 1e-3 * result["ms"],
            "temporary_mib": result["temporary_mib"],
            "time_ratio": result["ms"] / base["ms"],
            "memory_ratio": result["temporary_mib"] / base["temporary_mib"],
        }
        for name, result in found.items()
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    shape = {"tokens": 2048, "width": 512, "vocabulary": 32768}
    found = measure(**shape, repeats=options.repeats)
    print(f"{'':12}{'seconds':>10}{'ratio':>8}{'temporary MiB':>16}{'ratio':>8}")
    for name, row in found.items():
        seconds, mib, time_ratio, memory_ratio = row.values()
        print(f"{name:12}{seconds:10.3f}{time_ratio:8.2f}{mib:16.1f}{memory_ratio:8.2f}")
    write_record(options.out, {"command": command("cpu_head", words), **describe(), "shape": shape, "results": found})


if __name__ == "__main__":
    main()
