"""Losses of language model heads, computed through row statistics, without storing logits.

`linear_cross_entropy` is the loss; `linear_row_statistics` gives the statistics for losses of your own, `linear_loss`
reduces such a loss in either backward mode, and `explain` tells how a call will be carried out. `linear_log_probs` and
the losses of `post_training` on top of it train with rewards, preferences and teachers. For logits that are already
there, `cross_entropy` and `selective_log_softmax`. DESIGN.md has the idea.
"""

# First: it refuses a jax with which the others could not be imported.
import pallas_ce.backends.packages  # noqa: F401
from pallas_ce.api.distillation import linear_distillation as linear_distillation
from pallas_ce.api.explain import Explanation as Explanation
from pallas_ce.api.explain import explain as explain
from pallas_ce.api.linear_cross_entropy import LossAndGradients as LossAndGradients
from pallas_ce.api.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from pallas_ce.api.linear_cross_entropy import linear_cross_entropy_and_gradients as linear_cross_entropy_and_gradients
from pallas_ce.api.linear_loss import linear_loss as linear_loss
from pallas_ce.api.materialized import chunked_cross_entropy as chunked_cross_entropy
from pallas_ce.api.materialized import cross_entropy as cross_entropy
from pallas_ce.api.materialized import mean_squared_lse as mean_squared_lse
from pallas_ce.api.materialized import selective_log_softmax as selective_log_softmax
from pallas_ce.api.row_statistics import LogProbs as LogProbs
from pallas_ce.api.row_statistics import linear_log_probs as linear_log_probs
from pallas_ce.api.row_statistics import linear_row_statistics as linear_row_statistics
from pallas_ce.api.sampling import Samples as Samples
from pallas_ce.api.sampling import linear_sample as linear_sample
from pallas_ce.api.specs import LowRank as LowRank
from pallas_ce.api.top_k import TopK as TopK
from pallas_ce.api.top_k import linear_top_k as linear_top_k
from pallas_ce.objectives.crf import linear_chain_crf as linear_chain_crf
from pallas_ce.objectives.multi_task import MultiTaskLoss as MultiTaskLoss
from pallas_ce.objectives.multi_task import Task as Task
from pallas_ce.objectives.multi_task import multi_task_cross_entropy as multi_task_cross_entropy
from pallas_ce.objectives.post_training.distillation import top_k_distillation_loss as top_k_distillation_loss
from pallas_ce.objectives.post_training.policy import PolicyMetrics as PolicyMetrics
from pallas_ce.objectives.post_training.policy import group_advantages as group_advantages
from pallas_ce.objectives.post_training.policy import kl_estimate as kl_estimate
from pallas_ce.objectives.post_training.policy import policy_loss as policy_loss
from pallas_ce.objectives.post_training.preference import PreferenceMetrics as PreferenceMetrics
from pallas_ce.objectives.post_training.preference import dpo_loss as dpo_loss
from pallas_ce.objectives.post_training.preference import sequence_log_probs as sequence_log_probs
from pallas_ce.objectives.registry import LossConfig as LossConfig
from pallas_ce.objectives.registry import build_loss_fn as build_loss_fn
from pallas_ce.objectives.registry import loss_names as loss_names
from pallas_ce.objectives.registry import register_loss as register_loss
from pallas_ce.objectives.sampled_softmax import ClassSample as ClassSample
from pallas_ce.objectives.sampled_softmax import sampled_softmax_cross_entropy as sampled_softmax_cross_entropy
from pallas_ce.parallel.mesh_axes import MeshAxes as MeshAxes
from pallas_ce.statistics.cross_entropy import Metrics as Metrics
from pallas_ce.statistics.row import RowStatistics as RowStatistics

__version__ = "0.2.0"

__all__ = [name for name, x in globals().items() if getattr(x, "__module__", "").startswith(f"{__name__}.")]
