"""A run: steps, checkpoints, records, plots, and several processes."""
