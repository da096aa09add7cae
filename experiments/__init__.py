"""Experiments on the fused loss: each one a command with results and plots, run as `python -m experiments.<name>`."""
