"""The public name of `pallas_ce.objectives.post_training`: losses of post-training on log-probabilities."""

from pallas_ce.objectives.post_training import PolicyMetrics as PolicyMetrics
from pallas_ce.objectives.post_training import PreferenceMetrics as PreferenceMetrics
from pallas_ce.objectives.post_training import dpo_loss as dpo_loss
from pallas_ce.objectives.post_training import group_advantages as group_advantages
from pallas_ce.objectives.post_training import kl_estimate as kl_estimate
from pallas_ce.objectives.post_training import policy_loss as policy_loss
from pallas_ce.objectives.post_training import sequence_log_probs as sequence_log_probs
from pallas_ce.objectives.post_training import top_k_distillation_loss as top_k_distillation_loss
