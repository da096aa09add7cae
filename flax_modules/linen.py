"""Loss heads for models written in `flax.linen`: modules that own, or share, the unembedding and return the loss."""

from collections.abc import Sequence
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from flax_modules._head import HeadCalls, described_by
from flax_modules._multi_token import Heads, MultiTokenCalls, read_heads
from pallas_ce import LowRank, linear_cross_entropy

__all__ = ["LossHead", "MultiTokenLossHead"]


@described_by(HeadCalls, linear_cross_entropy)
class LossHead(HeadCalls, nn.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    {description} A head tied to the input embedding is built by `LossHead.of`.

    Its parameters are `kernel [features, V]` (none when tied) and, if asked for, `bias [V]`, `lora_a [features, r]` and
    `lora_b [r, V]`. V is `vocab_size`, or `padded_vocab_size` where given. To partition them wrap the initializers, as
    everywhere in Linen: `kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))`.

    Attributes:
        {options}

    Raises:
        ValueError: on first use, for `padded_vocab_size` below `vocab_size`, an `embed` of another shape or a
            `lora_rank` that is not between 1 and the smaller of features and V.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax_modules.linen import LossHead
        >>> head = LossHead(16, 100, z_loss=1e-4)
        >>> hidden = jax.random.normal(jax.random.key(1), (2, 5, 16))
        >>> labels = jnp.array([[1, 2, 3, 4, -100], [7, 8, 9, -100, -100]])  # -100: no label here
        >>> variables = head.init(jax.random.key(0), hidden, labels)
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'kernel': (16, 100)}}
        >>> loss, grads = jax.value_and_grad(head.apply)(variables, hidden, labels)
        >>> head.apply(variables, hidden[:, -1], method="logits").shape  # to sample the next token
        (2, 100)

        With the kernel frozen, an adapter is trained (LoRA):

        >>> adapted = LossHead(16, 100, lora_rank=4, lora_scale=2.0)
        >>> adapter = {x: adapted.init(jax.random.key(2), hidden, labels)["params"][x] for x in ("lora_a", "lora_b")}
        >>> def loss(adapter):
        ...     return adapted.apply({"params": variables["params"] | adapter}, hidden, labels)
        >>> jax.tree.map(jnp.shape, jax.grad(loss)(adapter))
        {'lora_a': (16, 4), 'lora_b': (4, 100)}
    """

    embed: nn.Embed | None = None

    # Linen wraps the methods that a module's own class names.
    __call__ = HeadCalls.__call__
    logits = HeadCalls.logits
    row_statistics = HeadCalls.row_statistics

    @classmethod
    def of(cls, embed: nn.Embed, *, vocab_size: int | None = None, **options: Any) -> Self:
        """A head whose weight *is* an embedding `[V, H]`: `logits = hidden @ embedding.T`, as `nn.Embed.attend`.

        The embedding stays the one parameter of its own module, and its gradient is the sum over both uses. Call this
        in the parent's `setup` or compact method, where `embed` is made; outside of any parent the head takes the
        embedding as its own submodule.

        Args:
            embed: the `nn.Embed`.
            vocab_size: number of its rows that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` defaults to the embedding's, as in `attend`.

        Returns:
            The head.

        Raises:
            TypeError: `embed` is not an `nn.Embed`.
            ValueError: `vocab_size` exceeds its rows.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> import flax.linen as nn
            >>> class Model(nn.Module):
            ...     def setup(self):
            ...         self.embed = nn.Embed(100, 16)
            ...         self.head = LossHead.of(self.embed)
            ...     def __call__(self, tokens, labels):
            ...         return self.head(self.embed(tokens), labels)
            >>> tokens = jnp.arange(10)
            >>> jax.tree.map(jnp.shape, Model().init(jax.random.key(0), tokens[:-1], tokens[1:]))
            {'params': {'embed': {'embedding': (100, 16)}}}
        """
        if not isinstance(embed, nn.Embed):
            raise TypeError(f"embed is a {type(embed).__name__}: pass the nn.Embed whose embedding the head shares")
        options.setdefault("dtype", embed.dtype)
        return cls._sharing("embed", embed, (embed.num_embeddings, embed.features), vocab_size, options)

    def setup(self) -> None:
        """Creates the parameters the head owns."""
        embed = self.embed
        columns = self._columns(None if embed is None else (embed.num_embeddings, embed.features))
        if embed is None:
            self.kernel = self.param("kernel", self.kernel_init, (self.features, columns), self.param_dtype)
        if self.use_bias:
            self.bias = self.param("bias", self.bias_init, (columns,), self.param_dtype)
        if (rank := self.lora_rank) is not None:
            self.lora_a = self.param("lora_a", self.lora_a_init, (self.features, rank), self.param_dtype)
            self.lora_b = self.param("lora_b", self.lora_b_init, (rank, columns), self.param_dtype)

    def _projection(self) -> tuple[jax.Array | LowRank, int, jax.Array | None]:
        weight, vocab_axis = (self.kernel, 1) if self.embed is None else (self.embed.embedding, 0)
        if self.lora_rank is not None:
            weight = self._adapted(weight, vocab_axis, self.lora_a, self.lora_b)
        return weight, vocab_axis, self.bias if self.use_bias else None


@described_by(MultiTokenCalls)
class MultiTokenLossHead(MultiTokenCalls, nn.Module):
    """Predicts the next k tokens of every position, after Gloeckle et al. 2024 (arXiv:2404.19737).

    {description}

    Attributes:
        {options}

    Raises:
        ValueError: on first use, for `num_tokens` missing or in contradiction with `head`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax_modules.linen import LossHead, MultiTokenLossHead
        >>> mtp = MultiTokenLossHead(LossHead(16, 100), num_tokens=3)
        >>> tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 100)
        >>> hidden = jax.random.normal(jax.random.key(1), (2, 8, 16))  # of tokens[:, :-1]
        >>> variables = mtp.init(jax.random.key(2), hidden, tokens[:, 1:])
        >>> loss, metrics = mtp.apply(variables, hidden, tokens[:, 1:], return_metrics=True)
        >>> loss.shape, len(metrics)
        ((), 3)
        >>> mtp.apply(variables, hidden[:, -1], head=2, method="logits").shape  # three tokens ahead
        (2, 100)
    """

    head: LossHead | Sequence[LossHead]
    num_tokens: int | None = None
    project_hidden: bool | None = None
    param_dtype: Dtype = jnp.float32
    projection_init: Initializer = jax.nn.initializers.zeros
    head_weights: float | Sequence[float] | None = None

    # Linen wraps the methods that a module's own class names.
    __call__ = MultiTokenCalls.__call__
    logits = MultiTokenCalls.logits
    future_labels = MultiTokenCalls.future_labels

    def setup(self) -> None:
        """Creates the projections; the heads were given."""
        heads = self._heads()
        options = heads.of_projections(self.param_dtype, self.projection_init)
        projected = heads.each[1:] if heads.projects else []
        self.projections = [nn.Dense(head.features, **options) for head in projected]

    def _heads(self) -> Heads:
        return read_heads(self.head, self.num_tokens, self.project_hidden)
