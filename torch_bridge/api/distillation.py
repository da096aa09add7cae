"""`linear_distillation` on PyTorch tensors: a student's head against a teacher's, both whole or split alike."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from pallas_ce import LowRank
from pallas_ce.api import integration
from pallas_ce.api.integration import documented
from torch_bridge.api import checks
from torch_bridge.api.options import DistillationOptions, PartDistillationOptions
from torch_bridge.api.prepared import Prepared, prepared, shaped
from torch_bridge.api.vocab_parallel import Part, gathered
from torch_bridge.autograd.operator import LINEAR_DISTILLATION, LINEAR_DISTILLATION_OF_PARTS
from torch_bridge.autograd.partitioned import gathering


@documented
@prepared
def linear_distillation(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    **options: Unpack[DistillationOptions],
) -> Prepared[Tensor]:
    r"""A divergence between a student's and a teacher's next-token distributions, without storing either's logits.

    With `p = softmax(student's logits / T)`, `q = softmax(teacher's logits / T)` for each row:

        forward_kl   KL(q‖p) = Σ_v q_v (log q_v - log p_v)
        reverse_kl   KL(p‖q)
        jsd          β·KL(q‖m) + (1-β)·KL(p‖m),   m = β·q + (1-β)·p

    Differentiable in `input`, `linear_weight`, `linear_bias`, `logit_scale` and `token_weights`, once. The teacher and
    the temperature are constants. The forward keeps O(N) numbers, and the backward computes tiles of both heads' logits
    again; see `pallas_ce.linear_distillation`.

    Args:
        input: the student's `[..., H]`, as in `linear_cross_entropy`, like all that is not described here.
        linear_weight: the student's `[V', H]`, or a `LowRank`.
        teacher_input: `[..., H_t]` with `input`'s leading shape; H_t may differ from H.
        teacher_weight: `[V'', H_t]`. The first V entries of both weights are one vocabulary.
        target: `[...]` integers that only say which rows count, or None.
        divergence: "forward_kl", "reverse_kl", or "jsd", the generalised Jensen-Shannon divergence.
        beta: β of "jsd", strictly between 0 and 1.
        vocab_size: V; entries from there on are padding in both heads. By default all, if both have as many.

    Returns:
        Tensor: float32 (float64 for float64), `[]` or `[...]`; 0.0 when no row counts.

    Raises:
        ValueError: shapes, devices or values that do not fit.
        TypeError: dtypes that do not fit; a DTensor.
        RuntimeError: inside the capture of a CUDA graph.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        >>> import torch
        >>> from torch_bridge import linear_distillation
        >>> student, teacher = torch.nn.Linear(8, 50), torch.nn.Linear(16, 50)
        >>> hidden, of_teacher = torch.randn(6, 8, requires_grad=True), torch.randn(6, 16)
        >>> loss = linear_distillation(
        ...     hidden, student.weight, of_teacher, teacher.weight,
        ...     linear_bias=student.bias, teacher_bias=teacher.bias, divergence="jsd", temperature=2.0,
        ... )
        >>> loss.backward()
        >>> hidden.grad.shape, teacher.weight.grad
        (torch.Size([6, 8]), None)
    """
    known = {**options, "divergence": divergence, "beta": beta}
    head, given = _checked(input, linear_weight, teacher_input, teacher_weight, known)
    row_mask, ignore_index = options.get("row_mask"), options.get("ignore_index", -100)
    all_count = row_mask is None and target is not None
    if target is not None:
        given["target"] = checks.labels(target, head.leading, size=head.size, ignore_index=ignore_index)
    given["row_mask"] = None if all_count else checks.mask(row_mask, input)
    return LINEAR_DISTILLATION, given, next


@documented
@gathering
def vocab_parallel_distillation(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    validate_parts: bool = False,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    **options: Unpack[PartDistillationOptions],
) -> Tensor:
    r"""`linear_distillation` where each process of `group` has some rows of both heads' weights.

    Every process calls it with the same tokens, and gets the same loss. `vocab_parallel_cross_entropy` says how the
    vocabulary is split. A process gathers five numbers by row of each part, four for "jsd", whose two sums by row are
    added up after that.

    Args:
        input: the student's `[..., H]`, the same on every process; its gradient is summed over them, in its dtype.
        linear_weight: the student's `[V_k, H]`, the rows from `vocab_start` on; or a `pallas_ce.LowRank` of them.
        teacher_input: `[..., H_t]`, the same on every process; H_t may differ from H.
        teacher_weight: `[V_k, H_t]`, the rows of the same ids. Cut off, or fill up, a teacher's other entries before.
        target: `[...]` integers in the whole vocabulary that only say which rows count, or None.
        vocab_start: the id of this process's first row.
        vocab_size: V, the entries of all processes together.
        group: the processes; None for all of them.
        validate_parts: compare the student's parts first, as in `vocab_parallel_cross_entropy`.
        divergence: "forward_kl", "reverse_kl", or "jsd".
        beta: β of "jsd".
        logit_scale: a number, or a scalar tensor that every process has, whose gradient is summed over them.

    Returns:
        Tensor: float32 (float64 for float64), `[]` or `[...]`; 0.0 when no row counts.

    Raises:
        ValueError: a part that does not lie in the vocabulary, or is all of it with several processes in the group;
            a teacher's part of another size; `torch.distributed` that is not initialised; and as
            `linear_distillation`.
        TypeError: as `linear_distillation`.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        On each of two processes that hold half of both heads of 1000 entries::

            loss = vocab_parallel_distillation(
                hidden, weight_part, of_teacher, teacher_part, vocab_start=500 * dist.get_rank(), vocab_size=1000)
    """
    part = Part(checks.weight(linear_weight), vocab_start, vocab_size, group)
    part.check(input, target, validate_parts, options)
    if teacher_weight.shape[:1] != (part.rows,):
        raise ValueError(
            f"teacher_weight has shape {tuple(teacher_weight.shape)} and linear_weight {part.rows} rows: a process "
            "needs the rows of the same ids of both"
        )
    known: dict[str, Any] = {**options, "divergence": divergence, "beta": beta}
    known["logit_scale"] = part.shared(options.get("logit_scale", 1.0))
    input, shared_weight = part.shared(input), part.shared_weight
    head, takes = _checked(input, shared_weight, teacher_input, teacher_weight, known)
    row_mask = checks.mask(options.get("row_mask"), input)(options.get("row_mask"))
    if target is not None:
        _, counted = part.counted(checks.labels(target, head.leading)(target), input, options)
        row_mask = row_mask & counted.reshape(-1)
    takes["row_mask"] = checks.as_it_is
    given = known | {"input": input, "linear_weight": shared_weight, "row_mask": row_mask}
    given |= {"teacher_input": teacher_input, "teacher_weight": teacher_weight}

    def outputs(of_all: dict[str, Tensor]) -> Sequence[Tensor]:
        call, tensors = LINEAR_DISTILLATION_OF_PARTS.call(
            takes | dict.fromkeys(of_all, checks.as_it_is), given | of_all
        )
        return call.run(tensors)

    with torch.no_grad():
        of_all = {"parts": gathered(outputs({}), group)[0].movedim(0, 1).contiguous()}
        if divergence == "jsd":
            (of_all["sums"],) = outputs(of_all)
            dist.all_reduce(of_all["sums"], group=group)
    return next(shaped(outputs(of_all), given))


def _checked(
    input: Tensor, linear_weight: Any, teacher_input: Tensor, teacher_weight: Tensor, options: dict[str, Any]
) -> tuple[checks.Head, dict[str, Any]]:
    """The student's head, and what the operators take but for which rows count."""
    integration.checks.check_reduction(options.get("reduction", "mean"), options.get("normalizer"))
    head = checks.head(input, linear_weight, **options)
    bias, scale = options.get("teacher_bias"), options.get("teacher_logit_scale", 1.0)
    given: dict[str, Any] = {
        "token_weights": checks.of_tokens(options.get("token_weights"), head.leading),
        **checks.teacher(teacher_input, teacher_weight, bias, scale, head.leading, head.size),
        **checks.scalars(head.dtype, options, "normalizer"),
        "temperature": None,
        **checks.temperature(options.get("temperature", 1.0), head.leading, head.dtype),
    }
    return head, options | head.given | given
