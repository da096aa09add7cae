"""Run by `test_meshes.py`, in processes of their own with eight CPU devices; prints the checks that passed.

Every check compares a sharded call with the materialised loss on one device: its value and all gradients.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    MeshAxes,
    explain,
    linear_chain_crf,
    linear_cross_entropy,
    linear_distillation,
    linear_row_statistics,
    linear_sample,
    linear_top_k,
    sampled_softmax_cross_entropy,
)
from tests.pallas_ce.layouts import (
    ALL,
    DIFFERENTIATED,
    LAYOUTS,
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
)  # fmt: skip

MODES = ("recompute", "in_forward")
OF_HEAD = (1, 2, 3)  # of the arguments of the loss: weight, bias and scale


def sampled(hidden: Any, weight: Any, **options: Any) -> Any:
    return sampled_softmax_cross_entropy(
        hidden, weight, jnp.argmax(hidden, axis=-1), key=jax.random.key(0), num_samples=9, **options
    )


def auto() -> Iterator[str]:
    """Under jit, from the arrays' shardings alone; results lie as their inputs, and repeats are equal in every bit."""
    for i, (layout, mode, padded) in enumerate(itertools.product(LAYOUTS, MODES, (True, False))):
        if i % 8 in (1, 7):  # without padding in one of the modes
            continue
        given = placed(layout, mesh(), padded)
        step = jax.jit(gradients(functools.partial(loss, padded=padded, backward=mode)))
        got = step(*given)
        same(got, expected(layout.vocabulary, padded))
        for gradient, place in zip(got[1], DIFFERENTIATED, strict=True):
            assert gradient.sharding.is_equivalent_to(given[place].sharding, gradient.ndim), (layout, mode, place)
        jax.tree.map(np.testing.assert_array_equal, step(*given), got)
        yield f"{layout.name}, {mode}, padded={padded}"


def explicit() -> Iterator[str]:
    """On explicit axes, eager and jitted, with gradients typed as their inputs."""
    on = mesh(AxisType.Explicit)
    with jax.set_mesh(on):
        for layout, mode in itertools.product(LAYOUTS, MODES):
            given = placed(layout, on, True)
            function = gradients(functools.partial(loss, padded=True, backward=mode))
            for step in (jax.jit(function), *((function,) if layout is LAYOUTS[2] else ())):
                got = step(*given)
                same(got, expected(layout.vocabulary, True))
                for gradient, i in zip(got[1], DIFFERENTIATED, strict=True):
                    assert jax.typeof(gradient) == jax.typeof(given[i])
            yield f"{layout.name}, {mode}"
        hidden, weight, *_ = placed(LAYOUTS[2], on, False)
        alone = arrays(LAYOUTS[2].vocabulary, False)[:2]
        key = jax.random.key(0)
        for function in (
            lambda h, w: linear_top_k(h, w, 3),
            lambda h, w: linear_sample(key, h, w),
            lambda h, w: linear_sample(key, h, w, top_k=3),
            jax.value_and_grad(sampled),
            jax.value_and_grad(lambda h, w: linear_chain_crf(h, jnp.argmax(h, axis=-1), w[:H])),
            jax.value_and_grad(lambda h, w: linear_distillation(h, w, h[..., ::-1], w)),
        ):
            same(jax.jit(function)(hidden, weight), function(*alone))
        yield "top-k, samples, distillation, sampled softmax, random field"


def differentiated(
    local: Callable[..., Any], axes: tuple[str, ...], specs: Any, argnums: Any, inside: bool, checked: bool
) -> Callable[..., Any]:
    """Value and gradients of `local`'s sum over the axes that split the rows, taken inside a shard_map or outside."""

    def add(x: Any) -> Any:
        return jax.lax.psum(x, axes) if axes else x

    def part(*args: Any) -> Any:
        return add(local(*args))

    def part_with_gradients(*args: Any) -> Any:
        if checked:
            return jax.value_and_grad(part, argnums)(*args)
        value, found = jax.value_and_grad(local, argnums)(*args)
        return add(value), tuple(add(x) if i in OF_HEAD else x for i, x in zip(argnums, found, strict=True))

    if inside:
        out_specs = P(), tuple(specs[i] for i in argnums)
        return jax.shard_map(part_with_gradients, mesh=mesh(), in_specs=specs, out_specs=out_specs, check_vma=checked)
    mapped = jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=checked)
    return jax.value_and_grad(mapped, argnums)


def manual(checked: bool) -> Iterator[str]:
    """Inside shard_map, by axis name, differentiated inside and outside."""
    for layout, mode, inside in itertools.product(LAYOUTS, MODES, (False, True)):
        grad: Any = None if checked else "inside" if inside else "outside"
        given = arrays(layout.vocabulary, True)
        count = jnp.sum(jnp.where(given[4] >= 0, given[5] * (0.5 + given[4] % 3), 0))
        local = functools.partial(
            loss, padded=True, vocabulary=layout.vocabulary, backward=mode, normalizer=count,
            mesh_axes=MeshAxes(**layout.axes, grad=grad),
        )  # fmt: skip
        function = differentiated(local, layout.only_rows, layout.specs, DIFFERENTIATED, inside, checked)
        reference = functools.partial(loss, padded=True, implementation="reference", normalizer=count)
        same(jax.jit(function)(*given), gradients(reference)(*given))
        yield f"{layout.name}, {mode}, inside={inside}"
    hidden, weight = arrays(64, False)[:2]
    given = hidden, weight, hidden[..., ::-1], weight
    for inside in (False, True):
        distilled = functools.partial(linear_distillation, normalizer=B * T)
        function = differentiated(distilled, ALL, (P(ALL), P(), P(ALL), P()), (0, 1), inside, checked)
        same(jax.jit(function)(*given), jax.value_and_grad(distilled, (0, 1))(*given))
        yield f"distillation, inside={inside}"
    if checked:
        local = functools.partial(sampled, normalizer=B * T)
        function = differentiated(local, ALL, (P(ALL), P()), (0, 1), inside=False, checked=True)
        same(jax.jit(function)(hidden, weight), jax.value_and_grad(sampled, (0, 1))(hidden, weight))
        yield "sampled softmax"


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

    def mapped(check_vma: bool, hidden: P, axes: MeshAxes, weight: Any = "tensor") -> Any:
        def part(h: Any, w: Any, t: Any) -> Any:
            return jax.lax.pmean(linear_cross_entropy(h, w, t, mesh_axes=axes), ALL)

        specs = (hidden, P(weight) if isinstance(weight, str) else weight, hidden)
        function = jax.shard_map(part, mesh=on, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return function(rows, weight_alone, ids)

    with pytest.raises(ValueError, match="grad='inside'"):
        mapped(False, P(), MeshAxes("tensor"))
    with pytest.raises(ValueError, match=r"hidden varies over \['tensor'\]"):
        mapped(True, P("tensor"), MeshAxes("tensor"))
    with pytest.raises(ValueError, match=r"split over \['data'\], but it is the same"):
        mapped(True, P(), MeshAxes(ALL))
    with pytest.raises(ValueError, match="mesh_axes names 'model'"):
        mapped(True, P(), MeshAxes("model"))
    with pytest.raises(ValueError, match=r"width names \['data'\]"):
        mapped(False, P(), MeshAxes("tensor", width="data", grad="inside"), P("tensor", "data"))
    some = jax.shard_map(
        lambda h: jax.lax.psum(linear_cross_entropy(h, weight_alone, ids[:1]), "data"),
        mesh=on, in_specs=P("data"), out_specs=P(), axis_names={"data"},
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"leaves the mesh axes \['tensor'\] automatic"):
        jax.jit(some)(rows[:2])
    width = jax.device_put(weight_alone, NamedSharding(on, P(None, "tensor")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="width H is split over the mesh axes"):
        jax.jit(linear_cross_entropy)(rows, width, ids)
    yield "refusals"


if __name__ == "__main__":
    sections = {
        "auto": auto,
        "explicit": explicit,
        "checked": functools.partial(manual, True),
        "unchecked": functools.partial(manual, False),
        "others": others,
    }
    for passed in sections[sys.argv[1]]():
        print(f"passed: {passed}", flush=True)
