"""What the shardings of a call's arrays amount to, under `jit` and for `explain`.

The rows' leading dimensions, the vocabulary and the weight's width may be split over mesh axes; `split` decides what
that amounts to: data, tensor or sequence parallelism, FSDP, and their combinations. Hidden states whose width is split
are gathered, as those of sequence parallelism are.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.parallel.shards import Axes, RowArrays, Shards, lay_out

# An array's dimensions by name. `row0`, `row1`, …, `vocabulary` and `width` may be split, others are left whole.
Names = tuple[str, ...]


def split(
    mesh: Mesh | AbstractMesh, hidden: PartitionSpec, weight: PartitionSpec | None, rows: RowArrays, head: Head | None
) -> tuple[dict[str, Axes], Shards]:
    """The mesh axes of every dimension that is split, and what they amount to.

    Args:
        mesh: the mesh.
        hidden: how the hidden states lie.
        weight: how the weight lies; None without a head.
        rows: the rows, for their shapes.
        head: the head, for its shapes; or None.

    Raises:
        ValueError: the weight does not divide evenly, or its width is split where the tokens are not.
    """
    names = row_names(rows)
    axes = {name: _axes(mesh, part) for name, part in zip(names, hidden, strict=False)}
    for name, size in zip(names, rows.batch.hidden.shape, strict=False):
        if size % _devices(mesh, axes[name]):
            axes[name] = ()  # an intermediate value may lie unevenly; the partitioner evens it out
    over_rows = tuple(axis for name in names for axis in axes[name])
    if head is None or weight is None:
        return axes, Shards(over_rows)
    for name, part, size in zip(weight_names(head), weight, head.weight.shape, strict=True):
        axes[name] = _axes(mesh, part)
        if size % _devices(mesh, axes[name]):
            raise ValueError(
                f"weight has {size} entries along its {name}, which do not divide evenly over the mesh axes "
                f"{axes[name]}: pad the weight, and pass vocab_size where it is the vocabulary that is padded"
            )
    vocabulary = axes["vocabulary"]
    if alone := [axis for axis in axes["width"] if axis not in over_rows]:
        raise ValueError(
            f"the weight's width H is split over the mesh axes {alone} and the tokens are not: every device would "
            "gather the weight and do all of the work; split the vocabulary over them instead, or the tokens too"
        )
    hidden_bytes = rows.batch.hidden.size * rows.batch.hidden.dtype.itemsize // _devices(mesh, over_rows)
    weight_bytes = head.weight.size * head.spec.dtype.itemsize // _devices(mesh, vocabulary)
    return axes, lay_out(over_rows, vocabulary, axes["width"], hidden_bytes, weight_bytes)


class Share(NamedTuple):
    """What one device of a mesh has of a call.

    Attributes:
        tokens: rows it works on, gathered ones included.
        spec: the head it works on.
        hidden: into how many parts the hidden states are split.
        weight: into how many the weight is.
        gathered_bytes: a gathered weight.
        padded: whether the vocabulary is split and padded, so that parts may hold padding.
        words: which parallelism it is; "" where neither is split.
    """

    tokens: int
    spec: HeadSpec
    hidden: int = 1
    weight: int = 1
    gathered_bytes: int = 0
    padded: bool = False
    words: str = ""


def share(hidden: Any, weight: Any, spec: HeadSpec) -> Share:
    """Reads off the shardings of arrays, or of `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: as the call itself would.
    """
    meshes = [x.sharding.mesh for x in (hidden, weight) if isinstance(getattr(x, "sharding", None), NamedSharding)]
    tokens = math.prod(hidden.shape[:-1])
    if not meshes or meshes[0].size == 1:
        return Share(tokens, spec)
    rows, head = RowArrays(Batch(hidden), None), Head(weight, None, None, None, spec)
    axes, shards = split(meshes[0], _spec_of(hidden), _spec_of(weight), rows, head)

    def devices(axes: Axes) -> int:
        return _devices(meshes[0], axes)

    over_vocabulary, gathered = devices(shards.vocabulary), shards.gathered
    columns = spec.weight_rows // over_vocabulary
    alone = tuple(axis for axis in shards.rows if axis not in shards.common)
    tensor = tuple(axis for axis in shards.vocabulary if axis not in shards.sequence)
    words = [
        (alone, "rows over {}"),
        (tensor, "vocabulary over {}, statistics merged"),
        (shards.sequence, "rows and vocabulary over {}: hidden gathered (sequence parallelism)"),
        (gathered, "rows and weight over {}: weight gathered (FSDP)"),
    ]
    return Share(
        tokens // devices(tuple(axis for axis in shards.rows if axis not in shards.sequence)),
        dataclasses.replace(spec, weight_rows=columns, vocab_size=min(spec.vocab_size, columns)),
        devices(shards.rows),
        devices(axes["vocabulary"] + axes["width"]),
        columns * spec.hidden_size * spec.dtype.itemsize if gathered else 0,
        bool(shards.vocabulary) and spec.vocab_size < spec.weight_rows,
        "; ".join(text.format(", ".join(names)) for names, text in words if names),
    )


def _spec_of(x: Any) -> PartitionSpec:
    """An entry for every dimension."""
    place = getattr(x, "sharding", None)
    spec = place.spec if isinstance(place, NamedSharding) else ()
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def _axes(mesh: Mesh | AbstractMesh, part: Any) -> Axes:
    """The mesh axes of one entry of a PartitionSpec, without those of one device."""
    names = () if part is None else part if isinstance(part, tuple) else (part,)
    return tuple(name for name in names if mesh.shape[name] > 1)


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
