"""Multi-token prediction as an `nnx.Module`: the losses of the next k tokens, each through a `LossHead`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from flax_modules._multi_token import Heads, MultiTokenCalls, read_heads
from flax_modules.nnx.loss_head import LossHead
from flax_modules.nnx.shared import ConstructorSignature


class MultiTokenLossHead(MultiTokenCalls, nnx.Module):
    """Predicts the next k tokens of every position, after Gloeckle et al. 2024 (arXiv:2404.19737).

    Head i (0, ..., k-1) predicts from position t the token i + 1 ahead, whose label is `labels[..., t + i]`:

        loss = Σ_i head_weights[i] · LossHead_i(x_i, labels_i),    labels_i[..., t] = labels[..., t + i]

    `labels_i` is ignored where the row ends before t + i, and where any label from t to t + i is. So rows do not leak
    into each other, nor do packed documents whose boundary is an ignored label. (Where labels are masked for another
    reason, such as a prompt, head i also skips the i positions before the unmasked ones.) Each head's mean is over its
    own counted tokens. Every head streams over the vocabulary in its turn; k-fold logits are never stored. With
    `reduction="none"` the loss at t is the weighted sum of the losses predicted from t.

    The heads are given, so all their options are theirs:

    * **shared**: one `LossHead` (own kernel or tied) and `num_tokens`. The heads differ by their hidden states:
      `x_0 = hidden`, `x_i = hidden + hidden @ P_i` with a learned `P_i [H, H]` each, zero at first. So head 0 is an
      ordinary next-token head and the rest can be dropped after training. To use blocks of your own instead (as in the
      paper), pass `project_hidden=False` and call with a sequence of k hidden states, one for each head.
    * **separate**: a sequence of k `LossHead` modules, which read the same hidden states.

    The heads run one after the other and reuse each other's scratch memory, but a shared head's k weight gradients
    exist together before they are summed.

    Args:
        head: one `LossHead`, or a sequence of them.
        num_tokens: number k of tokens predicted; only with one head.
        project_hidden: whether to own the `P_i` (default: only with one head).
        param_dtype: dtype of the `P_i`. They compute in the `dtype` and `precision` of the head.
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

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        head: LossHead | Sequence[LossHead],
        num_tokens: int | None = None,
        *,
        project_hidden: bool | None = None,
        param_dtype: Dtype = jnp.float32,
        projection_init: Initializer = jax.nn.initializers.zeros,
        projection_metadata: Mapping[str, Any] = MappingProxyType({}),
        head_weights: float | Sequence[float] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        heads = read_heads(head, num_tokens, project_hidden)
        self.num_tokens, self.project_hidden = heads.count, heads.projects
        self.head_weights = tuple(head_weights) if isinstance(head_weights, Sequence) else head_weights
        self.heads = nnx.List(heads.given)
        self.projections: nnx.List[nnx.Linear] = nnx.List([])
        if self.project_hidden and self.num_tokens > 1:
            if rngs is None:
                raise ValueError("rngs=None, but there are hidden projections to initialise: pass rngs=nnx.Rngs(seed)")
            options = {**heads.of_projections(param_dtype, projection_init), "kernel_metadata": projection_metadata}
            width = heads.of(0).features
            for _ in range(1, self.num_tokens):
                self.projections.append(nnx.Linear(width, width, rngs=rngs, **options))

    def _heads(self) -> Heads:
        return Heads(self.heads, self.num_tokens, self.project_hidden)
