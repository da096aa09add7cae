"""Adapters (LoRA) of a head in either framework: how they begin, what they cost, and how they are laid out."""

import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_modules import linen
from pallas_ce import MeshAxes
from tests.flax_modules.oracle import ADAPTER, FEATURES, RANK, VOCAB, assert_close, initialised, of, on_embedding


def products(function, *given):
    """Shapes of the results of all matrix products in the program of a function."""
    lines = [x for x in jax.jit(function).lower(*given).as_text().splitlines() if "stablehlo.dot_general" in x]
    return [tuple(map(int, re.findall(r"(\d+)x", line.rpartition("tensor<")[2]))) for line in lines]


def test_it_starts_as_the_head_without_and_keeps_its_parameters(framework, hidden, labels):
    plain, apply_plain = initialised(of(framework, "LossHead", FEATURES, VOCAB), hidden, labels)
    params, apply = initialised(of(framework, "LossHead", FEATURES, VOCAB, lora_rank=RANK), hidden, labels)
    np.testing.assert_array_equal(params["kernel"][...], plain["kernel"][...])
    shapes = sorted(x.shape for x in jax.tree.leaves(params))
    assert shapes == [(RANK, VOCAB), (FEATURES, RANK), (FEATURES, VOCAB)]
    assert_close(apply(params, hidden, labels), apply_plain(plain, hidden, labels))
    assert any(np.any(x) for x in jax.tree.leaves(jax.grad(apply)(params, hidden, labels)) if RANK in x.shape)


@pytest.mark.parametrize(("tied", "backward"), [(False, "in_forward"), (True, "recompute")])
def test_a_frozen_weight_costs_no_product(framework, tied, backward, hidden, labels):
    options = {"backward": backward, "implementation": "xla", **ADAPTER}
    head = on_embedding(framework, **options) if tied else of(framework, "LossHead", FEATURES, VOCAB, **options)
    params, apply = initialised(head, hidden, labels)

    def wide(frozen):
        """Products whose result has the weight's width H, like hidden states or the weight's gradient."""

        def trained(path, x):
            return jax.lax.stop_gradient(x) if frozen and "lora" not in jax.tree_util.keystr(path) else x

        made = products(
            jax.grad(lambda params: apply(jax.tree_util.tree_map_with_path(trained, params), hidden, labels)), params
        )
        assert made
        return [shape for shape in made if FEATURES in shape and RANK not in shape]

    assert not wide(frozen=True)
    assert wide(frozen=False)


def test_inside_a_shard_map_lora_b_is_split_as_the_kernel_is(framework, hidden, labels):
    params, whole = initialised(of(framework, "LossHead", FEATURES, VOCAB, **ADAPTER), hidden, labels)
    split = of(framework, "LossHead", FEATURES, VOCAB, mesh_axes=MeshAxes(vocabulary="tensor"), **ADAPTER)

    def part(params, *given):
        if framework is linen:
            return split.apply({"params": params}, *given)
        return nnx.merge(nnx.graphdef(split), params)(*given)

    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    places = jax.tree.map(lambda x: P(None, "tensor") if x.shape[1] == VOCAB else P(), params)
    sharded = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(places, P(), P()), out_specs=P()))
    assert_close(sharded(params, hidden, labels), whole(params, hidden, labels))
