"""TRL's trainers on this library's row statistics.

A trainer of TRL replaces the forward of its models and reference models by a head of its own (`add_fused_lm_head`). One
function makes all that the head reads of the logits, `trl.trainer.utils._ChunkedLogProbFunction`. Only that function is
replaced here: adapters, FSDP2, context parallelism and losses of routers stay TRL's. Its trainers refuse an adapter of
the head, since that function is given the weight alone.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import warnings
import weakref
from typing import Any

from torch import Tensor

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


def serve(model: Any, options: dict[str, Any]) -> None:
    """Has TRL, where it is installed, compute by `linear_row_statistics`: in all models of the process, as of now.

    Warns, once, where a version of TRL was not tested or has no such head. The options are of that function.
    """
    if (utils := _utils()) is None:
        return
    head = utils._ChunkedLogProbFunction
    if not isinstance(head, FusedHead):
        head = utils._ChunkedLogProbFunction = FusedHead(head)
    head.options = options
    head.models.add(model)


def release(model: Any) -> None:
    """Gives TRL its own function back, unless it serves another patched model."""
    if (utils := _utils()) is not None and isinstance(head := utils._ChunkedLogProbFunction, FusedHead):
        head.models.discard(model)
        if not head.models:
            utils._ChunkedLogProbFunction = head.original


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
