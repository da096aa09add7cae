"""`linear_distillation` on PyTorch tensors: a student's head against a teacher's."""

from typing import Any, Unpack

from torch import Tensor

from pallas_ce import LowRank
from pallas_ce.api import integration
from pallas_ce.api.integration import Reduction, documented
from torch_bridge.api import checks
from torch_bridge.api.options import WholeHeadOptions
from torch_bridge.autograd.operator import LINEAR_DISTILLATION
from torch_bridge.autograd.partitioned import gathering


@documented
@gathering
def linear_distillation(
    input: Tensor,
    linear_weight: Tensor | LowRank,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    row_mask: Tensor | None = None,
    ignore_index: int | None = -100,
    token_weights: Tensor | None = None,
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_logit_softcap: float | None = None,
    teacher_logit_scale: float | Tensor = 1.0,
    **options: Unpack[WholeHeadOptions],
) -> Tensor:
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
        temperature: T > 0 for both heads, a number or a tensor, `[]` or `[...]`. Multiply the loss by T² for gradients
            whose size does not depend on it.
        row_mask: `[...]` bool; rows where it is False do not count: no loss, gradients of exactly 0, no work.
        ignore_index: rows with this target do not count, nor do those with a target outside the vocabulary.
        token_weights: w `[...]`, differentiable.
        reduction: "mean", "sum", or "none" for `w_i·divergence_i` `[...]`.
        normalizer: what the mean divides by; by default Σ w over the rows that count.
        teacher_bias: the teacher's `[V'']`.
        teacher_logit_softcap: the cap of the teacher's logits.
        teacher_logit_scale: their scale, a number or a scalar tensor.
        vocab_size: V; entries from there on are padding in both heads. By default all, if both have as many.
        implementation: "xla" or None, or "reference" (materialised logits).

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
    integration.check_reduction(reduction, normalizer, "auto")
    head = checks.head(input, linear_weight, **options)
    teacher = checks.teacher(teacher_input, teacher_weight, teacher_bias, teacher_logit_scale, head.leading)
    all_count = row_mask is None and target is not None
    given: dict[str, Any] = {
        "target": None if target is None else checks.labels(target, head.leading, ignore_index=ignore_index),
        "row_mask": None if all_count else checks.mask(row_mask, input),
        "token_weights": checks.of_tokens(token_weights, head.leading),
        "divergence": divergence,
        "beta": beta,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "teacher_logit_softcap": teacher_logit_softcap,
        **checks.scalars(head.dtype, {"normalizer": normalizer}),
        **checks.temperature(temperature, head.leading, head.dtype),
    }
    loss: Tensor = head.shaped(LINEAR_DISTILLATION.call(options | head.given | teacher | given)[0])
    return loss
