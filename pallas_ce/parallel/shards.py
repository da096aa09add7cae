"""How one call is split over mesh axes, and the few collectives that make the parts agree.

A streamed operation runs on each device on its own rows and its own slice of the vocabulary. What it needs of the other
devices is here, as methods that do nothing where nothing is split:

* rows split (data parallelism): the head's gradients are summed over the row axes, the weight's in its own dtype, as
  JAX's data parallelism sums every other parameter's;
* vocabulary split (tensor parallelism): partial statistics merge by the rule of `row.merge`, and the devices' shares
  of the hidden states' gradient are summed in the accumulator dtype;
* both over the same axis: either the rows are gathered on entry and their gradient is reduce-scattered on exit
  (sequence parallelism), or the weight is gathered and its gradient is reduce-scattered (FSDP), whichever moves fewer
  bytes;
* the weight's width H split (FSDP): the weight is gathered, its gradient reduce-scattered, also in the weight's dtype.
"""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from pallas_ce.head import Batch, Head
from pallas_ce.statistics.labels import NO_TARGET
from pallas_ce.statistics.row import Partial, merge
from pallas_ce.statistics.table import as_large
from pallas_ce.streaming.gradient_products import BY_COLUMN, NO_ARRAYS, Arrays, PerInput
from pallas_ce.streaming.rows import present, spread

Axes = tuple[str, ...]
NO_AXES: PerInput[Axes] = NO_ARRAYS.map(lambda _: ())


class RowArrays(NamedTuple):
    """An operation's arrays by row: leaves `[..., *K]`, or flat `[N, *K]`; None where absent. `mask`: which count."""

    batch: Batch
    mask: jax.Array | None
    more: Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shards:
    """Static. Every field names mesh axes, major to minor; one array's dimensions have disjoint axes."""

    rows: Axes = ()  # the rows are split over these
    vocabulary: Axes = ()  # the weight's vocabulary is split over these, and so is the work
    sequence: Axes = ()  # the axes of `vocabulary` that split the rows too; the rows are gathered over them
    gathered_vocabulary: Axes = ()  # the vocabulary is split over these in memory only; the weight is gathered
    gathered_width: Axes = ()  # H is split over these in memory only; they split the rows too
    sums: PerInput[Axes] = NO_AXES  # over which axes each input's gradient is added up and left whole
    cotangents_by_row: Axes = ()  # over which axes a statistic's cotangent is added up before it is used
    cotangents_of_total: Axes = ()  # over which axes the cotangent of a loss summed over rows is
    typed: bool = False  # whether JAX tracks over which axes each value varies (`check_vma=True`)
    handed_whole: bool = False  # whether the head's arrays come in gathered already

    @property
    def gathered(self) -> Axes:
        """The axes over which the weight is gathered."""
        return self.gathered_width + self.gathered_vocabulary

    @property
    def common(self) -> Axes:
        """The axes that split both rows and weight: a sum over rows is over all rows of their devices."""
        return tuple(axis for axis in self.rows if axis in self.vocabulary + self.gathered)

    def enter(self, rows: RowArrays, head: Head) -> tuple[RowArrays, Head]:
        """The device's rows, gathered, its columns of the head, and labels counted from the first of them."""
        if self.sequence:
            rows = jax.tree.map(lambda x: lax.all_gather(x, self.sequence, axis=0, tiled=True), rows)
        head = self.own_columns(head)
        return rows._replace(batch=rows.batch._replace(labels=self.columns(rows.batch.labels, head))), head

    def columns(self, ids: jax.Array | None, local: Head) -> jax.Array | None:
        """Vocabulary ids as columns of this device; `NO_TARGET` for another device's."""
        if ids is None or not self.vocabulary:
            return ids
        columns = ids - self._start(local)
        return jnp.where((columns >= 0) & (columns < local.spec.weight_rows), columns, NO_TARGET)

    def gather(self, head: Head) -> Head:
        """`head` with whole arrays over the axes that split them in memory only."""
        if not self.gathered or self.handed_whole:
            return head
        weight = head.weight
        if jnp.dtype(head.spec.dtype).itemsize < weight.dtype.itemsize:
            weight = weight.astype(head.spec.dtype)  # moved in the dtype of the products
        head = dataclasses.replace(head, weight=_gather(weight, self.gathered_width, 1 - head.spec.vocab_axis))
        return head.columns(lambda x, axis: _gather(x, self.gathered_vocabulary, axis))

    def own_columns(self, head: Head) -> Head:
        """The columns that this device streams, gathered."""
        head, spec = self.gather(head), head.spec
        if not self.vocabulary:
            return head
        size = head.weight.shape[spec.vocab_axis]
        local = dataclasses.replace(spec, weight_rows=size, vocab_size=size, whole_vocab_size=spec.vocab_size)
        head = dataclasses.replace(head, spec=local)
        start = self._start(head)
        u = head.logit_weights
        if u is not None:
            u = jnp.pad(u, (0, size * axis_size(self.vocabulary) - u.shape[0]))
            u = lax.dynamic_slice_in_dim(u, start, size)
        valid = None
        read: dict[str, Any] = {name: getattr(head, name) for name, is_read in BY_COLUMN.items() if is_read}
        if spec.vocab_size < size * axis_size(self.vocabulary):
            valid = jnp.clip(spec.vocab_size - start, 0, size)

            def without_padding(x: jax.Array) -> jax.Array:
                return jnp.where(spread(jnp.arange(size), x) < valid, x, jnp.zeros((), x.dtype))

            read = jax.tree.map(without_padding, read)
        return dataclasses.replace(head, logit_weights=u, valid_columns=valid, **read)

    def _start(self, local: Head) -> jax.Array:
        """The vocabulary id of this device's first column."""
        return lax.axis_index(self.vocabulary).astype(jnp.int32) * local.spec.weight_rows

    def merge(self, partial: Partial, local: Head) -> Partial:
        """Statistics over the whole vocabulary from statistics of this device's columns, in one collective.

        The argmax costs a collective more.
        """
        if not self.vocabulary:
            return partial
        each, added = self.of_each(partial._replace(target_logit=None, argmax=None), partial.target_logit)
        whole = merge(*each)
        if partial.argmax is not None:
            # Ties: the lowest id. Columns are counted from 0 again on the way out.
            largest = as_large(present(partial.max), present(whole.max))
            mine = jnp.where(largest, partial.argmax + self._start(local), np.iinfo(np.int32).max)
            whole = whole._replace(argmax=lax.pmin(mine, self.vocabulary))
        return whole._replace(target_logit=added)

    def of_each[Own, Added](self, own: Own, added: Added) -> tuple[list[Own], Added]:
        """`own`, leaves `[N]`, of each device along the vocabulary, and the sum of what all have `added`.

        In one collective. Each device needs the others' maxima to add up their sums of exponentials. So all are told
        all: one sum of a table with a place for each device, which the others leave 0.
        """
        if not self.vocabulary:
            return [own], added
        devices = jnp.arange(axis_size(self.vocabulary))
        here = devices == lax.axis_index(self.vocabulary)
        table = jax.tree.map(lambda x: jnp.where(here[:, None], x, 0), own)
        if jax.tree.leaves((table, added)):  # as one array: one collective
            flat, in_parts = ravel_pytree((table, added))
            table, added = in_parts(lax.psum(flat, self.vocabulary))
        return [jax.tree.map(operator.itemgetter(i), table) for i in range(len(devices))], added

    def own_rows[Tree](self, rows: Tree) -> Tree:
        """The part of values `[N, ...]`, on which all devices agree, for the rows that came in on this one."""
        if not self.sequence:
            return rows
        here, parts = lax.axis_index(self.sequence), axis_size(self.sequence)
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, here * (len(x) // parts), len(x) // parts), rows)

    def sum_hidden(self, partial: jax.Array, dtype: np.dtype) -> jax.Array:
        """The gradient `[N, H]` of the rows that came in, rounded to `dtype`, from each device's share of it."""
        own, axes = _scatter(partial, self.sequence, 0), self.sums.hidden
        narrower = np.dtype(dtype).itemsize < own.dtype.itemsize
        if self.typed or not axes or not narrower or own.shape[0] % axis_size(axes):
            return psum(own, axes).astype(dtype)
        return _gather(_scatter(own, axes, 0).astype(dtype), axes, 0)  # a quarter less to move than by psum

    def scatter_weight(self, partial: jax.Array, vocab_axis: int) -> jax.Array:
        """The part of the weight's gradient that this device holds, from the sum over this device's rows."""
        return _scatter(_scatter(partial, self.gathered_width, 1 - vocab_axis), self.gathered_vocabulary, vocab_axis)

    def sum_entries(self, partial: jax.Array, axes: Axes) -> jax.Array:
        """The part that this device holds of a gradient `[V', ...]` that all rows have a share in, over `axes`."""
        return _scatter(psum(partial, axes), self.gathered_vocabulary, 0)

    def total(self, rows: jax.Array) -> jax.Array:
        """The sum over the devices that share a weight of what each has of its own rows."""
        if not self.common:
            return rows
        return lax.psum(rows, self.common) if self.typed else _replicated_sum(self, rows)


class Local(NamedTuple):
    """What one device works on: flat rows, its columns of the head, and given sums that gradients are added to."""

    shards: Shards
    rows: RowArrays
    head: Head
    given: Arrays

    @property
    def adds_in_place(self) -> bool:
        """Whether the device adds to its part of the weight's given sum what it makes; else what all made is added."""
        weight, shards = self.given.weight, self.shards
        wide = weight is not None and weight.dtype == self.head.spec.accumulator
        return wide and not (shards.sums.weight or shards.gathered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replicated_sum(shards: Shards, x: jax.Array) -> jax.Array:
    """`psum` with the derivative of a sum that every device uses as its own: JAX's own one would count it n times."""
    return lax.psum(x, shards.common)


_replicated_sum.defvjp(
    lambda shards, x: (_replicated_sum(shards, x), None),
    lambda shards, _, g: (lax.psum(g, shards.common) if shards.cotangents_of_total else g,),
)


def lay_out(rows: Axes, vocabulary: Axes, width: Axes, hidden_bytes: int, weight_bytes: int) -> Shards:
    """The way of working where rows, vocabulary and the weight's width are split over these axes.

    The bytes are a device's hidden states, and its part of the weight, once that is gathered over the width.
    """
    common = tuple(axis for axis in vocabulary if axis in rows)
    others = without(vocabulary, common)
    # One side is gathered over the axes that split both. A device's part of the gathered weight is one run of columns
    # only where these are the last of the vocabulary's axes.
    sequence: Axes = common
    gathered: Axes = ()
    if common and weight_bytes < hidden_bytes and vocabulary == others + common:
        vocabulary, sequence, gathered = others, (), common
    entries, all_of_it = without(rows, sequence + gathered), tuple(dict.fromkeys(rows + vocabulary))
    sums = NO_AXES.map(lambda _: all_of_it)._replace(
        hidden=without(vocabulary, sequence),
        weight=without(rows, sequence + gathered + width),
        **dict.fromkeys(BY_COLUMN, entries),
    )
    return Shards(rows, vocabulary, sequence, gathered, width, sums)


def without(axes: Axes, others: Axes) -> Axes:
    """`axes` but those among `others`."""
    return tuple(axis for axis in axes if axis not in others)


def axis_size(axes: Axes) -> int:
    """The number of devices along `axes`."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def psum(x: jax.Array, axes: Axes) -> jax.Array:
    """`lax.psum`, and `x` itself without axes."""
    return lax.psum(x, axes) if axes else x


def _gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x
