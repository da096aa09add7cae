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

    def __init__(self, rngs, **options):
        self.embed = nnx.Embed(VOCAB, FEATURES, rngs=rngs)
        self.mix = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.head = LossHead.tied(self.embed, **options)

    def hidden(self, tokens):
        return self.mix(self.embed(tokens))

    def __call__(self, tokens, labels, **options):
        return self.head(self.hidden(tokens), labels, **options)


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_loss_and_gradients_are_those_of_stored_logits(hidden, labels, backward, use_bias):
    head = LossHead(FEATURES, VOCAB, use_bias=use_bias, backward=backward, rngs=nnx.Rngs(0))
    if use_bias:
        head.bias[...] = jax.random.normal(jax.random.key(5), (VOCAB,))

    def canonical(head, hidden):
        bias = head.bias[...] if use_bias else None
        return mean_cross_entropy(stored_logits(hidden, head.kernel[...], bias), labels)

    actual = nnx.value_and_grad(lambda head, hidden: head(hidden, labels), argnums=(0, 1))(head, hidden)
    assert_close(actual, nnx.value_and_grad(canonical, argnums=(0, 1))(head, hidden))


def test_every_option_reaches_the_loss_and_the_logits(hidden, labels):
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0, "logit_scale": 2.0}
    head = LossHead(FEATURES, VOCAB, **options, implementation="reference", rngs=nnx.Rngs(0))
    logits = stored_logits(hidden, head.kernel[...], scale=2.0, softcap=3.0)
    weights = jnp.linspace(0.5, 2.0, labels.size).reshape(labels.shape)

    assert_close(head.logits(hidden), logits)
    expected = mean_cross_entropy(logits, labels, weights, label_smoothing=0.1, z_loss=1e-2)
    assert_close(head(hidden, labels, token_weights=weights), expected)


def test_options_of_a_call_replace_those_of_the_head_and_may_be_traced(hidden, labels):
    head = LossHead(FEATURES, VOCAB, label_smoothing=0.3, z_loss=0.3, implementation="reference", rngs=nnx.Rngs(0))

    @nnx.jit
    def loss(head, smoothing, z_loss, scale):
        return head(hidden, labels, label_smoothing=smoothing, z_loss=z_loss, logit_scale=scale)

    logits = stored_logits(hidden, head.kernel[...], scale=1.5)
    assert_close(loss(head, 0.1, 0.01, 1.5), mean_cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.01))
    assert_close(head.logits(hidden, logit_scale=1.5), logits)
    assert_close(
        head(hidden, labels, label_smoothing=0.0, z_loss=0.0, reduction="sum", logit_scale=1.5) / 12,
        mean_cross_entropy(logits, labels),
    )


def test_attributes_can_be_changed_after_construction(hidden, labels):
    head = LossHead(FEATURES, VOCAB, label_smoothing=0.3, implementation="reference", rngs=nnx.Rngs(0))
    head.label_smoothing = 0.0
    assert_close(nnx.jit(lambda head: head(hidden, labels))(head), mean_cross_entropy(head.logits(hidden), labels))


def test_reduction_normalizer_class_weights_and_metrics_pass_through(hidden, labels):
    head = LossHead(FEATURES, VOCAB, implementation="reference", rngs=nnx.Rngs(0))
    per_token = head(hidden, labels, reduction="none")
    assert per_token.shape == labels.shape
    assert_close(per_token[1, -2:], jnp.zeros(2))
    assert_close(head(hidden, labels, normalizer=100.0), per_token.sum() / 100)
    class_weights = jnp.linspace(0.1, 1.0, VOCAB)
    weighted = jnp.sum(class_weights[jnp.maximum(labels, 0)] * per_token)
    assert_close(head(hidden, labels, class_weights=class_weights, reduction="sum"), weighted)
    loss, metrics = head(hidden, labels, return_metrics=True)
    assert_close(loss, per_token.sum() / 12)
    assert 12 in [int(value) for value in jax.tree.leaves(metrics)]


def test_ignored_labels_alone_give_a_zero_loss(hidden):
    head = LossHead(FEATURES, VOCAB, rngs=nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(lambda head: head(hidden, jnp.full((2, 7), -100)))(head)
    assert loss == 0
    assert not np.any(grads["kernel"][...])


def test_padding_is_in_neither_loss_nor_logits(hidden, labels):
    head = LossHead(FEATURES, VOCAB, padded_vocab_size=64, rngs=nnx.Rngs(0))
    assert head.kernel.shape == (FEATURES, 64)
    logits = stored_logits(hidden, head.kernel[:, :VOCAB])
    loss, grads = nnx.value_and_grad(lambda head: head(hidden, labels))(head)
    assert_close(loss, mean_cross_entropy(logits, labels))
    assert_close(head.logits(hidden), logits)
    assert not np.any(grads["kernel"][:, VOCAB:])
    assert np.any(grads["kernel"][:, :VOCAB])


def test_row_statistics_are_those_of_the_logits(hidden, labels):
    head = LossHead(
        FEATURES, VOCAB, logit_softcap=2.0, padded_vocab_size=40, implementation="reference", rngs=nnx.Rngs(0)
    )
    logits = head.logits(hidden)
    stats = head.row_statistics(hidden, jnp.maximum(labels, 0), statistics=("lse", "target_logit", "argmax"))
    assert_close(stats.lse, jax.nn.logsumexp(logits, axis=-1))
    assert_close(stats.target_logit, jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0])
    np.testing.assert_array_equal(stats.argmax, jnp.argmax(logits, axis=-1))


def test_bfloat16_compute_keeps_float32_parameters_loss_and_gradients(hidden, labels):
    head = LossHead(FEATURES, VOCAB, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(lambda head: head(hidden, labels))(head)
    assert head.kernel.dtype == loss.dtype == grads["kernel"].dtype == head.logits(hidden).dtype == jnp.float32
    expected = nnx.grad(lambda head: mean_cross_entropy(stored_logits(hidden, head.kernel[...]), labels))(head)
    assert_close(grads["kernel"], expected["kernel"], rtol=0.1, atol=5e-3)
    # Not rounded to bfloat16 on the way, which a cast of the kernel in the module would have done.
    rounded = grads["kernel"].astype(jnp.bfloat16).astype(jnp.float32)
    assert np.mean(grads["kernel"][...] != rounded[...]) > 0.9


def test_without_dtype_inputs_and_parameters_are_promoted(hidden, labels):
    narrow = hidden.astype(jnp.bfloat16)
    head = LossHead(FEATURES, VOCAB, implementation="reference", rngs=nnx.Rngs(0))
    assert_close(head(narrow, labels), head(narrow.astype(jnp.float32), labels))
    half = LossHead(FEATURES, VOCAB, param_dtype=jnp.bfloat16, implementation="reference", rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda head: head(narrow, labels))(half)
    assert half.kernel.dtype == grads["kernel"].dtype == jnp.bfloat16


def test_a_tied_embedding_is_one_parameter_whose_gradient_sums_both_uses(labels):
    model = TiedModel(nnx.Rngs(0))
    tokens = jnp.maximum(labels, 0)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == VOCAB * FEATURES + FEATURES * FEATURES + FEATURES

    def two_uses(table_in, table_out):
        hidden = model.mix(table_in[tokens])
        return mean_cross_entropy(stored_logits(hidden, table_out.T), labels)

    table = model.embed.embedding[...]
    as_input, as_output = jax.grad(two_uses, argnums=(0, 1))(table, table)
    grads = nnx.grad(lambda model: model(tokens, labels))(model)
    assert_close(grads["embed"]["embedding"][...], as_input + as_output)
    assert_close(model.head.logits(model.hidden(tokens)), model.embed.attend(model.hidden(tokens)), atol=1e-5)


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


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_loop_reduces_the_loss(tied, labels):
    model = TiedModel(nnx.Rngs(0), z_loss=1e-4)
    if not tied:
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
    with pytest.raises(ValueError, match="padded_vocab_size=30 is smaller than vocab_size=37"):
        LossHead(FEATURES, VOCAB, padded_vocab_size=30, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="vocab_size=38 is larger than the embedding, which has 37 rows"):
        LossHead.tied(embed, vocab_size=38)
    with pytest.raises(TypeError, match="embed is a Linear"):
        LossHead.tied(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"embed has shape \(37, 16\), but this head needs \(37, 8\)"):
        LossHead(8, VOCAB, embed=embed)
    with pytest.raises(ValueError, match=r"embed has shape \(3,\)"):
        LossHead.tied(nnx.Param(jnp.ones(3)))


def test_calls_name_what_is_wrong(hidden, labels):
    head = LossHead(FEATURES, VOCAB, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="hidden"):
        head(hidden[..., :8], labels)
    with pytest.raises(ValueError, match="the hidden size is 8 in the one and 16 in the other"):
        head.logits(hidden[..., :8])
    with pytest.raises(ValueError, match="labels"):
        head(hidden, labels[:, :-1])
    with pytest.raises(ValueError, match="reduction"):
        head(hidden, labels, reduction="average")
