"""Every streamed operation is entered here: rows flattened, split over the mesh, and mapped by `vmap`.

Rows are independent given the head. So under `vmap` a batch that shares the head is just more rows: it folds into them,
and the weight is streamed once for all examples. Where the head itself is batched, or a gradient of the head is needed
for each example, the operation maps over the batch, one example's scratch at a time.

Under `jit` on a mesh, XLA cannot see through a kernel: left to itself it gathers the weight on every device.
`custom_partitioning` hands the decision to `partitioning.split`. Inside, where a device's share of the work is known,
the choice of a backend is left to the lowering. All this needs automatic mesh axes: see `program`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend import core as jex
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_ce.head import Head
from pallas_ce.parallel.partitioning import apart_over_width, known_device, row_names, spec_of, split, weight_names
from pallas_ce.parallel.reverse_mode import FORWARD_MODE, REFUSAL
from pallas_ce.parallel.shards import Axes, Local, RowArrays, Shards, without
from pallas_ce.streaming.gradient_products import BY_COLUMN
from pallas_ce.streaming.loops import vary_like
from pallas_ce.streaming.rows import flat_rows

# `(rows, head, sums, *shared) -> (by_row, of_head)`. Leaves of `by_row` begin with the rows' leading dimensions. Leaves
# of `sums`, which are added to, and of `of_head` have the names and shapes of the head's arrays. `shared` are whole
# arrays.
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
            inside = functools.partial(jitted, *facts)
            if mesh is not None:
                whole, as_rows = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in ((), shardings[0].spec[:-1]))
                places = jax.tree.map(
                    lambda of: (as_rows if of else whole) if isinstance(of, bool) else jax.typeof(of).sharding,
                    by_row(*arguments),
                )
                inside = jax.sharding.auto_axes(inside, axes=mesh.explicit_axes, out_sharding=places)
            try:
                return inside(*arrays)
            except TypeError as error:
                if FORWARD_MODE not in str(error):
                    raise
                raise NotImplementedError(REFUSAL) from error

        return run

    return decorate


def streamed(how: Any, operation: Callable[..., tuple[Any, Any]], *, whole_head: bool = False) -> Operation:
    """`operation(how, local, *shared)` as an `Operation` on rows of any leading shape, mapped by `vmap`.

    It is called for one device, with what that works on: flat rows `[N, ...]`, and its part of the head. Under `jit`
    that is the `whole_head` for operations that know no part of one. A `Head` among `shared`, with as many vocabulary
    entries, is split as the head is.

    `how`, static and hashable, has `shards`, how the operation is split inside a `shard_map`; where None, `jit`'s
    partitioner splits it on a mesh. Its `variants(local)` are how a device's share is carried out: one way for every
    platform, or one for CUDA and one for the others.
    """

    def on_device(shards: Shards, rows: RowArrays, head: Head, sums: Any, *shared: Any) -> tuple[Any, Any]:
        leading = rows.batch.leading
        rows, head = shards.enter(flat_rows(leading, rows), head)
        of_shared = dataclasses.replace(shards, handed_whole=how.shards is None)  # by the partitioner
        shared = tuple(of_shared.own_columns(x) if isinstance(x, Head) else x for x in shared)
        local = Local(shards, rows._replace(batch=head.with_low(rows.batch)), head, sums)
        cuda, *others = (functools.partial(operation, variant) for variant in how.variants(local))
        if others:  # both are traced and must return the same types; only one is lowered
            by_row, of_head = jax.lax.platform_dependent(local, *shared, cuda=cuda, default=others[0])
        else:
            by_row, of_head = cuda(local, *shared)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), by_row), of_head

    mesh = jax.sharding.get_abstract_mesh()
    automatic = {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.manual_axes and mesh.shape[axis] > 1}
    if automatic:
        return over_rows(_made_manual(on_device, how.shards or Shards(), automatic, whole_head))
    if how.shards is None:
        return over_rows(_partitioned(on_device, whole_head))
    return over_rows(functools.partial(on_device, how.shards))


def _made_manual(
    operation: Callable[..., tuple[Any, Any]], shards: Shards, automatic: dict[str, int], whole_head: bool
) -> Operation:
    """`operation(shards, rows, head, sums, *shared)` inside a `shard_map` that leaves axes automatic, made manual here.

    XLA's partitioner, which knows how arrays lie over them, cannot hand a part of a `shard_map` over. So the vocabulary
    is split over those that divide it, since partial statistics are little to merge, and the rest is whole. So is a
    weight that is gathered over the vocabulary: parts of its parts would not be one run of columns.
    """

    def entered(rows: RowArrays, head: Head, sums: Any, *shared: Any) -> tuple[Any, Any]:
        axes: Axes = ()
        entries = 1 if whole_head or shards.gathered_vocabulary else head.spec.weight_rows
        for axis in automatic:
            if entries % math.prod(automatic[a] for a in (*axes, axis)) == 0:
                axes = (*axes, axis)
        over = shards.sums.of(("hidden", "logit_scale", "down"), lambda before: before + axes)
        inner = dataclasses.replace(shards, vocabulary=shards.vocabulary + axes, sums=over)

        def places(*parts: Any) -> Any:
            names = _names("", rows, None if whole_head else head, *parts)
            found = [PartitionSpec(*(axes if name == "vocabulary" else None for name in dims)) for dims in names]
            return jax.tree.unflatten(jax.tree.structure(parts), found)

        # `shard_map` has to be told which results there are, and only a trace tells which gradients are asked for.
        results = jax.eval_shape(functools.partial(operation, shards), rows, head, sums, *shared)
        return jax.shard_map(
            functools.partial(operation, inner),
            in_specs=places(rows, head, sums, *shared),
            out_specs=places(*results),
            axis_names=set(automatic),
            check_vma=shards.typed,
        )(rows, head, sums, *shared)

    return entered


def over_rows(operation: Operation) -> Operation:
    """Gives `operation`, on pytrees of rows and of what all rows share, its `vmap` rule."""
    batched = custom_vmap(operation)

    @batched.def_vmap
    def rule(size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        (leaves, structure), flags = jax.tree.flatten(arguments), jax.tree.leaves(in_batched)
        is_batched = tuple(in_batched)

        def example(x: jax.Array, b: bool) -> jax.Array:
            return vary_like(jnp.zeros(x.shape[1:], x.dtype), x) if b else x

        per_example = jax.eval_shape(lambda *given: operation(*jax.tree.map(example, given, is_batched)), *arguments)
        if size == 0:
            out = jax.tree.map(lambda x: vary_like(jnp.zeros((0, *x.shape), x.dtype), x), per_example)
        elif any(jax.tree.leaves(is_batched[1:])) or jax.tree.leaves(per_example[1]):

            def one(given: list[jax.Array]) -> tuple[Any, Any]:
                example = iter(given)
                chosen = [next(example) if b else x for x, b in zip(leaves, flags, strict=True)]
                return batched(*jax.tree.unflatten(structure, chosen))

            out = jax.lax.map(one, [x for x, b in zip(leaves, flags, strict=True) if b])
        else:
            # The batch is one more leading dimension of every array by row.
            folded = jax.tree.map(
                lambda x, b: x if b else jax.lax.broadcast_in_dim(x, (size, *x.shape), tuple(range(1, x.ndim + 1))),
                arguments[0],
                is_batched[0],
            )
            out = batched(folded, *arguments[1:])
        return out, jax.tree.map(lambda _: True, out)

    return batched


def _partitioned(operation: Callable[..., tuple[Any, Any]], whole_head: bool) -> Operation:
    """`operation(Shards(), rows, ...)`, which XLA's partitioner splits; a whole head's by the rows only."""

    def entered(rows: RowArrays, head: Head, sums: Any, *shared: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten((rows, head, sums, *shared))
        with known_device(leaves):  # where nothing is split, this trace runs
            trace = jax.make_jaxpr(functools.partial(operation, Shards()), return_shape=True)
            whole, results = trace(rows, head, sums, *shared)
        out_structure, count = jax.tree.structure(results), len(leaves)
        # Printing, say, custom_partitioning cannot lower, nor anything for a mesh without devices, which none will run.
        meshes = (jax.typeof(x).sharding.mesh for x in leaves)
        if whole.effects or any(mesh.size > 1 and mesh.abstract_mesh.abstract_device is None for mesh in meshes):
            return jax.tree.unflatten(out_structure, jex.jaxpr_as_fun(whole)(*leaves))
        # Arrays from a closure are operands too. The partitioner keeps what it is given, so it gets shapes, no tracers.
        jaxpr, consts = whole.jaxpr, whole.consts
        rows, head = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (rows, head))
        parted = None if whole_head else head
        in_names = _names("in", rows, parted, rows, head, sums, *shared, consts)
        out_names = _names("out", rows, parted, *results)
        of_rows = len(jax.tree.leaves(rows))
        gatherable = of_rows + len(jax.tree.leaves(head))
        of_sums = range(gatherable, gatherable + len(jax.tree.leaves(sums)))

        @custom_partitioning
        def call(*operands: jax.Array) -> list[jax.Array]:
            leaves, consts = operands[:count], operands[count:]
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, consts))(*leaves)

        def partition(mesh: Mesh, given: Sequence[Any], result: Any) -> Any:
            specs = [spec_of(mesh, operand.sharding, operand.ndim) for operand in given[:count]]
            given_specs = jax.tree.unflatten(structure, specs)
            axes, shards = split(mesh, given_specs, rows, parted)
            taken, gathered = axes, axes | {dim: without(axes[dim], shards.gathered) for dim in weight_names(parted)}
            if parted is not None and parted.weight.dtype.itemsize <= parted.spec.dtype.itemsize:
                # The partitioner gathers it, once for the forward and the backward; a wider weight is narrowed first.
                shards = dataclasses.replace(shards, handed_whole=True)
                taken = gathered

            apart = apart_over_width(mesh, given_specs, rows, parted, axes)

            def place(dims: tuple[str, ...], axes: dict[str, Axes]) -> NamedSharding:
                return NamedSharding(mesh, PartitionSpec(*(axes.get(dim, ()) for dim in dims)))

            def local(*operands: jax.Array) -> list[jax.Array]:
                # Inside, only the axes' names and the kind of device are known.
                alone = AbstractMesh((), (), (), abstract_device=mesh.abstract_mesh.abstract_device)
                with jax.sharding.use_abstract_mesh(alone):
                    rows, head, *more = jax.tree.unflatten(structure, operands[:count])
                    return jax.tree.leaves(operation(shards, *apart.joined(rows, head), *more))

            places = [
                place(d, taken if i < gatherable else axes if i in of_sums else gathered)
                for i, d in enumerate(in_names)
            ]
            if apart.hidden:
                by_row = {name: without(axes[name], apart.hidden) for name in row_names(rows)}
                places[0] = place(in_names[0], by_row | {in_names[0][-1]: apart.hidden})
            if apart.weight:
                placed = taken | {"width": taken["width"] + apart.weight}
                places[of_rows] = place(in_names[of_rows], placed)  # the head's first array
            return mesh, local, [place(d, axes) for d in out_names], tuple(places)

        rule = SdyShardingRule(*(tuple(ArrayMapping(*dims) for dims in names) for names in (in_names, out_names)))
        # JAX itself fails to name the mesh axes of a layout that splits several dimensions over parts of one.
        call.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
        return jax.tree.unflatten(out_structure, call(*leaves, *consts))

    return entered


def _names(prefix: str, rows: RowArrays, head: Head | None, *parts: Any) -> list[tuple[str, ...]]:
    """The dimensions of the leaves of `parts`: arrays by row, the head's and sums for it, then what all rows share.

    A dimension that stays whole gets a name of its own, since equal names would mean equal sizes. The vocabulary of a
    head that all rows share is split as the operation's own, its width is not.
    """
    new = (f"{prefix}{i}" for i in itertools.count())
    found = []
    for place, part in enumerate(parts):
        for path, x in jax.tree.leaves_with_path(part):
            names: tuple[str, ...] = ()
            if place == 0:
                names = row_names(rows)
            elif head is not None and (place <= 2 or isinstance(part, Head)):
                if path[-1].name == "weight":
                    names = weight_names(head if place <= 2 else part)
                elif path[-1].name in BY_COLUMN:
                    names = ("vocabulary",)
            if place > 2:
                names = tuple("other_width" if name == "width" else name for name in names)
            found.append((*names, *itertools.islice(new, x.ndim - len(names))))
    return found


def replicated(x: jax.Array) -> jax.Array:
    """`x` whole on every device, and so its gradient: how either is made does not decide how what reads it is split."""
    return x if jax.sharding.get_abstract_mesh().manual_axes else _with_replicated_gradient(x)


@custom_vmap
def _replicated(x: jax.Array) -> jax.Array:
    call = custom_partitioning(lambda x: x)

    def partition(mesh: Mesh, given: Sequence[Any], result: Any) -> Any:
        place = NamedSharding(mesh, PartitionSpec())
        return mesh, lambda x: x, place, (place,)

    here, there = (ArrayMapping(*(f"{side}{axis}" for axis in range(x.ndim))) for side in ("in", "out"))
    rule = SdyShardingRule((here,), (there,))
    call.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False)
    return call(x)


_replicated.def_vmap(lambda size, batched, x: (_replicated(x), batched[0]))

_with_replicated_gradient = jax.custom_vjp(_replicated)
_with_replicated_gradient.defvjp(lambda x: (_replicated(x), None), lambda _, gradient: (_replicated(gradient),))
