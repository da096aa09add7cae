"""A language model's head as an `nnx.Module`: it owns (or shares) the unembedding and returns the loss."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from flax_modules import _head
from pallas_ce import Metrics, RowStatistics
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.statistics.cross_entropy import Reduction

default_kernel_init = nnx.initializers.lecun_normal()
default_bias_init = nnx.initializers.zeros_init()


class LossHead(nnx.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    With a kernel of its own the head replaces `nnx.Linear(features, vocab_size)` and the cross entropy after it:

        logits = softcap(logit_scale * (hidden @ kernel + bias)),    softcap(x) = c * tanh(x / c)
        loss   = mean over counted tokens of  lse - (1 - a) * logits[label] - a * mean(logits) + z_loss * lse**2

    with `lse = log(sum(exp(logits)))` and `a = label_smoothing`; `pallas_ce.linear_cross_entropy` states every option
    in full. A head tied to the input embedding is built by `LossHead.tied`.

    Attributes hold the loss options under the names of the constructor, so `head.label_smoothing = 0.0` for evaluation
    works as for any NNX module. Parameters are `kernel [features, V]` (or `embed`, the shared embedding) and
    `bias [V]`; where there is none the attribute is None. V is `vocab_size`, or `padded_vocab_size` where given.

    Args:
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
        kernel_metadata: metadata of the kernel's `nnx.Param`, for instance `{"out_sharding": (None, "model")}`.
        bias_metadata: metadata of the bias's `nnx.Param`.
        ignore_index: label of tokens that do not count; None for none.
        label_smoothing: share of the target's probability spread over the vocabulary, in [0, 1].
        z_loss: coefficient of `lse**2`.
        logit_softcap: soft cap c of the logits, or None.
        logit_scale: factor of the logits, before the cap.
        reduction: "mean", "sum" or "none" (one loss per token).
        backward: "auto", "recompute" or "in_forward"; which of `pallas_ce`'s two ways computes the gradient.
        implementation: which backend of `pallas_ce` runs; None chooses from the platform.
        scratch_bytes: bound on the scratch memory of every pass; None for `pallas_ce`'s default.
        rngs: random number generator of the initializers; only a tied head without bias needs none.

    Raises:
        ValueError: `padded_vocab_size` below `vocab_size`, no `rngs` where parameters must be initialised, or an
            `embed` of another shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_modules.nnx import LossHead
        >>> head = LossHead(16, 100, z_loss=1e-4, rngs=nnx.Rngs(0))
        >>> hidden = jax.random.normal(jax.random.key(1), (2, 5, 16))
        >>> labels = jnp.array([[1, 2, 3, 4, -100], [7, 8, 9, -100, -100]])  # -100: no label here
        >>> loss, grads = nnx.value_and_grad(lambda head: head(hidden, labels))(head)
        >>> loss.shape, grads["kernel"].shape
        ((), (16, 100))
        >>> head.logits(hidden[:, -1]).shape  # to sample the next token
        (2, 100)
    """

    def __init__(
        self,
        features: int,
        vocab_size: int,
        *,
        padded_vocab_size: int | None = None,
        embed: nnx.Module | nnx.Param[Any] | None = None,
        use_bias: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        ignore_index: int | None = -100,
        label_smoothing: ArrayLike = 0.0,
        z_loss: ArrayLike = 0.0,
        logit_softcap: float | None = None,
        logit_scale: ArrayLike = 1.0,
        reduction: Reduction = "mean",
        backward: Backward = "auto",
        implementation: Implementation | None = None,
        scratch_bytes: int | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        columns = _head.num_columns(vocab_size, padded_vocab_size)
        if rngs is None and (embed is None or use_bias):
            raise ValueError("rngs=None, but this head has parameters to initialise: pass rngs=nnx.Rngs(seed)")
        self.kernel: nnx.Param[Any] | None
        self.bias: nnx.Param[Any] | None
        if embed is None:
            assert rngs is not None
            self.kernel = nnx.Param(kernel_init(rngs.params(), (features, columns), param_dtype), **kernel_metadata)
        else:
            self.kernel = nnx.data(None)
            shape = _embedding(embed).shape
            if shape != (columns, features):
                raise ValueError(f"embed has shape {shape}, but this head needs {(columns, features)}: (V, features)")
        # The module and not its array: whoever replaces the embedding's parameter keeps the tie.
        self.embed = nnx.data(embed)
        if use_bias:
            assert rngs is not None
            self.bias = nnx.Param(bias_init(rngs.params(), (columns,), param_dtype), **bias_metadata)
        else:
            self.bias = nnx.data(None)

        self.features = features
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_softcap = logit_softcap
        self.logit_scale = logit_scale
        self.reduction = reduction
        self.backward = backward
        self.implementation = implementation
        self.scratch_bytes = scratch_bytes

    @classmethod
    def tied(cls, embed: nnx.Module | nnx.Param[Any], *, vocab_size: int | None = None, **options: Any) -> Self:
        """A head whose weight *is* an embedding `[V, H]`: `logits = hidden @ embedding.T`, as `nnx.Embed.attend`.

        The embedding is shared, not copied: it is one parameter of the model, counted once by `nnx.state`, and its
        gradient is the sum over both uses. Sharing is a reference between modules, so it needs NNX's graph mode (the
        default); the embedding and the head must be parts of one module for `nnx.split` and the optimizer to see both.

        Args:
            embed: an `nnx.Embed`, any other module with an `embedding` parameter `[V, H]`, or such a parameter.
            vocab_size: number of its rows that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` defaults to that of the embedding module, as in `attend`.

        Returns:
            The head.

        Raises:
            TypeError: `embed` is neither a module with an `embedding` nor a parameter.
            ValueError: the embedding is not a matrix, or `vocab_size` exceeds its rows.

        Example:
            >>> from flax import nnx
            >>> from flax_modules.nnx import LossHead
            >>> class Model(nnx.Module):
            ...     def __init__(self, rngs):
            ...         self.embed = nnx.Embed(100, 16, rngs=rngs)
            ...         self.head = LossHead.tied(self.embed)
            ...     def __call__(self, tokens, labels):
            ...         return self.head(self.embed(tokens), labels)
            >>> jax.tree.map(jnp.shape, nnx.state(Model(nnx.Rngs(0))))
            State({
              'embed': {
                'embedding': Param(
                  value=(100, 16)
                )
              }
            })
        """
        shape = _embedding(embed).shape
        if len(shape) != 2:
            raise ValueError(f"embed has shape {shape}: a head needs an embedding of shape (V, features)")
        options.setdefault("dtype", None if isinstance(embed, nnx.Variable) else getattr(embed, "dtype", None))
        size = _head.tied_vocab_size(vocab_size, shape[0])
        return cls(shape[1], size, padded_vocab_size=shape[0], embed=embed, **options)

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

        Example:
            >>> head = LossHead(16, 100, rngs=nnx.Rngs(0))
            >>> stats = head.row_statistics(jnp.ones((3, 16)), jnp.array([1, 2, 3]), statistics=("log_prob", "argmax"))
            >>> stats.log_prob.shape, stats.argmax.shape
            ((3,), (3,))
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
        bias = None if self.bias is None else self.bias[...]
        if self.kernel is not None:
            return _head.Projection(self.kernel[...], 1, bias)
        assert self.embed is not None
        return _head.Projection(_embedding(self.embed)[...], 0, bias)


def _embedding(embed: nnx.Module | nnx.Param[Any]) -> nnx.Variable[Any]:
    """The parameter of an embedding given as a module or as that parameter."""
    parameter = embed if isinstance(embed, nnx.Variable) else getattr(embed, "embedding", None)
    if not isinstance(parameter, nnx.Variable):
        raise TypeError(f"embed is a {type(embed).__name__}: pass an nnx.Embed, or its parameter `embed.embedding`")
    return parameter
