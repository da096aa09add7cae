"""Multi-token prediction as an `nn.Module`: the losses of the next k tokens, each through a `LossHead`."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from flax_modules._multi_token import Heads, MultiTokenCalls, read_heads
from flax_modules.linen.loss_head import LossHead


class MultiTokenLossHead(MultiTokenCalls, nn.Module):
    """Predicts the next k tokens of every position, after Gloeckle et al. 2024 (arXiv:2404.19737).

    Head i (0, ..., k-1) predicts from position t the token i + 1 ahead, whose label is `labels[..., t + i]`:

        loss = Σ_i head_weights[i] · LossHead_i(x_i, labels_i),    labels_i[..., t] = labels[..., t + i]

    `flax_modules.nnx.MultiTokenLossHead` has the rules in full: labels are ignored beyond the row's end and behind an
    ignored label, each head's mean is over its own counted tokens, and with one shared head `x_0 = hidden`,
    `x_i = hidden + hidden @ P_i`.

    Attributes:
        head: one `LossHead` (own kernel or tied), or a sequence of k of them.
        num_tokens: number k of tokens predicted; only with one head.
        project_hidden: whether to own the `P_i [H, H]` (default: only with one head). Without them and with one head,
            call with a sequence of k hidden states, made by blocks of your own.
        param_dtype: dtype of the `P_i`. They compute in the `dtype` and `precision` of the head.
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
        count = heads.count - 1 if heads.projects else 0
        self.projections = [nn.Dense(heads.of(0).features, **options) for _ in range(count)]

    def _heads(self) -> Heads:
        return read_heads(self.head, self.num_tokens, self.project_hidden)
