"""Time and memory on a GPU of the losses beside plain cross entropy: `python -m experiments.bench gpu_losses`.

Sections, each a result file:

    log_probs  log-probability and entropy: forward, and forward+backward with different upstream weights for the two
    support    log-probabilities over K ids of each row: forward, and with all gradients; 1,024 by XLA and gathered
    top_k      the 64 largest logits of each row and their log-probabilities
    given      cross entropy of logits at hand and its gradient, in their buffer ("donated") and not, at 8192 × 131072
    distillation  each divergence of two heads by Triton and by XLA, and with the student's gradients ("both"): as a
               ratio to the two products of their logits, and to six; also with a teacher of twice the width, N 8192

The first three at N 16384, V 131072, H 4096 in bfloat16, timed on the device in turn with the bare matrix products:
forwards as a ratio to the product `hidden·weightᵀ`, forward+backward to that and the two gradient products.
`given` is limited by memory: the bytes a
second that two reads and a write of the logits amount to (a forward: one read), as a share of what a copy reaches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.programs import (
    FORWARD,
    Program,
    Shape,
    bare,
    both,
    for_hidden,
    for_weight,
    inputs,
    of_logits,
)
from experiments.bench.sections import Case, Serve
from experiments.bench.timing import Rounds, back_to_back, compiled_in_turn, in_turn, temporary_mib
from pallas_ce import cross_entropy, linear_distillation, linear_log_probs, linear_top_k
from pallas_ce.backends.protocol import Implementation

_SHAPE = (16384, 131072, 4096)
_K = 64
_SUPPORTS = {"K 64": (64, "mosaic_gpu"), "K 1024": (1024, "xla"), "K 1024 gathered": (1024, "mosaic_gpu")}


def log_probs(serve: Serve, _: Shape) -> dict[str, Program]:
    """Log-probability and entropy, and all gradients through both."""

    def forward(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        return linear_log_probs(hidden, weight, labels, return_entropy=True, implementation=serve("mosaic_gpu"))

    def weighted(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        found = forward(hidden, weight, labels)
        angle = labels.astype(jnp.float32)  # weights of either sign, different for the two, and from row to row
        total: jax.Array = jnp.sum(jnp.cos(angle) * found.log_probs + jnp.sin(angle) * found.entropy)
        return total

    return {"forward": forward, "both": both(weighted)}


def support(serve: Serve, shape: Shape) -> dict[str, Program]:
    """Log-probabilities over K ids of each row, its label and others spread over the vocabulary, and gradients."""

    def summed(k: int, name: Any, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        ids = (labels[:, None] + shape[1] // k * jnp.arange(k)) % shape[1]
        found = linear_log_probs(hidden, weight, labels, support=ids, implementation=serve(name))
        return jnp.sum(found.log_probs)

    programs = {name: functools.partial(summed, *served) for name, served in _SUPPORTS.items()}
    return {f"{FORWARD} {k}": program for k, program in programs.items()} | {k: both(p) for k, p in programs.items()}


def top_k(serve: Serve, _: Shape) -> dict[str, Program]:
    """The k largest logits."""
    return {"forward": lambda hidden, weight, _: linear_top_k(hidden, weight, _K, implementation=serve("mosaic_gpu"))}


# The yardstick is the faster of these; each reads the array once and writes it once.
COPIES: dict[str, Program] = {
    "copy": lambda logits, labels: jnp.copy(logits),
    "negation": lambda logits, labels: -logits,
}

# Passes over the array in which the loss alone, and the loss with its gradient, are made: the statistics must be known
# before the first entry of the gradient is, so that logits which no cache holds are read twice.
_FORWARD_PASSES, _PASSES, _COPY_PASSES = 1, 3, 2
_DONATED = "donated"


def of_stored(serve: Serve, _: Shape) -> dict[str, Program]:
    """Ours by the kernels and by XLA, with logits that are kept and that are donated, and plain JAX."""
    found: dict[str, Program] = {}
    names: tuple[Implementation, ...] = ("mosaic_gpu", "xla")
    for name in names:
        ours = functools.partial(cross_entropy, implementation=serve(name))
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


def measure_stored(shape: Shape, contenders: dict[str, Program], rounds: Rounds) -> dict[str, Any]:
    """Times, memory and bandwidth of `(logits, labels) -> ...` at one shape `(N, V, anything)`, in turn.

    Of each program `bytes_per_second` for the passes that it has to make, and `share`, that over the copy's. Names that
    begin with "forward" and "donated" are that.
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
    found = in_turn(ready, lambda program: back_to_back(program, (logits, labels)), rounds)
    copied = max(_COPY_PASSES * logits.nbytes / (1e-3 * found[name]["ms"]) for name in COPIES)
    for name, result in found.items():
        result["temporary_mib"] = temporary_mib(compiled[name])
        if name in contenders:
            passes = _FORWARD_PASSES if name.startswith("forward") else _PASSES
            reached = passes * logits.nbytes / (1e-3 * result["ms"])
            result |= {"bytes_per_second": reached, "share": reached / copied}
    return {"n": n, "v": v, "copy_bytes_per_second": copied, "results": found}


_COMPILED_AT_ONCE = 4


def distillation(serve: Serve, _: Shape) -> dict[str, Program]:
    """Each divergence `(hidden, weight, teacher_hidden, teacher_weight) -> ...`, and with the student's gradients."""
    found: dict[str, Program] = {}
    for name in ("triton", "xla"):
        for divergence in ("forward_kl", "reverse_kl", "jsd"):
            chosen: Any = {"divergence": divergence, "implementation": serve(name)}
            loss = functools.partial(linear_distillation, **chosen)
            found |= {f"{FORWARD} {divergence} {name}": loss, f"both {divergence} {name}": both(loss)}
    return found


def measure_pairs(width: int, shape: Shape, contenders: dict[str, Program], rounds: Rounds) -> dict[str, Any]:
    """Times and memory beside the bare products of both heads, in turn; the teacher is `width` times as wide.

    Of `two` products, student's and teacher's logits, and of `six`, those twice and the student's gradients, `ms` are
    sums; a `ratio` is to the former for names that begin with "forward", else to the latter.
    """
    n, v, h = shape
    student, (states, *others) = inputs(n, v, h), inputs(n, v, width * h)
    teacher = (states[::-1], *others)  # another distribution, also in equal widths
    stored = jax.random.normal(jax.random.key(3), (n, v), jnp.bfloat16)
    products: dict[str, tuple[Program, tuple[Any, ...]]] = {
        "student": (bare, student),
        "teacher": (bare, teacher),
        "for_hidden": (for_hidden, (*student[:2], stored)),
        "for_weight": (for_weight, (*student[:2], stored)),
    }
    programs = {name: program for name, (program, _) in products.items()} | contenders
    arguments = {name: given for name, (_, given) in products.items()}
    arguments |= dict.fromkeys(contenders, (*student[:2], *teacher[:2]))
    found = compiled_in_turn(programs, arguments, rounds, _COMPILED_AT_ONCE)
    two = found["student"]["ms"] + found["teacher"]["ms"]
    six = 2 * two + found["for_hidden"]["ms"] + found["for_weight"]["ms"]
    for name in contenders:
        found[name]["ratio"] = found[name]["ms"] / (two if name.startswith(FORWARD) else six)
    return {"n": n, "v": v, "h": h, "teacher_h": width * h, "two_ms": two, "six_ms": six, "results": found}


SECTIONS = {
    "log_probs": [Case("log_probs", _SHAPE, log_probs)],
    "support": [Case("support", _SHAPE, support)],
    "top_k": [Case("top_k", _SHAPE, top_k)],
    "given": [Case("given", (8192, 131072, 1), of_stored, measure_stored)],
    "distillation": [
        Case("equal widths", _SHAPE, distillation, functools.partial(measure_pairs, 1)),
        Case("a teacher of twice the width", (8192, *_SHAPE[1:]), distillation, functools.partial(measure_pairs, 2)),
    ],
}
