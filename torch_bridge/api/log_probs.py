"""`linear_log_probs` on PyTorch tensors: what policies, preferences and distillation read of a head."""

from typing import Any, Unpack, cast

from torch import Tensor

from pallas_ce import LogProbs, LowRank
from pallas_ce.integration import documented
from torch_bridge.api import checks
from torch_bridge.api.options import LogProbsOptions
from torch_bridge.autograd.operator import LINEAR_LOG_PROBS


@documented
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_sum_sq_probs: bool = False,
    return_hit: bool = False,
    shift: int = 0,
    **options: Unpack[LogProbsOptions],
) -> Any:
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
        return_entropy: return `pallas_ce.LogProbs` with the rows' entropy.
        return_sum_sq_probs: return `LogProbs` with the rows' sum of squared probabilities.
        return_hit: return `LogProbs` with whether a target is the most likely token.
        shift: a row meets the targets `shift` positions later, as in `linear_cross_entropy`, at its own temperature.
        ignore_index: this target is ignored: log-probability and gradient exactly 0. The work of rows whose targets are
            all ignored is skipped, and what they hold does not matter. None: no target is special.
        implementation: "xla", "mosaic_gpu" (a number as temperature), "triton", "reference" or None.

    Returns:
        Tensor: the log-probabilities, float32 (float64 for float64), in the target's shape; where more is asked,
        `LogProbs` of tensors, entropies and sums `[...]`, without a gradient for `hit`.

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
    found = map(head.shaped, LINEAR_LOG_PROBS.call(options | head.given | given))
    if not any(asked.values()):
        return next(found)
    names = ["log_probs", *(name.removeprefix("return_") for name, wanted in asked.items() if wanted)]
    return LogProbs(**dict(zip(names, cast(Any, found), strict=False)))
