"""Memory and time of log-probabilities picked from logits, in PyTorch: `experiments.bench selective_log_softmax`.

Ways beside ours, at the sizes of the article that made the trick known ("Reducing VRAM Footprint in PPO and GRPO Using
Selective Log-Softmax": 16 sequences of 1024 tokens), in float32 and bfloat16, forward, and forward and backward:

    naive            log-softmax of everything, then a gather
    take1            gather minus log-sum-exp, all sequences at once
    take2            the same, sequence by sequence
    ablation1        naive, sequence by sequence
    compiled         naive under torch.compile
    compiled_dynamic naive under torch.compile(dynamic=True)
    ours             torch_bridge.selective.selective_log_softmax

`peak_mib` is allocated at the peak beside the logits; the methods take turns.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from experiments.bench import timing
from experiments.bench.results import Point, Record, ResultFile
from experiments.bench.torch_timing import peak_bytes, synchronize
from torch_bridge.selective import selective_log_softmax

VOCABULARIES = (8192, 32768, 131072)
BATCH, TOKENS = 16, 1024
Method = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _picked(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, index[..., None])[..., 0]


def naive(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Stores the log-softmax of every entry."""
    return _picked(torch.log_softmax(logits, -1), index)


def by_sequence(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`naive` on one sequence at a time."""
    return torch.stack([naive(*sequence) for sequence in zip(logits, index, strict=True)])


def methods(compiled: bool) -> dict[str, Method]:
    """Everything compared; the compiled ones anew, so that no earlier shape is in their caches."""
    lse = torch.logsumexp
    found: dict[str, Method] = {
        "naive": naive,
        "take1": lambda logits, index: _picked(logits, index) - lse(logits, -1),
        "take2": lambda logits, index: _picked(logits, index) - torch.stack([lse(sequence, -1) for sequence in logits]),
        "ablation1": by_sequence,
    }
    if compiled:
        torch.compiler.reset()
        found |= {"compiled": torch.compile(naive), "compiled_dynamic": torch.compile(naive, dynamic=True)}
    return found | {"ours": selective_log_softmax}


def forward(method: Method, logits: torch.Tensor, index: torch.Tensor) -> Any:
    """What the method returns; PyTorch records nothing."""
    with torch.no_grad():
        return method(logits, index)


def forward_backward(method: Method, logits: torch.Tensor, index: torch.Tensor) -> Any:
    """The gradient of what it returns."""
    return torch.autograd.grad(method(logits, index).float().sum(), logits)


def measure(
    run_pass: Callable[..., Any], dtype: torch.dtype, shape: tuple[int, int, int], rounds: int, device: str
) -> Record:
    """Of each method its time, peak memory and largest error; those whose memory does not suffice are left out."""
    generator = torch.Generator(device).manual_seed(42)
    logits = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype).requires_grad_()
    index = torch.randint(0, shape[-1], shape[:2], generator=generator, device=device)
    with torch.no_grad():
        exact = by_sequence(logits.float(), index)
    runs: dict[str, Callable[[], Any]] = {}
    peaks: dict[str, float] = {}
    errors: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, method in methods(compiled=device == "cuda").items():
        run = functools.partial(run_pass, method, logits, index)
        try:
            run()  # compiles, and warms up
            peaks[name] = peak_bytes(run) / 2**20 if device == "cuda" else 0.0
            errors[name] = float((forward(method, logits, index).float() - exact).abs().max())
            runs[name] = run
        except torch.OutOfMemoryError:
            left_out[name] = "out of memory"
            torch.cuda.empty_cache()
    clock = functools.partial(timing.of_series, wait=synchronize, launches=1)
    found = timing.in_turn(runs, clock, rounds)
    for name, result in found.items():
        result |= {"peak_mib": peaks[name], "largest_error": errors[name]}
    return {"logits_mib": logits.nbytes / 2**20, "results": found, "left_out": left_out}


def files(options: argparse.Namespace) -> list[ResultFile]:
    """A point a pass, dtype and vocabulary."""
    batch, tokens, most = (2, 16, 8192) if options.dry_run else (BATCH, TOKENS, VOCABULARIES[-1])
    points = [
        Point(
            f"{run_pass.__name__} {str(dtype).removeprefix('torch.')} {vocabulary}",
            functools.partial(measure, run_pass, dtype, (batch, tokens, vocabulary), options.rounds, options.device),
        )
        for dtype, vocabulary, run_pass in itertools.product(
            (torch.float32, torch.bfloat16), VOCABULARIES, (forward, forward_backward)
        )
        if vocabulary <= most
    ]
    facts = {"torch": torch.__version__, "batch": batch, "tokens": tokens}
    return [ResultFile("selective_log_softmax", points, "selective_log_softmax", facts)]
