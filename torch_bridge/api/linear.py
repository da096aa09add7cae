"""The public functions: `linear_cross_entropy` and `linear_row_statistics` on PyTorch tensors."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pallas_ce import LowRank, Metrics, RowStatistics, integration
from pallas_ce.integration import Backward, PrecisionLike, Reduction
from torch_bridge.api import checks
from torch_bridge.autograd.operator import LINEAR_CROSS_ENTROPY, LINEAR_ROW_STATISTICS


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    shift: int = 0,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float | Tensor = 0.0,
    z_loss: float | Tensor = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    vocab_size: int | None = None,
    normalizer: float | Tensor | None = None,
    backward: Backward = "auto",
    precision: PrecisionLike | None = None,
    implementation: str | None = None,
    scratch_bytes: int | None = None,
    validate_labels: bool = False,
    return_metrics: bool = False,
) -> Any:
    r"""Cross entropy of `softcap(logit_scale · (input @ linear_weight.T + linear_bias))`, without storing those logits.

    The value and gradients of `torch.nn.functional.cross_entropy(input @ linear_weight.T + linear_bias, target, …)`,
    in the memory of a few tiles of logits, by the kernels of `pallas_ce.linear_cross_entropy`, whose docstring has the
    formula. Products are computed in the dtype of `input` (under autocast, in autocast's), sums and the loss in
    float32; a float32 master weight gets a float32 gradient.

    Args:
        input: `[..., H]` bfloat16, float16, float32 or float64 (which needs JAX's 64-bit mode); zero tokens included.
        linear_weight: `[V', H]`, as in `torch.nn.Linear`; a transposed view of contiguous memory costs no copy,
            one that does not begin at a multiple of 256 bytes (of a flat parameter, say) does on a CUDA device. Or a
            `pallas_ce.LowRank` of this tensor, `up [V', r]` and `down [r, H]`: LoRA's B and A. Where the weight
            requires no gradient, the loss with gradients then makes no array of its size.
        target: `[...]`, integers; those outside `[0, vocab_size)` count as ignored.
        linear_bias: `[V']`.
        class_weights: `[V]`, PyTorch's `weight`; a constant.
        token_weights: `[...]`, differentiable.
        shift: 1 where the hidden state of a position predicts the next one's target, along the last leading axis: the
            loss of `input[..., :-1, :]` with `target[..., 1:]` and `token_weights[..., 1:]`, without the copy of
            the input. Positions whose target would lie behind the last one do not count.
        reduction: "mean", "sum", or "none" for `[...]`.
        ignore_index: tokens with this target have loss and gradient 0 and cost no work. None: no target is special.
        label_smoothing: in [0, 1]. Numbers may change from call to call without compiling anew.
        z_loss: factor β of `β·lse²`.
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None.
        logit_scale: a number, or a scalar tensor, differentiable.
        vocab_size: V; entries of the weight from there on are padding. Default V'.
        normalizer: what the mean divides by, in place of the (weighted) number of tokens that count.
        backward: "in_forward" computes the gradients in the forward and keeps them, with three matrix products;
            "recompute" keeps O(N) numbers and computes logits twice, with four: take it where many forwards wait for
            their backward, or under activation checkpointing. "auto" takes in_forward for scalar losses where its
            scratch fits.
        precision: how float32 operands are multiplied: a name, such as "highest", "tensorfloat32" or
            "BF16_BF16_F32_X3", or what else `pallas_ce.linear_cross_entropy` takes. None: as PyTorch's own products, in
            full float32, or in TF32 on CUDA devices where `torch.backends.cuda.matmul.fp32_precision` is "tf32", which
            `torch.set_float32_matmul_precision("high")` makes it, too.
        implementation: "xla", "mosaic_gpu", "triton", "reference", or None to choose; see `pallas_ce`.
        scratch_bytes: bound on scratch memory.
        validate_labels: raise a ValueError naming the first target that is neither in the vocabulary nor
            `ignore_index`, under `torch.compile` too. Reads the targets' values: on a GPU the host waits for them.
        return_metrics: return `(loss, Metrics)`.

    Returns:
        Tensor: float32 (float64 for float64), `[]` or `[...]`; 0.0 when no token counts. With `return_metrics` the pair
        `(loss, pallas_ce.Metrics)` of scalar tensors without gradient.

    Raises:
        ValueError: shapes, devices or values that do not fit.
        TypeError: dtypes that do not fit; a DTensor.
        RuntimeError: inside the capture of a CUDA graph.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        >>> import torch
        >>> from torch_bridge import linear_cross_entropy
        >>> hidden = torch.randn(2, 5, 8, requires_grad=True)
        >>> head = torch.nn.Linear(8, 100)
        >>> target = torch.randint(0, 100, (2, 5))
        >>> loss = linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias)
        >>> loss.backward()
        >>> hidden.grad.shape, head.weight.grad.shape
        (torch.Size([2, 5, 8]), torch.Size([100, 8]))
    """
    integration.check_reduction(reduction, normalizer, backward)
    how = (precision, implementation, scratch_bytes)
    head = checks.head(input, linear_weight, linear_bias, logit_scale, logit_softcap, vocab_size, how)
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "normalizer": normalizer}
    options = {"reduction": reduction, "ignore_index": ignore_index, "backward": backward}
    valid = (head.size, ignore_index) if validate_labels else None
    tensors = checks.loss(
        head.leading, head.size, head.options["dtype"], target, class_weights, token_weights, numbers, valid, shift
    )
    loss, *metrics = LINEAR_CROSS_ENTROPY.call(
        head.tensors | tensors, head.options | options | {"return_metrics": return_metrics}
    )
    loss = loss.reshape(head.leading) if reduction == "none" else loss
    return (loss, Metrics(*cast(Any, metrics[:5]))) if return_metrics else loss


def linear_row_statistics(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor | None = None,
    *,
    statistics: Sequence[str] = ("lse", "target_logit"),
    row_mask: Tensor | None = None,
    linear_bias: Tensor | None = None,
    logit_softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    logit_weights: Tensor | None = None,
    vocab_size: int | None = None,
    precision: PrecisionLike | None = None,
    implementation: str | None = None,
    scratch_bytes: int | None = None,
) -> RowStatistics:
    r"""Statistics of each row of the logits, which are not stored: any loss written in PyTorch on top of them trains.

    Differentiable in `input`, `linear_weight` and its parts, `linear_bias` and `logit_scale`, once, with any
    cotangents; the backward computes tiles of the logits again.

    Args:
        input: `[..., H]`, as in `linear_cross_entropy`, like all that is not described here.
        linear_weight: `[V', H]`, or a `LowRank`.
        target: `[...]`, integers; needed for `target_logit` and `log_prob`. No target is special: one outside
            `[0, vocab_size)` has `target_logit` 0. `[..., K]`: K targets for each row.
        statistics: names out of `pallas_ce.RowStatistics`' fields; others cost nothing.
        row_mask: `[...]` bool; rows where it is False hold 0, have gradient 0 and cost no work.
        linear_bias: `[V']`.
        logit_softcap: c > 0, or None.
        logit_scale: a number or a scalar tensor.
        temperature: what divides the logits; see `linear_log_probs`.
        logit_weights: `[V]`, the u of `mean_logit = Σ_v u_v·z_v`; 1/V each by default. A constant.
        vocab_size: V.
        precision: how float32 operands are multiplied; None: as PyTorch's settings say.
        implementation: "xla", "mosaic_gpu", "triton", "reference" or None.
        scratch_bytes: bound on the memory of tiles.

    Returns:
        RowStatistics: of tensors `[...]`, float32 (float64 for float64; `argmax` int32), None where not asked for;
            with K targets, `target_logit` and `log_prob` are `[..., K]`.

    Raises:
        ValueError: shapes, devices or names that do not fit.
        TypeError: dtypes that do not fit; a DTensor.
        RuntimeError: inside the capture of a CUDA graph.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        >>> import torch
        >>> from torch_bridge import linear_row_statistics
        >>> hidden, weight = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> row = linear_row_statistics(hidden, weight, torch.tensor([0, 3]), statistics=("log_prob", "entropy"))
        >>> row.entropy.detach()
        tensor([1.3863, 1.3863])
        >>> (-row.log_prob - 0.01 * row.entropy).mean().backward()
    """
    asked = integration.check_statistics(statistics, target)
    # As the operator returns them: argmax, which has no gradient, last.
    names = [name for name in RowStatistics._fields if name in asked and name != "argmax"]
    names += ["argmax"] if "argmax" in asked else []
    how = (precision, implementation, scratch_bytes)
    head = checks.head(input, linear_weight, linear_bias, logit_scale, logit_softcap, vocab_size, how)
    if target is not None:
        target = checks.labels(target, head.leading, several=True)
    checks.shape("row_mask", row_mask, head.leading)
    if row_mask is None:
        row_mask = torch.ones(head.leading, dtype=torch.bool, device=input.device)
    elif row_mask.dtype != torch.bool:
        raise TypeError(f"row_mask has dtype {row_mask.dtype}; it must be bool: pass row_mask != 0")
    checks.shape("logit_weights", logit_weights, (head.size,))
    number, temperatures = checks.temperature(temperature, head.leading, head.options["dtype"])
    tensors = head.tensors | {
        "target": target,
        "logit_weights": logit_weights,
        "row_mask": checks.by_row(row_mask, head.leading),
        "temperature": temperatures,
    }
    found = LINEAR_ROW_STATISTICS.call(
        tensors, head.options | {"statistics": ",".join(names), "fixed_temperature": number}
    )
    shaped = (cast(Any, x.reshape(*head.leading, *x.shape[1:])) for x in found)
    return RowStatistics(**dict(zip(names, shaped, strict=False)))
