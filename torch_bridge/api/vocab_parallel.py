"""A head whose vocabulary is split over a process group: `vocab_parallel_cross_entropy`.

Each process streams its own part of the vocabulary, of any size, and gathers a few numbers by row of all parts. With
l_k the log-sum-exp of part k, and L the largest of them,

    lse - L = log Σ_k exp(l_k - L),

and the target's logit and the mean of all logits, both less L, are sums over the parts. A log-sum-exp is rounded to the
size of the logits, so `l_k - L` is made of a logit z of part k, as `(z - L) - log p_z`. Every process computes the same
loss from the same numbers, so the derivatives in its own part's are the whole loss's. The backward sums the processes'
shares of the hidden states' gradient.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pallas_ce import LowRank, integration
from pallas_ce.integration import documented
from torch_bridge.api import checks
from torch_bridge.api.linear import linear_row_statistics
from torch_bridge.api.options import HeadOptions, PartOptions
from torch_bridge.autograd import first_order
from torch_bridge.materialized import losses


@documented
def vocab_parallel_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    validate_parts: bool = False,
    **options: Unpack[PartOptions],
) -> Tensor:
    r"""`linear_cross_entropy` where each process of `group` has some rows of the weight.

    Every process calls it with the same tokens, and gets the same loss. The parts may differ in size; they must be
    disjoint and together be `[0, vocab_size)`. Other parts, such as the same rows on two processes, give another loss.
    An error says so where a part is the whole vocabulary, or under `validate_parts`. The backward recomputes tiles of
    logits.

    Args:
        input: `[..., H]`, the same on every process; its gradient is summed over them, in its dtype.
        linear_weight: `[V_k, H]`, the rows from `vocab_start` on; or a `pallas_ce.LowRank` with these rows of the
            weight and of `up`, and the whole of `down`, whose gradient is summed over the processes too.
        target: `[...]` integers in the whole vocabulary, the same on every process; those outside count as ignored.
        vocab_start: the id of this process's first row.
        vocab_size: V, the entries of all processes together.
        group: the processes; None for all of them.
        logit_scale: a number, or a scalar tensor that every process has, whose gradient is summed over them.
        validate_parts: raise a ValueError, on every process, where the parts are not disjoint and the whole vocabulary,
            or where two hold equal weights, by their sums, smallest and largest entries. Reads the weight, exchanges
            six numbers, and the host waits for them: for a first step.

    Returns:
        Tensor: `[]`, or `[...]` for "none"; float32 (float64 for float64); 0 where nothing counts.

    Raises:
        ValueError: a part that does not lie in the vocabulary, or is all of it with several processes in the group;
            `torch.distributed` that is not initialised; and as `linear_cross_entropy`.
        TypeError: as `linear_cross_entropy`.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        On each of two processes that hold half of a head of 1000 entries::

            loss = vocab_parallel_cross_entropy(
                hidden, weight_part, target, vocab_start=500 * dist.get_rank(), vocab_size=1000)
    """
    weight = checks.weight(linear_weight)
    rows = weight.weight.shape[0]
    are_ints = integration.is_int(vocab_start) and integration.is_int(vocab_size)
    if not are_ints or not 0 <= vocab_start < vocab_start + rows <= vocab_size:
        raise ValueError(
            f"vocab_start={vocab_start!r} with {rows} rows of linear_weight is no part of vocab_size={vocab_size!r}: "
            "both must be ints, and a part has at least one row and lies in the vocabulary"
        )
    tensors = {"input": input, "target": target, "linear_bias": options.get("linear_bias")}
    weights = {"linear_weight": weight.weight, "linear_weight.up": weight.up, "linear_weight.down": weight.down}
    first_order.reverse_mode(tensors | weights)
    leading, ignored = input.shape[:-1], integration.read_ignore_index(options.get("ignore_index", -100))
    checked = checks.loss(leading, vocab_size, "float32", target, **options)
    if rows == vocab_size and dist.is_initialized() and (processes := dist.get_world_size(group)) > 1:
        raise ValueError(
            f"linear_weight has all {rows} rows of vocab_size={vocab_size} on one of {processes} processes, which "
            "would count them several times: pass each process its own rows, or call linear_cross_entropy"
        )
    if validate_parts:
        _check_parts(weight.weight, vocab_start, vocab_size, group)
    # Narrower integers could not be compared with V.
    target = cast(Tensor, checked["target"]).long().reshape(leading)
    counted = losses.counted(target, vocab_size, ignored)
    names = ("lse", "target_logit", "log_prob", *(("mean_log_prob",) if options.get("label_smoothing", 0.0) else ()))
    if weight.down is not None:
        weight = dataclasses.replace(weight, down=_shared(weight.down, group))
    within = target - vocab_start
    of_head: Any = {name: x for name, x in options.items() if name in HeadOptions.__annotations__}
    if isinstance(scale := of_head.get("logit_scale"), Tensor):
        of_head["logit_scale"] = _shared(scale, group)
    here: Any = linear_row_statistics(
        _shared(input, group),
        weight.weight if weight.down is None else weight,
        torch.where(counted, within.clamp(0, rows - 1), -1),  # the target, or another entry of this part
        statistics=names,
        row_mask=counted,
        **of_head,
    )
    mine = (within >= 0) & (within < rows)
    share = torch.full_like(here.lse, rows / vocab_size)
    found = (here.lse, here.target_logit, here.log_prob, mine, share, here.mean_log_prob)
    lse, logit, log_p, mine, share, *mean_log_p = _gathered([x for x in found if x is not None], group)
    largest = lse.detach().amax(0)
    largest = torch.where(largest.isinf(), 0.0, largest)
    distance = logit - largest
    above = torch.where(logit.isinf(), lse - largest, distance - log_p)
    log_sum = above.logsumexp(0)
    return losses.cross_entropy(
        largest + log_sum,
        torch.where(mine > 0, distance, 0.0).sum(0) - log_sum,
        ((mean_log_p[0] + above) * share).sum(0) - log_sum if mean_log_p else None,
        counted,
        **options,
    )


def _check_parts(weight: Tensor, start: int, vocab_size: int, group: dist.ProcessGroup | None) -> None:
    """Compares the parts of all processes."""
    of_weight = [weight.sum(dtype=torch.float64), *(x.double() for x in weight.aminmax())]
    mine = [*torch.tensor([start, weight.shape[0], vocab_size]).to(of_weight[0]), *of_weight]
    parts = _gathered(mine, group).detach().t().tolist()
    ranges = [(int(first), int(first + rows)) for first, rows, *_ in parts]
    bounds = [0, *(end for _, end in sorted(ranges))]
    if bounds != [*(first for first, _ in sorted(ranges)), vocab_size] or len({size for _, _, size, *_ in parts}) > 1:
        raise ValueError(
            f"vocab_start and the rows of linear_weight are {ranges} by process, with vocab_size="
            f"{[int(size) for _, _, size, *_ in parts]}: they must be disjoint and together be one [0, vocab_size)"
        )
    for (i, one), (j, other) in itertools.combinations(enumerate(parts), 2):
        smallest, largest = one[-2:]
        if smallest != largest and (one[1], *one[3:]) == (other[1], *other[3:]):
            raise ValueError(
                f"linear_weight is equal on processes {i} and {j} of the group (vocab_start={ranges[i][0]} and "
                f"{ranges[j][0]}): pass each its own rows"
            )


def _gathered(mine: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """`[numbers, processes, ...]`: each number of all processes; differentiable in this process's own."""
    stacked = torch.stack([x.to(mine[0].dtype) for x in mine])
    parts = [torch.empty_like(stacked) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, stacked.detach(), group=group)
    parts[dist.get_rank(group)] = stacked
    return torch.stack(parts, 1)


def _shared(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor that every process has; its gradient is the sum of their shares."""
    function: Any = _Shared
    return cast(Tensor, function.apply(tensor, group))


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
