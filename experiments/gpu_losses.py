"""Time and memory on a GPU of the losses beside plain cross entropy: `python -m experiments.gpu_losses`.

Sections, each a JSON file under `experiments/results/` with the machine and versions:

    log_probs  log-probability and entropy: forward, and forward+backward with different upstream weights for the two
    top_k      the 64 largest logits of each row and their log-probabilities
    given      cross entropy of logits at hand and its gradient, in their buffer ("donated") and not, at 8192 × 131072

The first two at N 16384, V 131072, H 4096 in bfloat16, timed on the device in turn with the bare matrix products:
forwards as a ratio to the product `hidden·weightᵀ`, forward+backward to that and the two gradient products.
`beside_accumulator_mib` is temporary memory less hidden's float32 gradient. `given` is limited by memory: the bytes a
second that two reads and a write of the logits amount to (a forward: one read), as a share of what a copy reaches.

Each point is written when it is measured; run the command again to go on. `experiments.selective_log_softmax` has the
log-probabilities picked from logits in PyTorch.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import materialized_logits, timing
from experiments.bench.command import Point, Sections, run_sections
from experiments.bench.programs import Program, Shape, both
from pallas_ce import linear_log_probs, linear_top_k
from pallas_ce.backends.protocol import Implementation

_SHAPE = (16384, 131072, 4096)
_K = 64


def log_probs(implementation: Implementation, _: Shape) -> dict[str, Program]:
    """Log-probability and entropy, and all gradients through both."""

    def forward(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        return linear_log_probs(hidden, weight, labels, return_entropy=True, implementation=implementation)

    def weighted(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        found = forward(hidden, weight, labels)
        angle = labels.astype(jnp.float32)  # weights of either sign, different for the two, and from row to row
        total: jax.Array = jnp.sum(jnp.cos(angle) * found.log_probs + jnp.sin(angle) * found.entropy)
        return total

    return {"forward": forward, "both": both(weighted)}


def top_k(implementation: Implementation, shape: Shape) -> dict[str, Program]:
    """The k largest logits, with the default scratch and with more, for blocks of 1024 rows."""

    def found(scratch_bytes: int | None) -> Program:
        return lambda hidden, weight, labels: linear_top_k(
            hidden, weight, _K, implementation=implementation, scratch_bytes=scratch_bytes
        )

    return {"forward": found(None), "forward more scratch": found(5 * 1024 * shape[1])}


def _measure_log_probs(shape: Shape, *given: Any) -> dict[str, Any]:
    record = timing.measure(shape, *given)
    result = record["results"]["both"]
    result["beside_accumulator_mib"] = result["temporary_mib"] - 4 * shape[0] * shape[2] / 2**20
    return record


SECTIONS: Sections = {
    "log_probs": {"log_probs": Point(_SHAPE, log_probs, _measure_log_probs)},
    "top_k": {"top_k": Point(_SHAPE, top_k)},
    "given": {"given": Point((8192, 131072, 1), materialized_logits.programs, materialized_logits.measure)},
}


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints and writes each section as it goes; returns the exit status."""
    return run_sections("gpu_losses", __doc__, SECTIONS, words)


if __name__ == "__main__":
    sys.exit(main())
