"""A Hugging Face model's training steps by several losses, on a GPU: `python -m experiments.bench huggingface_table`.

Qwen3 with random weights in bfloat16, in PyTorch's eager mode with its fused AdamW, at three sizes, by transformers'
own loss (`plain`), with Liger's kernels (`liger`, left out by name where it is missing or fails) and with
`patch_causal_lm`, as it is (`fused`) and with `backward="recompute", scratch_bytes=96 * 2**20` (`fused, lean`). Losses
and head gradients of the first step must agree. `huggingface_table.json` has, of each size and loss,

    ms                  of a step, the median of several processes' steps, which take turns
    torch_peak_mib      the most in PyTorch's tensors
    driver_mib          the most of the GPU's memory that the process takes within a step, by the driver's count
    first_step_seconds  "before", with empty caches of compiled programs, and "after", with the first process's

and of JAX what it takes of a GPU before it computes anything. Imports are not counted. Every measurement has a process
of its own: pools of memory grow, patches stay, and what one process has compiled another is to find in a folder or not
at all.
"""

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch

import torch_bridge
from experiments.bench.peers import GRADIENT_TOLERANCE, LOSS_TOLERANCE, PEERS, failure
from experiments.bench.processes import apart
from experiments.bench.results import Point, Record, ResultFile, versions
from experiments.bench.torch_timing import synchronize, used_bytes, used_peaks
from experiments.lm.programs_kept import programs_kept

APART = True

# The model's own loss, Liger's by `apply_liger_kernel_to_qwen3`, and `patch_causal_lm`'s, as it is and in
# the mode that takes least memory, with half the scratch that it would. Liger's other kernels would change the rest of
# the model.
PLAIN, LIGER, FUSED, LEAN = VARIANTS = ("plain", "liger", "fused", "fused, lean")
_OURS = (FUSED, LEAN)
_LEAN_SCRATCH_BYTES = 96 * 2**20

_SEQUENCE = 2048  # tokens of a text, or all where there are fewer
_STEPS, _WARM_STEPS, _STEPS_FOR_MEMORY = 30, 3, 3


class Setting(NamedTuple):
    """A model in the proportions of Qwen3 1.7B, with a head of its own, and a batch of `tokens`."""

    width: int
    layers: int
    tokens: int
    vocabulary: int = 151936
    head_size: int = 128


SETTINGS = (Setting(2048, 4, 8192), Setting(2048, 4, 32768), Setting(1024, 8, 1024))


def model_of(setting: Setting, device: str) -> Any:
    """A `Qwen3ForCausalLM` of random bfloat16 weights, the same each time, in training mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = setting.width // setting.head_size
    config = Qwen3Config(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        intermediate_size=3 * setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=setting.head_size,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM._from_config(config).train()


def patch_of(variant: str) -> Callable[[Any], Any]:
    """What gives a model the variant's loss, imported."""
    if variant == LIGER:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        others = {"rope": False, "rms_norm": False, "swiglu": False}
        return lambda model: apply_liger_kernel_to_qwen3(model=model, fused_linear_cross_entropy=True, **others)
    patches: dict[str, Callable[[Any], Any]] = {
        PLAIN: lambda model: model,
        FUSED: torch_bridge.patch_causal_lm,
        LEAN: functools.partial(torch_bridge.patch_causal_lm, backward="recompute", scratch_bytes=_LEAN_SCRATCH_BYTES),
    }
    return patches[variant]


def intervals(step: Callable[[], Any], count: int, device: str) -> list[float]:
    """Milliseconds from the end of each step to the end of the next, on the device; the host waits for none of them."""
    if device != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            step()
            times.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def train(folder: Path, setting: Setting, variant: str, device: str) -> Record:
    """Trains for a few steps, in a process that has done nothing else; programs are kept in the folder, or found there.

    `first_step_seconds` has the patching in it, `driver_mib` is beyond what the device had in use before.
    """
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    before = used_bytes(device) if device == "cuda" else 0
    model, patch = model_of(setting, device), patch_of(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    length = min(_SEQUENCE, setting.tokens)
    tokens = torch.randint(setting.vocabulary, (setting.tokens // length, length), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    synchronize()
    with programs_kept(folder, anyway=True):
        started = time.perf_counter()
        patch(model)
        loss = step().item()
        synchronize()
        seconds = time.perf_counter() - started
    gradient = torch.linalg.vector_norm(model.get_output_embeddings().weight.grad, dtype=torch.float32).item()
    samples = intervals(step, _WARM_STEPS + _STEPS, device)[_WARM_STEPS:]
    driver, _ = used_peaks(device, lambda: intervals(step, _STEPS_FOR_MEMORY, device))
    of_torch = torch.cuda.max_memory_allocated() if device == "cuda" else driver
    memory = {"torch_peak_mib": of_torch / 2**20, "driver_mib": (driver - before) / 2**20}
    return {"loss": loss, "head_gradient": gradient, "first_step_seconds": seconds, "samples": samples, **memory}


def idle_mib(device: str) -> float:
    """What JAX takes of a device that PyTorch has started on, when it has computed nothing; in a fresh process."""
    torch.zeros(1, device=device)
    before = used_bytes(device)
    jax.block_until_ready(jax.numpy.zeros(()))
    return (used_bytes(device) - before) / 2**20


def measure(setting: Setting, device: str, rounds: int) -> Record:
    """All variants in turn, in either direction, each `rounds` times; the first time finds no compiled programs."""
    (liger,) = (peer for peer in PEERS if peer.name == "Liger")
    left_out = {LIGER: why} if (why := liger.missing()) else {}
    processes: dict[str, list[Record]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for variant in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
                if variant in left_out:
                    continue
                try:
                    processes[variant].append(apart(train, Path(folder) / variant, setting, variant, device))
                except Exception as error:  # whatever a library raises, the others are still measured
                    if variant in _OURS:
                        raise
                    left_out[variant] = failure(error)
    results = {variant: summed_up(found) for variant, found in processes.items() if variant not in left_out}
    if LIGER in results and PLAIN in results and (why := differs(results[LIGER], results[PLAIN])):
        del results[LIGER]
        left_out[LIGER] = why
    for ours, other in itertools.product(_OURS, (PLAIN, LIGER)):
        if other in results and (why := differs(results[ours], results[other])):
            raise RuntimeError(f"{ours} and {other}: {why}")
    return {**setting._asdict(), "results": results, "left_out": left_out}


def summed_up(processes: list[Record]) -> Record:
    """Of a variant's processes the median, or the largest memory; the first compiled all, the others found it."""
    first, *later = processes
    after = statistics.median(found["first_step_seconds"] for found in later)
    return {
        **first,
        "ms": statistics.median(ms for found in processes for ms in found["samples"]),
        **{name: max(found[name] for found in processes) for name in ("torch_peak_mib", "driver_mib")},
        "first_step_seconds": {"before": first["first_step_seconds"], "after": after},
        "samples": [ms for found in processes for ms in found["samples"]],
    }


def differs(found: Record, other: Record) -> str | None:
    """What of the first step is further from the other's than bfloat16 explains; None where nothing is."""
    for name, bound in (("loss", LOSS_TOLERANCE), ("head_gradient", GRADIENT_TOLERANCE)):
        if not abs(found[name] - other[name]) <= bound * abs(other[name]):
            return f"differs by more than bfloat16 explains: {name} {found[name]:.6g} and {other[name]:.6g}"
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many processes."""
    parser.set_defaults(rounds=2)


def files(options: argparse.Namespace) -> list[ResultFile]:
    """JAX's idle footprint, and each size, `rounds` processes for each loss."""
    if options.rounds.least < 2:
        options.usage_error("--rounds must be at least 2: a loss's first process fills the caches, the next finds them")
    device, rounds = options.device, options.rounds.least
    points = [Point("JAX idle", lambda: {"mib": apart(idle_mib, device)})]
    for setting in SETTINGS:
        name = f"H {setting.width}, {setting.layers} layers, {setting.tokens} tokens"
        smaller = setting.width // 32, setting.layers, setting.tokens // 64, setting.vocabulary // 64, 16
        measured = Setting(*smaller) if options.dry_run else setting
        points.append(Point(name, functools.partial(measure, measured, device, rounds)))
    facts = {"torch": torch.__version__, **versions(("transformers", "liger-kernel", "triton"))}
    return [ResultFile("huggingface_table", points, "huggingface_table", facts)]
