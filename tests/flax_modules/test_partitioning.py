"""How parameters are laid out over devices is what their initializers, or NNX's metadata, say."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from flax_modules import linen
from flax_modules import nnx as on_nnx
from tests.flax_modules.oracle import FEATURES, VOCAB


def test_linens_metadata_is_that_of_the_initializers(hidden, labels):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    bias_init = nn.with_partitioning(nn.initializers.zeros_init(), ("model",))
    adapter = {"lora_rank": 3, "lora_b_init": nn.with_partitioning(nn.initializers.zeros_init(), (None, "model"))}
    head = linen.LossHead(FEATURES, VOCAB, use_bias=True, kernel_init=init, bias_init=bias_init, **adapter)
    variables = head.init(jax.random.key(0), hidden, labels)
    specs = nn.get_partition_spec(variables)["params"]
    columns = PartitionSpec(None, "model")
    assert specs == {"kernel": columns, "bias": PartitionSpec("model"), "lora_a": PartitionSpec(), "lora_b": columns}
    grads = jax.grad(head.apply)(variables, hidden, labels)
    assert nn.get_partition_spec(grads)["params"] == specs


def test_a_tied_embedding_may_be_partitioned(labels):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, labels):
            init = nn.with_partitioning(nn.initializers.normal(0.1), ("model", None))
            embed = nn.Embed(VOCAB, FEATURES, embedding_init=init, name="embed")
            return linen.LossHead.of(embed)(embed(tokens), labels)

    tokens = jnp.maximum(labels, 0)
    grads = jax.grad(Model().apply)(Model().init(jax.random.key(0), tokens, labels), tokens, labels)
    assert nn.get_partition_spec(grads)["params"]["embed"]["embedding"] == PartitionSpec("model", None)


def test_nnxs_metadata_reaches_parameters_and_gradients(hidden, labels):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    specs = {"kernel": (None, "model"), "bias": ("model",), "lora_a": ("data", None), "lora_b": (None, "model")}
    metadata = {f"{name}_metadata": {"out_sharding": spec} for name, spec in specs.items()}
    with jax.set_mesh(mesh):
        head = on_nnx.LossHead(FEATURES, VOCAB, use_bias=True, lora_rank=3, rngs=nnx.Rngs(0), **metadata)
        grads = nnx.jit(nnx.grad(lambda head: head(hidden, labels)))(head)
        for state in (nnx.state(head), grads):
            found = nnx.get_partition_spec(state)
            found = {name: found["lora"][name] if "lora" in name else found[name] for name in specs}
            assert {name: tuple(x.get_value()) for name, x in found.items()} == specs
