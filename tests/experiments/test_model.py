"""The language model: what its hidden states depend on, its two heads, and dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.lm.config import TrainConfig
from experiments.lm.model.objective import OBJECTIVES, fused, objective
from experiments.lm.model.transformer import LanguageModel, rotary

END = 0
CONFIG = TrainConfig(vocab_size=300, width=16, layers=2, attention_heads=2, mlp_width=32)


def make_model(**changes: object) -> LanguageModel:
    return LanguageModel(dataclasses.replace(CONFIG, **changes), END, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 12), 1, 300)


@pytest.mark.nightly  # the gate trains it by its command
def test_a_hidden_state_depends_on_the_tokens_of_its_document_up_to_its_own(tokens: jax.Array) -> None:
    body = make_model().body
    before, after = body(tokens), body(tokens.at[:, 6].add(1))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(np.asarray(before[:, 6:] != after[:, 6:]), axis=-1))
    two_documents = tokens.at[:, 5].set(END)
    before, after = body(two_documents), body(two_documents.at[:, :5].add(1))
    np.testing.assert_array_equal(before[:, 6:], after[:, 6:])
    assert np.any(np.asarray(before[:, 5] != after[:, 5]))


@pytest.mark.nightly
def test_rotary_products_depend_on_the_distance_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turned_query, turned_key = rotary(jnp.tile(query, (1, 20, 1, 1))), rotary(jnp.tile(key, (1, 20, 1, 1)))
    products = jnp.einsum("bqhd,bkhd->qk", turned_query, turned_key, precision="highest")
    for distance in (0, 1, 7):
        diagonal = jnp.diagonal(products, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_both_heads_and_recomputed_blocks_give_the_same_loss_and_gradients(tokens: jax.Array, tied: bool) -> None:
    def results(head: str, remat: bool) -> tuple[jax.Array, nnx.State]:
        model = make_model(tie_embeddings=tied, remat=remat)
        names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))]
        assert any(name.startswith("head") and "kernel" in name for name in names) is not tied
        return nnx.value_and_grad(lambda model: OBJECTIVES[head](model, tokens.at[0, 4].set(END)))(model)

    loss, gradients = results("fused", False)
    for head, remat in (("canonical", False), ("fused", True)):
        other, others = results(head, remat)
        np.testing.assert_allclose(loss, other, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, others)


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["fused", "canonical"])
def test_in_bfloat16_the_parameters_and_the_loss_stay_float32(tokens: jax.Array, head: str) -> None:
    model = make_model(dtype="bfloat16")
    loss, gradients = nnx.value_and_grad(lambda model: OBJECTIVES[head](model, tokens))(model)
    assert model.body(tokens).dtype == jnp.bfloat16
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["cross_entropy", "chunked_cross_entropy"])
def test_the_padding_of_a_split_vocabulary_has_no_part_in_a_smoothed_loss(name: str) -> None:
    options = {"mesh": "tensor=3", "label_smoothing": 0.1, "z_loss_weight": 1e-2, "logit_softcap": 2.0}
    model = make_model(vocab_size=257, layers=1, loss_fn=name, **options)
    rows = jax.random.randint(jax.random.key(1), (2, 9), 1, 257)
    assert model.head.kernel is not None
    assert model.head.kernel.shape == (16, 258)
    config = dataclasses.replace(CONFIG, vocab_size=257, layers=1, loss_fn=name, **options)
    np.testing.assert_allclose(objective(config, "logits")(model, rows), fused(model, rows), rtol=1e-5)
