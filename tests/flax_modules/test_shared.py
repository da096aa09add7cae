"""Heads on what a model has: an embedding in either framework; parameters and layers of NNX, adapted and quantised."""

import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from flax_modules import linen
from flax_modules import nnx as on_nnx
from flax_modules.nnx import LossHead
from tests.flax_modules.oracle import (
    FEATURES,
    NORMAL,
    RANK,
    VOCAB,
    assert_close,
    initialised,
    mean_cross_entropy,
    of,
    shifted,
    stored_logits,
)

WEIGHT = 0.3 * jax.random.normal(jax.random.key(5), (FEATURES, VOCAB))


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
    return of(nnx, "Einsum", "btd,vd->btv" if transposed else "btd,dv->btv", shape, **options)


@pytest.mark.parametrize(
    ("source", "axis"),
    [
        pytest.param(nnx.Param(WEIGHT), 1, id="param"),
        pytest.param(nnx.Param(WEIGHT.T), 0, id="transposed"),
        pytest.param(WEIGHT, 1, id="array"),
        pytest.param(np.asarray(WEIGHT.T), 0, id="numpy"),
        pytest.param(KerasVariable(WEIGHT), 1, id="keras"),
    ],
)
def test_a_parameter_is_the_weight(source, axis, hidden, labels):
    head = LossHead.of(source, vocab_axis=axis)
    want = mean_cross_entropy(stored_logits(hidden, WEIGHT), labels)
    assert_close(nnx.jit(lambda head: head(hidden, labels))(head), want)


def with_state(layer):
    """The layer with what packages keep in one beside its parameters."""
    layer.kernel_scale, layer.key = None, nnx.RngKey(jax.random.key(0), tag="dropout")
    layer.seen = nnx.Variable({"count": jnp.zeros(()), "sum": jnp.zeros(VOCAB)})  # as a quantiser of qwix
    layer.norm, layer.mean = nnx.Intermediate(jnp.zeros(VOCAB)), nnx.BatchStat(jnp.zeros(VOCAB))
    layer.calls, layer.dropout = nnx.Variable(jnp.zeros((), int)), nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    return layer


def layers():
    """Layers of several kinds, with which axis of the weight is the vocabulary, where they do not tell it."""
    bias, lora = {"bias_init": NORMAL}, {"b_initializer": NORMAL}
    linear = of(nnx, "Linear", FEATURES, VOCAB, **bias)
    yield "module", OwnEinsum(), 1
    yield "with its equation", OwnEinsum("BTD,DV->BTV"), None
    yield "einsum", einsum(False, bias_shape=(VOCAB,), **bias), None
    yield "transposed", einsum(True, bias_shape=(VOCAB,), **bias), None
    yield "linear", linear, None
    yield "lora of linear", of(nnx, "LoRA", FEATURES, RANK, VOCAB, base_module=linear, **lora), None
    yield "state beside the matrix", with_state(of(nnx, "Linear", FEATURES, VOCAB, dtype=np.float32, **bias)), None
    yield "lora linear", of(nnx, "LoRALinear", FEATURES, VOCAB, lora_rank=RANK, **lora, **bias), None


@pytest.mark.parametrize(("layer", "axis"), [pytest.param(*given, id=name) for name, *given in layers()])
def test_a_layer_is_its_weight_bias_and_adapter(layer, axis, hidden, labels):
    head = LossHead.of(layer, vocab_axis=axis)
    assert_close(head.logits(hidden), layer(hidden), rtol=1e-4, atol=1e-5)
    loss, grads = nnx.value_and_grad(lambda head: head(hidden, labels))(head)
    want, of_layer = nnx.value_and_grad(lambda layer: mean_cross_entropy(layer(hidden), labels))(layer)
    assert_close((loss, jax.tree.leaves(grads)), (want, jax.tree.leaves(of_layer)), rtol=1e-4, atol=1e-5)
    few = LossHead.of(layer, vocab_axis=axis, vocab_size=VOCAB - 2)
    assert_close(few.logits(hidden), layer(hidden)[..., :-2], rtol=1e-4, atol=1e-5)


def test_a_layer_may_be_given_a_bias_and_an_adapter(hidden):
    plain, rngs = einsum(True), nnx.Rngs(1)
    head = LossHead.of(plain, use_bias=True, bias_init=NORMAL, lora_rank=RANK, lora_b_init=NORMAL, rngs=rngs)
    added = hidden @ head.lora.lora_a[...] @ head.lora.lora_b[...] + head.bias[...]
    assert_close(head.logits(hidden), plain(hidden) + added, rtol=1e-4, atol=1e-5)


def test_an_array_is_differentiated_where_it_is_one_of_the_arguments(hidden, labels):
    gradient = jax.grad(lambda w: LossHead.of(w, vocab_axis=1)(hidden, labels))(WEIGHT)
    assert_close(gradient, jax.grad(lambda w: mean_cross_entropy(stored_logits(hidden, w), labels))(WEIGHT))


def test_what_is_replaced_in_the_source_is_the_heads_too(hidden, labels):
    variable, embed = KerasVariable(WEIGHT), of(nnx, "Embed", VOCAB, FEATURES)
    layer = of(nnx, "LoRALinear", FEATURES, VOCAB, lora_rank=RANK)
    heads = LossHead.of(variable, vocab_axis=1), LossHead.of(embed), LossHead.of(layer)
    assert [len(jax.tree.leaves(nnx.state(head))) for head in heads] == [0, 1, 4]
    assert len(jax.tree.leaves(nnx.state(nnx.List([layer, heads[2]])))) == 4
    variable.value = jnp.zeros_like(WEIGHT)
    embed.embedding = nnx.Param(jnp.ones((VOCAB, FEATURES)))
    layer.kernel[...] = jnp.zeros((FEATURES, VOCAB))
    layer.lora = of(nnx, "LoRA", FEATURES, 1, VOCAB)
    for head in heads:
        assert_close(head(hidden, labels), jnp.log(VOCAB))


@pytest.mark.parametrize(("kind", "sizes"), [("Embed", (VOCAB, FEATURES)), ("Linear", (FEATURES, VOCAB))])
def test_a_head_computes_in_the_dtype_and_precision_of_its_source(kind, sizes):
    narrow = of(nnx, kind, *sizes, dtype=jnp.bfloat16)
    assert LossHead.of(narrow).dtype == LossHead.of(of(nnx, kind, *sizes), dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert LossHead.of(of(nnx, "Linear", FEATURES, VOCAB, precision="highest")).precision == "highest"


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


def test_layers_that_a_head_does_not_take_are_refused_by_name():
    rngs = nnx.Rngs(0)
    linear, adapted = nnx.Linear(4, 9, rngs=rngs), nnx.LoRALinear(4, 9, lora_rank=2, rngs=rngs)
    make = LossHead.of

    def lora(base):
        return nnx.LoRA(4, 2, 9, base_module=base, rngs=rngs)

    class Own(nnx.Linear):
        pass

    def beside(name, *shape):
        layer = nnx.Linear(4, 9, use_bias=False, rngs=rngs)
        setattr(layer, name, nnx.Param(jnp.ones(shape)))
        return layer

    normed = beside("kernel_scale")
    normed.kernel_scale, normed.norm = None, nnx.LayerNorm(9, rngs=rngs)
    multiplies = nnx.Linear(4, 9, dot_general=lambda *given, **options: None, rngs=rngs)
    for error, words, call in (
        (TypeError, "source is an nnx.LoRA of a NoneType", lambda: make(lora(None))),
        (TypeError, "source is a list: pass a parameter", lambda: make([1])),
        (TypeError, "dot_general of its own", lambda: make(multiplies)),
        (TypeError, "Linear with kernel_scale beside its matrix, .*: dequantise", lambda: make(beside("kernel_scale"))),
        (TypeError, "Linear with kernel_scale beside its matrix", lambda: make(beside("kernel_scale", 9))),
        (TypeError, "Linear with norm beside its matrix", lambda: make(normed)),
        (TypeError, "Linear with b beside its matrix, .* call a bias `bias`", lambda: make(beside("b", 9))),
        (TypeError, r"Linear with the matrices \['kernel', 'scale'\]", lambda: make(beside("scale", 1, 9))),
        (TypeError, r"BatchNorm with the matrices \[\]", lambda: make(nnx.BatchNorm(4, rngs=rngs))),
        (ValueError, "vocab_axis=None, with a Own: pass 0 for", lambda: make(Own(4, 9, rngs=rngs))),
        (ValueError, "vocab_axis=0, but .* Linear is axis 1", lambda: make(linear, vocab_axis=0)),
        (ValueError, "vocab_axis=2, with a Param", lambda: make(linear.kernel, vocab_axis=2)),
        (ValueError, "nnx.LoRA of an LoRALinear: a head takes one adapter", lambda: make(lora(adapted))),
        (ValueError, "nnx.LoRA of an LoRA: a head takes one adapter", lambda: make(lora(lora(linear)))),
        (ValueError, "lora_rank=2, but .* has an adapter", lambda: make(adapted, lora_rank=2, rngs=rngs)),
        (ValueError, "use_bias=True, but the head shares", lambda: make(linear, use_bias=True, rngs=rngs)),
        (ValueError, "vocab_size=10 is larger than .* weight, 9", lambda: make(linear, vocab_size=10)),
        (ValueError, r"linear has shape \(4, 9\), .* \(4, 8\)", lambda: LossHead(4, 8, linear=linear)),
        (ValueError, "both given", lambda: LossHead(4, 9, embed=nnx.Embed(9, 4, rngs=rngs), linear=linear)),
        (ValueError, r"pass rngs=nnx\.Rngs", lambda: make(linear, lora_rank=2)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


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
