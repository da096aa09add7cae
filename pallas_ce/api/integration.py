"""The contract between `pallas_ce` and the packages that wrap it, such as `torch_bridge` and `flax_modules`.

A wrapper imports the public names of `pallas_ce` and, beyond those, only what stands here. Whoever changes one of these
names, or of the functions in `checks` and `label_rule`, changes the wrappers too; everything else inside `pallas_ce`
may change without them. Nothing here is for users.
"""
# ruff: noqa: F401

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_ce.api import checks
from pallas_ce.api import distillation as pair
from pallas_ce.api import linear_cross_entropy as loss
from pallas_ce.api import row_statistics as rows
from pallas_ce.api.head_options import called_here, documented
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import PrecisionLike, logits_spec, precision_name, read_weight
from pallas_ce.backends.device import local_cuda
from pallas_ce.backends.packages import refuse_older
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.head import NO_WEIGHT, Batch, Head, HeadSpec
from pallas_ce.modes import evaluate
from pallas_ce.modes.call import Known, Operands
from pallas_ce.modes.forward import forward_statistics
from pallas_ce.modes.how import How, implementation_of_pair, refusal_of_logits
from pallas_ce.modes.materialized import row_gradient as materialized_row_gradient
from pallas_ce.statistics import labels as label_rule
from pallas_ce.statistics.cross_entropy import Reduction
from pallas_ce.streaming.gradient_products import NO_ARRAYS, PerInput


class Steps(NamedTuple):
    """A function of a head in steps.

    Attributes:
        read: checks the arguments and chooses how to compute.
        compute: takes what `read` returns, and what `keep` does.
        keep: of what `read` returns, and of the inputs that a `PerInput` flags, `Known`: arrays that a backward needs.
        add_gradients: the loss's gradients, the weight's added to a sum.
    """

    read: Callable[..., Any]
    compute: Callable[..., Any]
    keep: Callable[..., Known | None]
    add_gradients: Callable[..., Any] | None = None


def _steps(
    public: Callable[..., Any], compute: Callable[..., Any], call_of: Callable[..., Any], *more: Callable[..., Any]
) -> Steps:
    """Of a function whose `call_of` makes what `evaluate` takes: a call and its operands first."""

    def keep(*read_and_needs_grad: Any) -> Known | None:
        *read, needs_grad = read_and_needs_grad
        call, operands = call_of(*read)[:2]
        return evaluate.keep(call, operands, needs_grad)

    return Steps(inspect.unwrap(public), compute, keep, *more)


cross_entropy_steps = _steps(loss.linear_cross_entropy, loss.compute, loss.operands_of, loss.add_gradients)
row_statistics_steps = _steps(rows.linear_row_statistics, rows.compute_statistics, rows.statistics_call)
log_probs_steps = _steps(rows.linear_log_probs, rows.compute_log_probs, rows.log_probs_call)
distillation_steps = Steps(inspect.unwrap(pair.linear_distillation), pair.compute, pair.keep)

# Of columns that a process has of two heads. What a backward needs is among the arguments.
distillation_of_parts_steps = Steps(pair.read_of_part, pair.compute_of_part, lambda *_: None)
