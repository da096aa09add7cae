"""Multi-token prediction as an `nnx.Module`: the losses of the next k tokens, each through a `LossHead`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from flax_modules import _multi_token
from flax_modules.nnx.loss_head import LossHead
from pallas_ce import Metrics
from pallas_ce.statistics.cross_entropy import Reduction

default_projection_init = nnx.initializers.zeros_init()


class MultiTokenLossHead(nnx.Module):
    """Predicts the next k tokens of every position, after Gloeckle et al. 2024 (arXiv:2404.19737).

    Head i (0, ..., k-1) predicts from position t the token i + 1 ahead, whose label is `labels[..., t + i]`:

        loss = Σ_i head_weights[i] · LossHead_i(x_i, labels_i),    labels_i[..., t] = labels[..., t + i]

    `labels_i` is ignored where the row ends before t + i, and where any label from t to t + i is: so rows do not leak
    into each other, nor do packed documents whose boundary is an ignored label (where labels are masked for another
    reason, such as a prompt, head i also skips the i positions before the unmasked ones). Each head's mean is over its
    own counted tokens. Every head streams over the vocabulary in its turn; k-fold logits are never stored. With
    `reduction="none"` the loss at t is the weighted sum of what is predicted from t.

    The heads are given, so all their options are theirs:

    * **shared**: one `LossHead` (own kernel or tied) and `num_tokens`. The heads differ by their hidden states:
      `x_0 = hidden`, `x_i = hidden + hidden @ P_i` with a learned `P_i [H, H]` each, zero at first. So head 0 is an
      ordinary next-token head and the rest can be dropped after training. To use blocks of your own instead (as in the
      paper), pass `project_hidden=False` and call with a sequence of k hidden states, one for each head.
    * **separate**: a sequence of k `LossHead`s, which read the same hidden states.

    The heads run one after the other and reuse each other's scratch memory, but a shared head's k weight gradients
    exist together before they are summed.

    Args:
        head: one `LossHead`, or a sequence of them.
        num_tokens: number k of tokens predicted; only with one head.
        project_hidden: whether to own the `P_i` (default: only with one head).
        param_dtype: dtype of the `P_i`. They compute in the `dtype` of the head.
        projection_init: initializer of the `P_i`.
        projection_metadata: metadata of their `nnx.Param`.
        head_weights: weights of the losses, one number or k (default: 1/k each, so the loss is a mean; the paper's sum
            is `head_weights=1.0`).
        rngs: random number generator of the initializers; only needed for the `P_i`.

    Raises:
        ValueError: `num_tokens` missing or in contradiction with `head`, or no `rngs` where they are needed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_modules.nnx import LossHead, MultiTokenLossHead
        >>> rngs = nnx.Rngs(0)
        >>> mtp = MultiTokenLossHead(LossHead(16, 100, rngs=rngs), num_tokens=3, rngs=rngs)
        >>> tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 100)
        >>> hidden = jax.random.normal(jax.random.key(1), (2, 8, 16))  # of tokens[:, :-1]
        >>> loss, metrics = mtp(hidden, tokens[:, 1:], return_metrics=True)
        >>> loss.shape, len(metrics)
        ((), 3)
        >>> mtp.logits(hidden[:, -1], head=2).shape  # three tokens ahead
        (2, 100)
    """

    def __init__(
        self,
        head: LossHead | Sequence[LossHead],
        num_tokens: int | None = None,
        *,
        project_hidden: bool | None = None,
        param_dtype: Dtype = jnp.float32,
        projection_init: Initializer = default_projection_init,
        projection_metadata: Mapping[str, Any] = MappingProxyType({}),
        head_weights: float | Sequence[float] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        shared = isinstance(head, LossHead)
        heads = [head] if isinstance(head, LossHead) else list(head)
        self.num_tokens = _multi_token.count_heads(len(heads), shared, num_tokens)
        self.project_hidden = shared if project_hidden is None else project_hidden
        self.head_weights = tuple(head_weights) if isinstance(head_weights, Sequence) else head_weights
        _multi_token.check_heads(heads)
        self.heads = nnx.List(heads)
        self.projections: nnx.List[nnx.Linear] = nnx.List([])
        if self.project_hidden and self.num_tokens > 1:
            if rngs is None:
                raise ValueError("rngs=None, but there are hidden projections to initialise: pass rngs=nnx.Rngs(seed)")
            features, dtype = heads[0].features, heads[0].dtype
            for _ in range(1, self.num_tokens):
                self.projections.append(
                    nnx.Linear(
                        features,
                        features,
                        use_bias=False,
                        dtype=dtype,
                        param_dtype=param_dtype,
                        kernel_init=projection_init,
                        kernel_metadata=projection_metadata,
                        rngs=rngs,
                    )
                )

    def __call__(
        self,
        hidden: jax.Array | Sequence[jax.Array],
        labels: jax.Array,
        *,
        token_weights: jax.Array | None = None,
        class_weights: jax.Array | None = None,
        normalizer: ArrayLike | Sequence[float] | None = None,
        head_weights: ArrayLike | Sequence[float] | None = None,
        label_smoothing: ArrayLike | None = None,
        z_loss: ArrayLike | None = None,
        logit_scale: ArrayLike | None = None,
        reduction: Reduction | None = None,
        validate_labels: bool = False,
        return_metrics: bool = False,
    ) -> jax.Array | tuple[jax.Array, tuple[Metrics, ...]]:
        """The weighted sum of the heads' losses.

        Args:
            hidden: hidden states `[..., T, H]` that all heads read, or a sequence of k such arrays, one a head.
            labels: the next token of each position, `[..., T]`, as for `LossHead`; further shifts are made here.
            token_weights: weight of each label's loss `[..., T]`; it moves with the label.
            normalizer: divisor of the means, one number or k of them; `future_labels` helps to count.
            head_weights: instead of the module's; may be traced.
            class_weights: as for `LossHead`, like all that follow.
            label_smoothing: instead of the heads'; may be traced.
            z_loss: instead of the heads'; may be traced.
            logit_scale: instead of the heads'; may be traced, and is differentiable.
            reduction: instead of the heads'.
            validate_labels: raise for labels outside the vocabulary; only outside of `jit`.
            return_metrics: also return a tuple of `pallas_ce.Metrics`, one a head.

        Returns:
            The loss, float32 (a scalar; `[..., T]` with reduction "none"), or the loss and the metrics.

        Raises:
            ValueError: a sequence whose length is not k, or one array where the heads could not differ.
        """
        distinct = len(self.heads) > 1 or self.project_hidden
        hiddens = _multi_token.per_head_hidden(hidden, self.num_tokens, distinct=distinct)
        return _multi_token.weighted_loss(
            [_multi_token.select(self.heads, i) for i in range(self.num_tokens)],
            [self._project(x, i) for i, x in enumerate(hiddens)],
            self.future_labels(labels),
            head_weights=self.head_weights if head_weights is None else head_weights,
            token_weights=token_weights,
            normalizer=normalizer,
            return_metrics=return_metrics,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logit_scale=logit_scale,
            reduction=reduction,
            validate_labels=validate_labels,
        )

    def logits(self, hidden: jax.Array, head: int = 0, *, logit_scale: ArrayLike | None = None) -> jax.Array:
        """The logits `[..., vocab_size]` of the token `head + 1` ahead, as `LossHead.logits`.

        Args:
            hidden: hidden states `[..., H]` (those of this head, where each has its own).
            head: which head, from 0 to k - 1.
            logit_scale: instead of the head's.

        Raises:
            ValueError: there is no such head, or `hidden` has another width.
        """
        _multi_token.check_index(head, self.num_tokens)
        return _multi_token.select(self.heads, head).logits(self._project(hidden, head), logit_scale=logit_scale)

    def future_labels(self, labels: jax.Array) -> tuple[jax.Array, ...]:
        """The labels of each head, k arrays like `labels`, the first of which is `labels` itself.

        Example:
            >>> mtp = MultiTokenLossHead([LossHead(4, 10, rngs=nnx.Rngs(0)) for _ in range(2)])
            >>> mtp.future_labels(jnp.array([1, 2, -100, 3, 4]))[1]
            Array([   2, -100, -100,    4, -100], dtype=int32)
        """
        first = self.heads[0]
        return _multi_token.future_labels(
            labels, self.num_tokens, ignore_index=first.ignore_index, vocab_size=first.vocab_size
        )

    def _project(self, hidden: jax.Array, i: int) -> jax.Array:
        return hidden + self.projections[i - 1](hidden) if self.project_hidden and i > 0 else hidden
