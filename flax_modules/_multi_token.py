"""What the NNX and the Linen `MultiTokenLossHead` share: the labels of each head, and the weighted sum of the losses.

Everything here works on one row of tokens at a time, the last axis of `labels`; leading axes are batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from flax_modules._head import HeadCalls, described_by
from pallas_ce import Metrics
from pallas_ce.api.integration import Reduction, checks, label_rule, precision_name


class Heads(NamedTuple):
    """The heads of a module.

    Attributes:
        each: the head of each token predicted: k, or the one that all share k times.
        shared: whether it is one.
        projects: whether head i > 0 reads a projection of its own of the hidden states.
    """

    each: Sequence[HeadCalls]
    shared: bool
    projects: bool

    def of_projections(self, param_dtype: Dtype, kernel_init: Initializer) -> dict[str, Any]:
        """The options of the layers that project: they compute as the first head does."""
        asked = self.each[0].precision
        return {
            "use_bias": False,
            "dtype": self.each[0].dtype,
            "precision": None if asked is None else precision_name(asked),
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
        }


class MultiTokenCalls:
    """What a module computes from its heads and from `projections`, where head i > 0 has the one at i - 1.

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

    Attributes:
        head: one `LossHead`, or a sequence of them.
        num_tokens: number k of tokens predicted; only with one head.
        project_hidden: whether to own the `P_i` (default: only with one head).
        param_dtype: dtype of the `P_i`. They compute in the `dtype` and `precision` of the head.
        projection_init: initializer of the `P_i`.
        head_weights: weights of the losses, one number or k (default: 1/k each, so the loss is a mean; the paper's sum
            is `head_weights=1.0`).
    """

    head_weights: float | Sequence[float] | None
    projections: Sequence[Callable[[jax.Array], jax.Array]]

    def _heads(self) -> Heads:
        """Needs no parameters."""
        raise NotImplementedError

    def _project(self, hidden: jax.Array, i: int) -> jax.Array:
        """`x_i`, what head i reads."""
        return hidden + self.projections[i - 1](hidden) if self._heads().projects and i > 0 else hidden

    @described_by(HeadCalls.__call__)
    def __call__(  # noqa: D417
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
            {options}
            return_metrics: also return a tuple of `pallas_ce.Metrics`, one a head.

        Returns:
            The loss, float32 (a scalar; `[..., T]` with reduction "none"), or the loss and the metrics.

        Raises:
            ValueError: a sequence whose length is not k, or one array where the heads could not differ.
        """
        heads = self._heads()
        count = len(heads.each)
        each = hidden if isinstance(hidden, (list, tuple)) else [hidden] * count
        if len(each) != count:
            raise ValueError(f"hidden is a sequence of {len(each)} arrays, but there are {count} heads")
        # One array may serve heads that differ by more than their hidden states.
        if each is not hidden and heads.shared and not heads.projects and count > 1:
            raise ValueError(
                f"hidden is one array, but the {count} heads share their weight and project_hidden=False, so all of "
                f"them would predict the same: give a sequence of {count} hidden states, or build with "
                "project_hidden=True"
            )
        inputs = [self._project(x, i) for i, x in enumerate(each)]
        # The first as given, since only so their values can be validated.
        head_labels = (labels, *self.future_labels(labels)[1:])
        head_weights = self.head_weights if head_weights is None else head_weights
        weights = per_head("head_weights", 1.0 / count if head_weights is None else head_weights, count)
        normalizers = None if normalizer is None else per_head("normalizer", normalizer, count)
        total: jax.Array | None = None
        metrics = []
        for i, (x, label) in enumerate(zip(inputs, head_labels, strict=True)):
            if i and token_weights is not None:
                # A token weight belongs to the label it came with, so it moves with it.
                token_weights = jnp.asarray(token_weights)
                token_weights = label_rule.shifted(token_weights, 1, token_weights.ndim - 1, 0)
            if total is not None:
                # One head at a time: left alone, XLA may interleave the heads and hold the scratch of several.
                x, total = jax.lax.optimization_barrier((x, total))
            # Metrics are not free (the accuracy needs the largest logit), so heads are only asked when the caller asks.
            result = heads.each[i](
                x,
                label,
                token_weights=token_weights,
                class_weights=class_weights,
                normalizer=None if normalizers is None else normalizers[i],
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                logit_scale=logit_scale,
                reduction=reduction,
                validate_labels=validate_labels and i == 0,  # the other labels are made from these
                return_metrics=return_metrics,
            )
            if isinstance(result, tuple):
                result, of_head = result
                metrics.append(of_head)
            term = weights[i].astype(result.dtype) * result
            total = term if total is None else total + term
        assert total is not None
        return (total, tuple(metrics)) if return_metrics else total

    def logits(self, hidden: jax.Array, head: int = 0, *, logit_scale: ArrayLike | None = None) -> jax.Array:
        """The logits `[..., vocab_size]` of the token `head + 1` ahead, as `LossHead.logits`.

        Args:
            hidden: hidden states `[..., H]`; this head's own, where each has its own.
            head: which head, from 0 to k - 1.
            logit_scale: instead of the head's.

        Raises:
            ValueError: there is no such head, or `hidden` has another width.
        """
        heads = self._heads()
        count = len(heads.each)
        if not 0 <= head < count:
            raise ValueError(f"{head=} is not one of the {count} heads: 0 to {count - 1}")
        return heads.each[head].logits(self._project(hidden, head), logit_scale=logit_scale)

    def future_labels(self, labels: jax.Array) -> tuple[jax.Array, ...]:
        """The labels of each head, k arrays like `labels`; the first is `labels` itself. Needs no parameters.

        Head i reads `labels[..., t + i]` at position t, from an int32 copy. It is ignored where the row has no such
        position, and where any label from t to t + i does not count: an ignored label is how packed documents mark
        their boundary, and no head may look across it.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from flax_modules.nnx import LossHead, MultiTokenLossHead
            >>> mtp = MultiTokenLossHead([LossHead(4, 10, rngs=nnx.Rngs(0)) for _ in range(2)])
            >>> mtp.future_labels(jnp.array([1, 2, -100, 3, 4]))[1]
            Array([   2, -100, -100,    4, -100], dtype=int32)
        """
        heads = self._heads()
        first = heads.each[0]
        own = label_rule.as_array(checks.ids("labels", labels))
        ids = label_rule.canonical(own, first.vocab_size)
        counts = label_rule.counted(ids, first.ignore_index)
        ignored = first.ignore_index
        if ignored is None or not -(2**31) <= ignored < 2**31:  # no label of 32 bits
            ignored = label_rule.NO_TARGET
        result = [own]
        shifted = jnp.where(counts, ids, ignored)
        for _ in heads.each[1:]:
            # One step at a time, so that each position's own label stops everything behind it.
            shifted = jnp.where(counts, label_rule.shifted(shifted, 1, shifted.ndim - 1, ignored), ignored)
            result.append(shifted)
        return tuple(result)


def per_head(name: str, value: ArrayLike | Sequence[float], count: int) -> jax.Array:
    """`value`, a scalar or `[count]`, as one float per head."""
    array = jnp.asarray(value, float)  # float64 where JAX has it: each is rounded to its loss's dtype
    if array.shape not in ((), (count,)):
        raise ValueError(f"{name} has shape {array.shape}: give one number, or one for each of the {count} heads")
    return jnp.broadcast_to(array, (count,))


def read_heads(head: HeadCalls | Sequence[HeadCalls], num_tokens: int | None, project_hidden: bool | None) -> Heads:
    """The heads from a module's arguments, checked."""
    shared, given = isinstance(head, HeadCalls), cast(Any, head)
    heads = [*given] if isinstance(given, Iterable) and not shared else [given]
    if not all(isinstance(each, HeadCalls) for each in heads):
        raise TypeError(f"head is a {type(head).__name__}; it must be a LossHead, or a sequence of them")
    projects = shared if project_hidden is None else project_hidden
    if shared:
        words = "an int, at least 1: how many tokens the head, which all share, predicts"
        return Heads(heads * checks.integer("num_tokens", num_tokens, words, 1), True, projects)
    if not heads:
        raise ValueError("head is an empty sequence: give one LossHead for each token predicted")
    if num_tokens is not None and num_tokens != len(heads):
        raise ValueError(f"{num_tokens=}, but head is a sequence of {len(heads)} heads: leave num_tokens out")
    for name in ("features", "vocab_size", "ignore_index"):
        values = [getattr(head, name) for head in heads]
        if len(set(values)) > 1:
            raise ValueError(f"head is a sequence of heads with different {name}: {values}; all must agree")
    return Heads(heads, False, projects)
