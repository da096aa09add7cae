"""Times a candidate of the tuner on this GPU, in turn with the rule's tiles, after comparing their results."""

import concurrent.futures
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, stash_kernel
from pallas_ce.backends.mosaic_gpu.schedule.config import Config
from pallas_ce.backends.mosaic_gpu.tuning import candidates
from pallas_ce.backends.mosaic_gpu.tuning.candidates import Case, Measure, Times
from pallas_ce.head import Head
from pallas_ce.statistics.gradient import Coefficients

_NAMES = frozenset({"lse"})


def on_device(case: Case, launches: int) -> Measure:
    """Measures candidates for `case`; the first ones are compiled at once, which takes longer than measuring them."""
    given = arrays(case)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        configs = candidates.first_candidates(case.kernel)
        ready = {config: pool.submit(_compiled, case, config, given) for config in configs}

    def measure(config: Config) -> Times | str:
        try:
            compiled = ready[config].result() if config in ready else _compiled(case, config, given)
            if not compiled(*given):
                return "its results differ from those of the default tiles"
        except jax.errors.JaxRuntimeError as error:
            return f"it does not run: {str(error).splitlines()[0][:200]}"
        return _in_turn(compiled, given, launches)

    return measure


def program(case: Case, config: Config) -> Callable[..., Any]:
    """The case as a function of hidden states, weight and a vector by row near the lse."""

    def run(hidden: jax.Array, weight: jax.Array, by_row: jax.Array) -> Any:
        head = Head(weight, None, None, None, case.spec)
        if case.kernel == "forward":
            return forward_kernel.statistics(head, hidden, _NAMES, config)
        stored: jax.Array | None
        if case.kernel == "stash":
            partial, stored = stash_kernel.stash(head, hidden, by_row, _NAMES, config)
        else:
            coefficients = Coefficients(jnp.ones_like(by_row))
            partial, stored = None, dlogits_kernel.dlogits(head, hidden, by_row, coefficients, config)
        assert stored is not None
        # Without the padding, whose contents are undefined; no copy where there is none.
        return partial, stored[: case.rows, : case.columns]

    return run


def arrays(case: Case) -> tuple[jax.Array, ...]:
    """Normal random operands, as the multiplier's power depends on its data, for logits of standard deviation 1."""
    keys = jax.random.split(jax.random.key(0), 2)
    h, dtype = case.hidden_size, case.spec.dtype
    hidden = jax.random.normal(keys[0], (case.rows, h), dtype)
    shape = (case.columns, h) if case.vocab_axis == 0 else (h, case.columns)
    weight = jax.random.normal(keys[1], shape, dtype) * jnp.asarray(h**-0.5, dtype)
    return hidden, weight, jnp.full(case.rows, jnp.log(case.columns) + 0.5, jnp.float32)


def _compiled(case: Case, config: Config, given: tuple[jax.Array, ...]) -> Any:
    """Launches the candidate and then the rule; returns whether their results agree."""

    def run(*given: jax.Array) -> jax.Array:
        found = program(case, config)(*given)
        found, given = jax.lax.optimization_barrier((found, given))
        return _agree(found, program(case, case.rule)(*given))

    return jax.jit(run).lower(*given).compile()


@jax.jit
def _agree(a: Any, b: Any) -> jax.Array:
    """Whether two results are the same but for the rounding of sums and of 16-bit numbers."""

    def close(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.all(jnp.abs(x - y) <= 1e-5 + 2.0**-7 * jnp.abs(y))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(close, a, b))))


def _in_turn(compiled: Any, arguments: tuple[jax.Array, ...], launches: int) -> Times:
    """Medians of launches that alternate: clocks drift by several per cent in a tenth of a second, and for both alike.

    The first half of them, while the clocks settle, does not count.
    """
    from jax.experimental.mosaic.gpu import profiler

    measure: Any = profiler.measure
    _, by_launch = measure(compiled, aggregate=False, iterations=2 * launches)(*arguments)
    own = [[1e3 * ms for name, ms in kernels if "pallas_ce" in name] for kernels in by_launch[launches:]]
    return Times(*map(statistics.median, zip(*own, strict=True)))
