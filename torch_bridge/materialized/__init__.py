"""Losses of logits that are stored already: statistics of their rows and the gradient, in two passes."""
