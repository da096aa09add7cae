"""The Linen loss head: the same loss, with parameters where Linen users expect them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from flax_modules.linen import LossHead
from tests.flax_modules.oracle import assert_close, mean_cross_entropy, stored_logits

FEATURES, VOCAB = 16, 37


class TiedInSetup(nn.Module):
    def setup(self):
        self.embed = nn.Embed(VOCAB, FEATURES)
        self.head = LossHead.tied(self.embed)

    def __call__(self, tokens, labels):
        return self.head(self.embed(tokens), labels)

    def logits(self, tokens):
        return self.head.logits(self.embed(tokens))


class TiedCompact(nn.Module):
    @nn.compact
    def __call__(self, tokens, labels):
        embed = nn.Embed(VOCAB, FEATURES, name="embed")
        return LossHead.tied(embed)(embed(tokens), labels)


@pytest.mark.parametrize("model", [TiedInSetup(), TiedCompact()])
def test_a_tied_embedding_is_one_parameter_whose_gradient_sums_both_uses(model, labels):
    tokens = jnp.maximum(labels, 0)
    variables = model.init(jax.random.key(0), tokens, labels)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"embed": {"embedding": (VOCAB, FEATURES)}}}

    def two_uses(table_in, table_out):
        return mean_cross_entropy(stored_logits(table_in[tokens], table_out.T), labels)

    table = variables["params"]["embed"]["embedding"]
    as_input, as_output = jax.grad(two_uses, argnums=(0, 1))(table, table)
    grads = jax.grad(model.apply)(variables, tokens, labels)
    assert_close(grads["params"]["embed"]["embedding"], as_input + as_output)


def test_a_tied_head_generates_without_labels(labels):
    model, tokens = TiedInSetup(), jnp.maximum(labels, 0)
    variables = model.init(jax.random.key(0), tokens, method="logits")
    table = variables["params"]["embed"]["embedding"]
    assert_close(model.apply(variables, tokens, method="logits"), stored_logits(table[tokens], table.T))


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


def test_a_training_loop_reduces_the_loss(labels):
    model, tokens = TiedInSetup(), jnp.maximum(labels, 0)
    variables = model.init(jax.random.key(0), tokens, labels)
    optimizer = optax.adam(0.1)
    state = optimizer.init(variables)

    @jax.jit
    def step(variables, state):
        loss, grads = jax.value_and_grad(model.apply)(variables, jnp.arange(13), jnp.arange(1, 14))
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for _ in range(40):
        variables, state, loss = step(variables, state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
