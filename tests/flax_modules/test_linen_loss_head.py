"""The Linen loss head: the same loss, with parameters where Linen users expect them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flax_modules.linen import LossHead
from tests.flax_modules.oracle import assert_close, mean_cross_entropy, stored_logits

FEATURES, VOCAB = 16, 37


def test_partitioning_metadata_is_that_of_the_initializers(hidden, labels):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    bias_init = nn.with_partitioning(nn.initializers.zeros_init(), ("model",))
    head = LossHead(FEATURES, VOCAB, use_bias=True, kernel_init=init, bias_init=bias_init)
    variables = head.init(jax.random.key(0), hidden, labels)
    specs = nn.get_partition_spec(variables)["params"]
    assert specs == {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")}
    grads = jax.grad(head.apply)(variables, hidden, labels)
    assert nn.get_partition_spec(grads)["params"] == specs


def test_a_tied_embedding_may_be_partitioned(labels):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, labels):
            init = nn.with_partitioning(nn.initializers.normal(0.1), ("model", None))
            embed = nn.Embed(VOCAB, FEATURES, embedding_init=init, name="embed")
            return LossHead.tied(embed)(embed(tokens), labels)

    tokens = jnp.maximum(labels, 0)
    grads = jax.grad(Model().apply)(Model().init(jax.random.key(0), tokens, labels), tokens, labels)
    assert nn.get_partition_spec(grads)["params"]["embed"]["embedding"] == PartitionSpec("model", None)


def test_gradients_pass_through_scanned_layers_and_remat(hidden, labels):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(FEATURES)(x)), None

    class Model(nn.Module):
        head_class: type = LossHead

        @nn.compact
        def __call__(self, x, labels):
            scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = scanned(name="layers")(x, None)
            return self.head_class(FEATURES, VOCAB, name="head")(x, labels)

    variables = Model().init(jax.random.key(0), hidden, labels)

    def canonical(variables):
        params = variables["params"]
        x = hidden
        for i in range(3):
            layer = params["layers"]["Dense_0"]
            x = jnp.tanh(x @ layer["kernel"][i] + layer["bias"][i])
        return mean_cross_entropy(stored_logits(x, params["head"]["kernel"]), labels)

    expected = jax.grad(canonical)(variables)
    assert_close(jax.grad(Model().apply)(variables, hidden, labels), expected)
    assert_close(jax.grad(Model(nn.remat(LossHead)).apply)(variables, hidden, labels), expected)
