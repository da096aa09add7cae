"""Heads of NNX on what a model has already: parameters and layers of several kinds, with adapters and quantised."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from flax_modules.nnx import LossHead
from tests.flax_modules.oracle import assert_close, mean_cross_entropy, stored_logits

FEATURES, VOCAB, RANK = 16, 37, 3
WEIGHT = 0.3 * jax.random.normal(jax.random.key(5), (FEATURES, VOCAB))


class KerasVariable:
    """What the head needs to know of a variable of Keras."""

    def __init__(self, value):
        self.value, self.shape = value, value.shape


class OwnEinsum(nnx.Module):
    """As models have them: a matrix under a name of its own."""

    def __init__(self, einsum_str=None):
        self.w, self.einsum_str = nnx.Param(WEIGHT), einsum_str

    def __call__(self, x):
        return jnp.einsum("btd,dv->btv", x, self.w[...], precision="highest")


def einsum(transposed, **options):
    shape = (VOCAB, FEATURES) if transposed else (FEATURES, VOCAB)
    return nnx.Einsum("btd,vd->btv" if transposed else "btd,dv->btv", shape, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("source", "axis"),
    [
        pytest.param(nnx.Param(WEIGHT), 1, id="param"),
        pytest.param(nnx.Param(WEIGHT.T), 0, id="transposed"),
        pytest.param(WEIGHT, 1, id="array"),
        pytest.param(np.asarray(WEIGHT.T), 0, id="numpy"),
        pytest.param(KerasVariable(WEIGHT), 1, id="keras"),
        pytest.param(OwnEinsum(), 1, id="module"),
        pytest.param(OwnEinsum("BTD,DV->BTV"), None, id="with its equation"),
    ],
)
def test_a_parameter_or_layer_is_its_weight(source, axis, hidden, labels):
    head = LossHead.of(source, vocab_axis=axis)
    want = mean_cross_entropy(stored_logits(hidden, WEIGHT), labels)
    assert_close(head(hidden, labels), want)
    assert_close(nnx.jit(lambda head: head(hidden, labels))(head), want)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_einsum_tells_which_axis_and_has_its_bias_or_is_given_one(transposed, hidden):
    layer = einsum(transposed, bias_shape=(VOCAB,), bias_init=jax.nn.initializers.normal(0.5))
    assert_close(LossHead.of(layer).logits(hidden), layer(hidden), rtol=1e-4, atol=1e-5)
    plain = einsum(transposed)
    head = LossHead.of(plain, use_bias=True, bias_init=jax.nn.initializers.ones, rngs=nnx.Rngs(1))
    assert_close(head.logits(hidden), plain(hidden) + 1, rtol=1e-4, atol=1e-5)


def test_an_array_is_differentiated_where_it_is_one_of_the_arguments(hidden, labels):
    gradient = jax.grad(lambda w: LossHead.of(w, vocab_axis=1)(hidden, labels))(WEIGHT)
    assert_close(gradient, jax.grad(lambda w: mean_cross_entropy(stored_logits(hidden, w), labels))(WEIGHT))


def test_a_variable_of_another_library_is_read_in_every_call(hidden, labels):
    variable = KerasVariable(WEIGHT)
    head = LossHead.of(variable, vocab_axis=1)
    assert not jax.tree.leaves(nnx.state(head))
    variable.value = jnp.zeros_like(WEIGHT)
    assert_close(head(hidden, labels), jnp.log(VOCAB))


def adapted(layer, name):
    """The layer as qwix leaves it: the factors beside the weight."""
    a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(FEATURES, RANK), (RANK, VOCAB)]))
    setattr(layer, f"{name}_lora_a", nnx.LoRAParam(a))
    setattr(layer, f"{name}_lora_b", nnx.LoRAParam(b))
    return 2.0 * a @ b


@pytest.mark.parametrize(
    ("made", "name"),
    [(lambda: einsum(False), "kernel"), (lambda: einsum(True), "kernel"), (lambda: OwnEinsum("btd,dv->btv"), "w")],
    ids=["einsum", "transposed", "module"],
)
def test_an_adapter_of_qwix_is_served_and_trained_alone(made, name, hidden, labels):
    layer = made()
    plain = layer(hidden)
    added = adapted(layer, name)
    with pytest.raises(ValueError, match=r"lora_scale is missing: the adapter of this \w*Einsum .*=alpha / rank"):
        LossHead.of(layer)
    head = LossHead.of(layer, lora_scale=2.0)
    assert_close(head.logits(hidden), plain + hidden @ added, rtol=1e-4, atol=1e-4)
    grads = nnx.grad(lambda head: head(hidden, labels), argnums=nnx.DiffState(0, nnx.LoRAParam))(head)
    assert sorted(x.shape for x in jax.tree.leaves(grads)) == [(RANK, VOCAB), (FEATURES, RANK)]
    with pytest.raises(ValueError, match="lora_rank=2, but the head shares a layer that has an adapter"):
        LossHead.of(layer, lora_scale=2.0, lora_rank=2, rngs=nnx.Rngs(0))


def test_adapters_that_came_after_the_head_or_beside_another_are_refused(hidden, labels):
    layer, two = einsum(False), nnx.LoRALinear(FEATURES, VOCAB, lora_rank=RANK, rngs=nnx.Rngs(0))
    head = LossHead.of(layer)
    adapted(layer, "kernel")
    with pytest.raises(ValueError, match=r"adapted the layer after the head: make it anew by LossHead\.of"):
        head(hidden, labels)
    adapted(two, "kernel")
    with pytest.raises(ValueError, match="LoRALinear with two adapters"):
        LossHead.of(two, lora_scale=1.0)


@struct.dataclass
class Quantised:
    """As `qwix.QArray`: integers with a scale."""

    qvalue: jax.Array
    scale: jax.Array
    shape = property(lambda self: self.qvalue.shape)


@struct.dataclass
class WithHow:
    """As qwix wraps it: with how it was quantised."""

    array: Quantised
    shape = property(lambda self: self.array.shape)


nnx.register_data_type(Quantised)
nnx.register_data_type(WithHow)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_quantised_weight_is_dequantised_by_its_own_package(wrapped, hidden, labels, monkeypatch):
    scale = jnp.abs(WEIGHT).max(axis=0, keepdims=True) / 127
    weight = Quantised(jnp.round(WEIGHT / scale).astype(jnp.int8), scale)
    head = LossHead.of(WithHow(weight) if wrapped else weight, vocab_axis=1)
    monkeypatch.setattr(Quantised, "__module__", "quantising.arrays")
    with pytest.raises(TypeError, match=r"is a quantising Quantised, and quantising\.dequantize does not exist"):
        head(hidden, labels)
    package = types.SimpleNamespace(dequantize=lambda x: x.qvalue * x.scale)
    monkeypatch.setitem(sys.modules, "quantising", package)
    assert_close(head.logits(hidden), stored_logits(hidden, weight.qvalue * scale), rtol=1e-4, atol=1e-5)


class Model(nnx.Module):
    """A model for qwix, which calls it."""

    def __init__(self, einsums, rngs):
        self.body = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        options = {"rngs": rngs, "bias_init": jax.nn.initializers.normal(0.5)}
        if einsums:
            self.lm_head = nnx.Einsum("btd,dv->btv", (FEATURES, VOCAB), (VOCAB,), **options)
        else:
            self.lm_head = nnx.Linear(FEATURES, VOCAB, **options)

    def __call__(self, x):
        return self.lm_head(self.body(x))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix's own
@pytest.mark.parametrize("einsums", [False, True])
@pytest.mark.parametrize("quantised", [{}, {"weight_qtype": jnp.int8, "tile_size": 8}], ids=["", "int8"])
def test_a_model_that_qwix_adapted(einsums, quantised, hidden, labels):
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path=".*lm_head", rank=RANK, alpha=8.0, **quantised)
    model = qwix.apply_lora_to_model(Model(einsums, nnx.Rngs(0)), provider, hidden, rngs=nnx.Rngs(1))
    model.lm_head.kernel_lora_b[...] = jax.random.normal(jax.random.key(1), (RANK, VOCAB))
    head = LossHead.of(model.lm_head, lora_scale=8.0 / RANK)
    assert_close(head.logits(model.body(hidden)), model(hidden), rtol=1e-3, atol=1e-3)

    def gradients(loss):
        return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)

    def streamed(model):
        return LossHead.of(model.lm_head, lora_scale=8.0 / RANK)(model.body(hidden), labels)

    want = gradients(lambda model: mean_cross_entropy(model(hidden), labels))
    assert_close(gradients(streamed), want, rtol=1e-3, atol=1e-4)
