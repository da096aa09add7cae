"""The public functions on tensors, and the module: they check the arguments and call what computes."""
