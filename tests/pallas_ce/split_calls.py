"""Other functions on a mesh, what `explain` tells of it, and refusals; run by `test_meshes.py` with eight CPUs."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    MeshAxes,
    cross_entropy,
    explain,
    linear_cross_entropy,
    linear_distillation,
    linear_row_statistics,
    linear_sample,
    linear_top_k,
)
from pallas_ce.streaming.loops import varying
from tests.pallas_ce.layouts import ALL, LAYOUTS, B, H, T, arrays, mesh, placed, same

KEY = jax.random.key(0)
HIDDEN, WEIGHT = (jnp.asarray(arrays(64)[name]) for name in ("hidden", "weight"))
IDS = jnp.arange(B * T).reshape(B, T)
whole = functools.partial(linear_cross_entropy, implementation="reference")


def test_explain_tells_the_layout_and_one_devices_gradients() -> None:
    words = {
        "DP 8": "rows over data, tensor",
        "TP 4, DP 2": "rows over data; vocabulary over tensor",
        "SP 4, DP 2": "rows over data; rows and vocabulary over tensor: hidden gathered",
        "FSDP 8 over V": "rows and weight over data, tensor: weight gathered",
        "TP 4, FSDP 2 over H": "vocabulary over tensor, statistics merged; rows and weight over data: weight gathered",
    }
    for layout in LAYOUTS:
        laid = placed(layout, mesh())
        given = laid["hidden"], laid["weight"]
        told = explain(*given, vocab_size=layout.vocabulary - 3)
        assert words.get(layout.name, "") in told.parallelism
        assert told.gradient_bytes == sum(x.addressable_shards[0].data.nbytes for x in given)


def test_vmap_over_rows_that_are_split() -> None:
    laid = placed(LAYOUTS[3], mesh())

    def each(hidden: Any, labels: Any, **options: Any) -> Any:
        return linear_cross_entropy(hidden, laid["weight"], labels, **options)

    found, want = (
        jax.jit(jax.vmap(jax.grad(functools.partial(each, **how))))(laid["hidden"], laid["labels"])
        for how in ({}, {"implementation": "reference"})
    )
    same(found, want)


ROWS, SMALL = jax.random.normal(jax.random.key(1), (8, 4, H)), jax.random.normal(KEY, (24, H))
SMALL_IDS = jnp.arange(32).reshape(8, 4) % 24


def test_pmap_inside_and_outside() -> None:
    mean = functools.partial(linear_cross_entropy, normalizer=32)
    want = jax.grad(mean, argnums=1)(ROWS, SMALL, SMALL_IDS)
    inside = jax.pmap(jax.grad(mean, argnums=1), in_axes=(0, None, 0))(ROWS, SMALL, SMALL_IDS)
    same(inside.sum(axis=0), want)
    same(jax.grad(lambda w: jax.pmap(mean, in_axes=(0, None, 0))(ROWS, w, SMALL_IDS).sum())(SMALL), want)


def of_loss(*axes: Any, vocab_size: int | None = None, **further: Any) -> Any:
    """The cross entropy with those axes."""
    return functools.partial(linear_cross_entropy, mesh_axes=MeshAxes(*axes, **further), vocab_size=vocab_size)


WHOLE = r"varies over the mesh axes \[\] .*a part along \[.*'tensor'\].*MeshAxes\(\)"
VARIES = r"weight varies over the mesh axes \['tensor'\].*vocabulary='tensor'"
INSIDE: dict[str, Any] = {"grad": "inside"}


@pytest.mark.parametrize(
    ("checked", "rows", "weight", "function", "words"),
    [
        (False, P(), P("tensor"), of_loss("tensor"), "grad='inside'"),
        (True, P("tensor"), P("tensor"), of_loss("tensor"), r"hidden varies over \['tensor'\]"),
        *((True, P(), P(), of_loss(*said), WHOLE) for said in (("tensor",), (ALL,), ("tensor", "data"))),
        (True, P(), P("tensor"), of_loss(ALL), r"the mesh axes \['tensor'\] .* a part along \['data'\]"),
        (False, P(), P(), of_loss("tensor", vocab_size=24, **INSIDE),
         r"vocab_size=24 with a weight of 24 entries, .* one of 4 parts"),
        (True, P(), P("tensor"), of_loss("model"), "mesh_axes names 'model'"),
        (False, P(), P("tensor", "data"), of_loss("tensor", width="data", **INSIDE), r"names \['data'\]"),
        (False, P(), P("tensor"), lambda h, w, t: linear_top_k(h, w, 3, vocab_size=24).ids,
         r"vocab_size=24 must be .* mesh_axes must tell"),
        (True, P(), P("tensor"),
         lambda h, w, t: linear_distillation(h, w, h, jnp.concatenate([w, w]), vocab_size=16,
                                             mesh_axes=MeshAxes("tensor")),
         "weight has 24 vocabulary entries over the devices and teacher_weight 48"),
        # A weight that varies, without its axes, where the rows are the same.
        (True, P("data"), P("tensor"), linear_cross_entropy, VARIES),
        (True, P("data"), P("tensor"), lambda h, w, t: linear_row_statistics(h, w, t).lse, VARIES),
        (True, P("data"), P("tensor"), lambda h, w, t: linear_top_k(h, w, 2).logits, VARIES),
        (True, P("data"), P("tensor"), lambda h, w, t: linear_distillation(h, w, h, w), VARIES),
    ],
)  # fmt: skip
def test_axes_that_do_not_fit_are_refused(checked: bool, rows: P, weight: P, function: Any, words: str) -> None:
    specs = rows, weight, rows
    part = jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=checked)
    with pytest.raises(ValueError, match=words):
        part(ROWS, SMALL, SMALL_IDS)


# Functions that split over rows only, a batch of heads, and stored logits.
OF_ROWS = {
    "statistics": lambda h, w, t: linear_row_statistics(h, w, t, statistics=("lse", "argmax")),
    "top_k": lambda h, w, t: linear_top_k(h, w, 3).ids,
    "sample": lambda h, w, t: linear_sample(KEY, h, w, top_k=1).ids,
    "distillation": lambda h, w, t: linear_distillation(h, w, 2 * h, w, reduction="none"),
    "stored logits": lambda h, w, t: cross_entropy(h @ w.T, t, reduction="none"),
    "heads": lambda h, w, t: jax.vmap(lambda w: linear_row_statistics(h, w, t).lse, out_axes=-1)(jnp.stack([w, 2 * w])),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_mesh_that_is_manual_in_part(name: str) -> None:
    specs = {"in_specs": (P("data"), P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    got = jax.jit(jax.shard_map(OF_ROWS[name], mesh=mesh(), **specs))(HIDDEN, WEIGHT, IDS)
    same(got, OF_ROWS[name](HIDDEN, WEIGHT, IDS))


def mapped(part: Any, rows: P, split: P, on: Any = None, **options: Any) -> Any:
    """The mean over devices, of a weight that varies inside a shard_map."""

    def mean_over_devices(*given: Any) -> Any:
        found = jnp.sum(part(*given, **options))
        return jax.lax.pmean(jax.lax.pcast(found, tuple(set(ALL) - varying(found)), to="varying"), ALL)

    function = jax.shard_map(mean_over_devices, mesh=on or mesh(), in_specs=(rows, split, rows), out_specs=P())
    return jax.jit(function)(HIDDEN, WEIGHT, IDS)


def test_a_varying_weight_with_its_axes_or_a_head_for_each_device() -> None:
    said = {"mesh_axes": MeshAxes("tensor")}
    same(mapped(linear_cross_entropy, P("data"), P("tensor"), **said), whole(HIDDEN, WEIGHT, IDS))
    parts = [whole(HIDDEN, part, IDS) for part in jnp.split(WEIGHT, 4)]
    alone = functools.partial(linear_cross_entropy, mesh_axes=MeshAxes())
    same(mapped(alone, P(), P("tensor")), jnp.mean(jnp.array(parts)))

    def sampled_apart(h: Any, w: Any, t: Any) -> Any:
        return linear_sample(KEY, jax.lax.pcast(h, ALL, to="varying"), w, top_p=0.8, min_p=0.01).ids

    mapped(sampled_apart, P(), P("tensor"))
    same(jax.jit(alone)(HIDDEN, WEIGHT, IDS), whole(HIDDEN, WEIGHT, IDS))
    unchecked = jax.shard_map(alone, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    same(jax.jit(jax.grad(unchecked, 1))(HIDDEN, WEIGHT, IDS), jax.grad(whole, 1)(HIDDEN, WEIGHT, IDS))


def test_one_warning_where_the_rows_vary_too_and_none_where_the_weight_is_said_to_be_whole() -> None:
    def gathered(h: Any, w: Any, t: Any, **options: Any) -> Any:
        return linear_cross_entropy(h, jax.lax.all_gather(w, "data", axis=0, tiled=True), t, **options)

    for given in ({}, {"mesh_axes": MeshAxes()}):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = [mapped(gathered, P("data"), P("data"), **given) for _ in range(2)]
        same(got[0], whole(HIDDEN, WEIGHT, IDS))
        assert [str(x.message).count("vocabulary='data', rows='data'") for x in told] == ([] if given else [1])
        assert all(x.filename == __file__ for x in told)


def test_nothing_is_said_where_the_weight_is_whole_gathered_or_on_an_axis_of_one_device() -> None:
    def invariant(h: Any, w: Any, t: Any) -> Any:
        return linear_top_k(h, jax.lax.all_gather(w, "tensor", axis=0, tiled=True, to="invarying"), 2).ids

    same(mapped(invariant, P(), P("tensor")), jnp.sum(linear_top_k(HIDDEN, WEIGHT, 2).ids))
    same(mapped(linear_cross_entropy, P(), P("tensor"), mesh(shape=(8, 1))), whole(HIDDEN, WEIGHT, IDS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jaxs_leak_check_finds_no_tracer_that_the_partitioner_holds(kind: AxisType) -> None:
    on = mesh(kind)
    given = [placed(LAYOUTS[0], on)[name] for name in ("hidden", "weight", "labels")]
    with jax.checking_leaks(), jax.set_mesh(on):
        jax.block_until_ready(jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))(*given))


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("tpu",)])
def test_a_program_of_a_shard_map_is_exported(platforms: tuple[str, ...]) -> None:
    """Under `jit` alone the partitioner would call back into this process, which no file can hold."""
    on, labels = mesh(), IDS % 64
    specs = P("data"), P("tensor"), P("data")

    @functools.partial(jax.shard_map, mesh=on, in_specs=specs, out_specs=P())
    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        axes = MeshAxes(vocabulary="tensor")
        part = linear_cross_entropy(hidden, weight, labels, normalizer=B * T, mesh_axes=axes)
        return jax.lax.psum(part, "data")

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    given = jax.device_put((HIDDEN, WEIGHT, labels), tuple(jax.NamedSharding(on, spec) for spec in specs))
    exported = export.export(step, platforms=platforms)(*given)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    if "cpu" in platforms:
        same(jax.jit(exported.call)(*given), jax.value_and_grad(whole, (0, 1))(HIDDEN, WEIGHT, labels))
