"""The contract between `pallas_ce` and the packages that wrap it, such as `torch_bridge` and `flax_modules`.

A wrapper imports the public names of `pallas_ce` and, beyond those, only what stands here. Whoever changes one of these
names changes the wrappers too; everything else inside `pallas_ce` may change without them. Nothing here is for users.

- Checks of arguments, whose errors name the argument: `check_*`, `read_ignore_index`, `is_int`; `read_logits_spec` to a
  `HeadSpec`.
- The functions of a head in three steps, for wrappers that differentiate them by other means than JAX's:
  `cross_entropy_steps`, `log_probs_steps`, `row_statistics_steps`, `distillation_steps` and
  `distillation_of_parts_steps` (columns that a process has of two heads) are modules with `read`
  (check the arguments and choose how to compute), `keep` (`Known`, the arrays that a backward needs for the inputs that
  a `PerInput` flags) and `compute`, which takes that back.
- Materialized logits row by row: `materialized_row_statistics` and `materialized_row_gradient` of `Operands`, of a
  `Batch` and a `Head` of `NO_WEIGHT`, carried out as `How` say; `materialized_refusal` says why a backend cannot.
- A head's arrays, and the rule for labels: `Problem`, `read_low_rank`, `read_ids`, `label_array`,
  `canonical_labels`, `check_label_values`, `counted_labels`, `shifted_labels`, `NO_TARGET`.
- `refuse_older`, for a package that is too old; `local_cuda`, the model of the process's GPU.
- The types of options: `Backward`, `Implementation`, `PrecisionLike`, `Reduction`; and `precision_name`, one string for
  what a precision may be. `documented` shows shared options in a function's signature and docstring.
"""
# ruff: noqa: F401

from pallas_ce.api import distillation as distillation_steps
from pallas_ce.api import distillation_of_parts as distillation_of_parts_steps
from pallas_ce.api import linear_cross_entropy as cross_entropy_steps
from pallas_ce.api import log_probs as log_probs_steps
from pallas_ce.api import row_statistics as row_statistics_steps
from pallas_ce.api.checks import check_reduction, check_statistics, is_int
from pallas_ce.api.checks import ids as read_ids
from pallas_ce.api.checks import ignored as read_ignore_index
from pallas_ce.api.checks import scalar as check_scalar
from pallas_ce.api.checks import shift as check_shift
from pallas_ce.api.checks import temperature as check_temperature
from pallas_ce.api.documented import documented
from pallas_ce.api.problem import Problem
from pallas_ce.api.specs import PrecisionLike, precision_name
from pallas_ce.api.specs import logits_spec as read_logits_spec
from pallas_ce.api.specs import read_weight as read_low_rank
from pallas_ce.backends.device import local_cuda
from pallas_ce.backends.packages import refuse_older
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.head import NO_WEIGHT, Batch, Head, HeadSpec
from pallas_ce.modes.call import Known, Operands
from pallas_ce.modes.how import How
from pallas_ce.modes.how import refusal_of_logits as materialized_refusal
from pallas_ce.modes.materialized import row_gradient as materialized_row_gradient
from pallas_ce.modes.materialized import row_statistics as materialized_row_statistics
from pallas_ce.statistics.cross_entropy import Reduction
from pallas_ce.statistics.labels import NO_TARGET
from pallas_ce.statistics.labels import as_array as label_array
from pallas_ce.statistics.labels import canonical as canonical_labels
from pallas_ce.statistics.labels import check as check_label_values
from pallas_ce.statistics.labels import counted as counted_labels
from pallas_ce.statistics.labels import shifted as shifted_labels
from pallas_ce.streaming.gradient_products import PerInput
