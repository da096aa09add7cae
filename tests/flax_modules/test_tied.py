"""Heads tied to the embedding of a model, in either framework: one parameter with two uses."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_modules import linen
from flax_modules import nnx as on_nnx
from tests.flax_modules.oracle import assert_close, initialised, mean_cross_entropy, of, shifted, stored_logits

FEATURES, VOCAB = 16, 37


def tied(package, embed, k):
    """A head for one token, or for the next k."""
    head = package.LossHead.of(embed)
    return head if k == 1 else of(package, "MultiTokenLossHead", head, k)


class LinenInSetup(nn.Module):
    k: int

    def setup(self):
        self.embed = nn.Embed(VOCAB, FEATURES)
        self.head = tied(linen, self.embed, self.k)

    def __call__(self, tokens, labels):
        return self.head(self.embed(tokens), labels)

    def logits(self, tokens):
        return self.head.logits(self.embed(tokens))


class LinenCompact(nn.Module):
    k: int

    @nn.compact
    def __call__(self, tokens, labels):
        embed = nn.Embed(VOCAB, FEATURES, name="embed")
        return tied(linen, embed, self.k)(embed(tokens), labels)


class OnNnx(nnx.Module):
    def __init__(self, k):
        self.embed = nnx.Embed(VOCAB, FEATURES, rngs=nnx.Rngs(0))
        self.head = tied(on_nnx, self.embed, k)

    def __call__(self, tokens, labels):
        return self.head(self.embed(tokens), labels)

    def logits(self, tokens):
        return self.head.logits(self.embed(tokens))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("model", [LinenInSetup, LinenCompact, OnNnx])
def test_a_tied_embedding_is_one_parameter_whose_gradient_sums_both_uses(model, k, labels):
    tokens = jnp.maximum(labels, 0)
    params, apply = initialised(model(k), tokens, labels)
    assert sorted(x.shape for x in jax.tree.leaves(params)) == [(FEATURES, FEATURES)] * (k - 1) + [(VOCAB, FEATURES)]
    table = params["embed"]["embedding"][...]

    def two_uses(table_in, table_out):
        logits = stored_logits(table_in[tokens], table_out.T)  # projections are still zero
        return sum(mean_cross_entropy(logits, shifted(labels, i)) for i in range(k)) / k

    loss, grads = jax.value_and_grad(apply)(params, tokens, labels)
    assert_close(loss, two_uses(table, table))
    assert_close(grads["embed"]["embedding"][...], sum(jax.grad(two_uses, argnums=(0, 1))(table, table)))
    if model is not LinenCompact:
        assert_close(apply(params, tokens, method="logits"), stored_logits(table[tokens], table.T))


def test_an_embedding_that_is_replaced_is_the_heads_too(labels):
    model = OnNnx(1)
    model.embed.embedding = nnx.Param(jnp.ones((VOCAB, FEATURES)))
    assert_close(model(jnp.maximum(labels, 0), labels), jnp.log(VOCAB))


def test_a_tied_head_computes_in_the_dtype_of_its_embedding():
    narrow, wide = (nnx.Embed(VOCAB, FEATURES, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in (jnp.bfloat16, None))
    assert on_nnx.LossHead.of(narrow).dtype == jnp.bfloat16
    assert on_nnx.LossHead.of(wide, dtype=jnp.bfloat16).dtype == jnp.bfloat16
