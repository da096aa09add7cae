"""The functions of a head on PyTorch tensors."""

import itertools
from collections.abc import Sequence
from typing import Any, Unpack, cast

from torch import Tensor

from pallas_ce import LogProbs, LowRank, Metrics, RowStatistics
from pallas_ce.api import integration
from pallas_ce.api.integration import documented
from torch_bridge.api import checks
from torch_bridge.api.options import CrossEntropyOptions, LogProbsOptions, WholeHeadOptions
from torch_bridge.api.prepared import Prepared, prepared
from torch_bridge.autograd.operator import LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROBS, LINEAR_ROW_STATISTICS


@documented
@prepared
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor,
    *,
    shift: int = 0,
    return_metrics: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> Prepared[Any]:
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
        shift: 1 where the hidden state of a position predicts the next one's target, along the last leading axis: the
            loss of `input[..., :-1, :]` with `target[..., 1:]` and `token_weights[..., 1:]`, without the copy of
            the input. Positions whose target would lie behind the last one do not count.
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
    head = checks.head(input, linear_weight, **options)
    taken = checks.loss(head.leading, head.size, head.dtype, target, shift=shift, **options)
    given = {**options, **head.given, **taken, "return_metrics": return_metrics}
    if not return_metrics:
        return LINEAR_CROSS_ENTROPY, given, next
    return LINEAR_CROSS_ENTROPY, given, lambda found: (next(found), Metrics(*itertools.islice(found, 5)))


@documented
@prepared
def linear_row_statistics(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor | None = None,
    *,
    statistics: Sequence[str] = ("lse", "target_logit"),
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_weights: Tensor | None = None,
    **options: Unpack[WholeHeadOptions],
) -> Prepared[RowStatistics]:
    r"""Statistics of each row of the logits, which are not stored: any loss written in PyTorch on top of them trains.

    Differentiable in `input`, `linear_weight` and its parts, `linear_bias` and `logit_scale`, once, with any
    cotangents; the backward computes tiles of the logits again.

    Args:
        input: `[..., H]`, as in `linear_cross_entropy`, like all that is not described here.
        linear_weight: `[V', H]`, or a `LowRank`.
        target: `[...]`, integers; needed for `target_logit` and `log_prob`. No target is special: one outside
            `[0, vocab_size)` has `target_logit` 0, and `log_prob` `-lse`; mask its row, or take `linear_log_probs`,
            where it is 0. `[..., K]`: K targets for each row.
        statistics: names out of `pallas_ce.RowStatistics`' fields; others cost nothing.
        row_mask: `[...]` bool; rows where it is False hold 0, have gradient 0 and cost no work.
        temperature: what divides the logits; see `linear_log_probs`.
        logit_weights: `[V]`, the u of `mean_logit = Σ_v u_v·z_v`; 1/V each by default. A constant.

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
    asked = integration.checks.check_statistics(statistics, target)
    # As the operator returns them: argmax, which has no gradient, last.
    names = sorted({*asked}, key=[*(x for x in RowStatistics._fields if x != "argmax"), "argmax"].index)
    head = checks.head(input, linear_weight, **options)
    checks.shape("logit_weights", logit_weights, (head.size,))
    given = {
        "target": None if target is None else checks.labels(target, head.leading, several=True, size=head.size),
        "statistics": ",".join(names),
        "logit_weights": None if logit_weights is None else checks.as_it_is,
        "row_mask": checks.mask(row_mask, input),
        **checks.temperature(temperature, head.leading, head.dtype),
    }
    given = options | head.given | given
    return LINEAR_ROW_STATISTICS, given, lambda found: RowStatistics(**dict(zip(names, found, strict=False)))


@documented
@prepared
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    support: Tensor | None = None,
    return_entropy: bool = False,
    return_sum_sq_probs: bool = False,
    return_hit: bool = False,
    shift: int = 0,
    **options: Unpack[LogProbsOptions],
) -> Prepared[Any]:
    r"""Log-probabilities of `target` under `softmax(z)`, without storing logits.

        z = softcap(logit_scale · (input @ linear_weight.T + linear_bias)) / temperature,
        log p_t = z_t - log Σ_v exp z_v

    Differentiable in `input`, `linear_weight`, `linear_bias` and `logit_scale`, once, through everything returned
    together, with any cotangents: what policy-gradient and preference losses written in PyTorch start from. The forward
    keeps O(N) numbers, and the backward computes tiles of the logits again. `pallas_ce.linear_log_probs` has the
    formulas.

    Args:
        input: `[..., H]`, as in `linear_cross_entropy`, like all that is not described here. `input.float()` with a
            bfloat16 weight is the float32 head of reinforcement learning: the weight is cast tile by tile.
        linear_weight: `[V', H]`, or a `LowRank`.
        target: `[...]`, integers, or `[..., K]` for the log-probabilities of K given tokens of each row; a token may be
            given several times. Targets outside `[0, vocab_size)` count as ignored.
        temperature: positive; a number, a tensor `[]` or one `[...]` of a temperature for each row. A constant: it gets
            no gradient. A number costs nothing but is compiled in: pass one that changes from call to call as a tensor.
        support: `[..., K]` integers: with each target the ids that its sampler kept, and the only ones that
            probabilities are over; -1 pads. A target outside its set has log-probability -inf and no gradient. See
            `pallas_ce.linear_log_probs`.
        return_entropy: return `pallas_ce.LogProbs` with the rows' entropy.
        return_sum_sq_probs: return `LogProbs` with the rows' sum of squared probabilities.
        return_hit: return `LogProbs` with whether a target is the most likely token.
        shift: a row meets the targets `shift` positions later, as in `linear_cross_entropy`, at its own temperature.
        ignore_index: this target is ignored: log-probability and gradient exactly 0. The work of rows whose targets are
            all ignored is skipped, and what they hold does not matter. None: no target is special.
        implementation: "xla", "mosaic_gpu" (a number as temperature), "triton", "reference" or None.

    Returns:
        Tensor: the log-probabilities, float32 (float64 for float64), in the target's shape; where more is asked,
        and with `support`, `LogProbs` of tensors, entropies and sums `[...]`, without a gradient for `hit` and
        `in_support`.

    Raises:
        ValueError: shapes, devices or values that do not fit, a named implementation that cannot serve.
        TypeError: dtypes that do not fit; a DTensor.
        RuntimeError: inside the capture of a CUDA graph.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        >>> import torch
        >>> from torch_bridge import linear_log_probs
        >>> hidden, weight = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> linear_log_probs(hidden, weight, torch.tensor([1, -100])).detach()
        tensor([-1.3863,  0.0000])
        >>> found = linear_log_probs(hidden, weight, torch.tensor([1, 2]), temperature=0.7, return_entropy=True)
        >>> before, advantage = found.log_probs.detach(), torch.tensor([0.5, -1.0])
        >>> ratio = (found.log_probs - before).exp()
        >>> (-(ratio * advantage).mean() - 0.01 * found.entropy.mean()).backward()
    """
    head = checks.head(input, linear_weight, **options)
    asked = {"return_entropy": return_entropy, "return_sum_sq_probs": return_sum_sq_probs, "return_hit": return_hit}
    labels = checks.labels(target, head.leading, several=True, shift=shift, size=head.size, **options)
    given = asked | {"target": labels} | checks.temperature(temperature, head.leading, head.dtype)
    if support is not None:
        given["support"] = checks.support(support, target, head.leading, shift)
    names = ["log_probs", *(name.removeprefix("return_") for name, wanted in asked.items() if wanted)]
    names += ["in_support"] * (support is not None)
    given = options | head.given | given
    if len(names) == 1:
        return LINEAR_LOG_PROBS, given, next
    return LINEAR_LOG_PROBS, given, lambda found: LogProbs(**dict(zip(names, cast(Any, found), strict=False)))
