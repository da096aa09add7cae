"""Functions and options on meshes, and refusals. Run by `test_meshes.py`, like `mesh_program`."""

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    MeshAxes,
    explain,
    linear_cross_entropy,
    linear_cross_entropy_and_gradients,
    linear_distillation,
    linear_row_statistics,
    linear_sample,
    linear_top_k,
)
from pallas_ce.streaming.loops import varying
from tests.pallas_ce.layouts import (
    ALL,
    LAYOUTS,
    MODES,
    B,
    H,
    T,
    arrays,
    expected,
    gradients,
    loss,
    mesh,
    placed,
    same,
    sampled,
)  # fmt: skip


def others() -> Iterator[str]:
    """Statistics, vmap, meshes with axes of one device, pmap, and refusals."""
    on = mesh()
    layout = LAYOUTS[3]
    hidden, weight, bias, scale, labels, _ = placed(layout, on, False)
    names = ("lse", "target_logit", "mean_logit", "entropy", "sum_sq_probs", "max_logit", "argmax", "varentropy")

    def statistics(hidden: Any, weight: Any, **options: Any) -> Any:
        found = linear_row_statistics(
            hidden, weight, labels, bias=bias, logit_scale=scale, statistics=names, row_mask=labels >= 0, **options
        )
        return sum(jnp.sum(jnp.sin(x)) for x in found if x is not None), found

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    got = jax.jit(grad(statistics))(hidden, weight)
    same(got, grad(functools.partial(statistics, implementation="reference"))(hidden, weight))
    yield "all statistics"

    words = {
        "DP 8": "rows over data, tensor",
        "TP 4, DP 2": "rows over data; vocabulary over tensor",
        "SP 4, DP 2": "rows over data; rows and vocabulary over tensor: hidden gathered",
        "FSDP 8 over V": "rows and weight over data, tensor: weight gathered",
        "TP 4, FSDP 2 over H": "vocabulary over tensor, statistics merged; rows and weight over data: weight gathered",
    }
    for layout in LAYOUTS:
        given = placed(layout, on, True)
        told = explain(*given[:2], vocab_size=layout.vocabulary - 3)
        assert words.get(layout.name, "") in told.parallelism
        local = sum(x.addressable_shards[0].data.nbytes for x in given[:2])
        assert told.gradient_bytes == local
    yield "explain"

    def each(hidden: Any, labels: Any, implementation: Any = None) -> Any:
        return linear_cross_entropy(hidden, weight, labels, implementation=implementation)

    want = jax.vmap(jax.grad(functools.partial(each, implementation="reference")))(hidden, labels)
    same(jax.jit(jax.vmap(jax.grad(each)))(hidden, labels), want)
    yield "vmap"

    for layout, mode in itertools.product(LAYOUTS[4:], MODES):
        step = gradients(functools.partial(loss, padded=True, backward=mode, dtype=jnp.bfloat16))

        def narrowed(hidden: Any, *others: Any) -> Any:
            return hidden.astype(jnp.bfloat16), *others

        value, got = jax.jit(step)(*narrowed(*placed(layout, on, True)))
        alone, needs_grad = step(*narrowed(*arrays(layout.vocabulary, True)))
        np.testing.assert_allclose(value, alone, rtol=1e-4)
        for x, y in zip(got, needs_grad, strict=True):
            assert x.dtype == y.dtype
            assert np.linalg.norm(np.float32(x) - np.float32(y)) <= 2**-7 * np.linalg.norm(np.float32(y))
    yield "float32 weights that are computed with, and gathered, in bfloat16"

    for shape in ((1, 8), (8, 1), (1, 1)):
        for layout, mode in itertools.product((LAYOUTS[2], LAYOUTS[7]), MODES):
            given = placed(layout, mesh(shape=shape), True)
            step = jax.jit(gradients(functools.partial(loss, padded=True, backward=mode)))
            same(step(*given), expected(layout.vocabulary, True))
        yield f"axes of sizes {shape}"

    alone = arrays(64, False)[:2]
    want = jax.value_and_grad(sampled, (0, 1))(*alone)
    for layout in LAYOUTS[:3]:
        same(jax.jit(jax.value_and_grad(sampled, (0, 1)))(*placed(layout, on, False)[:2]), want)
    each_alone = jax.grad(lambda w: jax.vmap(lambda h: sampled(h, w))(alone[0]).sum())
    in_turn = sum(jax.grad(lambda w, h=h: sampled(h, w))(alone[1]) for h in alone[0])
    same(each_alone(alone[1]), in_turn)
    yield "sampled softmax with a number of classes that divides over no axis"

    weight_alone = jax.random.normal(jax.random.key(0), (24, H))
    rows, ids = jax.random.normal(jax.random.key(1), (8, 4, H)), jnp.arange(32).reshape(8, 4) % 24

    def mean(hidden: Any, weight: Any, labels: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, normalizer=32)

    whole = jax.grad(mean, argnums=1)(rows, weight_alone, ids)
    inside = jax.pmap(jax.grad(mean, argnums=1), in_axes=(0, None, 0))(rows, weight_alone, ids)
    same(inside.sum(axis=0), whole)
    same(jax.grad(lambda w: jax.pmap(mean, in_axes=(0, None, 0))(rows, w, ids).sum())(weight_alone), whole)
    yield "pmap, inside and outside"

    def mapped(check_vma: bool, hidden: P, axes: MeshAxes, weight: Any = "tensor", **options: Any) -> Any:
        def part(h: Any, w: Any, t: Any) -> Any:
            return jax.lax.pmean(linear_cross_entropy(h, w, t, mesh_axes=axes, **options), ALL)

        specs = (hidden, P(weight) if isinstance(weight, str) else weight, hidden)
        function = jax.shard_map(part, mesh=on, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return function(rows, weight_alone, ids)

    with pytest.raises(ValueError, match="grad='inside'"):
        mapped(False, P(), MeshAxes("tensor"))
    with pytest.raises(ValueError, match=r"hidden varies over \['tensor'\]"):
        mapped(True, P("tensor"), MeshAxes("tensor"))
    for said in (MeshAxes("tensor"), MeshAxes(ALL), MeshAxes("tensor", "data")):  # of a weight that is whole
        with pytest.raises(
            ValueError, match=r"varies over the mesh axes \[\] .*a part along \[.*'tensor'\].*MeshAxes\(\)"
        ):
            mapped(True, P(), said, P())
    with pytest.raises(ValueError, match=r"varies over the mesh axes \['tensor'\] .* a part along \['data'\]"):
        mapped(True, P(), MeshAxes(ALL))
    with pytest.raises(ValueError, match=r"vocab_size=24 with a weight of 24 entries, .* one of 4 parts"):
        mapped(False, P(), MeshAxes("tensor", grad="inside"), P(), vocab_size=24)
    with pytest.raises(ValueError, match="mesh_axes names 'model'"):
        mapped(True, P(), MeshAxes("model"))
    with pytest.raises(ValueError, match=r"width names \['data'\]"):
        mapped(False, P(), MeshAxes("tensor", width="data", grad="inside"), P("tensor", "data"))
    with pytest.raises(
        ValueError, match=r"vocab_size=24 must be .* mesh_axes must tell"
    ):  # known without check_vma, too
        jax.shard_map(
            lambda h, w: linear_top_k(h, w, 3, vocab_size=24).ids,
            mesh=on, in_specs=(P(), P("tensor")), out_specs=P(), check_vma=False,
        )(rows, weight_alone)  # fmt: skip
    yield "refusals"


def running() -> Iterator[str]:
    """Gradients added to sums that lie as weight and bias, which stay where they are."""

    def options_of(layout: Any, labels: Any) -> dict[str, Any]:
        count = jnp.sum(labels >= 0)
        return {"label_smoothing": 0.1, "z_loss": 1e-2, "normalizer": count, "vocab_size": layout.vocabulary - 3}

    def added(layout: Any, mode: Any, given: Any, **options: Any) -> Any:
        hidden, weight, bias, scale, labels, _ = given
        return linear_cross_entropy_and_gradients(
            hidden, weight, labels, 2 * weight, bias=bias, bias_sum=2 * bias, loss_scale=0.5, logit_scale=scale,
            backward=mode, **{**options_of(layout, labels), **options},
        )  # fmt: skip

    def wanted(layout: Any) -> Any:
        hidden, weight, bias, scale, labels, _ = arrays(layout.vocabulary, True)

        def plain(hidden: Any, weight: Any, bias: Any) -> Any:
            return linear_cross_entropy(
                hidden, weight, labels, bias=bias, logit_scale=scale, implementation="reference",
                **options_of(layout, labels),
            )  # fmt: skip

        loss, (d_hidden, d_weight, d_bias) = jax.value_and_grad(plain, (0, 1, 2))(hidden, weight, bias)
        return loss, 0.5 * d_hidden, 2 * weight + 0.5 * d_weight, 2 * bias + 0.5 * d_bias

    explicit = mesh(AxisType.Explicit)
    for layout, mode in itertools.product(LAYOUTS, MODES):
        given = placed(layout, mesh(), True)
        got = jax.jit(functools.partial(added, layout, mode))(given)
        same(got, wanted(layout))
        assert got.weight_sum.sharding.is_equivalent_to(given[1].sharding, 2)
        assert got.hidden.sharding.is_equivalent_to(given[0].sharding, 3)
        if layout in LAYOUTS[2:6]:
            with jax.set_mesh(explicit):
                given = placed(layout, explicit, True)
                typed = jax.jit(functools.partial(added, layout, mode))(given)
                same(typed, wanted(layout))
                assert jax.typeof(typed.weight_sum) == jax.typeof(given[1])
        yield f"{layout.name}, {mode}"
    for layout, checked in itertools.product(LAYOUTS[1:4], (True, False)):
        hidden, weight, bias, scale, labels, weights = arrays(layout.vocabulary, True)
        axes = MeshAxes(**layout.axes, grad=None if checked else "inside")
        count = jnp.sum(labels >= 0)

        def local(*given: Any, layout: Any = layout, axes: MeshAxes = axes, count: Any = count) -> Any:
            loss, d_hidden, *sums = added(layout, "in_forward", given, mesh_axes=axes, normalizer=count)
            if layout.only_rows:
                loss = jax.lax.psum(loss, layout.only_rows)
            return loss, d_hidden, *sums

        out = P(), layout.hidden, layout.weight, layout.bias
        if layout.only_rows and not checked:
            continue  # each device would add up its own rows' gradients to a sum of its own
        mapped = jax.shard_map(local, mesh=mesh(), in_specs=layout.specs, out_specs=out, check_vma=checked)
        same(jax.jit(mapped)(hidden, weight, bias, scale, labels, weights), wanted(layout))
        yield f"{layout.name}, checked={checked}"


def unsaid() -> Iterator[str]:
    """A weight that varies inside a shard_map, and no mesh_axes."""
    hidden, weight = arrays(64, False)[:2]
    labels = jnp.arange(B * T).reshape(B, T)
    whole = functools.partial(linear_cross_entropy, implementation="reference")

    def mapped(part: Callable[..., Any], rows: P, split: P, on: Any = None, **options: Any) -> Any:
        def mean_over_devices(*given: Any) -> Any:
            total = jnp.sum(part(*given, **options))
            return jax.lax.pmean(jax.lax.pcast(total, tuple(set(ALL) - varying(total)), to="varying"), ALL)

        specs = (rows, split, rows)
        mapped = jax.shard_map(mean_over_devices, mesh=on or mesh(), in_specs=specs, out_specs=P())
        return jax.jit(mapped)(hidden, weight, labels)

    for function in (
        linear_cross_entropy,
        lambda h, w, t: linear_row_statistics(h, w, t).lse,
        lambda h, w, t: linear_top_k(h, w, 2).logits,
        lambda h, w, t: linear_distillation(h, w, h, w),
    ):
        with pytest.raises(ValueError, match=r"weight varies over the mesh axes \['tensor'\].*vocabulary='tensor'"):
            mapped(function, P("data"), P("tensor"))
    same(mapped(linear_cross_entropy, P("data"), P("tensor"), mesh_axes=MeshAxes("tensor")),
         whole(hidden, weight, labels))  # fmt: skip
    yield "an error where the rows are the same along its axes"

    parts = [whole(hidden, part, labels) for part in jnp.split(weight, 4)]
    same(mapped(linear_cross_entropy, P(), P("tensor"), mesh_axes=MeshAxes()), jnp.mean(jnp.array(parts)))

    def sampled_apart(h: Any, w: Any, t: Any) -> Any:
        return linear_sample(jax.random.key(0), jax.lax.pcast(h, ALL, to="varying"), w, top_p=0.8, min_p=0.01).ids

    mapped(sampled_apart, P(), P("tensor"))
    alone = jax.jit(functools.partial(linear_cross_entropy, mesh_axes=MeshAxes()))  # as without it
    same(alone(hidden, weight, labels), whole(hidden, weight, labels))
    unchecked = jax.shard_map(alone, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    same(jax.jit(jax.grad(unchecked, 1))(hidden, weight, labels), jax.grad(whole, 1)(hidden, weight, labels))
    yield "a head for each device"

    def gathered(h: Any, w: Any, t: Any, **options: Any) -> Any:
        return linear_cross_entropy(h, jax.lax.all_gather(w, "data", axis=0, tiled=True), t, **options)

    for given in ({}, {"mesh_axes": MeshAxes()}):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = [mapped(gathered, P("data"), P("data"), **given) for _ in range(2)]
        same(got[0], whole(hidden, weight, labels))
        assert [str(x.message).count("vocabulary='data', rows='data'") for x in told] == ([] if given else [1])
        assert all(x.filename == __file__ for x in told)
    yield "one warning where the rows vary, too, and none where it is said to be whole"

    def invariant(h: Any, w: Any, t: Any) -> Any:
        return linear_top_k(h, jax.lax.all_gather(w, "tensor", axis=0, tiled=True, to="invarying"), 2).ids

    same(mapped(invariant, P(), P("tensor")), jnp.sum(linear_top_k(hidden, weight, 2).ids))
    same(mapped(linear_cross_entropy, P(), P("tensor"), mesh(shape=(8, 1))), whole(hidden, weight, labels))
    yield "nothing where the weight is whole: gathered, or on an axis of one device"


def shifted() -> Iterator[str]:
    """Labels that stand a position later, where the positions may be split."""
    layout = LAYOUTS[3]
    hidden, weight, _, _, labels, token_weights = arrays(layout.vocabulary, False)

    def by_shift(hidden: Any, weight: Any, labels: Any, token_weights: Any, **options: Any) -> Any:
        return linear_cross_entropy(hidden, weight, labels, token_weights=token_weights, shift=1, **options)

    def sliced(h: Any, w: Any, t: Any, weights: Any) -> Any:
        return linear_cross_entropy(h[:, :-1], w, t[:, 1:], token_weights=weights[:, 1:], implementation="reference")

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 3))
    want = grad(sliced)(hidden, weight, labels, token_weights)
    for kind, mode in itertools.product((AxisType.Auto, AxisType.Explicit), MODES):
        on = mesh(kind)
        with jax.set_mesh(on):
            given = [placed(layout, on, False)[i] for i in (0, 1, 4, 5)]
            same(jax.jit(grad(functools.partial(by_shift, backward=mode)))(*given), want)
    yield "under jit, with positions split over an axis"

    def mapped(rows: P, check_vma: bool, **options: Any) -> Any:
        def part(*given: Any) -> Any:
            axes = MeshAxes("tensor", grad="outside")
            return by_shift(*given, mesh_axes=axes, **options)

        specs = rows, P("tensor"), rows, rows
        function = jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma)
        return jax.jit(grad(function))(hidden, weight, labels, token_weights)

    same(mapped(P(), True), want)
    for rows, check_vma, axes in (
        (P("data"), True, "data"),
        (P(None, "data"), True, "data"),
        (P(), False, "data.*tensor"),
    ):
        with pytest.raises(ValueError, match=rf"shift=1 inside a shard_map whose axes \['{axes}'\] may split"):
            mapped(rows, check_vma)
    yield "inside a shard_map where no axis may split them, and refused elsewhere"


if __name__ == "__main__":
    sections = {"others": others, "running": running, "unsaid": unsaid, "shifted": shifted}
    for passed in sections[sys.argv[1]]():
        print(f"passed: {passed}", flush=True)
