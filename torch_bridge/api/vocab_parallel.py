"""Heads whose vocabulary is split over a process group: their parts, cross entropy and log-probabilities.

Each process streams its own part of the vocabulary, of any size, and gathers a few numbers by row of all parts. With
l_k the log-sum-exp of part k, and L the largest of them,

    lse - L = log Σ_k exp(l_k - L),      entropy = Σ_k s_k·(entropy_k - log s_k),      log s_k = l_k - lse,

and the target's logit and the mean of all logits, both less L, are sums over the parts. A log-sum-exp is rounded to the
size of the logits, so `l_k - L` is made of a logit z of part k, as `(z - L) - log p_z`. Every process computes the same
numbers, so the derivatives in its own part's are the whole head's. The backward sums the processes' shares of the
hidden states' gradient.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pallas_ce import LowRank, RowStatistics
from pallas_ce.api import integration
from pallas_ce.api.integration import documented
from torch_bridge.api import checks
from torch_bridge.api.linear import linear_row_statistics
from torch_bridge.api.options import HeadOptions, PartLogProbsOptions, PartOptions
from torch_bridge.autograd import first_order
from torch_bridge.autograd.partitioned import gathering
from torch_bridge.materialized import losses
from torch_bridge.materialized.chunks import wide


@documented
@gathering
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
        class_weights: `[V]` of the whole vocabulary, the same on every process; a constant.
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
    part = Part(checks.weight(linear_weight), vocab_start, vocab_size, group)
    part.check(input, target, validate_parts, options)
    checked = checks.loss(input.shape[:-1], vocab_size, input.dtype, target, **options)
    target, counted = part.counted(cast(Any, checked["target"])(target), input, options)
    names, further, of_loss = ["lse", "log_prob"], {}, cast(Any, {**options})
    if checked["label_smoothing"] is not None:
        names.append("mean_log_prob")
    if (class_weights := options.get("class_weights")) is not None:
        classes = class_weights.detach().to(wide(input.dtype))
        of_loss["class_weights"] = classes[torch.where(counted, target, 0)]
        if "mean_log_prob" in names:
            further["logit_weights"] = classes[vocab_start : vocab_start + part.rows] / vocab_size
    row = part.statistics(names, input, target, counted, options, **further)
    return losses.cross_entropy(row.lse, row.log_prob, row.mean_log_prob, counted, **of_loss)


@documented
@gathering
def vocab_parallel_log_probs(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    target: Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    validate_parts: bool = False,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    return_argmax: bool = False,
    **options: Unpack[PartLogProbsOptions],
) -> Any:
    r"""`linear_log_probs` where each process of `group` has some rows of the weight.

    Every process calls it with the same tokens, and gets the whole head's numbers. Differentiable in `input`,
    `linear_weight`, `linear_bias` and `logit_scale`, once, through log-probabilities and entropies together; every
    process must compute the same loss of them. `vocab_parallel_cross_entropy` says how the vocabulary is split.

    Args:
        input: `[..., H]`, the same on every process; its gradient is summed over them, in its dtype.
        linear_weight: `[V_k, H]`, the rows from `vocab_start` on; or a `pallas_ce.LowRank` of them.
        target: `[...]` integers in the whole vocabulary, the same on every process; those outside count as ignored.
        vocab_start: the id of this process's first row.
        vocab_size: V, the entries of all processes together.
        group: the processes; None for all of them.
        validate_parts: compare the parts first, as in `vocab_parallel_cross_entropy`.
        temperature: what divides the logits, positive: a number, a tensor `[]`, or one `[...]` of a temperature for
            each row, the same on every process. A constant.
        return_entropy: return `pallas_ce.RowStatistics` with the rows' entropy, in nats.
        return_argmax: return `RowStatistics` with the id of the largest logit, the lowest one where several tie.
        logit_scale: a number, or a scalar tensor that every process has, whose gradient is summed over them.
        ignore_index: rows with this target hold 0 in all results, have gradient 0, and cost no work. None: no target is
            special.

    Returns:
        Tensor: the log-probabilities `[...]`, float32 (float64 for float64). Where more is asked, `RowStatistics` with
        `log_prob`, and `entropy` or `argmax` (int32, without gradient), each `[...]`.

    Raises:
        ValueError: a part that does not lie in the vocabulary, or is all of it with several processes in the group;
            `torch.distributed` that is not initialised; and as `linear_log_probs`.
        TypeError: as `linear_log_probs`.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        On each of two processes that hold half of a head of 1000 entries::

            row = vocab_parallel_log_probs(
                hidden, weight_part, target, vocab_start=500 * dist.get_rank(), vocab_size=1000,
                temperature=0.7, return_entropy=True)
            loss = -(advantage * row.log_prob).mean() - 0.01 * row.entropy.mean()
    """
    part = Part(checks.weight(linear_weight), vocab_start, vocab_size, group)
    part.check(input, target, validate_parts, options)
    target = checks.labels(target, input.shape[:-1], size=vocab_size, **options)(target)
    target, counted = part.counted(target, input, options)
    names = ["log_prob", *["entropy"] * return_entropy, *["argmax"] * return_argmax]
    row = part.statistics(names, input, target, counted, options, temperature=temperature)
    row = row._replace(**{name: torch.where(counted, getattr(row, name), 0) for name in names})
    return row if return_entropy or return_argmax else row.log_prob


class Part(NamedTuple):
    """The rows of a head's weight on this process, which begin at `start`."""

    weight: LowRank
    start: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @property
    def rows(self) -> int:
        """How many."""
        return int(self.weight.weight.shape[0])

    @property
    def shared_weight(self) -> Tensor | LowRank:
        """The weight; of a low-rank term every process has the whole `down`."""
        if self.weight.down is None:
            return self.weight.weight
        return dataclasses.replace(self.weight, down=self.shared(self.weight.down))

    def shared(self, x: Any) -> Any:
        """What every process has; the gradient of a tensor is the sum of their shares."""
        function: Any = _Shared
        return function.apply(x, self.group) if isinstance(x, Tensor) else x

    def check(self, input: Tensor, target: Tensor | None, validate_parts: bool, options: Any) -> None:
        """Checks what the functions of a part have in common, all but the target."""
        weight, rows, start, vocab_size = self.weight, self.rows, self.start, self.vocab_size
        are_ints = integration.checks.is_int(start) and integration.checks.is_int(vocab_size)
        if not are_ints or not 0 <= start < start + rows <= vocab_size:
            raise ValueError(
                f"vocab_start={start!r} with {rows} rows of linear_weight is no part of vocab_size={vocab_size!r}: "
                "both must be ints, and a part has at least one row and lies in the vocabulary"
            )
        tensors = {"input": input, "target": target, "linear_bias": options.get("linear_bias")}
        weights = {"linear_weight": weight.weight, "linear_weight.up": weight.up, "linear_weight.down": weight.down}
        first_order.reverse_mode(tensors | weights)
        if rows == vocab_size and dist.is_initialized() and (processes := dist.get_world_size(self.group)) > 1:
            raise ValueError(
                f"linear_weight has all {rows} rows of vocab_size={vocab_size} on one of {processes} processes, which "
                "would count them several times: pass each process its own rows, or call the function of a "
                "whole head"
            )
        if validate_parts:
            _check_parts(weight.weight, start, vocab_size, self.group)

    def counted(self, target: Any, input: Tensor, options: Any) -> tuple[Tensor, Tensor]:
        """Checked targets in input's leading shape, and which of them count."""
        # Narrower integers could not be compared with V.
        target, ignored = target.long().reshape(input.shape[:-1]), options.get("ignore_index", -100)
        return target, losses.counted(target, self.vocab_size, integration.checks.ignored(ignored))

    def statistics(
        self, names: Sequence[str], input: Tensor, target: Tensor, counted: Tensor, options: Any, **further: Any
    ) -> Any:
        """The whole head's `RowStatistics` of these names, the same on every process; rows that do not count have any.

        The targets that count lie in `[0, V)`. `further` are arguments of `linear_row_statistics`, of `logit_weights`
        this process's part.
        """
        of_head = {name: x for name, x in options.items() if name in HeadOptions.__annotations__} | further
        of_head["logit_scale"] = self.shared(of_head.get("logit_scale", 1.0))
        within = target - self.start
        here: Any = linear_row_statistics(
            self.shared(input),
            self.shared_weight,
            torch.where(counted, within.clamp(0, self.rows - 1), -1),  # the target, or another entry of this part
            statistics=("lse", "target_logit", "log_prob", *names, *["max_logit"] * ("argmax" in names)),
            row_mask=counted,
            **of_head,
        )
        mine = {"lse": here.lse, "logit": here.target_logit, "log_p": here.log_prob}
        mine["is_here"] = (within >= 0) & (within < self.rows)
        if "mean_log_prob" in names:
            u, even = of_head.get("logit_weights"), self.rows / self.vocab_size
            mine["sum_weights"] = torch.full_like(here.lse, even) if u is None else u.sum().expand_as(here.lse)
            mine["mean_log_p"] = here.mean_log_prob * even if u is None else here.mean_log_prob
        if "entropy" in names:
            mine["entropy"] = here.entropy
        if "argmax" in names:
            mine["max_logit"] = here.max_logit.detach()
            # As bits, since float32 does not hold every id.
            integer = torch.int64 if here.lse.dtype == torch.float64 else torch.int32
            mine["argmax"] = (here.argmax + self.start).to(integer).view(here.lse.dtype)
        parts = dict(zip(mine, gathered(list(mine.values()), self.group), strict=True))
        lse, logit = parts["lse"], parts["logit"]
        largest = lse.detach().amax(0)
        reference = torch.where(largest.isinf(), 0.0, largest)
        distance = logit - reference
        above = torch.where(logit.isinf() | lse.isinf(), lse - reference, distance - parts["log_p"])
        # Nothing changes a row of -inf only, nor a part that +inf of another one leaves no probability. The part that
        # has it gets derivatives that are finite, like the whole head's: its probabilities are then 0, or NaN.
        is_infinite = largest.isinf()
        above = torch.where(is_infinite & ~lse.isposinf(), 0.0, above)
        log_sum = torch.where(is_infinite, above.amax(0), torch.where(is_infinite, 0.0, above).logsumexp(0))
        found = {"log_prob": torch.where(parts["is_here"] > 0, distance, 0.0).sum(0) - log_sum}
        if "lse" in names:
            found["lse"] = torch.where(largest.isneginf(), largest, largest + log_sum)
        if "mean_log_prob" in names:
            of_part = losses.times(parts["sum_weights"], above - log_sum)
            found["mean_log_prob"] = (parts["mean_log_p"] + of_part).sum(0)
        if "entropy" in names:
            log_share = torch.where(largest.isneginf(), -torch.inf, above - log_sum)
            found["entropy"] = losses.times(log_share.exp(), parts["entropy"] - log_share).sum(0)
        if "argmax" in names:
            most = parts["max_logit"].detach()
            is_first = most.isnan() | (most == most.amax(0))
            ids = parts["argmax"].detach().view(integer)
            found["argmax"] = torch.where(is_first, ids, self.vocab_size).amin(0).int()
        return RowStatistics(**cast(Any, found))


def _check_parts(weight: Tensor, start: int, vocab_size: int, group: dist.ProcessGroup | None) -> None:
    """Compares the parts of all processes."""
    of_weight = [weight.sum(dtype=torch.float64), *(x.double() for x in weight.aminmax())]
    mine = [*torch.tensor([start, weight.shape[0], vocab_size]).to(of_weight[0]), *of_weight]
    parts = gathered(mine, group).detach().t().tolist()
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


def gathered(mine: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """`[numbers, processes, ...]`: each number of all processes; differentiable in this process's own."""
    stacked = torch.stack([x.to(mine[0].dtype) for x in mine])
    parts = [torch.empty_like(stacked) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, stacked.detach(), group=group)
    parts[dist.get_rank(group)] = stacked
    return torch.stack(parts, 1)


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
