"""Losses of language model heads, computed through row statistics, without storing logits.

`linear_cross_entropy` is the loss; `linear_row_statistics` gives the statistics for losses of your own, `linear_loss`
reduces such a loss in either backward mode, and `explain` tells how a call will be carried out. `linear_log_probs` and
the losses of `post_training` on top of it train with rewards, preferences and teachers. DESIGN.md has the idea.
"""

from pallas_ce.cross_entropy import linear_cross_entropy as linear_cross_entropy
from pallas_ce.explain import Explanation as Explanation
from pallas_ce.explain import explain as explain
from pallas_ce.linear_loss import linear_loss as linear_loss
from pallas_ce.log_probs import LogProbs as LogProbs
from pallas_ce.log_probs import linear_log_probs as linear_log_probs
from pallas_ce.losses import Metrics as Metrics
from pallas_ce.post_training import PolicyMetrics as PolicyMetrics
from pallas_ce.post_training import PreferenceMetrics as PreferenceMetrics
from pallas_ce.post_training import dpo_loss as dpo_loss
from pallas_ce.post_training import group_advantages as group_advantages
from pallas_ce.post_training import kl_estimate as kl_estimate
from pallas_ce.post_training import policy_loss as policy_loss
from pallas_ce.post_training import sequence_log_probs as sequence_log_probs
from pallas_ce.post_training import top_k_distillation_loss as top_k_distillation_loss
from pallas_ce.row_statistics import linear_row_statistics as linear_row_statistics
from pallas_ce.statistics import RowStatistics as RowStatistics

__all__ = [
    "Explanation",
    "LogProbs",
    "Metrics",
    "PolicyMetrics",
    "PreferenceMetrics",
    "RowStatistics",
    "dpo_loss",
    "explain",
    "group_advantages",
    "kl_estimate",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_loss",
    "linear_row_statistics",
    "policy_loss",
    "sequence_log_probs",
    "top_k_distillation_loss",
]
