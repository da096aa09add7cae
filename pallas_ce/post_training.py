"""The public name of `pallas_ce.objectives.post_training`: losses of post-training on log-probabilities."""

from pallas_ce.objectives.post_training.distillation import top_k_distillation_loss as top_k_distillation_loss
from pallas_ce.objectives.post_training.policy import PolicyMetrics as PolicyMetrics
from pallas_ce.objectives.post_training.policy import group_advantages as group_advantages
from pallas_ce.objectives.post_training.policy import kl_estimate as kl_estimate
from pallas_ce.objectives.post_training.policy import policy_loss as policy_loss
from pallas_ce.objectives.post_training.preference import PreferenceMetrics as PreferenceMetrics
from pallas_ce.objectives.post_training.preference import dpo_loss as dpo_loss
from pallas_ce.objectives.post_training.preference import sequence_log_probs as sequence_log_probs
