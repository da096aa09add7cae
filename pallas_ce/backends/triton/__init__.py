"""Kernels in Triton for NVIDIA GPUs from Ampere on."""

from pallas_ce.backends.triton.backend import TritonBackend

BACKEND = TritonBackend()
