"""`selective_log_softmax`, and the same under the names that verl and OpenRLHF import."""

from torch_bridge.api.selective import log_probs_from_logits as log_probs_from_logits
from torch_bridge.api.selective import logprobs_from_logits as logprobs_from_logits
from torch_bridge.api.selective import selective_log_softmax as selective_log_softmax
