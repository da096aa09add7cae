"""Refuses a PyTorch that is too old, which would lack a name somewhere else."""

import torch

from pallas_ce.api.integration import refuse_older

refuse_older("torch_bridge", "torch", torch.__version__, (2, 11))
