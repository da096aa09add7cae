"""Runs a program in a process of its own, or a function on two, which talk through gloo, or NCCL with a GPU each."""

import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def script(program, **environment):
    """The output of a Python program, which must end without an error."""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], env=os.environ | environment,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run(program, device="cpu"):
    """`program(rank, device)` on both; what one of them raises is raised here."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_joined, (f"file://{folder}/store", program, device), nprocs=2)


def _joined(rank, store, program, device):
    torch.set_num_threads(1)
    os.environ |= {"CUDA_VISIBLE_DEVICES": str(rank), "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
    backend, timeout = "nccl" if device == "cuda" else "gloo", datetime.timedelta(seconds=240)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=timeout)
    program(rank, device)
    dist.destroy_process_group()
