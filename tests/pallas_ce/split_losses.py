"""Losses split in every way, beside the materialised loss on one device; run by `test_meshes.py` with eight CPUs.

The value, all gradients, and sums that gradients are added to.
"""

import contextlib
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

from pallas_ce import (
    MeshAxes,
    linear_cross_entropy,
    linear_cross_entropy_and_gradients,
    linear_distillation,
    linear_log_probs,
)
from tests.pallas_ce.cases import DISTILLATIONS
from tests.pallas_ce.layouts import (
    ALL,
    DIFFERENTIATED,
    LAYOUTS,
    MODES,
    B,
    Layout,
    T,
    arrays,
    gradients,
    loss,
    mesh,
    placed,
    same,
    sampled,
)

OF_HEAD = (1, 2, 3)  # of the arguments of the loss: weight, bias and scale
KINDS = (AxisType.Auto, AxisType.Explicit)
IDS = {"ids": lambda x: getattr(x, "name", str(x))}


def added(hidden: Any, weight: Any, bias: Any, scale: Any, labels: Any, _: Any, **options: Any) -> Any:
    """Gradients added to sums that lie as weight and bias."""
    given = {"bias": bias, "logit_scale": scale, **of_sums(labels, bias.shape[0]), **options}
    return linear_cross_entropy_and_gradients(
        hidden, weight, labels, 2 * weight, bias_sum=2 * bias, loss_scale=0.5, **given
    )


def of_sums(labels: Any, vocabulary: int) -> dict[str, Any]:
    return {"label_smoothing": 0.1, "z_loss": 1e-2, "normalizer": jnp.sum(labels >= 0), "vocab_size": vocabulary - 3}


@functools.cache
def expected_sums(vocabulary: int) -> Any:
    hidden, weight, bias, scale, labels, _ = arrays(vocabulary, True)
    given = {"implementation": "reference", **of_sums(labels, vocabulary)}

    def plain(hidden: Any, weight: Any, bias: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, bias=bias, logit_scale=scale, **given)

    found, (d_hidden, d_weight, d_bias) = jax.value_and_grad(plain, (0, 1, 2))(hidden, weight, bias)
    return found, 0.5 * d_hidden, 2 * weight + 0.5 * d_weight, 2 * bias + 0.5 * d_bias


def differentiated(
    local: Callable[..., Any], axes: Any, specs: Any, argnums: Any, inside: bool, checked: bool, **manual: Any
) -> Any:
    """Value and gradients of `local`'s sum over the axes that split the rows, taken inside a shard_map or outside."""

    def add(x: Any) -> Any:
        return jax.lax.psum(x, axes) if axes else x

    def part(*args: Any) -> Any:
        return add(local(*args))

    def part_with_gradients(*args: Any) -> Any:
        if checked:
            return jax.value_and_grad(part, argnums)(*args)
        value, found = jax.value_and_grad(local, argnums)(*args)
        each = (jax.tree.map(add, x) if i in OF_HEAD else x for i, x in zip(argnums, found, strict=True))
        return add(value), tuple(each)

    if inside:
        out_specs = P(), tuple(specs[i] for i in argnums)
        return jax.shard_map(part_with_gradients, mesh=mesh(), in_specs=specs, out_specs=out_specs, check_vma=checked)
    mapped = jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=checked, **manual)
    return jax.value_and_grad(mapped, argnums)


@functools.cache
def normalised(vocabulary: int, low_rank: bool) -> tuple[Any, Any, Any]:
    """Arrays, their normaliser, and value and gradients."""
    given = arrays(vocabulary, True, low_rank)
    count = jnp.sum(jnp.where(given[4] >= 0, given[5] * (0.5 + given[4] % 3), 0))
    reference = functools.partial(loss, padded=True, implementation="reference", normalizer=count)
    return given, count, gradients(reference)(*given)


# On a mesh whose other axis is left automatic; the last one's vocabulary cannot be split over `tensor`.
IN_PART = (
    Layout("DP 2", P("data"), P(), low_rank=True),
    Layout("FSDP 2 over V", P("data"), P("data"), vocabulary=32),
    Layout("FSDP 2 over H", P("data"), P(None, "data")),
    Layout("DP 2, 61 entries", P("data"), P(), vocabulary=61),
)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("layout", "inside"),
    [(layout, x) for each in zip(IN_PART, LAYOUTS[:4], LAYOUTS[4:], strict=True) for layout in each
     for x in (False, True) if not (x and layout in IN_PART)],
    **IDS,
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_inside_shard_map(layout: Layout, mode: str, inside: bool, checked: bool) -> None:
    """By axis name, differentiated inside and outside; and with the weight split over an automatic axis as well."""
    in_part = layout in IN_PART
    layout = layout if in_part else layout.with_term((mode == MODES[0]) == (layout in LAYOUTS[::2]))
    grad: Any = None if checked else "inside" if inside else "outside"
    given, count, want = normalised(layout.vocabulary, layout.low_rank)
    local = functools.partial(
        loss, padded=True, vocabulary=layout.vocabulary, backward=mode, normalizer=count,
        mesh_axes=MeshAxes(**layout.axes, grad=grad),
    )  # fmt: skip
    if layout.name == "FSDP 2 over H":
        given = (given[0], jax.device_put(given[1], NamedSharding(mesh(), P("tensor", "data"))), *given[2:])
    manual: Any = {"axis_names": {"data"}} if in_part else {}
    function = differentiated(local, layout.only_rows, layout.specs, DIFFERENTIATED, inside, checked, **manual)
    same(jax.jit(function)(*given), want)


def test_sampled_classes_inside_shard_map() -> None:
    given, whole = arrays(64, False)[:2], functools.partial(sampled, normalizer=B * T)
    mapped = differentiated(whole, ALL, (P(ALL), P()), (0, 1), inside=False, checked=True)
    same(jax.jit(mapped)(*given), jax.value_and_grad(whole, (0, 1))(*given))


def distilled(
    hidden: Any, weight: Any, bias: Any, scale: Any, labels: Any, token_weights: Any, *teacher: Any,
    vocabulary: int, **options: Any,
) -> Any:  # fmt: skip
    """The loss from a wider teacher, or the sum over its rows, at the last array's temperatures or a given one."""
    given = {"temperature": teacher[3], "logit_softcap": 5.0, "vocab_size": vocabulary - 3, **options}
    if given.get("reduction") == "none":
        labels, given["row_mask"] = None, labels >= 0
    found = linear_distillation(
        hidden, weight, *teacher[:2], labels, bias=bias, logit_scale=scale, token_weights=token_weights,
        teacher_bias=teacher[2], **given,
    )  # fmt: skip
    return jnp.sum(found)


@functools.cache
def two_heads(layout: Layout) -> tuple[Any, Any]:
    """Arrays of the call, the padding's NaN, and how they lie."""
    given = arrays(layout.vocabulary, True, layout.low_rank)
    keys = jax.random.split(jax.random.key(1), 2)
    teacher = jax.random.normal(keys[0], (B, T, 24)), jax.random.normal(keys[1], (layout.vocabulary, 24))
    temperature = jnp.linspace(0.5, 3.0, B * T).reshape(B, T)
    given = (*given, teacher[0], teacher[1].at[-3:].set(jnp.nan), given[2][::-1], temperature)
    return given, (*layout.specs, layout.hidden, layout.weight, layout.bias, layout.hidden)


def divergence_of(layout: Layout, **options: Any) -> Any:
    """Value and gradients of stored logits."""
    function = functools.partial(distilled, implementation="reference", vocabulary=layout.vocabulary, **options)
    return jax.jit(gradients(function))(*two_heads(layout)[0])


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("divergence", DISTILLATIONS)
@pytest.mark.parametrize("layout", LAYOUTS, **IDS)
def test_a_divergence_inside_shard_map(layout: Layout, divergence: Any, inside: bool, checked: bool) -> None:
    """Both heads split alike; a case draws its options. By the mean's own normaliser where the devices share it."""
    draw = random.Random(f"{layout.name} {divergence} {inside} {checked}").choice
    layout = layout.with_term(draw([True, False]))
    options: dict[str, Any] = {"divergence": divergence, "beta": draw([0.1, 0.5, 0.9])}
    options |= draw([{}, {"temperature": 1.3}]) | draw([{}, {"teacher_logit_softcap": 3.0, "logit_softcap": None}])
    options |= draw([{}, {"vocab_size": 3 * layout.vocabulary // 4 - 1}])  # the last of four parts is padding
    if layout.only_rows:
        options["normalizer"] = 30.0
    elif not layout.axes["rows"]:
        options["reduction"] = draw(["mean", "none"])
    (given, specs), want = two_heads(layout), divergence_of(layout, **options)
    axes = MeshAxes(**layout.axes, grad=None if checked else "inside" if inside else "outside")
    local = functools.partial(
        distilled, vocabulary=layout.vocabulary, mesh_axes=axes, scratch_bytes=draw([None, 20_000]), **options
    )
    same(jax.jit(differentiated(local, layout.only_rows, specs, DIFFERENTIATED, inside, checked))(*given), want, 2e-5)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("kind", KINDS, **IDS)
@pytest.mark.parametrize("layout", LAYOUTS, **IDS)
@pytest.mark.parametrize("name", [*MODES, "jsd", "support"])
def test_gradients_lie_as_their_arrays(name: str, layout: Layout, kind: AxisType) -> None:
    """A divergence's, a support's, and sums in either mode; repeats are equal in every bit."""
    explicit, on = kind == AxisType.Explicit, mesh(kind)
    given, specs = two_heads(layout)
    if name == "jsd":
        function = gradients(functools.partial(distilled, vocabulary=layout.vocabulary, divergence=name))
        want = divergence_of(layout, divergence=name)
    elif name == "support":
        given, specs, want = given[:6], specs[:6], supported(layout.vocabulary, False)
        function = weighted(functools.partial(over_support, vocabulary=layout.vocabulary))
    else:
        given, specs, want = given[:6], specs[:6], expected_sums(layout.vocabulary)
        function = functools.partial(added, backward=name)
    with jax.set_mesh(on) if explicit else contextlib.nullcontext():
        given = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(given, specs, strict=True)]
        step = jax.jit(function)
        got = step(*given)
        same(got, want, 2e-5)
        jax.tree.map(np.testing.assert_array_equal, step(*given), got)
        for x, place in zip(jax.tree.leaves(got[1:]), DIFFERENTIATED, strict=False):
            y = given[place]
            assert jax.typeof(x) == jax.typeof(y) if explicit else x.sharding.is_equivalent_to(y.sharding, y.ndim)


def over_support(
    hidden: Any, weight: Any, bias: Any, scale: Any, labels: Any, by_token: Any, *, vocabulary: int, **options: Any
) -> Any:
    """Sums by row, over ids of all parts, one of them twice, and padding; some without the label."""
    ids = labels[..., None] + jnp.array([55, 0, 17, 7, 17, 30, 41]) + (by_token < 0.3)[..., None]
    found = linear_log_probs(
        hidden, weight, labels, support=jnp.where(ids % 5 == 0, -1, ids % vocabulary), bias=bias, logit_scale=scale,
        temperature=0.5 + by_token, vocab_size=vocabulary - 3, return_entropy=True, return_hit=True, **options,
    )  # fmt: skip
    return jnp.where(found.in_support, found.log_probs, 0.1) + jnp.sin(found.entropy) + found.hit


OF_SUPPORT = DIFFERENTIATED[:4]


def weighted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Values by row, and gradients of their weighted sum."""

    def run(*given: Any) -> Any:
        found = function(*given)
        return jnp.sum(found * jnp.cos(jnp.arange(B * T)).reshape(B, T)), found

    return jax.value_and_grad(run, OF_SUPPORT, has_aux=True)


@functools.cache
def supported(vocabulary: int, low_rank: bool) -> Any:
    function = functools.partial(over_support, vocabulary=vocabulary, implementation="reference")
    return weighted(function)(*arrays(vocabulary, True, low_rank))


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("scratch", [None, 20_000])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, **IDS)
def test_a_support_inside_shard_map(layout: Layout, checked: bool, scratch: int | None) -> None:
    layout = layout.with_term(scratch is None)
    axes = MeshAxes(**layout.axes, grad=None if checked else "outside")
    local = functools.partial(over_support, vocabulary=layout.vocabulary, mesh_axes=axes, scratch_bytes=scratch)
    how = {"in_specs": layout.specs, "out_specs": layout.hidden, "check_vma": checked}
    given, want = arrays(layout.vocabulary, True, layout.low_rank), supported(layout.vocabulary, layout.low_rank)
    same(jax.jit(weighted(jax.shard_map(local, mesh=mesh(), **how)))(*given), want, 2e-5)


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


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("layout", "checked"), [(layout, x) for layout in LAYOUTS[1:4] for x in (True, False) if x or not layout.only_rows]
)
def test_gradients_are_added_to_sums_inside_shard_map(layout: Layout, checked: bool) -> None:
    """Unchecked, each device would add up its own rows' gradients to a sum of its own."""
    given = arrays(layout.vocabulary, True)
    axes, count = MeshAxes(**layout.axes, grad=None if checked else "inside"), jnp.sum(given[4] >= 0)

    def local(*given: Any) -> Any:
        options = {"mesh_axes": axes, "normalizer": count, "vocab_size": layout.vocabulary - 3}
        loss, d_hidden, *sums = added(*given, backward="in_forward", **options)
        return jax.lax.psum(loss, layout.only_rows) if layout.only_rows else loss, d_hidden, *sums

    out = P(), layout.hidden, layout.weight, layout.bias
    mapped = jax.shard_map(local, mesh=mesh(), in_specs=layout.specs, out_specs=out, check_vma=checked)
    same(jax.jit(mapped)(*given), expected_sums(layout.vocabulary))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS[4:], **IDS)
def test_float32_weights_are_computed_with_and_gathered_in_bfloat16(layout: Layout, mode: str) -> None:
    step = gradients(functools.partial(loss, padded=True, backward=mode, dtype=jnp.bfloat16))
    results = []
    for hidden, *others in (placed(layout, mesh(), True), arrays(layout.vocabulary, True)):
        results.append(jax.jit(step)(hidden.astype(jnp.bfloat16), *others))
    (value, got), (alone, want) = results
    np.testing.assert_allclose(value, alone, rtol=1e-4)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert np.linalg.norm(np.float32(x) - np.float32(y)) <= 2**-7 * np.linalg.norm(np.float32(y))


@pytest.mark.parametrize("mode", MODES)
def test_fsdp_adds_up_the_shares_that_data_parallelism_does(mode: str) -> None:
    """Each device's share of the weight's gradient is rounded once, to bfloat16, whatever the layout."""
    on, rows, whole = mesh(shape=(2, 1)), P("data"), P()
    hidden, weight, _, _, labels, _ = arrays(32, False)
    given = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), labels
    found = []
    for split in (whole, P("data"), P(None, "data")):
        axes = MeshAxes(**Layout("", rows, split).axes, grad="outside")

        def part(*given: Any, axes: Any = axes) -> Any:
            loss = linear_cross_entropy(*given, normalizer=B * T, backward=mode, mesh_axes=axes)
            return loss if axes.rows else jax.lax.psum(loss, "data")

        specs = rows, split, rows
        mapped = jax.shard_map(part, mesh=on, in_specs=specs, out_specs=whole, check_vma=False)
        alone = functools.partial(linear_cross_entropy, normalizer=B * T, backward=mode)
        laid = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(given, specs, strict=True)]
        found += [np.float32(jax.jit(jax.grad(function, 1))(*laid)) for function in (alone, mapped)]
    for x in found[1:]:
        np.testing.assert_array_equal(x, found[0])


def by_shift(hidden: Any, weight: Any, labels: Any, token_weights: Any, **options: Any) -> Any:
    return linear_cross_entropy(hidden, weight, labels, token_weights=token_weights, shift=1, **options)


of_shift = functools.partial(jax.value_and_grad, argnums=(0, 1, 3))


@functools.cache
def shifted() -> tuple[Any, Any]:
    """Arrays of a call, and its value and gradients by slices."""
    hidden, weight, _, _, labels, token_weights = arrays(LAYOUTS[3].vocabulary, False)

    def sliced(h: Any, w: Any, t: Any, weights: Any) -> Any:
        return linear_cross_entropy(h[:, :-1], w, t[:, 1:], token_weights=weights[:, 1:], implementation="reference")

    given = hidden, weight, labels, token_weights
    return given, of_shift(sliced)(*given)


@pytest.mark.parametrize(("kind", "mode"), [(KINDS[0], MODES[0]), (KINDS[1], MODES[1])], **IDS)
def test_labels_a_position_later_where_positions_are_split(kind: AxisType, mode: str) -> None:
    on = mesh(kind)
    with jax.set_mesh(on):
        given = [placed(LAYOUTS[3], on, False)[i] for i in (0, 1, 4, 5)]
        same(jax.jit(of_shift(functools.partial(by_shift, backward=mode)))(*given), shifted()[1])


def test_labels_a_position_later_inside_shard_map() -> None:
    """Where no axis may split the positions; refused elsewhere."""

    def mapped(rows: P, check_vma: bool) -> Any:
        part = functools.partial(by_shift, mesh_axes=MeshAxes("tensor", grad="outside"))
        specs = rows, P("tensor"), rows, rows
        function = jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma)
        return jax.jit(of_shift(function))(*shifted()[0])

    same(mapped(P(), True), shifted()[1])
    for rows, check_vma, axes in (
        (P("data"), True, "data"),
        (P(None, "data"), True, "data"),
        (P(), False, "data.*tensor"),
    ):
        with pytest.raises(ValueError, match=rf"shift=1 inside a shard_map whose axes \['{axes}'\] may split"):
            mapped(rows, check_vma)
