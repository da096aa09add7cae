"""The functions of `pallas_ce` as compiled JAX programs, forward and backward, that PyTorch tensors run through."""
