"""For calls inside the caller's own `shard_map`: how the arrays of a call are split over the mesh axes."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax

from pallas_ce.parallel.shards import NO_AXES, Axes, Shards, lay_out, without
from pallas_ce.streaming.gradient_products import PerInput
from pallas_ce.streaming.loops import varying


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Names the mesh axes over which the arrays of a call inside `jax.shard_map` are split.

    Outside `shard_map` leave `mesh_axes` out: under `jit` the arrays' own shardings are read, on meshes with automatic
    and with explicit axes. Inside, arrays are local parts, and what they are parts of has to be named. With n devices
    along the vocabulary's axes, `weight` is `[V'/n, H]`, `bias` `[V'/n]`, labels and `vocab_size` count in the whole
    vocabulary, and `class_weights` and `logit_weights` are whole.

    * `vocabulary` only: tensor parallelism. Row statistics are merged over its axes, so that results agree on them.
    * `vocabulary` and `rows` share axes: sequence parallelism or FSDP, whichever moves fewer bytes. A mean or sum is
      over all rows of the devices along these axes, and agrees on them; values by row are of a device's own rows.
    * `width` (its axes must be among `rows`): FSDP over H. Means and sums are as above.
    * Axes that split the rows only (data parallelism) need no mention. A mean or sum is over the device's own rows:
      pass the global count as `normalizer` and add up.
    * `MeshAxes()` says that each device has a whole weight, gathered or its own, where JAX knows that it varies.

    How gradients meet collectives depends on where differentiation happens. With `check_vma=True` JAX tracks which
    values differ along which axes, and every gradient is right wherever `jax.grad` stands. With `check_vma=False` it
    must be said with `grad`: no rule serves both.

    Attributes:
        vocabulary: axis name, or names from major to minor, over which the weight's vocabulary axis is split.
        rows: those over which tokens are split; needed under `check_vma=False` where they split the weight too.
        width: those over which the weight's H is split.
        grad: "inside" where `jax.grad` is called inside the `shard_map`, "outside" where `shard_map` itself is
            differentiated (or nothing is). Only for `check_vma=False`. Inside, the gradient of a scalar that all rows
            share, such as a traced `z_loss` or `normalizer`, is of the device's own rows: add it up over the axes
            of the rows. Gradients of the head's arrays, and of `logit_scale`, are added up already over the axes that
            `rows` names.

    Raises:
        ValueError: axes that the surrounding `shard_map` lacks, that do not go together, or over which JAX knows that
            the arrays do not vary.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from pallas_ce import MeshAxes, linear_cross_entropy
        >>> auto = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=auto)
        >>> def loss(hidden, weight, labels):
        ...     local = linear_cross_entropy(
        ...         hidden, weight, labels, normalizer=6, mesh_axes=MeshAxes(vocabulary="tensor"))
        ...     return jax.lax.psum(local, "data")
        >>> sharded = jax.shard_map(
        ...     loss, mesh=mesh, in_specs=(P("data"), P("tensor"), P("data")), out_specs=P())
        >>> hidden, weight, labels = jnp.ones((6, 4)), jnp.ones((8, 4)), jnp.arange(6)
        >>> float(jax.jit(sharded)(hidden, weight, labels))
        2.0794...
    """

    vocabulary: str | Axes = ()
    rows: str | Axes = ()
    width: str | Axes = ()
    grad: Literal["inside", "outside"] | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "rows", "width"):
            value = getattr(self, name)
            axes = tuple(value) if isinstance(value, tuple | list) else (value,)
            if not all(isinstance(axis, str) for axis in axes) or len(set(axes)) != len(axes):
                raise ValueError(f"{name}={value!r} must be the name of a mesh axis, or a tuple of different names")
            object.__setattr__(self, name, axes)
        if self.grad not in (None, "inside", "outside"):
            raise ValueError(f"grad={self.grad!r} is unknown; choose from 'inside', 'outside' or None")
        if both := sorted(set(self.vocabulary) & set(self.width)):
            raise ValueError(
                f"vocabulary and width both name {both}; an axis can split only one dimension of the weight"
            )

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts the vocabulary and H are split."""
        return _devices(self.vocabulary), _devices(self.width)


def shards_of(mesh_axes: MeshAxes | None, arrays: Any, others: Any) -> Shards | None:
    """What a call inside `shard_map` has to do; None where it concerns one device only, or `jit`'s partitioner.

    `arrays` has the fields of `PerInput`, `others` are the call's further arrays.
    """
    axes, said = varying((arrays, others)), mesh_axes or MeshAxes()
    vocabulary, rows, width = tuple(said.vocabulary), tuple(said.rows), tuple(said.width)
    if not (axes or vocabulary or rows or width):
        return None
    tracked = _is_tracked()
    if tracked:
        of_hidden = varying(arrays.hidden)
        if absent := sorted(set(rows) - of_hidden):
            raise ValueError(
                f"mesh_axes says that the tokens are split over {absent}, but hidden is the same along them"
            )
        if unsaid := sorted((of_hidden & {*vocabulary, *width}) - set(rows)):
            raise ValueError(
                f"hidden varies over {unsaid}, which split the weight: name them in mesh_axes.rows if the tokens are "
                "split over them; if each device holds the same tokens, make hidden invariant (by lax.pmean, say) "
                "before the call"
            )
        rows = (*rows, *sorted(of_hidden - set(rows)))
    elif said.grad is None:
        raise ValueError(
            "mesh_axes.grad=None inside a shard_map with check_vma=False, where gradients need another rule inside "
            "than outside: pass grad='inside' where jax.grad is called inside the shard_map, grad='outside' where "
            "shard_map is differentiated (or nothing is), or use check_vma=True"
        )
    if missing := sorted(set(width) - set(rows)):
        raise ValueError(
            f"mesh_axes.width names {missing}, over which the tokens are not split: add them to rows, or gather the "
            "weight before the call"
        )
    weight_bytes = arrays.weight.size * arrays.weight.dtype.itemsize * _devices(width)
    shards = lay_out(rows, vocabulary, width, arrays.hidden.size * arrays.hidden.dtype.itemsize, weight_bytes)
    if tracked:
        sums = PerInput.by_name(lambda name: tuple(sorted(axes - varying(getattr(arrays, name)))))
        return dataclasses.replace(shards, sums=sums, typed=True)
    if said.grad == "inside":
        return shards
    # shard_map's own differentiation divides the cotangent of an output by the number of devices that hold a copy, and
    # adds up the cotangents of inputs over those that do.
    copies = vocabulary + width
    by_row = without(copies, rows)
    return dataclasses.replace(shards, sums=NO_AXES, cotangents_by_row=by_row, cotangents_of_total=copies)


def check_split(problem: Any) -> str | None:
    """Holds a problem's `mesh_axes` against the axes over which JAX knows its weight to vary; what to warn of, or None.

    A gathered weight, or a copy for each device, has the type of a part. So without `mesh_axes` a weight that varies as
    the rows do may be whole; one that varies where no array of the rows does is a part.

    Raises:
        ValueError: the weight surely is a part and nobody says so, or it is said to be one and is not.
    """
    mesh_axes, hidden = problem.mesh_axes, problem.hidden
    varies, split = varying(problem.weight), () if mesh_axes is None else (*mesh_axes.vocabulary, *mesh_axes.width)
    absent = _of_several_devices(set(split) - varies) if _is_tracked() else ()
    unsaid = _of_several_devices(varies) if mesh_axes is None else ()
    if not absent and not unsaid:
        return None
    rows, named = _of_several_devices(set(unsaid) & varying(hidden)), unsaid or absent
    name, of_rows = (axes[0] if len(axes) == 1 else axes for axes in (named, rows))
    parts = f"vocabulary={name!r}" + (f", rows={of_rows!r}" if rows else "")
    taken = f"a part along {list(absent)}" if absent else "the whole vocabulary"
    message = (
        f"weight varies over the mesh axes {list(_of_several_devices(varies))} of the surrounding shard_map, and "
        f"mesh_axes={mesh_axes} takes a device's own for {taken}: if it is not that, results are wrong. Where it is a "
        f"part, by in_specs with {name!r}, pass mesh_axes=MeshAxes({parts}); where each device has a whole weight, "
        "gathered or its own, mesh_axes=MeshAxes(). To a function without mesh_axes pass "
        f"jax.lax.all_gather(weight, {name!r}, axis=vocab_axis, tiled=True, to='invarying'), or, with a weight for "
        f"each device, jax.lax.pcast(hidden, {name!r}, to='varying')"
    )
    if absent or _of_several_devices(varies - varying((hidden, problem.labels, problem.row_mask))):
        raise ValueError(message)
    return message


def refuse_shift(shift: int, rows: Any) -> None:
    """Raises ValueError inside a `shard_map` that may split the positions, so that a device lacks its last one's label.

    Without `check_vma` any axis may.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axes := _of_several_devices(varying(rows) if _is_tracked() else manual):
        raise ValueError(
            f"shift={shift} inside a shard_map whose axes {list(axes)} may split the positions, where the label of a "
            f"device's last one lies on another: shift before the shard_map, as by jnp.pad(labels[:, {shift}:], "
            f"((0, 0), (0, {shift})), constant_values=ignore_index), and leave shift out"
        )


def _is_tracked() -> bool:
    """Whether JAX tracks over which axes of a surrounding `shard_map` values vary (`check_vma=True`)."""
    return any(varying(jax.lax.axis_index(axis)) for axis in jax.sharding.get_abstract_mesh().manual_axes)


def _of_several_devices(axes: Iterable[str]) -> Axes:
    return tuple(sorted(axis for axis in axes if jax.lax.axis_size(axis) > 1))


def _devices(axes: Iterable[str]) -> int:
    """The number of devices along `axes` of the surrounding `shard_map`."""
    count = 1
    for axis in axes:
        try:
            count *= jax.lax.axis_size(axis)
        except NameError as error:
            raise ValueError(
                f"mesh_axes names {axis!r}, which is not an axis of a surrounding shard_map; under jit alone leave "
                "mesh_axes out: the arrays' own shardings are read"
            ) from error
    return count
