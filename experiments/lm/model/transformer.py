"""A small decoder-only transformer in Flax NNX: RoPE, RMSNorm before each part, SwiGLU, causal attention.

The model ends at its final hidden states; the loss head is a module of its own beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import NamedSharding

from experiments.lm.config import TrainConfig
from experiments.lm.model.mesh import padded_vocab_size
from flax_modules.nnx import LossHead

# The usual scale of a language model's initial weights; with it the first loss is close to log(vocabulary).
_INITIAL_SCALE = 0.02
# The residual stream starts as the embedding. At the scale above, an optimiser step would be a large part of it and the
# first steps erratic; a tied embedding is also the head's kernel, and keeps that scale for the sake of the first loss.
_EMBEDDING_SCALE = 0.1
_ROTARY_BASE = 10_000.0


def rotary(x: jax.Array) -> jax.Array:
    """Rotary embedding of `x [B, T, heads, D]`: turns the pair (i, i + D/2) at position t by t·base^(−2i/D)."""
    tokens, features = x.shape[1], x.shape[-1]
    frequencies = _ROTARY_BASE ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def same_document(tokens: jax.Array, end_of_text: int) -> jax.Array:
    """Which keys of `tokens [B, T]` a query may see, the causal rule aside: its document's; bool `[B, 1, T, T]`."""
    ends = (tokens == end_of_text).astype(jnp.int32)
    document = jnp.cumsum(ends, axis=1) - ends
    return (document[:, :, None] == document[:, None, :])[:, None]


class Attention(nnx.Module):
    """Causal multi-head attention within documents."""

    def __init__(self, config: TrainConfig, rngs: nnx.Rngs) -> None:
        shape = (3, config.attention_heads, config.width // config.attention_heads)
        self.query_key_value = _linear(config.width, shape, ("width", None, "heads", None), config, rngs)
        self.output = _linear(config.width, config.width, ("heads", "width"), config, rngs, branches=2 * config.layers)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps `x [B, T, width]` and `mask [B, 1, T, T]` to `[B, T, width]`."""
        packed = self.query_key_value(x)
        query, key, value = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
        mixed = jax.nn.dot_product_attention(rotary(query), rotary(key), value, mask=mask, is_causal=True)
        return self.output(mixed.reshape(x.shape))


class SwiGLU(nnx.Module):
    """The gated feed-forward block: `(silu(x·G) ⊙ x·U)·D`."""

    def __init__(self, config: TrainConfig, rngs: nnx.Rngs) -> None:
        self.gate_up = _linear(config.width, (2, config.mlp_width), ("width", None, "mlp"), config, rngs)
        self.down = _linear(config.mlp_width, config.width, ("mlp", "width"), config, rngs, branches=2 * config.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x [B, T, width]` to the same shape."""
        packed = self.gate_up(x)
        return self.down(jax.nn.silu(packed[:, :, 0]) * packed[:, :, 1])


class Block(nnx.Module):
    """One transformer block, pre-norm."""

    def __init__(self, config: TrainConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps `x [B, T, width]` and `mask [B, 1, T, T]` to `[B, T, width]`."""
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """Token ids to final hidden states."""

    def __init__(
        self, config: TrainConfig, end_of_text: int, *, residual: NamedSharding | None = None, rngs: nnx.Rngs
    ) -> None:
        self.end_of_text = end_of_text
        self.remat = config.remat
        self.residual = residual
        scale = _INITIAL_SCALE if config.tie_embeddings else _EMBEDDING_SCALE
        self.embedding = nnx.Embed(
            padded_vocab_size(config),
            config.width,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.float32,
            embedding_init=_padded(nnx.initializers.normal(scale), (config.vocab_size, config.width)),
            embedding_metadata=_dimensions("vocabulary", "width"),
            rngs=rngs,
        )
        self.blocks = _blocks(config, rngs)
        self.final_norm = _norm(config, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps `tokens [B, T]` to hidden states `[B, T, width]`."""
        mask = same_document(tokens, self.end_of_text)
        apply = nnx.remat(Block.__call__) if self.remat else Block.__call__
        x = self._placed(self.embedding(tokens))
        for block in self.blocks:
            x = self._placed(apply(block, x, mask))
        return self.final_norm(x)

    def _placed(self, x: jax.Array) -> jax.Array:
        return x if self.residual is None else jax.lax.with_sharding_constraint(x, self.residual)


class LanguageModel(nnx.Module):
    """A transformer and its loss head, which are trained, saved and restored.

    Every parameter names its dimensions in Flax's `out_sharding`, except the norms', which are small. On a mesh they
    tell the axis of each split (`experiments.lm.model.mesh`), and `residual` how the residual stream lies.
    """

    def __init__(
        self, config: TrainConfig, end_of_text: int, *, residual: NamedSharding | None = None, rngs: nnx.Rngs
    ) -> None:
        self.body = Transformer(config, end_of_text, residual=residual, rngs=rngs)
        options: dict[str, Any] = {
            "dtype": jnp.dtype(config.dtype),
            "label_smoothing": config.label_smoothing,
            "z_loss": config.z_loss_weight,
            "logit_softcap": config.logit_softcap or None,
            "backward": config.backward,
            "implementation": None if config.implementation == "auto" else config.implementation,
        }
        if config.tie_embeddings:
            self.head = LossHead.of(self.body.embedding, vocab_axis=0, vocab_size=config.vocab_size, **options)
        else:
            self.head = LossHead(
                config.width,
                config.vocab_size,
                padded_vocab_size=padded_vocab_size(config),
                kernel_init=_padded(nnx.initializers.normal(_INITIAL_SCALE), (config.width, config.vocab_size)),
                kernel_metadata=_dimensions("width", "vocabulary"),
                rngs=rngs,
                **options,
            )


def _blocks(config: TrainConfig, rngs: nnx.Rngs) -> nnx.List[Block]:
    """All blocks, their parameters drawn in a loop: drawn one by one, each is code that a start has to compile."""

    def parameters(key: jax.Array) -> nnx.State[Any, Any]:
        return nnx.state(Block(config, nnx.Rngs(key)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))
    stacked = jax.lax.map(parameters, jax.random.split(rngs.params(), config.layers))
    states = [jax.tree.map(lambda x, number=number: x[number], stacked) for number in range(config.layers)]
    return nnx.List([nnx.merge(graph, state) for state in states])


def _linear(
    inputs: int,
    outputs: int | tuple[int, ...],
    names: tuple[str | None, ...],
    config: TrainConfig,
    rngs: nnx.Rngs,
    branches: int = 1,
) -> nnx.LinearGeneral:
    # A layer that adds to the residual stream starts smaller, so that the stream's variance does not grow with depth.
    init = nnx.initializers.normal(_INITIAL_SCALE / branches**0.5)
    return nnx.LinearGeneral(
        inputs,
        outputs,
        use_bias=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.float32,
        kernel_init=init,
        kernel_metadata=_dimensions(*names),
        rngs=rngs,
    )


def _dimensions(*names: str | None) -> dict[str, Any]:
    # Placing is left to the program that makes the state: a model by itself needs no mesh.
    return {"out_sharding": names, "eager_sharding": False}


def _padded(init: Initializer, shape: tuple[int, int]) -> Initializer:
    """`init` of `shape` and zeros around it: random numbers depend on a shape, and padding must not change them."""

    def initialize(key: jax.Array, padded: Any, dtype: Any = jnp.float32, *_: Any) -> jax.Array:
        missing = [(0, size - own) for size, own in zip(padded, shape, strict=True)]
        return jnp.pad(init(key, shape, dtype), missing)

    return initialize


def _norm(config: TrainConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, dtype=jnp.dtype(config.dtype), param_dtype=jnp.float32, rngs=rngs)
