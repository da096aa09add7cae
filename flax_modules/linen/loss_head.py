"""A language model's head as an `nn.Module`: it owns (or shares) the unembedding and returns the loss."""

from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from flax_modules import _head
from pallas_ce import Metrics, RowStatistics
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.statistics.cross_entropy import Reduction

default_kernel_init = nn.initializers.lecun_normal()
default_bias_init = nn.initializers.zeros_init()


class LossHead(nn.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    With a kernel of its own the head replaces `nn.Dense(vocab_size)` and the cross entropy after it:

        logits = softcap(logit_scale * (hidden @ kernel + bias)),    softcap(x) = c * tanh(x / c)
        loss   = mean over counted tokens of  lse - (1 - a) * logits[label] - a * mean(logits) + z_loss * lse**2

    with `lse = log(sum(exp(logits)))` and `a = label_smoothing`; `pallas_ce.linear_cross_entropy` states every option
    in full. A head tied to the input embedding is built by `LossHead.tied`.

    Its parameters are `kernel [features, V]` (none when tied) and, if asked for, `bias [V]`. V is `vocab_size`, or
    `padded_vocab_size` where given. To partition them wrap the initializers, as everywhere in Linen:
    `kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))`.

    Attributes:
        features: width H of the hidden states.
        vocab_size: number of entries of the vocabulary.
        padded_vocab_size: number of columns of the kernel where it is padded, say to a multiple of 128. The padding
            takes no part in the loss, gets zero gradient, and does not appear in the logits.
        embed: the embedding to share instead of owning a kernel; see `tied`.
        use_bias: whether to add a bias to the logits.
        dtype: dtype of the products' operands (default: what hidden states and parameters promote to, the Flax rule;
            so with float32 parameters pass `jnp.bfloat16` for mixed precision). Sums, logits and the loss are float32,
            and every gradient has the dtype of its parameter.
        param_dtype: dtype of the parameters.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        ignore_index: label of tokens that do not count; None for none.
        label_smoothing: share of the target's probability spread over the vocabulary, in [0, 1].
        z_loss: coefficient of `lse**2`.
        logit_softcap: soft cap c of the logits, or None.
        logit_scale: factor of the logits, before the cap.
        reduction: "mean", "sum" or "none" (one loss per token).
        backward: "auto", "recompute" or "in_forward"; which of `pallas_ce`'s two ways computes the gradient.
        implementation: which backend of `pallas_ce` runs; None chooses from the platform.
        scratch_bytes: bound on the scratch memory of every pass; None for `pallas_ce`'s default.

    Raises:
        ValueError: on first use, for `padded_vocab_size` below `vocab_size` or an `embed` of another shape.

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
    """

    features: int
    vocab_size: int
    padded_vocab_size: int | None = None
    embed: nn.Embed | None = None
    use_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    ignore_index: int | None = -100
    label_smoothing: ArrayLike = 0.0
    z_loss: ArrayLike = 0.0
    logit_softcap: float | None = None
    logit_scale: ArrayLike = 1.0
    reduction: Reduction = "mean"
    backward: Backward = "auto"
    implementation: Implementation | None = None
    scratch_bytes: int | None = None

    @classmethod
    def tied(cls, embed: nn.Embed, *, vocab_size: int | None = None, **options: Any) -> Self:
        """A head whose weight *is* an embedding `[V, H]`: `logits = hidden @ embedding.T`, as `nn.Embed.attend`.

        The embedding stays the one parameter of its own module, and its gradient is the sum over both uses. Call this
        in the parent's `setup` or compact method, where `embed` is made; outside of any parent the head takes the
        embedding as its own submodule.

        Args:
            embed: the `nn.Embed`.
            vocab_size: number of its rows that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` defaults to that of the embedding, as in `attend`.

        Returns:
            The head.

        Raises:
            TypeError: `embed` is not an `nn.Embed`.
            ValueError: `vocab_size` exceeds its rows.

        Example:
            >>> import flax.linen as nn
            >>> class Model(nn.Module):
            ...     def setup(self):
            ...         self.embed = nn.Embed(100, 16)
            ...         self.head = LossHead.tied(self.embed)
            ...     def __call__(self, tokens, labels):
            ...         return self.head(self.embed(tokens), labels)
            >>> tokens = jnp.arange(10)
            >>> jax.tree.map(jnp.shape, Model().init(jax.random.key(0), tokens[:-1], tokens[1:]))
            {'params': {'embed': {'embedding': (100, 16)}}}
        """
        if not isinstance(embed, nn.Embed):
            raise TypeError(f"embed is a {type(embed).__name__}: pass the nn.Embed whose embedding the head shares")
        options.setdefault("dtype", embed.dtype)
        size = _head.tied_vocab_size(vocab_size, embed.num_embeddings)
        return cls(embed.features, size, padded_vocab_size=embed.num_embeddings, embed=embed, **options)

    def setup(self) -> None:
        """Creates the parameters the head owns."""
        columns = _head.num_columns(self.vocab_size, self.padded_vocab_size)
        if self.embed is None:
            self.kernel = self.param("kernel", self.kernel_init, (self.features, columns), self.param_dtype)
        elif (shape := (self.embed.num_embeddings, self.embed.features)) != (columns, self.features):
            raise ValueError(f"embed has shape {shape}, but this head needs {(columns, self.features)}: (V, features)")
        if self.use_bias:
            self.bias = self.param("bias", self.bias_init, (columns,), self.param_dtype)

    def __call__(
        self,
        hidden: jax.Array,
        labels: jax.Array,
        *,
        token_weights: jax.Array | None = None,
        class_weights: jax.Array | None = None,
        normalizer: ArrayLike | None = None,
        label_smoothing: ArrayLike | None = None,
        z_loss: ArrayLike | None = None,
        logit_scale: ArrayLike | None = None,
        reduction: Reduction | None = None,
        validate_labels: bool = False,
        return_metrics: bool = False,
    ) -> jax.Array | tuple[jax.Array, Metrics]:
        """The loss of the labels.

        Args:
            hidden: hidden states `[..., H]`, any floating dtype.
            labels: labels `[...]`, integers; those that are `ignore_index` or outside the vocabulary do not count.
            token_weights: weight of each token's loss `[...]`; differentiable.
            class_weights: weight of each vocabulary entry `[V]`; constant.
            normalizer: divisor of the mean, instead of the sum of this call's weights; for instance the number of
                tokens of the global batch.
            label_smoothing: instead of the head's; may be traced, so that a schedule does not recompile.
            z_loss: instead of the head's; may be traced.
            logit_scale: instead of the head's; may be traced, and is differentiable.
            reduction: instead of the head's.
            validate_labels: raise for labels outside the vocabulary; only outside of `jit`.
            return_metrics: also return `pallas_ce.Metrics`.

        Returns:
            The loss, float32 (a scalar; `[...]` with reduction "none"), or the loss and its metrics.

        Raises:
            ValueError: shapes that do not fit, or an option that cannot be served; see `linear_cross_entropy`.
        """
        return _head.loss(
            self,
            self._projection(),
            hidden,
            labels,
            token_weights=token_weights,
            class_weights=class_weights,
            normalizer=normalizer,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logit_scale=logit_scale,
            reduction=reduction,
            validate_labels=validate_labels,
            return_metrics=return_metrics,
        )

    def logits(self, hidden: jax.Array, *, logit_scale: ArrayLike | None = None) -> jax.Array:
        """The logits `[..., vocab_size]`, float32, for generation: scaled and capped as in the loss, padding left out.

        They are computed in `dtype` with sums in float32, by an ordinary matrix product: all of them are stored.

        Args:
            hidden: hidden states `[..., H]`; to sample, usually those of the last position only.
            logit_scale: instead of the head's.

        Raises:
            ValueError: the last axis of `hidden` is not `features`.
        """
        return _head.logits(self, self._projection(), hidden, logit_scale)

    def row_statistics(
        self,
        hidden: jax.Array,
        labels: jax.Array | None = None,
        *,
        statistics: tuple[str, ...] = ("lse", "target_logit"),
        row_mask: jax.Array | None = None,
        logit_weights: jax.Array | None = None,
        logit_scale: ArrayLike | None = None,
    ) -> RowStatistics:
        """Statistics of the logits (log-probabilities, entropy, argmax, ...) without storing them; differentiable.

        Takes the arguments of `pallas_ce.linear_row_statistics` that are not options of the head,
        and `logit_scale` instead of the head's.
        """
        return _head.row_statistics(
            self,
            self._projection(),
            hidden,
            labels,
            statistics=statistics,
            row_mask=row_mask,
            logit_weights=logit_weights,
            logit_scale=logit_scale,
        )

    def _projection(self) -> _head.Projection:
        bias = self.bias if self.use_bias else None
        if self.embed is None:
            return _head.Projection(self.kernel, 1, bias)
        return _head.Projection(self.embed.embedding, 0, bias)
