"""What the loss heads must agree with, stored logits and optax's cross entropy; and heads of either framework."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_modules import linen

FEATURES, VOCAB, RANK = 16, 37, 3
# An adapter and a bias that are something, where what starts at zero would hide a mistake.
NORMAL = jax.nn.initializers.normal(0.5)
ADAPTER = {"lora_rank": RANK, "lora_scale": 0.7, "lora_b_init": NORMAL}
BIAS = {"use_bias": True, "bias_init": NORMAL}


@functools.partial(jax.jit, static_argnames="softcap")
def stored_logits(hidden, kernel, bias=None, *, scale=1.0, softcap=None):
    """Logits of `hidden [..., H]` and a kernel `[H, V]`, in float32."""
    z = jnp.matmul(hidden, kernel, precision="highest", preferred_element_type=jnp.float32)
    z = scale * (z if bias is None else z + bias)
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


@jax.jit
def mean_cross_entropy(logits, labels, token_weights=None, *, label_smoothing=0.0, z_loss=0.0):
    """The weighted mean over tokens whose label is not negative."""
    counted = labels >= 0
    safe = jnp.where(counted, labels, 0)
    lse = jax.nn.logsumexp(logits, axis=-1)
    row = (1 - label_smoothing) * optax.losses.softmax_cross_entropy_with_integer_labels(logits, safe)
    row += label_smoothing * (lse - logits.mean(axis=-1)) + z_loss * lse**2
    weights = counted * (1.0 if token_weights is None else token_weights)
    return jnp.sum(weights * row) / jnp.sum(weights)


def logits_of(params, hidden):
    """Stored logits of the parameters of a head of either framework, with `ADAPTER` where it has one."""
    names = ("kernel", "embedding", "bias", "lora_a", "lora_b")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    x = {next(name for name in names if name in jax.tree_util.keystr(path)): leaf for path, leaf in leaves}
    weight = x["kernel"] if "kernel" in x else x["embedding"].T
    if "lora_a" in x:
        weight += ADAPTER["lora_scale"] * x["lora_a"] @ x["lora_b"]
    return stored_logits(hidden, weight, x.get("bias"))


def shifted(labels, i):
    """`labels[..., t + i]`, ignored where the row has ended; written apart from the implementation."""
    result = np.full(labels.shape, -100)
    result[..., : labels.shape[-1] - i] = labels[..., i:]
    return jnp.asarray(result)


def assert_close(actual, desired, rtol=2e-5, atol=1e-6):
    """Compares two trees of arrays."""
    jax.tree.map(lambda a, d: np.testing.assert_allclose(a, d, rtol=rtol, atol=atol), actual, desired)


def assert_agrees(apply, canonical, params, hidden, labels, *bounds):
    """Loss and gradients of parameters and hidden states: the head's are the canonical loss's."""
    actual = jax.value_and_grad(lambda params, hidden: apply(params, hidden, labels), argnums=(0, 1))(params, hidden)
    assert_close(actual, jax.value_and_grad(canonical, argnums=(0, 1))(params, hidden), *bounds)


def assert_same(got, want):
    """(loss, gradients): each leaf up to float32's rounding, and some gradient is not zero."""
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    expected = dict(jax.tree_util.tree_leaves_with_path(want))  # their loss may have metrics that ours has not
    for path, value in jax.tree_util.tree_leaves_with_path(got):
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-5, err_msg=str(path))
    assert any(np.max(abs(x)) > 1e-3 for x in jax.tree.leaves(got[1]))


def initialised(head, *given):
    """Parameters of a head of either framework, and `apply(parameters, *given, method=…)`."""
    if isinstance(head, nnx.Module):
        graph, parameters = nnx.split(head)
        return parameters, lambda p, *given, method="__call__", **options: getattr(nnx.merge(graph, p), method)(
            *given, **options
        )
    variables = head.init(jax.random.key(0), *given)
    return variables["params"], lambda p, *given, **options: head.apply({"params": p}, *given, **options)


def of(package, name, *arguments, **options):
    """A module of ours or of Flax: `rngs` is NNX's, and initialises at once."""
    rngs = {} if package in (linen, nn) else {"rngs": nnx.Rngs(0)}
    return getattr(package, name)(*arguments, **options, **rngs)


def on_embedding(package, **options):
    """A head on an embedding of its framework."""
    embed = of(nn if package is linen else nnx, "Embed", VOCAB, FEATURES)
    return package.LossHead.of(embed, **options, **({} if package is linen else {"rngs": nnx.Rngs(0)}))
