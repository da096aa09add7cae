"""How a call is split, from the shardings of its arrays, under `jit` and for `explain`.

The rows' leading dimensions, the vocabulary and the weight's width may be split over mesh axes. `split` decides between
data, tensor and sequence parallelism, FSDP, and their combinations, whatever the layout.

A program is lowered after it was traced, for the device its arrays lie on; the process's default backend says nothing
of it. But a mesh knows its devices, also where a program is only compiled for them: `known_device`.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.parallel.shards import Axes, RowArrays, Shards, lay_out, without

# An array's dimensions by name. `row0`, `row1`, …, `vocabulary` and `width` may be split, others are left whole.
Names = tuple[str, ...]


def split(mesh: Mesh | AbstractMesh, given: Any, rows: RowArrays, head: Head | None) -> tuple[dict[str, Axes], Shards]:
    """The mesh axes of every dimension that is split, and what they amount to. Whatever the layout, there is an answer.

    Rows lie as the hidden states do, and where these are whole as labels, masks and other arrays of the rows. Along any
    other axis that splits an array devices would repeat each other's work. So rows or vocabulary are split over it,
    whichever has to be moved less for it; XLA lays the arrays so. An axis that divides neither splits nothing.

    `given` is how all arrays lie, a tree of `PartitionSpec`s: `(rows, head, ...)`. Rows and head are read for their
    shapes; the head is None where it is whole or there is none.
    """
    by_row, names, hidden = jax.tree.leaves(given[0]), row_names(rows), rows.batch.hidden
    sizes = dict(zip(names, hidden.shape, strict=False))
    axes: dict[str, Axes] = dict.fromkeys(names, ())

    def over_rows(*more: str) -> Axes:
        return tuple(axis for name in (*names, *more) for axis in axes.get(name, ()))

    def of_a_device() -> tuple[int, int]:
        """Bytes of its hidden states and, once the width is gathered, of its part of the weight."""
        weight = 0 if head is None else head.weight.size * head.spec.dtype.itemsize
        over_vocabulary = _devices(mesh, axes.get("vocabulary", ()))
        return hidden.size * hidden.dtype.itemsize // _devices(mesh, over_rows()), weight // over_vocabulary

    def divided(name: str, axis: str) -> bool:
        """Whether the axis can split a dimension further, which it then does."""
        fits = sizes[name] % _devices(mesh, (*axes[name], axis)) == 0
        axes[name] += (axis,) * fits
        return fits

    for name, axis in _splits(mesh, names, by_row[0]):
        if axis not in over_rows():
            divided(name, axis)
    splits_of_weight = []
    if head is not None:
        splits_of_weight = _splits(mesh, weight_names(head), given[1].weight)
        sizes |= dict(zip(weight_names(head), head.weight.shape, strict=True))
        axes |= dict.fromkeys(weight_names(head), ())
        for name, axis in splits_of_weight:
            if name == "vocabulary":
                divided(name, axis)
    for spec in by_row[1:]:
        for name, axis in _splits(mesh, names, spec):
            if axis not in over_rows("vocabulary"):
                divided(name, axis)
    for axis in dict.fromkeys(axis for spec in jax.tree.leaves(given) for axis in _axes(mesh, spec)):
        if axis in over_rows("vocabulary"):
            continue
        of_hidden, of_weight = of_a_device()
        choices = names if head is None else (*names, "vocabulary") if of_weight < of_hidden else ("vocabulary", *names)
        any(divided(name, axis) for name in choices)
    for name, axis in splits_of_weight:
        if name == "width" and axis in over_rows():
            divided(name, axis)
    return axes, lay_out(over_rows(), axes.get("vocabulary", ()), axes.get("width", ()), *of_a_device())


class Apart(NamedTuple):
    """Axes over which arrays come in parts of their width that are worked on otherwise."""

    # The hidden states', which split the rows; parts are exchanged for parts of the rows. XLA itself would gather the
    # hidden states first, and warn of it.
    hidden: Axes = ()
    dimension: int = 0  # the rows' dimension that these split
    weight: Axes = ()  # which split nothing; it is gathered, once in each pass. XLA itself would keep it between

    def joined(self, rows: RowArrays, head: Head | None) -> tuple[RowArrays, Head | None]:
        """Rows and head as they are worked on, from what comes in."""
        if self.hidden:
            hidden = rows.batch.hidden
            hidden = jax.lax.all_to_all(hidden, self.hidden, self.dimension, hidden.ndim - 1, tiled=True)
            rows = rows._replace(batch=rows.batch._replace(hidden=hidden))
        if head is not None:
            head = Shards(gathered_width=self.weight).gather(head)
        return rows, head


def apart_over_width(mesh: Mesh, given: Any, rows: RowArrays, head: Head | None, axes: dict[str, Axes]) -> Apart:
    """Which arrays come in parts of their width; `given` and `axes` as for `split`."""
    weight: Axes = ()
    hidden = _axes(mesh, given[0].batch.hidden[-1:])
    ends = [axes[name][-len(hidden) :] == hidden for name in row_names(rows)]
    if not hidden or True not in ends or rows.batch.hidden.shape[-1] % _devices(mesh, hidden):
        hidden = ()
    if head is not None:
        width = (axis for name, axis in _splits(mesh, weight_names(head), given[1].weight) if name == "width")
        weight = without(tuple(width), axes["width"] + axes["vocabulary"])
        if head.spec.hidden_size % _devices(mesh, axes["width"] + weight):
            weight = ()
    return Apart(hidden, ends.index(True) if hidden else 0, weight)


class Share(NamedTuple):
    """One device's share of a call on a mesh."""

    tokens: int  # rows it works on, gathered ones included
    spec: HeadSpec  # the head it works on
    hidden: int = 1  # into how many parts the hidden states are split
    weight: int = 1  # into how many the weight is
    gathered_bytes: int = 0  # a gathered or exchanged weight
    padded: bool = False  # whether the vocabulary is split and padded, so that parts may hold padding
    words: str = ""  # which parallelism it is; "" where neither is split


def share(hidden: Any, weight: Any, labels: Any | None, spec: HeadSpec) -> Share:
    """Reads off the shardings of arrays, or of `jax.ShapeDtypeStruct`s."""
    arrays = [x for x in (hidden, weight, labels) if x is not None]
    meshes = [x.sharding.mesh for x in arrays if isinstance(getattr(x, "sharding", None), NamedSharding)]
    tokens = math.prod(hidden.shape[:-1])
    if not meshes or meshes[0].size == 1:
        return Share(tokens, spec)
    mesh, rows, head = meshes[0], RowArrays(Batch(hidden, labels), None), Head(weight, None, None, None, spec)
    given = jax.tree.map(_spec_of, (rows, head))
    axes, shards = split(mesh, given, rows, head)

    over_vocabulary, of_weight = _devices(mesh, shards.vocabulary), _splits(mesh, weight_names(head), given[1].weight)
    columns = spec.weight_rows // over_vocabulary
    alone, tensor = without(shards.rows, shards.common), without(shards.vocabulary, shards.sequence)
    exchanged = tuple(axis for name, axis in of_weight if name == "width" and axis in axes["vocabulary"])
    whole = tuple(axis for _, axis in of_weight if axis not in axes["vocabulary"] + axes["width"])
    words = [
        (alone, "rows over {}"),
        (tensor, "vocabulary over {}, statistics merged"),
        (exchanged, "weight exchanged over {}: parts of its width for parts of the vocabulary"),
        (shards.sequence, "rows and vocabulary over {}: hidden gathered (sequence parallelism)"),
        (shards.gathered, "rows and weight over {}: weight gathered (FSDP)"),
        (whole, "weight gathered over {}, which do not divide it evenly, or divide neither rows nor vocabulary"),
    ]
    return Share(
        tokens // _devices(mesh, without(shards.rows, shards.sequence)),
        dataclasses.replace(spec, weight_rows=columns, vocab_size=min(spec.vocab_size, columns)),
        _devices(mesh, shards.rows),
        _devices(mesh, axes["vocabulary"] + axes["width"]),
        columns * spec.hidden_size * spec.dtype.itemsize if shards.gathered or exchanged or whole else 0,
        bool(shards.vocabulary) and spec.vocab_size < spec.weight_rows,
        "; ".join(text.format(", ".join(names)) for names, text in words if names),
    )


def spec_of(mesh: Mesh, place: Sharding, dimensions: int) -> PartitionSpec:
    """The mesh axes that split an array's dimensions, an entry for each, from where its parts lie.

    An axis whose halves split different dimensions is named for both.
    """
    parts = place.devices_indices_map((mesh.size,) * dimensions)  # of an array that every layout divides
    starts = np.array([[part.start or 0 for part in parts[device]] for device in mesh.devices.flat], np.int64)
    starts = starts.reshape(*mesh.devices.shape, dimensions)
    others = (0,) * (mesh.devices.ndim - 1)
    # How far parts lie along each dimension from the first device's part: the further, the more major the axis.
    reach = {axis: np.moveaxis(starts, i, -1)[others].max(axis=-1) for i, axis in enumerate(mesh.axis_names)}
    by_reach = (sorted(reach, key=lambda axis: -reach[axis][i]) for i in range(dimensions))
    return PartitionSpec(*(tuple(axis for axis in order if reach[axis][i]) for i, order in enumerate(by_reach)))


def _spec_of(x: Any) -> PartitionSpec:
    """An entry for every dimension."""
    place = getattr(x, "sharding", None)
    spec = place.spec if isinstance(place, NamedSharding) else ()
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def _splits(mesh: Mesh | AbstractMesh, names: Names, spec: PartitionSpec) -> list[tuple[str, str]]:
    """Which of an array's first dimensions, by name, are split over which axes of several devices, major to minor."""
    return [(name, axis) for name, part in zip(names, spec, strict=False) for axis in _axes(mesh, (part,))]


def _axes(mesh: Mesh | AbstractMesh, spec: Iterable[Any]) -> Axes:
    """The mesh axes of the entries of a PartitionSpec, without axes of one device."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return tuple(axis for axis in itertools.chain.from_iterable(parts) if axis is not None and mesh.shape[axis] > 1)


def _devices(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def row_names(rows: RowArrays) -> Names:
    """The names of the rows' leading dimensions."""
    return tuple(f"row{i}" for i in range(rows.batch.hidden.ndim - 1))


def weight_names(head: Head | None) -> Names:
    """The names of the weight's dimensions, none without a head."""
    if head is None:
        return ()
    return ("vocabulary", "width") if head.spec.vocab_axis == 0 else ("width", "vocabulary")


@contextlib.contextmanager
def known_device(arrays: Any) -> Iterator[AbstractDevice | None]:
    """The device that `arrays`, a pytree, are known to lie on; None where only lowering will tell.

    Inside, JAX's ambient mesh names it too, which is where rules and tables that depend on the device look.
    """
    ambient = jax.sharding.get_abstract_mesh().abstract_device
    device = ambient or next(filter(None, map(_device, jax.tree.leaves(arrays))), None)
    known = AbstractMesh((), (), (), abstract_device=device)
    with contextlib.nullcontext() if ambient or not device else jax.sharding.use_abstract_mesh(known):
        yield device


def _device(array: Any) -> AbstractDevice | None:
    """The device of an array's, tracer's or struct's mesh."""
    # A tracer has the sharding of its type only.
    place = jax.typeof(array).sharding if isinstance(array, jax.Array) else getattr(array, "sharding", None)
    mesh = getattr(place, "mesh", None)
    return None if mesh is None else mesh.abstract_mesh.abstract_device
