"""The functions of a head as PyTorch operators and autograd functions: what is saved, and which gradients are asked."""
