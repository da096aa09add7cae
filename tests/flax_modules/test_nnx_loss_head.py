"""The NNX loss head: the loss of stored logits, under every transformation a training step uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from flax_modules.nnx import LossHead
from tests.flax_modules.oracle import assert_close, mean_cross_entropy, stored_logits

FEATURES, VOCAB = 16, 37
# `implementation="reference"` below: it compiles faster, where what is tested does not depend on which one runs.


class TiedModel(nnx.Module):
    """The smallest language model with one matrix for input and output."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, FEATURES, rngs=rngs)
        self.mix = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.head = LossHead.tied(self.embed)

    def hidden(self, tokens):
        return self.mix(self.embed(tokens))

    def __call__(self, tokens, labels):
        return self.head(self.hidden(tokens), labels)


def test_attributes_can_be_changed_after_construction(hidden, labels):
    head = LossHead(FEATURES, VOCAB, label_smoothing=0.3, implementation="reference", rngs=nnx.Rngs(0))
    head.label_smoothing = 0.0
    assert_close(nnx.jit(lambda head: head(hidden, labels))(head), mean_cross_entropy(head.logits(hidden), labels))


def test_ignored_labels_alone_give_a_zero_loss(hidden):
    head = LossHead(FEATURES, VOCAB, rngs=nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(lambda head: head(hidden, jnp.full((2, 7), -100)))(head)
    assert loss == 0
    assert not np.any(grads["kernel"][...])


def test_the_tie_survives_split_and_merge_and_replacing_the_parameter(labels):
    model = TiedModel(nnx.Rngs(0))
    tokens = jnp.maximum(labels, 0)
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(lambda leaf: 2 * leaf, state))
    assert copy.head.embed is copy.embed
    assert_close(copy(tokens, labels), mean_cross_entropy(copy.embed.attend(copy.hidden(tokens)), labels))

    model.embed.embedding = nnx.Param(jnp.ones((VOCAB, FEATURES)))
    assert_close(model(tokens, labels), jnp.log(VOCAB))


def test_a_head_can_be_tied_to_a_bare_parameter(hidden, labels):
    table = nnx.Param(jax.random.normal(jax.random.key(3), (VOCAB + 3, FEATURES)))
    head = LossHead.tied(table, vocab_size=VOCAB)
    assert head.logits(hidden).shape == (2, 7, VOCAB)
    assert_close(head(hidden, labels), mean_cross_entropy(stored_logits(hidden, table[:VOCAB].T), labels))


def test_a_tied_head_computes_in_the_dtype_of_its_embedding():
    assert LossHead.tied(nnx.Embed(VOCAB, FEATURES, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))).dtype == jnp.bfloat16
    assert LossHead.tied(nnx.Embed(VOCAB, FEATURES, rngs=nnx.Rngs(0)), dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_nnxs_own_training_loop_reduces_the_loss(labels):
    model = TiedModel(nnx.Rngs(0))
    model.head = LossHead(FEATURES, VOCAB, z_loss=1e-4, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)
    tokens = jnp.maximum(labels, 0)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: model(tokens, labels))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]


def test_gradients_pass_through_scanned_layers_and_checkpoint(hidden, labels):
    @nnx.vmap(in_axes=0)
    def make_layers(key):
        return nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(key))

    layers = make_layers(jax.random.split(jax.random.key(1), 3))
    head = LossHead(FEATURES, VOCAB, rngs=nnx.Rngs(0))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def trunk(layer, x):
        return jnp.tanh(layer(x))

    def fused(layers, head):
        return nnx.remat(lambda head, x: head(x, labels))(head, trunk(layers, hidden))

    def canonical(layers, head):
        x = hidden
        for i in range(3):
            x = jnp.tanh(jnp.matmul(x, layers.kernel[i]) + layers.bias[i])
        return mean_cross_entropy(stored_logits(x, head.kernel[...]), labels)

    both = (0, 1)
    assert_close(nnx.grad(fused, argnums=both)(layers, head), nnx.grad(canonical, argnums=both)(layers, head))


@pytest.mark.parametrize(("backward", "tokens"), [("recompute", 6), ("in_forward", 5)])
def test_one_step_may_use_a_head_on_trained_and_on_constant_hidden_states(hidden, labels, backward, tokens):
    # A number of tokens of its own: nothing traced by another test may serve these calls.
    hidden, labels = hidden[:, :tokens], labels[:, :tokens]
    head = LossHead(FEATURES, VOCAB, backward=backward, rngs=nnx.Rngs(0))

    def gradient(one_loss):
        def loss(head):
            trained = hidden + jnp.mean(head.kernel[...], axis=1)
            return one_loss(head, trained) + one_loss(head, hidden)

        return nnx.grad(loss)(head)

    expected = gradient(lambda head, x: mean_cross_entropy(stored_logits(x, head.kernel[...]), labels))
    assert_close(gradient(lambda head, x: head(x, labels)), expected)


def test_microbatches_accumulate_in_lax_scan(hidden, labels):
    head = LossHead(FEATURES, VOCAB, rngs=nnx.Rngs(0))
    graph, params = nnx.split(head)

    def loss(params, x, y):
        return nnx.merge(graph, params)(x, y, normalizer=12.0)

    def body(total, microbatch):
        grads = jax.grad(loss)(params, *microbatch)
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (hidden, labels))
    assert_close(total, jax.grad(loss)(params, hidden, labels))


def test_sharding_metadata_reaches_parameters_and_survives_training(hidden, labels):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.set_mesh(mesh):
        head = LossHead(
            FEATURES,
            VOCAB,
            use_bias=True,
            kernel_metadata={"out_sharding": (None, "model")},
            bias_metadata={"out_sharding": ("model",)},
            rngs=nnx.Rngs(0),
        )
        specs = nnx.get_partition_spec(nnx.state(head))
        assert specs["kernel"].get_value() == PartitionSpec(None, "model")
        assert specs["bias"].get_value() == PartitionSpec("model")
        grads = nnx.jit(nnx.grad(lambda head: head(hidden, labels)))(head)
        assert nnx.get_partition_spec(grads)["kernel"].get_value() == PartitionSpec(None, "model")


def test_construction_names_what_is_wrong():
    embed = nnx.Embed(VOCAB, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"pass rngs=nnx\.Rngs"):
        LossHead(FEATURES, VOCAB)
    with pytest.raises(ValueError, match=r"pass rngs=nnx\.Rngs"):
        LossHead.tied(embed, use_bias=True)
    with pytest.raises(ValueError, match=r"embed has shape \(3,\)"):
        LossHead.tied(nnx.Param(jnp.ones(3)))
