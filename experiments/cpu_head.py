"""Time and temporary memory of the head on a CPU, ours beside stored logits: `python -m experiments.cpu_head`.

Forward and backward at N 2048, H 512, V 32768 in float32. Prints ratios to the canonical loss of the same process and
writes them, with the machine and versions, to `experiments/results/cpu_head.json`.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.machine import describe
from experiments.bench.timing import in_turn, temporary_mib
from experiments.command_line import command, positive, write_record
from pallas_ce import linear_cross_entropy

RESULTS = Path(__file__).parent / "results" / "cpu_head.json"


def canonical(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of stored float32 logits."""
    logits = hidden @ weight.T
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - target)


def contenders() -> dict[str, Callable[..., jax.Array]]:
    """The losses compared, canonical first."""
    return {
        "canonical": canonical,
        "in_forward": lambda h, w, t: linear_cross_entropy(h, w, t, backward="in_forward", implementation="xla"),
        "recompute": lambda h, w, t: linear_cross_entropy(h, w, t, backward="recompute", implementation="xla"),
    }


def measure(tokens: int, width: int, vocabulary: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds and temporary MiB of each contender's loss and gradients, timed in turn."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width))
    weight = jax.random.normal(keys[1], (vocabulary, width)) / width**0.5
    labels = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
    programs: dict[str, Any] = {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(hidden, weight, labels).compile()
        for name, loss in contenders().items()
    }

    def milliseconds(program: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(hidden, weight, labels))
        return 1e3 * (time.perf_counter() - start)

    found = in_turn({name: functools.partial(milliseconds, program) for name, program in programs.items()}, repeats)
    return {
        name: {"seconds": 1e-3 * found[name]["ms"], "temporary_mib": temporary_mib(program)}
        for name, program in programs.items()
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    shape = {"tokens": 2048, "width": 512, "vocabulary": 32768}
    found = measure(**shape, repeats=options.repeats)
    base = found["canonical"]
    print(f"{'':12}{'seconds':>10}{'ratio':>8}{'temporary MiB':>16}{'ratio':>8}")
    for name, row in found.items():
        row["time_ratio"] = row["seconds"] / base["seconds"]
        row["memory_ratio"] = row["temporary_mib"] / base["temporary_mib"]
        print(
            f"{name:12}{row['seconds']:10.3f}{row['time_ratio']:8.2f}{row['temporary_mib']:16.1f}{row['memory_ratio']:8.2f}"
        )
    write_record(options.out, {"command": command("cpu_head", words), **describe(), "shape": shape, "results": found})


if __name__ == "__main__":
    main()
