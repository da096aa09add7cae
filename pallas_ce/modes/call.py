"""What the modes share: a call as data."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from pallas_ce.head import Batch, Head
from pallas_ce.modes.how import How
from pallas_ce.parallel.shards import RowArrays
from pallas_ce.streaming.gradient_products import NO_ARRAYS, Arrays, PerInput


class RowTotal(Protocol):
    """`(statistics [n], (by_row, shared)) -> [n]`, each row's share of the total.

    Attributes:
        defined_at_zero: whether its values and derivatives are finite where statistics and inputs by row are 0. It is
            then given zeros for rows that do not count, else what a row that counts holds.
    """

    defined_at_zero: ClassVar[bool]

    @property
    def names(self) -> frozenset[str]:
        """The statistics that it reads."""
        ...

    def __call__(self, statistics: dict[str, jax.Array], inputs: tuple[Any, Any], /) -> jax.Array:
        """Each row by itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Call:
    """Static facts of a call.

    Attributes:
        how: how it is carried out.
        names: the primitive statistics to return.
        row_total: makes the sum over the rows; None where the call returns the statistics.
    """

    how: How
    names: frozenset[str]
    row_total: RowTotal | None = None

    @property
    def in_forward(self) -> bool:
        """Whether a handle carries the gradients, made in the forward."""
        return self.how.mode == "in_forward" and self.row_total is not None

    @property
    def read(self) -> frozenset[str]:
        """The `names` that `row_total` reads and that have a derivative."""
        return frozenset() if self.row_total is None else self.row_total.names - {"argmax"}


class Known(NamedTuple):
    """A forward's results, given to a later evaluation of the same problem so that they are not made again.

    For callers whose differentiation keeps arrays from forward to backward and not closures: `evaluate.keep` makes it,
    and the functions there that take it have the same values and gradients with it as without.

    Attributes:
        statistics: a tree of `[N]`, those that the loss reads and those that its derivatives do.
        sums: in_forward's, that the gradients come from, before upstream scalar and scale.
    """

    statistics: Any
    sums: Arrays = NO_ARRAYS


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
        batch: the rows.
        head: the head.
        mask: `[...]` bool, which rows count; None: all.
        inputs: what else is read, with `row_total` its `(by_row, shared)`: pytrees of `[..., *K]`, and of arrays that
            all rows share.
        known: what `evaluate.keep` has found for the same call, or None.
        cotangent: `[]`, of the sum of the row totals, where gradients are made at once; None: it is not known yet.
        weight_sum: like the weight, float32 or of its dtype: what its gradient is then added to; else None.
    """

    batch: Batch
    head: Head
    mask: jax.Array | None
    inputs: Any = ((), ())
    known: Known | None = None
    cotangent: jax.Array | None = None
    weight_sum: jax.Array | None = None

    @property
    def rows(self) -> RowArrays:
        """Which are streamed."""
        return RowArrays(self.batch, self.mask)

    @property
    def differentiable(self) -> Arrays:
        """The inputs that can be differentiated."""
        head = self.head
        return PerInput(self.batch.hidden, head.weight, head.bias, head.logit_scale, head.up, head.down)

    def replaced(self, inputs: PerInput[Any]) -> Self:
        """Puts `inputs`, arrays or not, in place of the differentiable ones."""
        hidden, weight, bias, logit_scale, up, down = inputs
        head = dataclasses.replace(self.head, weight=weight, bias=bias, logit_scale=logit_scale, up=up, down=down)
        return self._replace(batch=self.batch._replace(hidden=hidden), head=head)


def absent() -> jax.Array:
    """Stands for None among residuals."""
    return jnp.zeros(1, jnp.int8)
