"""Runs a program of this folder on several processes, which talk through gloo, or through NCCL with a GPU each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str, processes: int = 2, seconds: float = 240, gpus: bool = False) -> str:
    """Runs `tests/torch_bridge/<program>` on every rank; returns the output, or raises AssertionError with it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"} if gpus else {"JAX_PLATFORMS": "cpu"}),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/torch_bridge" / program), *arguments],
            env=environment
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | ({"CUDA_VISIBLE_DEVICES": str(rank)} if gpus else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return "\n".join(outputs)
