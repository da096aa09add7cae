import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.lm.config import TrainConfig
from experiments.lm.model.objective import OBJECTIVES
from experiments.lm.model.transformer import LanguageModel, rotary

pytestmark = pytest.mark.nightly  # the gate trains it by its command

END = 0
CONFIG = TrainConfig(vocab_size=300, width=16, layers=2, attention_heads=2, mlp_width=32)


def make_model(**changes: object) -> LanguageModel:
    return LanguageModel(dataclasses.replace(CONFIG, **changes), END, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 12), 1, 300)


def test_a_hidden_state_depends_on_the_tokens_before_it_only(tokens: jax.Array) -> None:
    model = make_model()
    before, after = model.body(tokens), model.body(tokens.at[:, 6].add(1))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(np.asarray(before[:, 6:] != after[:, 6:]), axis=-1))


def test_a_hidden_state_depends_on_its_own_document_only(tokens: jax.Array) -> None:
    model = make_model()
    two_documents = tokens.at[:, 5].set(END)
    other_first = two_documents.at[:, :5].add(1)
    before, after = model.body(two_documents), model.body(other_first)
    np.testing.assert_array_equal(before[:, 6:], after[:, 6:])
    assert np.any(np.asarray(before[:, 5] != after[:, 5]))


def test_rotary_products_depend_on_the_distance_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turned_query, turned_key = rotary(jnp.tile(query, (1, 20, 1, 1))), rotary(jnp.tile(key, (1, 20, 1, 1)))
    products = jnp.einsum("bqhd,bkhd->qk", turned_query, turned_key, precision="highest")
    for distance in (0, 1, 7):
        diagonal = jnp.diagonal(products, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)


def test_recomputing_blocks_changes_no_gradient(tokens: jax.Array) -> None:
    def gradients(remat: bool) -> nnx.State:
        return nnx.grad(lambda model: OBJECTIVES["fused"](model, tokens))(make_model(remat=remat))

    plain, recomputed = gradients(False), gradients(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, recomputed)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_adds_no_parameters(tied: bool) -> None:
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(make_model(tie_embeddings=tied)))]
    assert len([name for name in names if "kernel" in name and name.startswith("head")]) == (0 if tied else 1)


@pytest.mark.parametrize("tied", [False, True])
def test_fused_and_canonical_give_the_same_loss_and_gradients(tokens: jax.Array, tied: bool) -> None:
    model = make_model(tie_embeddings=tied)
    rows = tokens.at[0, 4].set(END)
    (fused, fused_gradients), (canonical, canonical_gradients) = (
        nnx.value_and_grad(lambda model, head=head: OBJECTIVES[head](model, rows))(model) for head in OBJECTIVES
    )
    np.testing.assert_allclose(fused, canonical, rtol=1e-6)
    assert len(jax.tree.leaves(fused_gradients)) > 10
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), fused_gradients, canonical_gradients
    )


@pytest.mark.parametrize("head", ["fused", "canonical"])
def test_in_bfloat16_the_parameters_and_the_loss_stay_float32(tokens: jax.Array, head: str) -> None:
    model = make_model(dtype="bfloat16")
    loss, gradients = nnx.value_and_grad(lambda model: OBJECTIVES[head](model, tokens))(model)
    assert model.body(tokens).dtype == jnp.bfloat16
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
