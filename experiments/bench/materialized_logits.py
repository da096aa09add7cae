"""The loss of logits that the caller holds, beside a copy of them: what bandwidth it reaches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.programs import Program, Shape, of_logits
from experiments.bench.timing import Clock, in_turn, temporary_mib
from pallas_ce import cross_entropy
from pallas_ce.backends.protocol import Implementation

# The yardstick is the faster of these; each reads the array once and writes it once.
COPIES: dict[str, Program] = {
    "copy": lambda logits, labels: jnp.copy(logits),
    "negation": lambda logits, labels: -logits,
}

# Passes over the array in which the loss alone, and the loss with its gradient, are made: the statistics must be known
# before the first entry of the gradient is, so that logits which no cache holds are read twice.
_FORWARD_PASSES = 1
_PASSES = 3
_COPY_PASSES = 2

_DONATED = "donated"


def programs(implementation: Implementation, _: Shape | None = None) -> dict[str, Program]:
    """Ours by this implementation and by XLA, with logits that are kept and that are donated, and plain JAX."""
    found: dict[str, Program] = {}
    for name in dict.fromkeys((implementation, "xla")):
        ours = functools.partial(cross_entropy, implementation=name)
        both = jax.value_and_grad(ours)
        found |= {f"forward {name}": ours, f"kept {name}": both, f"{_DONATED} {name}": both}
    return found | {"forward plain": of_logits, "kept plain": jax.value_and_grad(of_logits)}


class _InPlace:
    """A program that donates the logits, called again and again: each launch takes the gradient that the last left."""

    def __init__(self, compiled: Any, logits: jax.Array) -> None:
        self._compiled, self._buffer = compiled, jnp.copy(logits)

    def __call__(self, _: jax.Array, labels: jax.Array) -> jax.Array:
        loss, self._buffer = self._compiled(self._buffer, labels)
        return loss


def measure(shape: Shape, contenders: dict[str, Program], rounds: int, clock: Clock) -> dict[str, Any]:
    """Times, memory and bandwidth at one shape `(N, V, anything)`, bfloat16, the programs in turn.

    Args:
        shape: of the logits.
        contenders: by name, `(logits, labels) -> ...`; "forward" and "donated" begin the names of those that are that.
        rounds: times each is timed.
        clock: by which.

    Returns:
        `{"n", "v", "copy_bytes_per_second", "results"}`: of each program its median `ms`, all `samples`,
        `temporary_mib`, `bytes_per_second` for the passes that it has to make, and `share`, that over the copy's.
    """
    n, v, _ = shape
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (n, v), jnp.bfloat16)
    labels = jax.random.randint(keys[1], (n,), 0, v)
    compiled: dict[str, Any] = {
        name: jax.jit(program, donate_argnums=(0,) if name.startswith(_DONATED) else ()).lower(logits, labels).compile()
        for name, program in (COPIES | contenders).items()
    }
    ready = {n: _InPlace(program, logits) if n.startswith(_DONATED) else program for n, program in compiled.items()}
    for program in ready.values():
        jax.block_until_ready(program(logits, labels))
    found = in_turn(ready, lambda program: clock(program, (logits, labels)), rounds)
    copied = max(_COPY_PASSES * logits.nbytes / (1e-3 * found[name]["ms"]) for name in COPIES)
    for name, result in found.items():
        result["temporary_mib"] = temporary_mib(compiled[name])
        if name in contenders:
            passes = _FORWARD_PASSES if name.startswith("forward") else _PASSES
            reached = passes * logits.nbytes / (1e-3 * result["ms"])
            result |= {"bytes_per_second": reached, "share": reached / copied}
    return {"n": n, "v": v, "copy_bytes_per_second": copied, "results": found}
