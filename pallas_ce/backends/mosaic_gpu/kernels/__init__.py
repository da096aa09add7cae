"""The kernels: a GEMM each, with an epilogue that never stores the logits."""
