"""Multi-token prediction as an `nn.Module`: the losses of the next k tokens, each through a `LossHead`."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from flax_modules import _multi_token
from flax_modules.linen.loss_head import LossHead
from pallas_ce import Metrics
from pallas_ce.statistics.cross_entropy import Reduction

default_projection_init = nn.initializers.zeros_init()


class MultiTokenLossHead(nn.Module):
    """Predicts the next k tokens of every position, after Gloeckle et al. 2024 (arXiv:2404.19737).

    Head i (0, ..., k-1) predicts from position t the token i + 1 ahead, whose label is `labels[..., t + i]`:

        loss = Σ_i head_weights[i] · LossHead_i(x_i, labels_i),    labels_i[..., t] = labels[..., t + i]

    The rules are those of `flax_modules.nnx.MultiTokenLossHead`, which states them in full: labels are ignored beyond
    the row's end and behind an ignored label, each head's mean is over its own counted tokens, and with one shared head
    `x_0 = hidden`, `x_i = hidden + hidden @ P_i`.

    Attributes:
        head: one `LossHead` (own kernel or tied), or a sequence of k of them.
        num_tokens: number k of tokens predicted; only with one head.
        project_hidden: whether to own the `P_i [H, H]` (default: only with one head). Without them and with one head,
            call with a sequence of k hidden states, made by blocks of your own.
        param_dtype: dtype of the `P_i`. They compute in the `dtype` of the head.
        projection_init: initializer of the `P_i`; zeros, so that training starts from plain next-token prediction.
        head_weights: weights of the losses, one number or k (default: 1/k each, so the loss is a mean; the paper's sum
            is `head_weights=1.0`).

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
    projection_init: Initializer = default_projection_init
    head_weights: float | Sequence[float] | None = None

    def setup(self) -> None:
        """Creates the projections; the heads were given."""
        heads, count = self._heads(), self._count()
        _multi_token.check_heads(heads)
        self.projections = [
            nn.Dense(
                heads[0].features,
                use_bias=False,
                dtype=heads[0].dtype,
                param_dtype=self.param_dtype,
                kernel_init=self.projection_init,
            )
            for _ in range(1, count if self._projects() else 1)
        ]

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
        heads, count, projects = self._heads(), self._count(), self._projects()
        hiddens = _multi_token.per_head_hidden(hidden, count, distinct=len(heads) > 1 or projects)
        return _multi_token.weighted_loss(
            [_multi_token.select(heads, i) for i in range(count)],
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
        _multi_token.check_index(head, self._count())
        return _multi_token.select(self._heads(), head).logits(self._project(hidden, head), logit_scale=logit_scale)

    def future_labels(self, labels: jax.Array) -> tuple[jax.Array, ...]:
        """The labels of each head, k arrays like `labels`, the first of which is `labels` itself.

        Needs no parameters.

        Example:
            >>> mtp = MultiTokenLossHead(LossHead(4, 10), num_tokens=2)
            >>> mtp.future_labels(jnp.array([1, 2, -100, 3, 4]))[1]
            Array([   2, -100, -100,    4, -100], dtype=int32)
        """
        head = self._heads()[0]
        return _multi_token.future_labels(
            labels, self._count(), ignore_index=head.ignore_index, vocab_size=head.vocab_size
        )

    def _heads(self) -> list[LossHead]:
        return [self.head] if isinstance(self.head, LossHead) else list(self.head)

    def _count(self) -> int:
        return _multi_token.count_heads(len(self._heads()), isinstance(self.head, LossHead), self.num_tokens)

    def _projects(self) -> bool:
        return isinstance(self.head, LossHead) if self.project_hidden is None else self.project_hidden

    def _project(self, hidden: jax.Array, i: int) -> jax.Array:
        return hidden + self.projections[i - 1](hidden) if self._projects() and i > 0 else hidden
