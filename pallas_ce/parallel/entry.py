"""Every streamed operation is entered here: rows flattened, split over the mesh, and mapped by `vmap`.

Rows are independent given the head. So under `vmap` a batch that shares the head is just more rows: it folds into them,
and the weight is streamed once for all examples. Where the head itself is batched, or a gradient of the head is needed
for each example, the operation maps over the batch, one example's scratch at a time.

Under `jit` on a mesh, XLA cannot see through a kernel: left to itself it gathers the weight on every device.
`custom_partitioning` hands the decision to `partitioning.split`. Inside, where a device's share of the work is known,
`at_lowering` leaves the choice of a backend to the lowering. All this needs automatic mesh axes: see `program`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend import core as jex
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_ce.head import Batch, Head
from pallas_ce.parallel.partitioning import Names, apart_over_width, row_names, spec_of, split, weight_names
from pallas_ce.parallel.reverse_mode import in_reverse_mode
from pallas_ce.parallel.shards import Axes, Local, RowArrays, Shards, without
from pallas_ce.parallel.target import known_device
from pallas_ce.streaming.rows import flat_rows

# `(rows, head, sums, *shared) -> (by_row, of_head)`. Leaves of `by_row` begin with the rows' leading dimensions. Leaves
# of `sums`, which are added to, and of `of_head` have the names and shapes of the head's arrays. `shared` are whole
# arrays. Without a head it is None, and so are `sums`.
Operation = Callable[..., tuple[Any, Any]]


def program[Out](
    static: int = 0, by_row: Callable[..., Any] = lambda *_: True
) -> Callable[[Callable[..., Out]], Callable[..., Out]]:
    """Jits a function; the explicit axes of its arguments' mesh, if there are any, are automatic inside.

    Args:
        static: how many arguments are static, the first ones. The first array of the others is `[..., K]`: its leading
            dimensions are the rows'.
        by_row: of the arguments: a prefix of the result's tree, whether a result has the rows' leading dimensions and
            lies as they do, or is a replicated scalar; or the argument that it lies as.
    """

    def decorate(function: Callable[..., Out]) -> Callable[..., Out]:
        jitted = jax.jit(function, static_argnums=tuple(range(static)))

        @functools.wraps(jitted)
        def run(*arguments: Any) -> Out:
            facts, arrays = arguments[:static], arguments[static:]
            shardings = [jax.typeof(x).sharding for x in jax.tree.leaves(arrays)]
            mesh = next((x.mesh for x in shardings if AxisType.Explicit in (x.mesh.axis_types or ())), None)
            if mesh is None:
                return in_reverse_mode(jitted, *arguments)
            whole, as_rows = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in ((), shardings[0].spec[:-1]))

            def place(of: Any) -> NamedSharding:
                return (as_rows if of else whole) if isinstance(of, bool) else jax.typeof(of).sharding

            places = jax.tree.map(place, by_row(*arguments))
            inside = functools.partial(jitted, *facts)
            return in_reverse_mode(jax.sharding.auto_axes(inside, out_sharding=places), *arrays)

        return run

    return decorate


class How(Protocol):
    """How an operation is carried out."""

    @property
    def shards(self) -> Shards | None:
        """How it is split inside a `shard_map`; where None, `jit`'s partitioner splits it on a mesh."""
        ...

    def variants(self, head: Head, /) -> Sequence[Self]:
        """How one device's share is, with the head that it works on; see `at_lowering`."""
        ...


def streamed[H: How](how: H, operation: Callable[..., tuple[Any, Any]], *, whole_head: bool = False) -> Operation:
    """`operation(how, local, *shared)` as an `Operation` on rows of any leading shape.

    It is called for one device, with what that works on: flat rows `[N, ...]`, and its part of the head. Under `jit`
    that is the `whole_head` for operations that know no part of one.
    """

    def on_device(shards: Shards, rows: RowArrays, head: Head, sums: Any, *shared: Any) -> tuple[Any, Any]:
        rows, head = shards.enter(rows, head)
        rows = rows._replace(batch=head.with_low(rows.batch))

        def local(how: H, rows: RowArrays, head: Head, sums: Any, *shared: Any) -> tuple[Any, Any]:
            return operation(how, Local(shards, rows, head, sums), *shared)

        return at_lowering(how.variants(head), local, rows, head, sums, *shared)

    return _flat_and_split(how.shards, on_device, whole_head)


def over_rows_only(operation: Callable[..., Any]) -> Callable[..., Any]:
    """As `streamed`, for an operation whose head, if it has one, is not split: `(by_row, *shared) -> by_row`.

    `by_row` is any tree of `[..., *K]` leaves, the first of them `[..., K]`; the operation sees them flat.
    """

    def entered(by_row: Any, *shared: Any) -> Any:
        (first, *others), structure = jax.tree.flatten(by_row)

        def headless(shards: Shards, rows: RowArrays, head: None, sums: None, *shared: Any) -> tuple[Any, None]:
            del shards, head, sums
            return operation(jax.tree.unflatten(structure, [rows.batch.hidden, *rows.more]), *shared), None

        return _flat_and_split(None, headless, whole_head=True)(
            RowArrays(Batch(first), None, more=others), None, None, *shared
        )[0]

    return entered


def at_lowering[Variant, Out](variants: Sequence[Variant], operation: Callable[..., Out], *arrays: Any) -> Out:
    """`operation(variant, *arrays)`: the first of `variants` in a program lowered for CUDA, the second in any other.

    Both are traced and must return the same types; only one is lowered. A single variant is for every platform.
    """
    cuda, *others = (functools.partial(operation, variant) for variant in variants)
    if not others:
        return cuda(*arrays)
    (default,) = others
    return lax.platform_dependent(*arrays, cuda=cuda, default=default)


def _flat_and_split(shards: Shards | None, operation: Callable[..., tuple[Any, Any]], whole_head: bool) -> Operation:
    """`operation(shards, rows, head, sums, *shared)`, which sees flat rows, mapped by `vmap`."""

    def flat(shards: Shards, rows: RowArrays, *more: Any) -> tuple[Any, Any]:
        leading = rows.batch.leading
        by_row, of_head = operation(shards, flat_rows(leading, rows), *more)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), by_row), of_head

    if automatic := automatic_axes():
        return over_rows(_made_manual(flat, shards or Shards(), automatic, whole_head))
    return over_rows(_partitioned(flat, whole_head) if shards is None else functools.partial(flat, shards))


def _made_manual(
    operation: Callable[..., tuple[Any, Any]], shards: Shards, automatic: dict[str, int], whole_head: bool
) -> Operation:
    """`operation(shards, rows, head, sums, *shared)` inside a `shard_map` that leaves axes automatic, made manual here.

    XLA's partitioner, which knows how arrays lie over them, cannot hand a part of a `shard_map` over. So the vocabulary
    is split over those that divide it, since partial statistics are little to merge, and the rest is whole. So is a
    weight that is gathered over the vocabulary: parts of its parts would not be one run of columns.
    """

    def entered(rows: RowArrays, head: Head | None, sums: Any, *shared: Any) -> tuple[Any, Any]:
        parted = None if whole_head else head
        axes: Axes = ()
        entries = 1 if parted is None or shards.gathered_vocabulary else parted.spec.weight_rows
        for axis in automatic:
            if entries % math.prod(automatic[a] for a in (*axes, axis)) == 0:
                axes = (*axes, axis)
        over = shards.sums
        over = over._replace(hidden=over.hidden + axes, logit_scale=over.logit_scale + axes, down=over.down + axes)
        inner = dataclasses.replace(shards, vocabulary=shards.vocabulary + axes, sums=over)

        def places(head_arrays: Any) -> Any:
            names = iter(_names_of_head(head_arrays, parted))
            return jax.tree.map(
                lambda _: PartitionSpec(*(axes if name == "vocabulary" else None for name in next(names))), head_arrays
            )

        whole = PartitionSpec()
        # `shard_map` has to be told which results there are, and only a trace tells which gradients are asked for.
        _, gradients = jax.eval_shape(functools.partial(operation, shards), rows, head, sums, *shared)
        return jax.shard_map(
            functools.partial(operation, inner),
            in_specs=(whole, places(head), places(sums), *[whole] * len(shared)),
            out_specs=(whole, places(gradients)),
            axis_names=set(automatic),
            check_vma=shards.typed,
        )(rows, head, sums, *shared)

    return entered


def automatic_axes() -> dict[str, int]:
    """The axes of several devices that the surrounding `shard_map`, if there is one, leaves automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.manual_axes and mesh.shape[axis] > 1}


def over_rows(operation: Operation) -> Operation:
    """Gives `operation`, on pytrees of rows and of what all rows share, its `vmap` rule."""

    @custom_vmap
    def batched(by_row: Any, *shared: Any) -> tuple[Any, Any]:
        return operation(by_row, *shared)

    @batched.def_vmap
    def rule(size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        is_batched = jax.tree.unflatten(jax.tree.structure(arguments), jax.tree.leaves(in_batched))
        per_example = jax.eval_shape(operation, *jax.tree.map(_one_example, arguments, is_batched))
        if size == 0:
            out = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), per_example)
        elif any(jax.tree.leaves(is_batched[1:])) or jax.tree.leaves(per_example[1]):
            out = _map(batched, arguments, is_batched)
        else:
            out = batched(_fold(size, arguments[0], is_batched[0]), *arguments[1:])
        return out, jax.tree.map(lambda _: True, out)

    return batched


def _one_example(x: jax.Array, is_batched: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:] if is_batched else x.shape, x.dtype)


def _fold(size: int, by_row: Any, is_batched: Any) -> Any:
    """The batch as one more leading dimension of every leaf."""
    return jax.tree.map(
        lambda x, flag: x if flag else lax.broadcast_in_dim(x, (size, *x.shape), tuple(range(1, x.ndim + 1))),
        by_row, is_batched,
    )  # fmt: skip


def _map(operation: Operation, arguments: tuple[Any, ...], is_batched: Any) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(is_batched)

    def one(batched: list[jax.Array]) -> tuple[Any, Any]:
        example = iter(batched)
        chosen = [next(example) if b else x for x, b in zip(leaves, flags, strict=True)]
        return operation(*jax.tree.unflatten(structure, chosen))

    return lax.map(one, [x for x, b in zip(leaves, flags, strict=True) if b])


def _partitioned(operation: Callable[..., tuple[Any, Any]], whole_head: bool) -> Operation:
    """`operation(Shards(), rows, ...)`, which XLA's partitioner splits; a whole head's by the rows only."""

    def entered(rows: RowArrays, head: Head | None, sums: Any, *shared: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten((rows, head, sums, *shared))

        def flat(shards: Shards, leaves: Sequence[jax.Array]) -> tuple[Any, Any]:
            return operation(shards, *jax.tree.unflatten(structure, leaves))

        with known_device(leaves):  # where nothing is split, this trace runs
            whole, results = jax.make_jaxpr(functools.partial(flat, Shards()), return_shape=True)(leaves)
        out_structure, count = jax.tree.structure(results), len(leaves)
        # Printing, say, custom_partitioning cannot lower, nor anything for a mesh without devices, which none will run.
        if whole.effects or _without_devices(leaves):
            return jax.tree.unflatten(out_structure, jex.jaxpr_as_fun(whole)(*leaves))
        # Arrays from a closure are operands too. The partitioner keeps what it is given, so it gets shapes, no tracers.
        jaxpr, consts = whole.jaxpr, whole.consts
        gatherable = len(jax.tree.leaves((rows, head)))
        rows, head, shared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (rows, head, shared))
        parted = None if whole_head else head
        names = _names(rows, parted, sums, (head if whole_head else None, shared, consts))
        out_names = _out_names(results, rows, parted)

        @custom_partitioning
        def call(*operands: jax.Array) -> list[jax.Array]:
            leaves, consts = operands[:count], operands[count:]
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))(*leaves)

        def partition(mesh: Mesh, given: Sequence[Any], result: Any) -> Any:
            del result
            specs = [spec_of(mesh, operand.sharding, operand.ndim) for operand in given[:count]]
            given_specs = jax.tree.unflatten(structure, specs)
            axes, shards = split(mesh, given_specs, rows, parted)
            taken = axes
            if parted is not None and parted.weight.dtype.itemsize <= parted.spec.dtype.itemsize:
                # The partitioner gathers it, once for the forward and the backward; a wider weight is narrowed first.
                shards = dataclasses.replace(shards, handed_whole=True)
                taken = axes | {dim: without(axes[dim], shards.gathered) for dim in weight_names(parted)}

            apart = apart_over_width(mesh, given_specs, rows, parted, axes)

            def place(dims: Names, axes: dict[str, Axes]) -> NamedSharding:
                return NamedSharding(mesh, PartitionSpec(*(axes.get(dim, ()) for dim in dims)))

            def local(*operands: jax.Array) -> list[jax.Array]:
                # A device knows the axes by their names only, and itself.
                alone = AbstractMesh((), (), (), abstract_device=mesh.abstract_mesh.abstract_device)
                with jax.sharding.use_abstract_mesh(alone):
                    rows, head, *more = jax.tree.unflatten(structure, operands[:count])
                    return jax.tree.leaves(operation(shards, *apart.joined(rows, head), *more))

            places = [place(d, taken if i < gatherable else axes) for i, d in enumerate(names)]
            if apart.hidden:
                by_row = {name: without(axes[name], apart.hidden) for name in row_names(rows)}
                places[0] = place(names[0], by_row | {names[0][-1]: apart.hidden})
            if apart.weight:
                first = len(jax.tree.leaves(rows))  # of the head's arrays
                places[first] = place(names[first], taken | {"width": taken["width"] + apart.weight})
            return mesh, local, [place(d, axes) for d in out_names], tuple(places)

        rule = SdyShardingRule(
            tuple(ArrayMapping(*dims) for dims in names), tuple(ArrayMapping(*dims) for dims in out_names)
        )
        # JAX itself fails to name the mesh axes of a layout that splits several dimensions over parts of one.
        call.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
        return jax.tree.unflatten(out_structure, call(*leaves, *consts))

    return entered


def _without_devices(arrays: Iterable[jax.Array]) -> bool:
    """Whether the arrays lie on a mesh that the caller made without devices, to look at a program for it."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return any(mesh.size > 1 and mesh.abstract_mesh.abstract_device is None for mesh in meshes)


def _names(rows: RowArrays, head: Head | None, sums: Any, shared: Any) -> list[Names]:
    """The dimensions of every leaf of `(rows, head, sums, *shared)`."""
    leaves = jax.tree.leaves((rows, head, sums, *shared))
    known = [row_names(rows)] * len(jax.tree.leaves(rows)) + _names_of_head((head, sums), head)
    return _with_whole("in", leaves, known)


def _out_names(results: tuple[Any, Any], rows: RowArrays, head: Head | None) -> list[Names]:
    """The dimensions of every leaf of an operation's results."""
    by_row = [row_names(rows)] * len(jax.tree.leaves(results[0]))
    return _with_whole("out", jax.tree.leaves(results), by_row + _names_of_head(results[1], head))


def _names_of_head(arrays: Any, head: Head | None) -> list[Names]:
    """For each leaf of `arrays`, named as the head's, the names of its dimensions that may be split."""
    weight, entries = weight_names(head), () if head is None else ("vocabulary",)
    given: dict[str, Names] = {"weight": weight, "bias": entries, "up": entries}
    return [given.get(path[-1].name, ()) for path, _ in jax.tree.leaves_with_path(arrays)]


def _with_whole(prefix: str, leaves: list[jax.Array], known: list[Names]) -> list[Names]:
    """Names for all dimensions: those that are left whole get one each, since equal names would mean equal sizes."""
    new = (f"{prefix}{i}" for i in itertools.count())
    known = known + [()] * (len(leaves) - len(known))
    return [(*names, *itertools.islice(new, x.ndim - len(names))) for x, names in zip(leaves, known, strict=True)]


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
    rule = SdyShardingRule((here,), (there,))
    call.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
    found: jax.Array = call(x)
    return found


_replicated.def_vmap(lambda size, batched, x: (_replicated(x), batched[0]))


@jax.custom_vjp
def _with_replicated_gradient(x: jax.Array) -> jax.Array:
    return _replicated(x)


_with_replicated_gradient.defvjp(lambda x: (_replicated(x), None), lambda _, gradient: (_replicated(gradient),))
