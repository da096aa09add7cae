"""Cross entropy from row statistics, in PyTorch's own operators, which differentiate all of it."""

import torch
from torch import Tensor


def cross_entropy(
    lse: Tensor,
    target_logit: Tensor,
    mean_logit: Tensor | None,
    counts: Tensor,
    *,
    label_smoothing: float | Tensor,
    z_loss: float | Tensor,
    token_weights: Tensor | None,
    reduction: str,
    normalizer: float | Tensor | None,
    class_weights: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The reduced loss.

    Args:
        lse: of each row.
        target_logit: of each row.
        mean_logit: of each row, where labels are smoothed; None where not.
        counts: bool, which rows do.
        label_smoothing: read with `mean_logit` only.
        z_loss: factor of `lse²`; the number 0 leaves it out.
        token_weights: of each row, or None.
        reduction: "mean", "sum" or "none".
        normalizer: of the mean; by default the weights that count, for the z part without those of classes.
        class_weights: of each row's target, and the mean of all; None: 1.
    """
    weight = torch.ones_like(lse) if token_weights is None else token_weights.to(lse.dtype)
    of_class, mean_class = class_weights or (torch.ones_like(lse), lse.new_ones(()))
    loss, z_part = _times(of_class, lse - target_logit), torch.zeros_like(lse)
    if mean_logit is not None:
        spread = _times(mean_class, lse) - mean_logit
        loss = _times(1 - label_smoothing, loss) + _times(label_smoothing, spread)
    if isinstance(z_loss, Tensor) or z_loss != 0:
        z_part = _times(z_loss, lse * lse)
    loss, z_part = (torch.where(counts, _times(weight, part), 0.0) for part in (loss, z_part))
    if reduction == "none":
        return loss + z_part
    if reduction == "sum":
        return (loss + z_part).sum()
    if normalizer is not None:
        return _over((loss + z_part).sum(), torch.as_tensor(normalizer, dtype=lse.dtype, device=lse.device))
    weight = torch.where(counts, weight, 0.0)
    return _over(loss.sum(), (weight * of_class).sum()) + _over(z_part.sum(), weight.sum())


def counted(target: Tensor, vocab_size: int, ignore_index: int | None) -> Tensor:
    """Which targets count."""
    inside = (target >= 0) & (target < vocab_size)
    return inside if ignore_index is None else inside & (target != ignore_index)


def _times(factor: float | Tensor, value: Tensor) -> Tensor:
    """`factor·value`, and 0 where the factor is 0 and the value infinite."""
    factor = factor if isinstance(factor, Tensor) else value.new_full((), factor)
    return factor * torch.where((factor == 0) & ~value.isfinite(), 0.0, value)


def _over(total: Tensor, divisor: Tensor) -> Tensor:
    """`total / divisor`, and 0 with derivative 0 where that is 0: a mean over nothing."""
    nothing = divisor == 0
    return torch.where(nothing, 0.0, total / torch.where(nothing, 1.0, divisor))
