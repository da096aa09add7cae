"""What the tuner tries, and how it times it: on this GPU, in turn with the rule's tiles, after comparing results.

It tries tiles that are known to fit registers and shared memory, and refines the best of them in steps.
"""

import concurrent.futures
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.mosaic_gpu.kernels import dlogits_kernel, forward_kernel, stash_kernel
from pallas_ce.backends.mosaic_gpu.schedule import config as rules
from pallas_ce.backends.mosaic_gpu.schedule.config import TILES, Config, Kernel, most_stages
from pallas_ce.backends.mosaic_gpu.tuning.tables import Entry, Shape
from pallas_ce.head import Head, HeadSpec
from pallas_ce.statistics.gradient import Coefficients

_NAMES = frozenset({"lse"})
_ROW_GROUPS = (4, 8, 12, 16)

# A candidate that gains less than the noise of a measurement leaves the rule's choice in place. The best of many is
# measured once more: to be the best it may have needed luck.
_LEAST_GAIN = 0.99

# Times a candidate, or says why it cannot be taken.
Measure = Callable[[Config], Entry | str]


def first_candidates(kernel: Kernel) -> Iterator[Config]:
    """Every tile with every schedule, and as many stages as fit."""
    for (rows, columns, piece, ping_pong), cluster in itertools.product(TILES[kernel], ("columns", "rows", None)):
        for lead in (0,) if ping_pong else (0, 2):
            candidate = Config(
                rows=rows,
                columns=columns,
                piece=piece,
                ping_pong=ping_pong,
                cluster=cluster,  # type: ignore[arg-type]
                in_flight=1,
                lead=lead,
                row_group=12 if cluster is None else 6 if ping_pong else 8,
            )
            yield dataclasses.replace(candidate, stages=most_stages(kernel, candidate))


def refinements(best: Config) -> Iterator[Config]:
    """Neighbours of the best tile: row groups, and one stage fewer."""
    for row_group in _ROW_GROUPS:
        if row_group != best.row_group:
            yield dataclasses.replace(best, row_group=row_group)
    if best.stages > 2:
        yield dataclasses.replace(best, stages=best.stages - 1)


def number_of_measurements(kernel: Kernel) -> int:
    """How many a shape takes, at most: every candidate once, the best twice."""
    return len(list(first_candidates(kernel))) + len(_ROW_GROUPS) + 1


def best_of(shape: Shape, measure: Measure) -> Entry | None:
    """The fastest candidate; the rule's where none is faster; None where none runs."""
    found: list[Entry] = []

    def fastest(configs: Iterable[Config]) -> Entry | None:
        found.extend(entry for entry in map(measure, configs) if isinstance(entry, Entry))
        return min(found, key=lambda entry: entry.ratio, default=None)

    if (best := fastest(first_candidates(shape.kernel))) is None:
        return None
    best = fastest(refinements(best.config))
    assert best is not None
    again = measure(best.config)
    best = again if isinstance(again, Entry) else best
    return best if best.ratio < _LEAST_GAIN else Entry(rule(shape), best.rule_microseconds, best.rule_microseconds)


def rule(shape: Shape) -> Config:
    """What is taken where no table knows better."""
    return rules.rule(shape.kernel, shape.rows, shape.vocab_size, 2, 0)


def on_device(shape: Shape, launches: int) -> Measure:
    """Measures candidates; the first ones are compiled at once, which takes longer than measuring them."""
    given = arrays(shape)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ready = {config: pool.submit(_compiled, shape, config, given) for config in first_candidates(shape.kernel)}

    def measure(config: Config) -> Entry | str:
        try:
            compiled = ready[config].result() if config in ready else _compiled(shape, config, given)
            if not compiled(*given):
                return "its results differ from those of the default tiles"
        except jax.errors.JaxRuntimeError as error:
            return f"it does not run: {str(error).splitlines()[0][:200]}"
        return Entry(config, *_in_turn(compiled, given, launches))

    return measure


def program(shape: Shape, config: Config) -> Callable[..., Any]:
    """The kernel as a function of hidden states, weight and a vector by row near the lse."""
    kernel, rows, v, h, axis = shape
    spec = HeadSpec(h, v, v, axis, np.dtype(jnp.bfloat16), None)

    def run(hidden: jax.Array, weight: jax.Array, by_row: jax.Array) -> Any:
        head = Head(weight, None, None, None, spec)
        if kernel == "forward":
            return forward_kernel.statistics(head, hidden, _NAMES, config)
        partial, stored = None, None
        if kernel == "stash":
            joined, stored = stash_kernel.stash(head, hidden, by_row, _NAMES, config)
            partial = joined()
        else:
            stored = dlogits_kernel.dlogits(head, hidden, by_row, Coefficients(jnp.ones_like(by_row)), config)
        assert stored is not None
        # Without the padding, whose contents are undefined; no copy where there is none.
        return partial, stored[:rows, :v]

    return run


def arrays(shape: Shape) -> tuple[jax.Array, ...]:
    """Normal random operands, as the multiplier's power depends on its data, for logits of standard deviation 1."""
    _, rows, v, h, axis = shape
    keys = jax.random.split(jax.random.key(0), 2)
    hidden = jax.random.normal(keys[0], (rows, h), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (v, h) if axis == 0 else (h, v), jnp.bfloat16) * jnp.bfloat16(h**-0.5)
    return hidden, weight, jnp.full(rows, jnp.log(v) + 0.5, jnp.float32)


def _compiled(shape: Shape, config: Config, given: tuple[jax.Array, ...]) -> Any:
    """Launches the candidate and then the rule; returns whether their results agree."""

    def run(*given: jax.Array) -> jax.Array:
        found, given = jax.lax.optimization_barrier((program(shape, config)(*given), given))
        return _agree(found, program(shape, rule(shape))(*given))

    return jax.jit(run).lower(*given).compile()


@jax.jit
def _agree(a: Any, b: Any) -> jax.Array:
    """Whether two results are the same but for the rounding of sums and of 16-bit numbers."""

    def close(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.all(jnp.abs(x - y) <= 1e-5 + 2.0**-7 * jnp.abs(y))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(close, a, b))))


def _in_turn(compiled: Any, arguments: tuple[jax.Array, ...], launches: int) -> Iterator[float]:
    """Medians of launches that alternate: clocks drift by several per cent in a tenth of a second, and for both alike.

    The first half of them, while the clocks settle, does not count.
    """
    from jax.experimental.mosaic.gpu import profiler

    measure: Any = profiler.measure
    _, by_launch = measure(compiled, aggregate=False, iterations=2 * launches)(*arguments)
    own = [[1e3 * ms for name, ms in kernels if "pallas_ce" in name] for kernels in by_launch[launches:]]
    return map(statistics.median, zip(*own, strict=True))
