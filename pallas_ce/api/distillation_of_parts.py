"""`linear_distillation` of a vocabulary whose parts several processes hold, in steps for wrappers that exchange arrays.

Each process calls `compute` of its own columns of both heads. Of what all have found before it makes the next:

    nothing            `[N, 4]`, "jsd", or `[N, 5]`: the statistics of its columns
    parts              "jsd" only, `[N, 2]`: its columns' sums of the mixture, which are to be added up
    parts and sums     the loss of the whole vocabulary, the same in each process; so for the others from `parts` alone

The loss has the derivatives in the student's own columns, and a share of the hidden states' gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ce.api import distillation
from pallas_ce.modes import two_heads
from pallas_ce.modes.call import Known
from pallas_ce.statistics.divergences import PairPartial, whole
from pallas_ce.statistics.row import Partial

# What `compute` takes: the arguments of `linear_distillation`, `[N, processes, 4 or 5]` and `[N, 2]`.
Checked = tuple[*distillation.Checked, jax.Array | None, jax.Array | None]


def read(*, parts: Any = None, sums: Any = None, **arguments: Any) -> Checked:
    """Checks the arguments of `linear_distillation`, where V is the part's."""
    pair, student, teacher = distillation.read(**arguments)
    if pair.how.mode is None:
        raise ValueError(
            f"implementation={student.implementation!r} does not know parts of a vocabulary; choose 'xla' or None"
        )
    return pair, student, teacher, parts, sums


def keep(*_: Any) -> None:
    """Nothing: what a backward needs are `parts` and `sums`."""


def compute(pair: Any, student: Any, teacher: Any, parts: Any, sums: Any, known: None = None) -> jax.Array:
    """What can be made next."""
    del known
    operands = distillation.operands(student, teacher)
    by_row: Any = functools.partial(two_heads.by_row, pair, operands)
    if parts is None:
        numbers = 5 if pair.divergence.passes == 1 else 4  # a cross term needs no second pass
        own = by_row(lambda _, block, __: jax.tree.leaves(block.partial()), lambda zeros: [zeros] * numbers)
        return jnp.stack(own, axis=1)
    each = (part.T for part in jnp.unstack(parts, axis=1))
    found = whole(pair.divergence, (PairPartial(Partial(*x[:2]), Partial(*x[2:4]), *x[4:]) for x in each))
    if pair.divergence.passes > 1:
        if sums is None:
            own = by_row(lambda _, block, found: block.mixture_sums(found), lambda zeros: (zeros, zeros), found)
            return jnp.stack(own, axis=1)
        found = found.with_mixture(*sums.T)
    return distillation.compute(pair, student, teacher, Known(jax.lax.stop_gradient(found)))
