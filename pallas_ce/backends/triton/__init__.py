"""A kernel in Triton for NVIDIA GPUs from Ampere on: by name only, as it has been compiled but not yet run on a GPU."""

from pallas_ce.backends.triton.backend import TritonBackend

BACKEND = TritonBackend()
