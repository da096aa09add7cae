"""The functions of a head as PyTorch operators and autograd functions: what they save, which gradients they make."""
