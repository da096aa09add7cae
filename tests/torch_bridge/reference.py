"""The contract with PyTorch's own functions in float64, on stored logits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def logits(arrays: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """Scaled and capped logits without the vocabulary's padding."""
    size = options.get("vocab_size") or arrays["weight"].shape[0]
    z = arrays["hidden"] @ arrays["weight"][:size].T
    if "bias" in arrays:
        z = z + arrays["bias"][:size]
    z = z * arrays.get("logit_scale", 1.0)
    cap = options.get("logit_softcap")
    return z if cap is None else cap * torch.tanh(z / cap)


def loss(arrays: dict[str, Tensor], labels: Tensor, options: dict[str, Any]) -> Tensor:
    """`functional.cross_entropy`, with token weights, z-loss and normaliser around it."""
    z = logits(arrays, options)
    counts = (labels >= 0) & (labels < z.shape[1]) & (labels != options.get("ignore_index", -100))
    class_weights = options.get("class_weights")
    each = functional.cross_entropy(
        z,
        torch.where(counts, labels, -100),
        weight=class_weights,
        reduction="none",
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    w = torch.where(counts, arrays.get("token_weights", torch.ones_like(each)), 0.0)
    z_part = options.get("z_loss", 0.0) * torch.logsumexp(z, 1) ** 2
    if options.get("reduction", "mean") == "none":
        return w * (each + z_part)
    norm = z_norm = torch.ones((), dtype=z.dtype)
    if options.get("reduction", "mean") == "mean":
        c = torch.ones_like(w) if class_weights is None else class_weights[torch.where(counts, labels, 0)]
        norm, z_norm = (w * c).sum(), w.sum()
        if "normalizer" in options:
            norm = z_norm = torch.tensor(options["normalizer"], dtype=z.dtype)
    total = (w * each).sum() / torch.where(norm == 0, 1.0, norm)
    return total + (w * z_part).sum() / torch.where(z_norm == 0, 1.0, z_norm)
