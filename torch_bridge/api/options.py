"""The keyword arguments that the functions share: their types and texts, once. Their defaults are `pallas_ce`'s."""

from typing import TypedDict

from torch import Tensor

from pallas_ce.api.integration import Backward, PrecisionLike, Reduction


class HeadOptions(TypedDict, total=False):
    """A head, whole or a part.

    Attributes:
        linear_bias: `[V']`, an entry for each row of the weight.
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None.
        logit_scale: a number, or a scalar tensor, differentiable.
        precision: how float32 operands are multiplied: a name, such as "highest", "tensorfloat32" or
            "BF16_BF16_F32_X3", or what else `pallas_ce.linear_cross_entropy` takes. None: as PyTorch's own products, in
            full float32, or in TF32 on CUDA devices where `torch.backends.cuda.matmul.fp32_precision` is "tf32", which
            `torch.set_float32_matmul_precision("high")` makes it, too.
        implementation: "xla", "mosaic_gpu", "triton", "reference", or None to choose; see `pallas_ce`.
        scratch_bytes: bound on scratch memory.
    """

    linear_bias: Tensor | None
    logit_softcap: float | None
    logit_scale: float | Tensor
    precision: PrecisionLike | None
    implementation: str | None
    scratch_bytes: int | None


class WholeHeadOptions(HeadOptions, total=False):
    """A head with all of the vocabulary.

    Attributes:
        vocab_size: V; entries of the weight from there on are padding. Default V'.
    """

    vocab_size: int | None


class TargetOptions(TypedDict, total=False):
    """Targets that may have to be ignored.

    Attributes:
        ignore_index: tokens with this target have loss and gradient 0 and cost no work. None: no target is special.
        validate_labels: raise a ValueError naming the first target that is neither in the vocabulary nor
            `ignore_index`, under `torch.compile` too. Reads the targets' values: on a GPU the host waits for them.
    """

    ignore_index: int | None
    validate_labels: bool


class LogProbsOptions(WholeHeadOptions, TargetOptions, total=False):
    """A head with targets."""


class LossOptions(TargetOptions, total=False):
    """Cross entropy, reduced.

    Attributes:
        class_weights: `[V]`, PyTorch's `weight`; a constant.
        token_weights: `[...]`, differentiable.
        reduction: "mean", "sum", or "none" for `[...]`.
        label_smoothing: in [0, 1]; differentiable, as a tensor. Numbers may change from call to call without compiling
            anew.
        z_loss: factor β of `β·lse²`; differentiable, as a tensor.
        normalizer: what the mean divides by, in place of the (weighted) number of tokens that count.
    """

    class_weights: Tensor | None
    token_weights: Tensor | None
    reduction: Reduction
    label_smoothing: float | Tensor
    z_loss: float | Tensor
    normalizer: float | Tensor | None


class PartOptions(HeadOptions, LossOptions, total=False):
    """The loss of a head that has a part of the vocabulary."""


class PartLogProbsOptions(HeadOptions, TargetOptions, total=False):
    """A head with targets that has a part of the vocabulary."""


class TeacherOptions(TypedDict, total=False):
    """A teacher's head, and a divergence from it by row, reduced.

    Attributes:
        temperature: T > 0 for both heads, a number or a tensor, `[]` or `[...]`. Multiply the loss by T² for gradients
            whose size does not depend on it.
        row_mask: `[...]` bool; rows where it is False do not count: no loss, gradients of exactly 0, no work.
        ignore_index: rows with this target do not count, nor do those with a target outside the vocabulary.
        token_weights: w `[...]`, differentiable.
        reduction: "mean", "sum", or "none" for `w_i·divergence_i` `[...]`.
        normalizer: what the mean divides by; by default Σ w over the rows that count.
        teacher_bias: an entry for each row of the teacher's weight.
        teacher_logit_softcap: the cap of the teacher's logits.
        teacher_logit_scale: their scale, a number or a scalar tensor.
        implementation: "xla", "triton" (kernels for NVIDIA GPUs from Ampere on), or for a head with all of the
            vocabulary "reference" (stored logits). None chooses as `pallas_ce.linear_distillation` does.
    """

    temperature: float | Tensor
    row_mask: Tensor | None
    ignore_index: int | None
    token_weights: Tensor | None
    reduction: Reduction
    normalizer: float | Tensor | None
    teacher_bias: Tensor | None
    teacher_logit_softcap: float | None
    teacher_logit_scale: float | Tensor
    implementation: str | None


class DistillationOptions(TeacherOptions, WholeHeadOptions, total=False):
    """A divergence of two heads."""


class PartDistillationOptions(TeacherOptions, HeadOptions, total=False):
    """A divergence of two heads that have a part of the vocabulary."""


class CrossEntropyOptions(WholeHeadOptions, LossOptions, total=False):
    """The loss of a head.

    Attributes:
        backward: "in_forward" computes the gradients in the forward and keeps them, with three matrix products;
            "recompute" keeps O(N) numbers and computes logits twice, with four: take it where many forwards wait for
            their backward, or under activation checkpointing. "auto" takes in_forward for scalar losses where its
            scratch fits.
    """

    backward: Backward
