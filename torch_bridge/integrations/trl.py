"""TRL's trainers on this library's row statistics.

A trainer of TRL replaces the forward of its models and reference models by a head of its own (`add_fused_lm_head`). One
function makes all that the head reads of the logits, `trl.trainer.utils._ChunkedLogProbFunction`. Only that function is
replaced here: adapters, FSDP2, context parallelism and losses of routers stay TRL's. Its trainers refuse an adapter of
the head, since that function is given the weight alone. `DistillationTrainer` has another function, of two heads.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from pallas_ce.api.integration import implementation_of_pair
from torch_bridge.api.distillation import linear_distillation
from torch_bridge.api.linear import linear_row_statistics

# The versions whose trainers the tests have run.
TESTED = ("1.16.0",)

# The fields of `FusedCausalLMOutput` in the order of TRL's function, each with the statistic that makes it.
_STATISTICS = {
    "log_probs": "log_prob",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax",
}


# The arguments of TRL's function of two heads, in its order, each with its name here.
_OF_TWO_HEADS = {
    "student_hidden": "input",
    "student_weight": "linear_weight",
    "student_bias": "linear_bias",
    "teacher_hidden": "teacher_input",
    "teacher_weight": "teacher_weight",
    "teacher_bias": "teacher_bias",
    "beta": "beta",
    "temperature": "temperature",
    "student_logit_scale": "logit_scale",
    "student_final_logit_softcapping": "logit_softcap",
    "teacher_logit_scale": "teacher_logit_scale",
    "teacher_final_logit_softcapping": "teacher_logit_softcap",
}
_ENDS = {0.0: "forward_kl", 1.0: "reverse_kl"}


class FusedHead:
    """Replaces TRL's `original` function, whose `apply` has these arguments, for some patched models."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.options: dict[str, Any] = {}  # of `linear_row_statistics`
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(_STATISTICS),
    ) -> tuple[Tensor | None, ...]:
        """`[N]` of hidden states `[N, H]`, for each of `_STATISTICS`; None for one that is not in `outputs`.

        Only log-probabilities and entropies have a gradient, as in TRL.
        """
        row: Any = linear_row_statistics(
            hidden,
            weight,
            targets,
            statistics=[x for name, x in _STATISTICS.items() if name == "log_probs" or name in outputs],
            linear_bias=bias,
            logit_softcap=final_logit_softcapping,
            logit_scale=logit_scale,
            temperature=temperature,
            **self.options,
        )
        return (
            row.log_prob,
            row.entropy,
            None if row.sum_sq_probs is None else row.sum_sq_probs.detach().log(),
            None if row.mean_logit is None else row.mean_logit.detach(),
            None if row.argmax is None else row.argmax == targets,
        )

    def divergence(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """The divergence from a teacher, and the student's entropy, without gradient: `[N]` each.

        Takes the place of `apply` of TRL's function of two heads, whose `arguments` these are: β is 0 for the forward
        divergence, 1 for the reverse one.
        """
        given = dict(zip(_OF_TWO_HEADS.values(), arguments, strict=True)) | self.options
        beta = given.pop("beta")
        student = {name: x for name, x in given.items() if not name.startswith("teacher_")}
        given |= {"divergence": "jsd", "beta": beta} if 0 < beta < 1 else {"divergence": _ENDS[beta]}
        with torch.no_grad():
            row: Any = linear_row_statistics(**student, statistics=("entropy",))
        given["implementation"] = implementation_of_pair(given.get("implementation"))
        return linear_distillation(**given, reduction="none"), row.entropy


def serve(model: Any, options: dict[str, Any]) -> None:
    """Has TRL, where it is installed, compute by this library: in all models of the process, as of now.

    Warns, once, where a version of TRL was not tested or has no such head. The options are of that function.
    """
    if (utils := _utils()) is None:
        return
    head = utils._ChunkedLogProbFunction
    if not isinstance(head, FusedHead):
        head = utils._ChunkedLogProbFunction = FusedHead(head)
        if (of_two := _of_two_heads()) is not None:
            of_two.apply = head.divergence  # where the trainer's module looks, whenever it was imported
    head.options = options
    head.models.add(model)


def release(model: Any) -> None:
    """Gives TRL its own function back, unless it serves another patched model."""
    if (utils := _utils()) is not None and isinstance(head := utils._ChunkedLogProbFunction, FusedHead):
        head.models.discard(model)
        if not head.models:
            utils._ChunkedLogProbFunction = head.original
            if (of_two := _of_two_heads()) is not None and "apply" in vars(of_two):
                del of_two.apply  # its own is inherited


def check_options(model: Any, forward: Any, of_a_loss: list[str]) -> None:
    """Raises ValueError where a trainer of TRL gives a patched model its forward, which would pass over `of_a_loss`.

    These are the options that it was patched with and that change a loss.
    """
    # By the module that defines it: its `__module__` names the function that it wraps.
    defined_in = getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")
    if of_a_loss and defined_in.startswith("trl."):
        raise ValueError(
            f"this {type(model).__name__} was patched with {of_a_loss}, but TRL's trainers compute their losses "
            "themselves, from log-probabilities: patch it without"
        )


@functools.cache
def _of_two_heads() -> Any:
    """The class of TRL's function of two heads, or None where there is none with these arguments."""
    try:
        found = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    except (ImportError, AttributeError):
        return None
    return found if list(inspect.signature(found.forward).parameters)[1:] == [*_OF_TWO_HEADS] else None


@functools.cache
def _utils() -> Any:
    """The module of TRL that holds the function, or None where there is no such module or function."""
    if importlib.util.find_spec("trl") is None:
        return None
    version = importlib.metadata.version("trl")
    try:
        utils = importlib.import_module("trl.trainer.utils")
        theirs, why = list(inspect.signature(utils._ChunkedLogProbFunction.forward).parameters)[1:], ""
    except (ImportError, AttributeError) as error:
        theirs, why = [], f" ({error})"
    served = theirs == list(inspect.signature(FusedHead.apply).parameters)[1:]
    if not served or version not in TESTED:
        result = "was not tested with" if served else "has trainers that will not use"
        warnings.warn(f"TRL {version} {result} patch_causal_lm{why}; tested: {', '.join(TESTED)}", stacklevel=6)
    return utils if served else None
