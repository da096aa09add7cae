"""Adapters (LoRA) of a head in either framework: the head whose weight they were added to, and what they cost."""

import re

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_modules import linen
from flax_modules import nnx as on_nnx
from pallas_ce import MeshAxes
from tests.flax_modules.oracle import (
    assert_agrees,
    assert_close,
    initialised,
    mean_cross_entropy,
    of,
    shifted,
    stored_logits,
)

FEATURES, VOCAB, RANK = 16, 37, 3
# An adapter that is something, where what starts at zero would hide a mistake.
DRAWN = {"lora_rank": RANK, "lora_scale": 0.7, "lora_b_init": jax.nn.initializers.normal(0.5)}


class Tied(nn.Module):
    """A head of Linen on an embedding."""

    options: dict
    features: int = FEATURES
    vocab: int = VOCAB

    def setup(self):
        self.embed = nn.Embed(self.vocab, self.features)
        self.head = linen.LossHead.of(self.embed, **self.options)

    def __call__(self, hidden, labels):
        return self.head(hidden, labels)

    def logits(self, hidden):
        return self.head.logits(hidden)


def head(package, tied, features=FEATURES, vocab=VOCAB, **options):
    if not tied:
        return of(package, "LossHead", features, vocab, **options)
    if package is linen:
        return Tied(options, features, vocab)
    rngs = nnx.Rngs(0)
    return on_nnx.LossHead.of(nnx.Embed(vocab, features, rngs=rngs), rngs=rngs, **options)


def name_of(path):
    """Of the parameter of a head that is there; None for a projection of the hidden states."""
    where = jax.tree_util.keystr(path)
    names = ("kernel", "embedding", "bias", "lora_a", "lora_b")
    return None if "projections" in where else next(name for name in names if name in where)


def named(params):
    """The parameters of a head, by name."""
    found = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return {name: leaf for name, leaf in found.items() if name is not None}


def replaced(params, new):
    """The parameters, with leaves named in `new` replaced."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: new.get(name_of(path), leaf), params)


def parts(params):
    """Weight as `[H, V]`, `lora_a` and `lora_b`."""
    found = named(params)
    weight = found["kernel"] if "kernel" in found else found["embedding"].T
    return weight, found["lora_a"], found["lora_b"]


def products(function, *given):
    """Shapes of the results of all matrix products in the program of a function."""
    lines = [x for x in jax.jit(function).lower(*given).as_text().splitlines() if "stablehlo.dot_general" in x]
    return [tuple(map(int, re.findall(r"(\d+)x", line.rpartition("tensor<")[2]))) for line in lines]


def layer(kind, features, vocab, rank, rngs, **options):
    """A layer of NNX of that kind, with an adapter where the kind has one."""
    drawn = {"b_initializer": jax.nn.initializers.normal(0.5), "rngs": rngs}
    if kind == "lora linear":
        return nnx.LoRALinear(features, vocab, lora_rank=rank, **drawn, **options)
    linear = nnx.Linear(features, vocab, rngs=rngs, **options)
    return nnx.LoRA(features, rank, vocab, base_module=linear, **drawn) if kind == "lora of linear" else linear


@pytest.mark.parametrize(
    ("package", "kind"),
    [(linen, "own"), (linen, "tied")]
    + [(on_nnx, kind) for kind in ("own", "tied", "linear", "lora of linear", "lora linear")],
)
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 3)
@hypothesis.given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 40)),
    data=st.data(),
    backward=st.sampled_from(["in_forward", "recompute"]),
)
def test_a_head_of_any_shape_is_the_one_whose_weight_has_the_term_in_it(package, sizes, data, backward, kind):
    tokens, features, vocab = sizes
    rank = data.draw(st.integers(1, min(features, vocab)), "rank")
    scale = data.draw(st.sampled_from([1.0, 0.5, -2.0]), "scale")
    rngs = nnx.Rngs(data.draw(st.integers(0, 9), "seed"))
    options = {"backward": backward, "lora_scale": scale}
    own = {"lora_rank": rank, "lora_b_init": jax.nn.initializers.normal(0.5)}
    if kind in ("own", "tied"):
        made = head(package, kind == "tied", features, vocab, **options, **own)
    else:
        source = layer(kind, features, vocab, rank, rngs, use_bias=False)
        made = on_nnx.LossHead.of(source, rngs=rngs, **options, **(own if kind == "linear" else {}))
    hidden = jax.random.normal(rngs(), (tokens, features))
    labels = jax.random.randint(rngs(), (tokens,), -1, vocab).at[0].set(0)
    params, apply = initialised(made, hidden, labels)

    def logits(params, hidden):
        weight, a, b = parts(params)
        return stored_logits(hidden, weight + scale * a @ b)

    assert_agrees(apply, lambda *x: mean_cross_entropy(logits(*x), labels), params, hidden, labels, 1e-4, 1e-5)
    assert_close(apply(params, hidden, method="logits"), logits(params, hidden), rtol=1e-4, atol=1e-5)


def test_it_starts_as_the_head_without_and_keeps_its_parameters(framework, hidden, labels):
    plain, apply_plain = initialised(of(framework, "LossHead", FEATURES, VOCAB), hidden, labels)
    params, apply = initialised(of(framework, "LossHead", FEATURES, VOCAB, lora_rank=RANK), hidden, labels)
    weight, a, b = parts(params)
    np.testing.assert_array_equal(weight, plain["kernel"][...])
    assert (a.shape, b.shape) == ((FEATURES, RANK), (RANK, VOCAB))
    assert np.any(a)
    assert not np.any(b)
    assert_close(apply(params, hidden, labels), apply_plain(plain, hidden, labels))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_frozen_weight_costs_no_product(framework, tied, backward, hidden, labels):
    params, apply = initialised(head(framework, tied, backward=backward, implementation="xla", **DRAWN), hidden, labels)

    def wide(*names):
        """Products whose result has the weight's width H, like hidden states or the weight's gradient."""
        chosen = {name: x for name, x in named(params).items() if name in names}
        made = products(jax.grad(lambda x: apply(replaced(params, x), hidden, labels)), chosen)
        assert made
        return [shape for shape in made if FEATURES in shape and RANK not in shape]

    assert not wide("lora_a", "lora_b")
    assert wide("kernel", "embedding", "lora_a", "lora_b")


def test_nnx_trains_the_adapter_alone(hidden, labels):
    head = on_nnx.LossHead(FEATURES, VOCAB, lora_rank=RANK, rngs=nnx.Rngs(0), implementation="reference")
    before = jax.tree.map(jnp.copy, nnx.state(head))
    optimizer = nnx.Optimizer(head, optax.adam(0.1), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(head, optimizer):
        of_adapter = nnx.value_and_grad(lambda head: head(hidden, labels), argnums=nnx.DiffState(0, nnx.LoRAParam))
        loss, grads = of_adapter(head)
        optimizer.update(head, grads)
        return loss

    losses = [step(head, optimizer) for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_array_equal(before["kernel"][...], head.kernel[...])
    assert np.any(head.lora.lora_b[...])


def test_heads_of_several_tokens_share_it(framework, hidden, labels):
    several = of(framework, "MultiTokenLossHead", of(framework, "LossHead", FEATURES, VOCAB, **DRAWN), 2)
    params, apply = initialised(several, hidden, labels)

    def merged(x):
        logits = stored_logits(hidden, x["kernel"] + 0.7 * x["lora_a"] @ x["lora_b"])  # projections are still zero
        return sum(mean_cross_entropy(logits, shifted(labels, i)) for i in range(2)) / 2

    actual = jax.value_and_grad(lambda x: apply(replaced(params, x), hidden, labels))(named(params))
    assert_close(actual, jax.value_and_grad(merged)(named(params)))


def test_padding_is_none_of_its_vocabulary_and_its_parameters_keep_their_dtype(framework, hidden, labels):
    options = DRAWN | {"padded_vocab_size": 64, "dtype": jnp.bfloat16, "use_bias": True}
    params, apply = initialised(of(framework, "LossHead", FEATURES, VOCAB, **options), hidden, labels)
    assert named(params)["lora_b"].shape == (RANK, 64)
    loss, grads = jax.value_and_grad(apply)(params, hidden, labels)
    weight, a, b = parts(params)
    want = mean_cross_entropy(stored_logits(hidden, (weight + 0.7 * a @ b)[:, :VOCAB]), labels)
    assert_close(loss, want, rtol=2e-2)
    _, of_a, of_b = parts(grads)
    assert of_a.dtype == of_b.dtype == jnp.float32
    assert not np.any(of_b[:, VOCAB:])
    assert np.any(of_b[:, :VOCAB])


def test_inside_a_shard_map_lora_b_is_split_as_the_kernel_is(framework, hidden, labels):
    params, whole = initialised(of(framework, "LossHead", FEATURES, VOCAB, **DRAWN), hidden, labels)
    split = of(framework, "LossHead", FEATURES, VOCAB, mesh_axes=MeshAxes(vocabulary="tensor"), **DRAWN)

    def part(params, *given):
        if framework is linen:
            return split.apply({"params": params}, *given)
        return nnx.merge(nnx.split(split)[0], params)(*given)

    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    places = replaced(params, {"kernel": P(None, "tensor"), "lora_a": P(), "lora_b": P(None, "tensor")})
    sharded = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(places, P(), P()), out_specs=P()))
    assert_close(sharded(params, hidden, labels), whole(params, hidden, labels))


@pytest.mark.parametrize("kind", ["linear", "lora of linear", "lora linear"])
def test_a_layer_of_the_model_gives_its_logits(kind, hidden, labels):
    source = layer(kind, FEATURES, VOCAB, RANK, nnx.Rngs(0), bias_init=jax.nn.initializers.normal(0.5))
    made = on_nnx.LossHead.of(source)
    assert_close(made.logits(hidden), source(hidden), rtol=1e-4, atol=1e-5)
    assert_close(made(hidden, labels), mean_cross_entropy(source(hidden), labels))
    few = on_nnx.LossHead.of(source, vocab_size=VOCAB - 2)
    assert_close(few.logits(hidden), source(hidden)[..., :-2], rtol=1e-4, atol=1e-5)


def test_a_layer_is_shared_and_computes_as_it_says(hidden, labels):
    layer = nnx.LoRALinear(FEATURES, VOCAB, lora_rank=RANK, dtype=jnp.bfloat16, precision="highest", rngs=nnx.Rngs(0))
    made = on_nnx.LossHead.of(layer)
    assert (made.dtype, made.precision) == (jnp.bfloat16, "highest")
    layer.kernel[...] = jnp.zeros((FEATURES, VOCAB))
    layer.lora = nnx.LoRA(FEATURES, 1, VOCAB, rngs=nnx.Rngs(1))
    assert_close(made(hidden, labels), jnp.log(VOCAB))
    model = nnx.List([layer, made])
    assert len(jax.tree.leaves(nnx.state(model))) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"lora_rank": x} for x in (0, -1, FEATURES + 1, 2.0, True)] + [{"lora_scale": x} for x in ("2", jnp.ones(()))],
)
def test_a_rank_or_scale_that_cannot_be_is_named(framework, wrong, hidden, labels):
    rank = rf"lora_rank={wrong.get('lora_rank')} must be None or an integer from 1 to {FEATURES}"

    def call():
        made = of(framework, "LossHead", FEATURES, VOCAB, **{"lora_rank": 2} | wrong)
        return made.init(jax.random.key(0), hidden, labels) if framework is linen else made(hidden, labels)

    with pytest.raises((ValueError, TypeError), match=rf"{rank}|lora_scale is a .* multiply lora_b"):
        call()


def test_layers_that_a_head_does_not_take_are_refused_by_name():
    rngs = nnx.Rngs(0)
    linear, adapted = nnx.Linear(4, 9, rngs=rngs), nnx.LoRALinear(4, 9, lora_rank=2, rngs=rngs)
    make = on_nnx.LossHead.of

    def lora(base):
        return nnx.LoRA(4, 2, 9, base_module=base, rngs=rngs)

    class Own(nnx.Linear):
        pass

    multiplies = nnx.Linear(4, 9, dot_general=lambda *given, **options: None, rngs=rngs)
    for error, words, call in (
        (TypeError, "source is an nnx.LoRA of a NoneType", lambda: make(lora(None))),
        (TypeError, "source is a list: pass a parameter", lambda: make([1])),
        (TypeError, "dot_general of its own", lambda: make(multiplies)),
        (TypeError, r"BatchNorm with the matrices \[\]", lambda: make(nnx.BatchNorm(4, rngs=rngs))),
        (ValueError, "vocab_axis=None, with a Own: pass 0 for", lambda: make(Own(4, 9, rngs=rngs))),
        (ValueError, "vocab_axis=0, but .* Linear is axis 1", lambda: make(linear, vocab_axis=0)),
        (ValueError, "vocab_axis=2, with a Param", lambda: make(linear.kernel, vocab_axis=2)),
        (ValueError, "nnx.LoRA of an LoRALinear: a head takes one adapter", lambda: make(lora(adapted))),
        (ValueError, "nnx.LoRA of an LoRA: a head takes one adapter", lambda: make(lora(lora(linear)))),
        (ValueError, "lora_rank=2, but .* has an adapter", lambda: make(adapted, lora_rank=2, rngs=rngs)),
        (ValueError, "use_bias=True, but the head shares", lambda: make(linear, use_bias=True, rngs=rngs)),
        (ValueError, "vocab_size=10 is larger than .* weight, 9", lambda: make(linear, vocab_size=10)),
        (ValueError, r"linear has shape \(4, 9\), .* \(4, 8\)", lambda: on_nnx.LossHead(4, 8, linear=linear)),
        (ValueError, "both given", lambda: on_nnx.LossHead(4, 9, embed=nnx.Embed(9, 4, rngs=rngs), linear=linear)),
        (ValueError, r"pass rngs=nnx\.Rngs", lambda: make(linear, lora_rank=2)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()
