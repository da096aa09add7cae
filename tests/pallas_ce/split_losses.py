"""Losses split in every way, beside the materialised loss on one device; run by `test_meshes.py` with eight CPUs.

The value, all gradients, and sums that gradients are added to.
"""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import MeshAxes, linear_cross_entropy, linear_log_probs, sampled_softmax_cross_entropy
from tests.pallas_ce import layouts
from tests.pallas_ce.cases import DISTILLATIONS
from tests.pallas_ce.layouts import ALL, LAYOUTS, MODES, B, Layout, T, arrays, expected, flat, mesh, placed, same

KINDS = (AxisType.Auto, AxisType.Explicit)
IDS = {"ids": lambda x: getattr(x, "name", str(x))}
# On a mesh whose other axis is left automatic; the last one's vocabulary cannot be split over `tensor`.
IN_PART = (
    Layout("DP 2", P("data"), P()),
    Layout("FSDP 2 over V", P("data"), P("data"), vocabulary=32),
    Layout("FSDP 2 over H", P("data"), P(None, "data")),
    Layout("DP 2, 61 entries", P("data"), P(), vocabulary=61),
)


def mapped(
    local: Callable[..., Any], layout: Layout, axes: Any, inside: bool, checked: bool, **manual: Any
) -> Callable[..., Any]:
    """Value and gradients of `local`'s sum over those axes, taken inside a shard_map or outside."""

    def add(x: Any, over: Any = axes) -> Any:
        return jax.lax.psum(x, over) if over else x

    def part_with_gradients(a: Any) -> Any:
        if checked:
            return layouts.differentiated(lambda a: add(local(a)))(a)
        value, found = layouts.differentiated(local)(a)
        return add(value), {
            name: add(x, layout.only_rows) if name in ("weight", "bias", "logit_scale") else x
            for name, x in found.items()
        }

    how: Any = {"mesh": mesh(), "in_specs": (layout.specs,), "check_vma": checked, **manual}
    if inside:
        out_specs = P(), {name: layout.specs[name] for name in layouts.DIFFERENTIATED}
        return jax.shard_map(part_with_gradients, out_specs=out_specs, **how)
    return layouts.differentiated(jax.shard_map(lambda a: add(local(a)), out_specs=P(), **how))


def _drawn(name: str, layout: Layout, draw: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Options of the call."""
    options: dict[str, Any] = {}
    if name in DISTILLATIONS:
        options = {"beta": draw([0.1, 0.5, 0.9])} | draw([{}, {"temperature": 1.3}])
        options |= draw([{}, {"teacher_logit_softcap": 3.0, "logit_softcap": None}])
        options |= draw([{}, {"vocab_size": 3 * layout.vocabulary // 4 - 1}])  # the last of four parts is padding
        options |= {} if layout.axes["rows"] else {"reduction": draw(["mean", "none"])}
    if layout.only_rows and name != "support":  # else the devices share the mean's normaliser
        options |= {"normalizer": 30.0, "reduction": "mean"}
    return options


@pytest.mark.nightly(keep=9)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("layout", "inside"), [*((x, y) for x in LAYOUTS for y in (True, False)), *((x, False) for x in IN_PART)], **IDS
)
@pytest.mark.parametrize("name", [*MODES, "support", *DISTILLATIONS])
def test_a_call_inside_shard_map(name: str, layout: Layout, inside: bool, checked: bool) -> None:
    """By axis name, differentiated inside and outside; and with the weight split over an automatic axis as well.

    A case draws its options.
    """
    draw = random.Random(f"{name} {layout.name} {inside} {checked}").choice
    layout = dataclasses.replace(layout, low_rank=draw([True, False]))
    options, scratch = _drawn(name, layout, draw), draw([None, 20_000])
    axes = MeshAxes(**layout.axes, grad=None if checked else "inside" if inside else "outside")
    given = arrays(layout.vocabulary, layout.low_rank)
    if layout.name == "FSDP 2 over H" and not layout.low_rank:
        given["weight"] = jax.device_put(given["weight"], NamedSharding(mesh(), P("tensor", "data")))

    def local(a: Any) -> Any:
        return layouts.CALLS[name](a, layout.vocabulary, mesh_axes=axes, scratch_bytes=scratch, **options)

    over = flat(layout.hidden) if name == "support" else layout.only_rows  # whose rows are each device's own
    manual: Any = {"axis_names": {"data"}} if layout.name.startswith(("DP 2", "FSDP 2")) else {}
    function = mapped(local, layout, over, inside, checked, **manual)
    same(jax.jit(function)(given), expected(name, layout.vocabulary, layout.low_rank, **options), 2e-5)


@pytest.mark.parametrize(
    ("name", "layout", "inside", "checked"),
    [
        ("in_forward", LAYOUTS[4], True, False),
        ("recompute", IN_PART[2], False, False),
        ("in_forward", IN_PART[3], False, True),
    ],
    **IDS,
)
def test_losses_inside_shard_map(name: str, layout: Layout, inside: bool, checked: bool) -> None:
    """Under each rule for gradients, and with axes that are left automatic."""
    test_a_call_inside_shard_map(name, layout, inside, checked)


@pytest.mark.parametrize(
    ("mode", "layout", "lies"),
    [("recompute", IN_PART[0], P("tensor")), ("in_forward", IN_PART[2], P("tensor", "data"))],
    **IDS,
)
def test_explicit_axes_that_a_shard_map_leaves(mode: str, layout: Layout, lies: P) -> None:
    """Differentiated inside: outside, JAX would keep scalars for the backward and take their axes for explicit ones."""
    on, options = mesh(AxisType.Explicit), {"normalizer": 30.0} if layout.only_rows else {}
    call = functools.partial(layouts.CALLS[mode], vocabulary=layout.vocabulary, **options)
    local = functools.partial(call, mesh_axes=MeshAxes(**layout.axes))
    function = mapped(local, layout, layout.only_rows, True, True, mesh=on, axis_names={"data"})
    with jax.set_mesh(on):
        given = placed(layout, on)
        given["weight"] = jax.device_put(arrays(layout.vocabulary)["weight"], NamedSharding(on, lies))
        same(jax.jit(function)(given), expected(mode, layout.vocabulary, **options), 2e-5)


def test_vmap_inside_shard_map() -> None:
    """Gradients of what varies over fewer axes than the rows."""
    layout = LAYOUTS[2]

    def several(a: Any, **options: Any) -> Any:
        def one(factor: Any) -> Any:
            found = layouts.shifted({**a, "hidden": factor * a["hidden"]}, layout.vocabulary, shift=0, **options)
            return jnp.sum(a["token_weights"] * found)

        return jnp.sum(jax.vmap(one)(jnp.array([1.0, 0.3])))

    given = {"backward": "recompute", "reduction": "none"}
    local = functools.partial(several, mesh_axes=MeshAxes(**layout.axes), **given)
    want = jax.jit(layouts.differentiated(functools.partial(several, reduction="none", implementation="reference")))
    for inside in (True, False):
        function = mapped(local, layout, layout.only_rows, inside, True)
        same(jax.jit(function)(arrays(layout.vocabulary)), want(arrays(layout.vocabulary)), 2e-5)


def test_sampled_classes_inside_shard_map() -> None:
    """Each row's label is its largest feature."""

    def sampled(hidden: Any, weight: Any) -> Any:
        labels, drawn = jnp.argmax(hidden, axis=-1), {"key": jax.random.key(0), "num_samples": 9}
        return sampled_softmax_cross_entropy(hidden, weight, labels, normalizer=B * T, **drawn)

    def part(hidden: Any, weight: Any) -> Any:
        return jax.lax.psum(sampled(hidden, weight), ALL)

    over = jax.shard_map(part, mesh=mesh(), in_specs=(P(ALL), P()), out_specs=P())
    found, want = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(arrays(64)["hidden"], arrays(64)["weight"]) for f in (over, sampled)
    )
    same(found, want)


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("kind", KINDS, **IDS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((f"shift, {mode}", LAYOUTS[3]) for mode in MODES),  # whose positions are split
        *((name, layout) for name in ("jsd", "support", *(f"sums, {mode}" for mode in MODES)) for layout in LAYOUTS),
    ],
    **IDS,
)
def test_gradients_lie_as_their_arrays(name: str, layout: Layout, kind: AxisType) -> None:
    """Repeats are equal in every bit."""
    explicit, on = kind == AxisType.Explicit, mesh(kind)
    with jax.set_mesh(on) if explicit else contextlib.nullcontext():
        given = placed(layout, on)
        step = jax.jit(layouts.with_gradients(name, layout.vocabulary))
        got = step(given)
        same(got, expected(name, layout.vocabulary), 2e-5)
        jax.tree.map(np.testing.assert_array_equal, step(given), got)
        for place, x in got[1].items():
            y = given[place]
            assert jax.typeof(x) == jax.typeof(y) if explicit else x.sharding.is_equivalent_to(y.sharding, y.ndim)


def test_a_support_takes_memory_by_rows_and_ids_where_the_vocabulary_is_split() -> None:
    """A device's part of the logits would be 16 MiB."""
    n, v, k, on, budget = 512, 8 * 8192, 16, mesh(), 2**20

    def total(hidden: Any, weight: Any, labels: Any, support: Any) -> Any:
        found = linear_log_probs(hidden, weight, labels, support=support, return_entropy=True, scratch_bytes=budget)
        return jnp.sum(jnp.where(found.in_support, found.log_probs, 0.0)) + jnp.sum(found.entropy)

    shapes = ((n, 64), jnp.float32, P()), ((v, 64), jnp.float32, P(ALL)), ((n,), jnp.int32, P())
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, spec))
        for shape, dtype, spec in (*shapes, ((n, k), jnp.int32, P()))
    ]
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*given).compile()
    assert f"[{n},{v // 8}]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= budget + 4 * n * 64 + 4 * v // 8 * 64 + 48 * n * k


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("layout", "checked", "grad"),
    [
        *((x, False, grad) for x in LAYOUTS[1:] for grad in ("outside", None, "inside") if not x.only_rows),
        *((layout, True, None) for layout in LAYOUTS[1:]),
    ],
    **IDS,
)
def test_gradients_are_added_to_sums_inside_shard_map(layout: Layout, checked: bool, grad: Any, mode: str) -> None:
    """Whatever is said of `jax.grad`. Unchecked, devices that share the weight alone would each have their own sum."""
    axes = MeshAxes(**layout.axes, grad=grad)

    def local(a: Any) -> Any:
        value, found = layouts.added(a, layout.vocabulary, backward=mode, mesh_axes=axes)
        return jax.lax.psum(value, layout.only_rows) if layout.only_rows else value, found

    out = P(), {name: layout.specs[name] for name in ("hidden", "weight", "bias")}
    function = jax.shard_map(local, mesh=mesh(), in_specs=(layout.specs,), out_specs=out, check_vma=checked)
    same(jax.jit(function)(arrays(layout.vocabulary)), expected(f"sums, {mode}", layout.vocabulary))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS[4:], **IDS)
def test_float32_weights_are_computed_with_and_gathered_in_bfloat16(layout: Layout, mode: str) -> None:
    step = jax.jit(layouts.with_gradients(mode, layout.vocabulary, dtype=jnp.bfloat16))
    (value, got), (alone, want) = (
        step({**a, "hidden": a["hidden"].astype(jnp.bfloat16)})
        for a in (placed(layout, mesh()), arrays(layout.vocabulary))
    )
    np.testing.assert_allclose(value, alone, rtol=1e-4)
    for name, x in got.items():
        y = want[name]
        assert x.dtype == y.dtype
        assert np.linalg.norm(np.float32(x) - np.float32(y)) <= 2**-7 * np.linalg.norm(np.float32(y))


@pytest.mark.parametrize("mode", MODES)
def test_fsdp_adds_up_the_shares_that_data_parallelism_does(mode: str) -> None:
    """Each device's share of the weight's gradient is rounded once, to bfloat16, whatever the layout."""
    on, rows, a = mesh(shape=(2, 1)), P("data"), arrays(32)
    given = a["hidden"].astype(jnp.bfloat16), a["weight"].astype(jnp.bfloat16), a["labels"]
    alone = functools.partial(linear_cross_entropy, normalizer=B * T, backward=mode)
    found = []
    for split in (P(), P("data"), P(None, "data")):
        axes = MeshAxes(**Layout("", rows, split).axes, grad="outside")

        def part(*given: Any, axes: Any = axes) -> Any:
            loss = alone(*given, mesh_axes=axes)
            return loss if axes.rows else jax.lax.psum(loss, "data")

        specs = rows, split, rows
        over = jax.shard_map(part, mesh=on, in_specs=specs, out_specs=P(), check_vma=False)
        laid = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(given, specs, strict=True)]
        found += [np.float32(jax.jit(jax.grad(function, 1))(*laid)) for function in (alone, over)]
    for x in found[1:]:
        np.testing.assert_array_equal(x, found[0])


def test_labels_a_position_later_inside_shard_map() -> None:
    """Where no axis may split the positions; refused elsewhere."""

    def of(rows: P, checked: bool) -> Any:
        layout = Layout("", rows, P("tensor"))
        part = functools.partial(layouts.shifted, vocabulary=64, mesh_axes=MeshAxes("tensor", grad="outside"))
        return jax.jit(mapped(part, layout, (), inside=False, checked=checked))(arrays(64))

    same(of(P(), True), expected("shift, recompute", 64))
    for rows, checked, axes in (
        (P("data"), True, "data"),
        (P(None, "data"), True, "data"),
        (P(), False, "data.*tensor"),
    ):
        with pytest.raises(ValueError, match=rf"shift=1 inside a shard_map whose axes \['{axes}'\] may split"):
            of(rows, checked)
