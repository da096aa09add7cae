"""How a streamed operation is split under `jit`, from the shardings of its arrays alone.

XLA cannot see through a kernel: left to itself it gathers the weight on every device. `custom_partitioning` hands the
decision to this file. The rows' leading dimensions, the vocabulary and the weight's width may be split over mesh axes;
`split` decides what that amounts to: data, tensor or sequence parallelism, FSDP, and their combinations. Hidden states
whose width is split are gathered, as those of sequence parallelism are.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.parallel.shards import Axes, RowArrays, Shards, lay_out, without

Operation = Callable[..., tuple[Any, Any]]

# An array's dimensions by name. `row0`, `row1`, …, `vocabulary` and `width` may be split, others are left whole.
Names = tuple[str, ...]


def partitioned(operation: Operation) -> Callable[..., tuple[Any, Any]]:
    """`operation(Shards(), rows, head, *shared)`, which XLA's partitioner splits.

    Args:
        operation: `(shards, rows, head, *shared) -> (by_row, of_head)`. Leaves of `by_row` begin with the rows' leading
            dimensions; those of `of_head` are of the weight's shape, `[V']` or scalar; `shared` are whole arrays.
            Without a head (None), only the rows are split.
    """

    def entered(rows: RowArrays, head: Head | None, *shared: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten((rows, head, *shared))

        def flat(shards: Shards, leaves: Sequence[jax.Array]) -> tuple[Any, Any]:
            return operation(shards, *jax.tree.unflatten(structure, leaves))

        whole, results = jax.make_jaxpr(functools.partial(flat, Shards()), return_shape=True)(leaves)
        out_structure, consts, count = jax.tree.structure(results), whole.consts, len(leaves)
        if whole.effects:  # printing, say, which custom_partitioning cannot lower
            return jax.tree.unflatten(out_structure, jex.jaxpr_as_fun(whole)(*leaves))
        # Arrays from a closure are operands too.
        names, out_names = _names(rows, head, (shared, consts)), _out_names(results, rows, head)

        @custom_partitioning
        def call(*operands: jax.Array) -> list[jax.Array]:
            leaves, consts = operands[:count], operands[count:]
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(whole.jaxpr, consts))(*leaves)

        def partition(mesh: Mesh, given: Sequence[Any], result: Any) -> Any:
            del result
            specs = [operand.sharding.spec for operand in given[:count]]
            given_rows, given_head, *_ = jax.tree.unflatten(structure, specs)
            weight = None if given_head is None else given_head.weight
            axes, shards = split(mesh, given_rows.batch.hidden, weight, rows, head)
            taken = axes
            if head is not None and head.weight.dtype.itemsize <= head.spec.dtype.itemsize:
                # The partitioner gathers it, once for the forward and the backward; a wider weight is narrowed first.
                shards = dataclasses.replace(shards, handed_whole=True)
                taken = axes | {dim: without(axes[dim], shards.gathered) for dim in _weight_names(head)}

            def place(dims: Names, axes: dict[str, Axes]) -> NamedSharding:
                return NamedSharding(mesh, PartitionSpec(*(axes.get(dim, ()) for dim in dims)))

            def local(*operands: jax.Array) -> list[jax.Array]:
                # A device knows the axes by their names only, and itself.
                alone = AbstractMesh((), (), (), abstract_device=mesh.abstract_mesh.abstract_device)
                with jax.sharding.use_abstract_mesh(alone):
                    return jax.tree.leaves(flat(shards, operands[:count]))

            return mesh, local, [place(d, axes) for d in out_names], tuple(place(d, taken) for d in names)

        rule = SdyShardingRule(
            tuple(ArrayMapping(*dims) for dims in names), tuple(ArrayMapping(*dims) for dims in out_names)
        )
        call.def_partition(partition=partition, sharding_rule=rule)
        return jax.tree.unflatten(out_structure, call(*leaves, *consts))

    return entered


def replicated(x: jax.Array) -> jax.Array:
    """`x` whole on every device, and so its gradient: how either is made does not decide how what reads it is split."""
    return x if jax.sharding.get_abstract_mesh().manual_axes else _with_replicated_gradient(x)


@custom_vmap
def _replicated(x: jax.Array) -> jax.Array:
    call = custom_partitioning(lambda x: x)

    def partition(mesh: Mesh, given: Sequence[Any], result: Any) -> Any:
        del given, result
        place = NamedSharding(mesh, PartitionSpec())
        return mesh, lambda x: x, place, (place,)

    here, there = (ArrayMapping(*(f"{side}{axis}" for axis in range(x.ndim))) for side in ("in", "out"))
    call.def_partition(partition=partition, sharding_rule=SdyShardingRule((here,), (there,)))
    found: jax.Array = call(x)
    return found


_replicated.def_vmap(lambda size, batched, x: (_replicated(x), batched[0]))


@jax.custom_vjp
def _with_replicated_gradient(x: jax.Array) -> jax.Array:
    return _replicated(x)


_with_replicated_gradient.defvjp(lambda x: (_replicated(x), None), lambda _, gradient: (_replicated(gradient),))


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
    row_names = _row_names(rows)
    axes = {name: _axes(mesh, part) for name, part in zip(row_names, hidden, strict=False)}
    for name, size in zip(row_names, rows.batch.hidden.shape, strict=False):
        if size % _devices(mesh, axes[name]):
            axes[name] = ()  # an intermediate value may lie unevenly; the partitioner evens it out
    over_rows = tuple(axis for name in row_names for axis in axes[name])
    if head is None or weight is None:
        return axes, Shards(over_rows)
    for name, part, size in zip(_weight_names(head), weight, head.weight.shape, strict=True):
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
        words: which parallelism it is.
    """

    tokens: int
    spec: HeadSpec
    hidden: int
    weight: int
    gathered_bytes: int
    padded: bool
    words: str


def share(hidden: Any, weight: Any, spec: HeadSpec) -> Share | None:
    """Reads off the shardings of arrays, or of `jax.ShapeDtypeStruct`s; None where neither is split.

    Raises:
        ValueError: as the call itself would.
    """
    meshes = [x.sharding.mesh for x in (hidden, weight) if isinstance(getattr(x, "sharding", None), NamedSharding)]
    if not meshes or meshes[0].size == 1:
        return None
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
        hidden.size // hidden.shape[-1] // devices(tuple(axis for axis in shards.rows if axis not in shards.sequence)),
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


def _row_names(rows: RowArrays) -> Names:
    return tuple(f"row{i}" for i in range(rows.batch.hidden.ndim - 1))


def _weight_names(head: Head | None) -> Names:
    if head is None:
        return ()
    return ("vocabulary", "width") if head.spec.vocab_axis == 0 else ("width", "vocabulary")


def _names(rows: RowArrays, head: Head | None, shared: Any) -> list[Names]:
    """The dimensions of every leaf of `(rows, head, *shared)`."""
    given = {"weight": _weight_names(head), "bias": ("vocabulary",)}
    arrays = [field.name for field in dataclasses.fields(Head) if field.name != "spec" and head is not None]
    of_head = [given.get(name, ()) for name in arrays if getattr(head, name) is not None]
    leaves = jax.tree.leaves((rows, head, *shared))
    known = [_row_names(rows)] * len(jax.tree.leaves(rows)) + of_head
    return _with_whole("in", leaves, known)


def _out_names(results: tuple[Any, Any], rows: RowArrays, head: Head | None) -> list[Names]:
    """The dimensions of every leaf of an operation's results."""
    by_row, of_head = (jax.tree.leaves(result) for result in results)
    kinds = {0: (), 1: ("vocabulary",), 2: _weight_names(head)}
    return _with_whole("out", by_row + of_head, [_row_names(rows)] * len(by_row) + [kinds[x.ndim] for x in of_head])


def _with_whole(prefix: str, leaves: list[jax.Array], known: list[Names]) -> list[Names]:
    """Names for all dimensions: those that are left whole get one each, since equal names would mean equal sizes."""
    new = (f"{prefix}{i}" for i in itertools.count())
    known = known + [()] * (len(leaves) - len(known))
    return [(*names, *itertools.islice(new, x.ndim - len(names))) for x, names in zip(leaves, known, strict=True)]
