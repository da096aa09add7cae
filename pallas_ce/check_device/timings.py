"""How long the loss takes, alone and with both gradients, beside stored logits and the bare products."""

import concurrent.futures
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.api.linear_cross_entropy import linear_cross_entropy

_ROUNDS = 5
_LAUNCHES = 8

# Programs that compile at once: XLA times candidates for its products on arrays as large as the logits.
_AT_ONCE = 2


def measure(dtype: str, implementations: Sequence[str], shape: tuple[int, int, int]) -> dict[str, Any]:
    """Times programs of a dtype at N, H, V on JAX's default device.

    Returns:
        `{"dtype", "shape", "products_ms", "results"}`: for each loss, forward and forward+backward, median `ms`, all
        `samples`, and the `ratio` to the bare product that makes the logits, or to all three bare products.
    """
    n, h, v = shape
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, weight = jax.random.normal(keys[0], (n, h), dtype), jax.random.normal(keys[1], (v, h), dtype) / h**0.5
    labels, dlogits = jax.random.randint(keys[2], (n,), 0, v), jax.random.normal(keys[3], (n, v), dtype)
    programs: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
        "nh,vh->nv": (functools.partial(_product, "nh,vh->nv"), (hidden, weight)),
        "nv,vh->nh": (functools.partial(_product, "nv,vh->nh"), (dlogits, weight)),
        "nv,nh->vh": (functools.partial(_product, "nv,nh->vh"), (dlogits, hidden)),
    }
    products, given = list(programs), (hidden, weight, labels)
    losses: list[tuple[str, Callable[..., Any]]] = [("stored logits", _stored_logits)]
    losses += [(name, _streamed(name)) for name in implementations]
    for name, loss in losses:
        programs[f"{name}, forward"] = (loss, given)
        programs[f"{name}, forward+backward"] = (jax.value_and_grad(loss, (0, 1)), given)
    lowered = [jax.jit(program).lower(*arguments) for program, arguments in programs.values()]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        compiled = pool.map(lambda program: program.compile(), lowered)
        runs = {
            name: functools.partial(run, *arguments)
            for run, (name, (_, arguments)) in zip(compiled, programs.items(), strict=True)
        }
    samples = _in_turn(runs)
    ms = {name: statistics.median(taken) for name, taken in samples.items()}
    floors = {"forward": ms[products[0]], "forward+backward": sum(ms[name] for name in products)}
    results = {
        name: {"ms": ms[name], "ratio": ms[name] / floors[name.rpartition(", ")[2]], "samples": taken}
        for name, taken in samples.items()
        if name not in products
    }
    return {"dtype": dtype, "shape": shape, "products_ms": floors, "results": results}


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A bare product; of float32 operands in full float32, as the implementations' products are."""
    return jnp.einsum(subscripts, a, b, precision="highest" if a.dtype == jnp.float32 else None)


def _stored_logits(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    logits = _product("nh,vh->nv", hidden, weight)
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0].astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=1) - target)


def _streamed(implementation: Any) -> Callable[..., Any]:
    return lambda *arrays: linear_cross_entropy(*arrays, implementation=implementation)


def _in_turn(programs: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of a launch of each program in each round; a first round warms up and does not count.

    A GPU's clocks drift by several per cent within seconds. So each round goes through all programs, and begins with
    another: each meets the clocks that the others meet.
    """
    samples: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for number in range(_ROUNDS + 1):
        for name in names[number:] + names[:number]:
            start = time.perf_counter()
            for _ in range(_LAUNCHES):
                last = programs[name]()
            jax.block_until_ready(last)
            samples[name].append(1e3 * (time.perf_counter() - start) / _LAUNCHES)
    return {name: taken[1:] for name, taken in samples.items()}
