"""Losses of post-training, as plain differentiable functions of log-probabilities `[..., T]` of sequences.

`pallas_ce.linear_log_probs` makes those from hidden states without storing logits; any others will do. Nothing here
knows of a vocabulary. `pallas_ce.post_training` is the public name.
"""
