"""Losses of language model heads, computed through row statistics, without storing logits.

`linear_cross_entropy` is the loss; `linear_row_statistics` gives the statistics for losses of your own, `linear_loss`
reduces such a loss in either backward mode, and `explain` tells how a call will be carried out. `linear_log_probs` and
the losses of `post_training` on top of it train with rewards, preferences and teachers. For logits that are already
there, `cross_entropy` and `selective_log_softmax`. DESIGN.md has the idea.
"""

# First: it refuses a jax with which the others could not be imported.
import pallas_ce.backends.packages  # noqa: F401
from pallas_ce.api.distillation import linear_distillation
from pallas_ce.api.explain import Explanation, explain
from pallas_ce.api.linear_cross_entropy import (
    LossAndGradients,
    linear_cross_entropy,
    linear_cross_entropy_and_gradients,
)
from pallas_ce.api.linear_loss import linear_loss
from pallas_ce.api.log_probs import LogProbs, linear_log_probs
from pallas_ce.api.materialized import chunked_cross_entropy, cross_entropy, mean_squared_lse, selective_log_softmax
from pallas_ce.api.row_statistics import linear_row_statistics
from pallas_ce.api.sampling import Samples, linear_sample
from pallas_ce.api.specs import LowRank
from pallas_ce.api.top_k import TopK, linear_top_k
from pallas_ce.objectives.class_samplers import ClassSample
from pallas_ce.objectives.crf import linear_chain_crf
from pallas_ce.objectives.multi_task import MultiTaskLoss, Task, multi_task_cross_entropy
from pallas_ce.objectives.post_training.distillation import top_k_distillation_loss
from pallas_ce.objectives.post_training.policy import PolicyMetrics, group_advantages, kl_estimate, policy_loss
from pallas_ce.objectives.post_training.preference import PreferenceMetrics, dpo_loss, sequence_log_probs
from pallas_ce.objectives.registry import LossConfig, build_loss_fn, loss_names, register_loss
from pallas_ce.objectives.sampled_softmax import sampled_softmax_cross_entropy
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics.cross_entropy import Metrics
from pallas_ce.statistics.row import RowStatistics

__version__ = "0.2.0"

__all__ = [
    "ClassSample",
    "Explanation",
    "LogProbs",
    "LossAndGradients",
    "LossConfig",
    "LowRank",
    "MeshAxes",
    "Metrics",
    "MultiTaskLoss",
    "PolicyMetrics",
    "PreferenceMetrics",
    "RowStatistics",
    "Samples",
    "Task",
    "TopK",
    "build_loss_fn",
    "chunked_cross_entropy",
    "cross_entropy",
    "dpo_loss",
    "explain",
    "group_advantages",
    "kl_estimate",
    "linear_chain_crf",
    "linear_cross_entropy",
    "linear_cross_entropy_and_gradients",
    "linear_distillation",
    "linear_log_probs",
    "linear_loss",
    "linear_row_statistics",
    "linear_sample",
    "linear_top_k",
    "loss_names",
    "mean_squared_lse",
    "multi_task_cross_entropy",
    "policy_loss",
    "register_loss",
    "sampled_softmax_cross_entropy",
    "selective_log_softmax",
    "sequence_log_probs",
    "top_k_distillation_loss",
]
