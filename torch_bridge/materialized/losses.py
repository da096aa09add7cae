"""Cross entropy from row statistics, in PyTorch's own operators, which differentiate all of it."""

from typing import Any

import torch
from torch import Tensor


def cross_entropy(
    lse: Tensor,
    log_prob: Tensor,
    mean_log_prob: Tensor | None,
    counts: Tensor,
    *,
    label_smoothing: float | Tensor = 0.0,
    z_loss: float | Tensor = 0.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    class_weights: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The reduced loss of rows, from the checked options of a public function.

    Only `z_loss` reads the `lse`. `mean_log_prob` is `Σ_v u_v·log p_v` where labels are smoothed and None where not,
    `counts` is True for rows that do, and `class_weights` has an entry for each row's target. By default the mean
    divides by the weights that count, without class weights for the z part.
    """
    weight = torch.ones_like(lse) if token_weights is None else token_weights.to(lse.dtype)
    of_class = torch.ones_like(lse) if class_weights is None else class_weights
    loss, z_part = times(of_class, -log_prob), torch.zeros_like(lse)
    if mean_log_prob is not None:
        loss = times(1 - label_smoothing, loss) + times(label_smoothing, -mean_log_prob)
    if isinstance(z_loss, Tensor) or z_loss != 0:
        z_part = times(z_loss, lse * lse)
    loss, z_part = (torch.where(counts, times(weight, part), 0.0) for part in (loss, z_part))
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


def times(factor: float | Tensor, value: Tensor) -> Tensor:
    """`factor·value`, and 0 where the factor is 0 and the value infinite; NaN stays."""
    factor = factor if isinstance(factor, Tensor) else value.new_full((), factor)
    return factor * torch.where((factor == 0) & value.isinf(), 0.0, value)


def _over(total: Tensor, divisor: Tensor) -> Tensor:
    """`total / divisor`, and 0 with derivative 0 where that is 0: a mean over nothing; NaN stays."""
    nothing = divisor == 0
    return torch.where(nothing & ~total.isnan(), 0.0, total / torch.where(nothing, 1.0, divisor))
