"""The loss head of either framework: the loss of stored logits, and what every option does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_modules import linen
from flax_modules import nnx as on_nnx
from tests.flax_modules.oracle import (
    ADAPTER,
    BIAS,
    FEATURES,
    VOCAB,
    assert_agrees,
    assert_close,
    initialised,
    logits_of,
    mean_cross_entropy,
    of,
    on_embedding,
    stored_logits,
)

# `implementation="reference"` below compiles faster, where the test does not depend on which one runs.
FAST = {"implementation": "reference"}
REFUSED = "its last axis must be 16, the head's features"


@pytest.fixture
def make(framework, hidden, labels):
    def make(**options):
        """A head's parameters, and how it is applied."""
        return initialised(of(framework, "LossHead", FEATURES, VOCAB, **options), hidden, labels)

    return make


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {"backward": "in_forward"}),
        (False, {"backward": "recompute", **BIAS}),
        (False, {"backward": "recompute", **ADAPTER}),
        (True, {"backward": "in_forward", **ADAPTER, **BIAS}),
    ],
    ids=["own", "bias", "adapter", "tied"],
)
def test_logits_loss_and_gradients_are_those_of_stored_logits(framework, tied, options, hidden, labels):
    head = on_embedding(framework, **options) if tied else of(framework, "LossHead", FEATURES, VOCAB, **options)
    params, apply = initialised(head, hidden, labels)
    assert_agrees(apply, lambda *x: mean_cross_entropy(logits_of(*x), labels), params, hidden, labels)
    assert_close(apply(params, hidden, method="logits"), logits_of(params, hidden), rtol=1e-4, atol=1e-5)


def test_a_shift_is_that_of_labels_and_token_weights(make, hidden, labels):
    params, apply = make(**FAST)
    weights = jnp.linspace(0.5, 2.0, labels.size).reshape(labels.shape)
    got = apply(params, hidden, labels, shift=1, token_weights=weights)
    assert_close(got, apply(params, hidden[:, :-1], labels[:, 1:], token_weights=weights[:, 1:]))


def test_every_option_reaches_loss_logits_and_statistics(make, hidden, labels):
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0, "logit_scale": 2.0}
    params, apply = make(padded_vocab_size=64, **options)
    assert params["kernel"].shape == (FEATURES, 64)
    logits, targets = stored_logits(hidden, params["kernel"][:, :VOCAB], scale=2.0, softcap=3.0), jnp.maximum(labels, 0)
    weights = jnp.linspace(0.5, 2.0, labels.size).reshape(labels.shape)

    assert_close(apply(params, hidden, method="logits"), logits)
    expected = mean_cross_entropy(logits, labels, weights, label_smoothing=0.1, z_loss=1e-2)
    assert_close(apply(params, hidden, labels, token_weights=weights), expected)
    names = ("lse", "target_logit", "argmax")
    stats = apply(params, hidden, targets, statistics=names, method="row_statistics")
    assert_close(stats.lse, jax.nn.logsumexp(logits, axis=-1))
    assert_close(stats.target_logit, jnp.take_along_axis(logits, targets[..., None], -1)[..., 0])
    np.testing.assert_array_equal(stats.argmax, jnp.argmax(logits, axis=-1))


def test_options_of_a_call_replace_those_of_the_head_and_may_be_traced(make, hidden, labels):
    params, apply = make(label_smoothing=0.3, z_loss=0.3, **FAST)

    @jax.jit
    def loss(params, smoothing, z_loss, scale):
        return apply(params, hidden, labels, label_smoothing=smoothing, z_loss=z_loss, logit_scale=scale)

    logits = stored_logits(hidden, params["kernel"][...], scale=1.5)
    assert_close(loss(params, 0.1, 0.01, 1.5), mean_cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.01))
    assert_close(apply(params, hidden, method="logits", logit_scale=1.5), logits)
    plain = {"label_smoothing": 0.0, "z_loss": 0.0, "logit_scale": 1.5}
    assert_close(apply(params, hidden, labels, reduction="sum", **plain) / 12, mean_cross_entropy(logits, labels))


def test_reduction_normalizer_class_weights_and_metrics_pass_through(make, hidden, labels):
    params, apply = make(**FAST)
    per_token = apply(params, hidden, labels, reduction="none")
    assert per_token.shape == labels.shape
    assert_close(per_token[1, -2:], jnp.zeros(2))
    assert_close(apply(params, hidden, labels, normalizer=100.0), per_token.sum() / 100)
    class_weights = jnp.linspace(0.1, 1.0, VOCAB)
    weighted = jnp.sum(class_weights[jnp.maximum(labels, 0)] * per_token)
    assert_close(apply(params, hidden, labels, class_weights=class_weights, reduction="sum"), weighted)
    loss, metrics = apply(params, hidden, labels, return_metrics=True)
    assert_close(loss, per_token.sum() / 12)
    assert 12 in [int(value) for value in jax.tree.leaves(metrics)]


def test_bfloat16_compute_keeps_float32_parameters_loss_and_gradients_and_padding_has_none(make, hidden, labels):
    params, apply = make(dtype=jnp.bfloat16, padded_vocab_size=64, **BIAS, **ADAPTER)
    loss, grads = jax.value_and_grad(apply)(params, hidden, labels)
    everything = params, loss, grads, apply(params, hidden, method="logits")
    assert {x.dtype for x in jax.tree.leaves(everything)} == {jnp.dtype("float32")}

    def canonical(params):
        return mean_cross_entropy(logits_of(params, hidden)[..., :VOCAB], labels)

    assert_close((loss, grads), jax.value_and_grad(canonical)(params), rtol=0.1, atol=5e-3)
    assert_close(loss, canonical(params), rtol=2e-2)
    kernel = grads["kernel"][:, :VOCAB]
    # Not rounded to bfloat16 on the way, which a cast of the kernel in the module would have done.
    assert np.mean(kernel != kernel.astype(jnp.bfloat16).astype(jnp.float32)) > 0.9
    of_columns = [x for x in jax.tree.leaves(grads) if x.shape[-1] == 64]
    assert len(of_columns) == 3
    assert not any(np.any(x[..., VOCAB:]) for x in of_columns)


def test_every_product_has_the_precision_of_the_head(framework, hidden, labels):
    head = of(framework, "LossHead", FEATURES, VOCAB, precision="tensorfloat32")
    several = of(framework, "MultiTokenLossHead", head, num_tokens=2)
    for module, method, given in (
        (head, "__call__", (hidden, labels)),
        (head, "logits", (hidden,)),
        (head, "row_statistics", (hidden, labels)),
        (several, "__call__", (hidden, labels)),
    ):
        params, apply = initialised(module, hidden, labels)

        def total(params, *given, apply=apply, method=method):
            return sum(jnp.sum(x) for x in jax.tree.leaves(apply(params, *given, method=method)))

        text = jax.jit(jax.grad(total)).lower(params, *given).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert products
        assert all("precision = [HIGH, HIGH]" in line for line in products)


def test_without_dtype_inputs_and_parameters_are_promoted(make, hidden, labels):
    narrow = hidden.astype(jnp.bfloat16)
    params, apply = make(**FAST)
    assert_close(apply(params, narrow, labels), apply(params, narrow.astype(jnp.float32), labels))
    half, apply = make(param_dtype=jnp.bfloat16, **FAST)
    assert half["kernel"].dtype == jax.grad(apply)(half, narrow, labels)["kernel"].dtype == jnp.bfloat16


def test_attributes_can_be_changed_after_construction(hidden, labels):
    head = on_nnx.LossHead(FEATURES, VOCAB, label_smoothing=0.3, rngs=nnx.Rngs(0), **FAST)
    head.label_smoothing = 0.0
    assert_close(nnx.jit(lambda head: head(hidden, labels))(head), mean_cross_entropy(head.logits(hidden), labels))


def test_a_rematerialised_head_has_the_same_gradients(framework, hidden, labels):
    def through_linen(*given):
        return initialised(nn.remat(linen.LossHead)(FEATURES, VOCAB), hidden, labels)[1](*given)

    def through_nnx(params, *given):
        return nnx.remat(lambda head: head(*given))(nnx.merge(nnx.graphdef(head), params))

    head = of(framework, "LossHead", FEATURES, VOCAB)
    params, apply = initialised(head, hidden, labels)
    rematerialised = through_linen if framework is linen else through_nnx
    assert_close(jax.grad(rematerialised)(params, hidden, labels), jax.grad(apply)(params, hidden, labels))


def test_calls_name_what_is_wrong(make, hidden, labels):
    params, apply = make(**FAST)
    for message, given, options in (
        ("hidden", (hidden[..., :8], labels), {}),
        (REFUSED, (hidden[..., :8],), {"method": "logits"}),
        ("labels", (hidden, labels[:, :-1]), {}),
        ("reduction", (hidden, labels), {"reduction": "average"}),
    ):
        with pytest.raises(ValueError, match=message):
            apply(params, *given, **options)


def test_construction_names_what_is_wrong(framework, hidden, labels):
    def embed(features):
        return of(nn if framework is linen else nnx, "Embed", VOCAB, features)

    def call(**options):
        params, apply = initialised(of(framework, "LossHead", FEATURES, VOCAB, **options), hidden, labels)
        return apply(params, hidden, labels)

    wrong = [
        ("padded_vocab_size=30 is smaller than vocab_size=37", {"padded_vocab_size": 30}),
        (r"embed has shape \(37, 8\), but this head needs \(37, 16\)", {"embed": embed(8)}),
        *((r"lora_scale is a .* multiply lora_b", {"lora_rank": 2, "lora_scale": x}) for x in ("2", jnp.ones(()))),
        *((f"lora_rank={x} must be None or an integer from 1 to 16", {"lora_rank": x}) for x in (0, -1, 17, 2.0, True)),
    ]
    for words, options in wrong:
        with pytest.raises((ValueError, TypeError), match=words):
            call(**options)
    with pytest.raises(ValueError, match="vocab_size=38 is larger than the vocabulary of the shared weight, 37"):
        framework.LossHead.of(embed(FEATURES), vocab_size=38)
    with pytest.raises(TypeError, match=r"(embed|source) is a Dense"):
        framework.LossHead.of(nn.Dense(3))


def test_nnx_needs_random_numbers_for_parameters_and_a_table_to_tie_to():
    embed = of(nnx, "Embed", VOCAB, FEATURES)
    for words, make in (
        (r"pass rngs=nnx\.Rngs", lambda: on_nnx.LossHead(FEATURES, VOCAB)),
        (r"pass rngs=nnx\.Rngs", lambda: on_nnx.LossHead.of(embed, use_bias=True)),
        (r"source has shape \(3,\)", lambda: on_nnx.LossHead.of(nnx.Param(jnp.ones(3)), vocab_axis=0)),
    ):
        with pytest.raises(ValueError, match=words):
            make()
