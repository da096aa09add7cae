"""Memory of a pipeline's last stage: stored logits, a chunked loss on them, and `PipelineFusedLoss`.

    python -m experiments.pipeline_memory            # counts bytes; on a CUDA device measures them too, in two minutes
    python -m experiments.pipeline_memory --in-flight 8 --tokens 8192

A GPipe schedule's last stage: the head and loss of every microbatch forward, then every one backward. The case is
Qwen3-1.7B's head (H 2048, V 151936, bfloat16), 1 x 4096 tokens a microbatch, 4 in flight.

Counting runs PyTorch's own operators and autograd on tensors without memory, and follows each storage from its making
to its end; what the fused operator uses inside, as `pallas_ce.explain` predicts it, is added while it runs. The weight
and its gradient are counted, and the hidden states with theirs; optimiser states and the stage's layers are not. The
rest of the stage is taken to be what a stage without a head needs, 2 GB in the case that the design was made for.

Measuring runs the same schedule of one stage, each contender in a process of its own: microbatches arrive as they would
from the stage before, and their gradients are made, but nothing is sent. Peaks are the driver's count, of both
frameworks' pools and with what pools round up; beside them stands the sum of both allocators' own peaks.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pallas_ce
from experiments.bench.processes import apart
from experiments.bench.results import describe
from experiments.bench.used import allocated_peak_bytes, used_bytes
from experiments.command_line import command, parser_of, positive, save_figure, write_record
from torch_bridge import take_head

RESULTS = Path(__file__).parent / "results" / "pipeline_memory.json"
REST_OF_STAGE = 2 * 10**9
CHUNK = 1024

_WARM_UP = {"tokens": 128, "width": 128, "vocabulary": 1024, "in_flight": 1}


def stored_logits(logits: Tensor, target: Tensor) -> Tensor:
    """The usual loss: logits as float32, then cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


def chunked(logits: Tensor, target: Tensor) -> Tensor:
    """The same by chunks of tokens, each converted to float32 when it is needed and again in the backward."""

    def part(rows: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(rows.float(), labels, reduction="sum")

    rows, labels = logits.flatten(0, -2).split(CHUNK), target.flatten().split(CHUNK)
    parts = [checkpoint(part, r, t, use_reentrant=False) for r, t in zip(rows, labels, strict=True)]
    return torch.stack(parts).sum() / target.numel()


def fused(implementation: str | None, head: nn.Linear) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The head's loss, which has taken it."""
    model = nn.Sequential(head)
    return model, take_head(model, "0", implementation=implementation)


def contenders(
    implementation: str | None = None,
) -> dict[str, Callable[[nn.Linear], tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]]]:
    """For each, what the last stage has for a head, and its loss function."""
    return {
        "logits": lambda head: (head, stored_logits),
        "chunked": lambda head: (head, chunked),
        "fused": functools.partial(fused, implementation),
    }


def run_stage(name: str, shape: dict[str, int], device: str, implementation: str | None = None) -> None:
    """Forward of every microbatch, then backward of every one, as GPipe does it."""
    head = nn.Linear(shape["width"], shape["vocabulary"], bias=False, device=device, dtype=torch.bfloat16)
    module, loss_fn = contenders(implementation)[name](head)
    waiting = []
    for _ in range(shape["in_flight"]):
        hidden = torch.empty(1, shape["tokens"], shape["width"], device=device, dtype=torch.bfloat16).normal_()
        target = torch.zeros(1, shape["tokens"], device=device, dtype=torch.int64)
        output = module(hidden.requires_grad_())
        # The schedule keeps the output until its microbatch's backward is over.
        waiting.append((output, loss_fn(output, target)))
    for i, (_, loss) in enumerate(waiting):
        loss.backward()
        waiting[i] = None  # type: ignore[call-overload]
        del loss, _


class Counter(TorchDispatchMode):
    """Adds up the bytes of all storages alive; `peak` is the most there were."""

    def __init__(self, scratch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._scratch = scratch  # of the fused operator, while it runs
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and counts what it returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        inside = self._scratch if func.namespace == "pallas_ce" else 0
        self.peak = max(self.peak, self.now + inside)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        self.now += size
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def counted(name: str, shape: dict[str, int], implementation: str | None = None) -> int:
    """Peak bytes of a contender by accounting."""
    import jax

    plan = pallas_ce.explain(
        jax.ShapeDtypeStruct((shape["tokens"], shape["width"]), jax.numpy.bfloat16),
        jax.ShapeDtypeStruct((shape["vocabulary"], shape["width"]), jax.numpy.bfloat16),
        backward="recompute",
        differentiate=("hidden", "weight"),
        implementation=implementation,  # type: ignore[arg-type]
    )
    with FakeTensorMode(), Counter(plan.scratch_bytes + plan.accumulator_bytes) as counter:
        run_stage(name, shape, "cpu", implementation)
    return counter.peak


def measured(name: str, shape: dict[str, int], device: str, implementation: str | None) -> tuple[int, int]:
    """Bytes that the stage takes at its peak, by the driver's count and by both allocators' own.

    In this process, one contender a process: pools only grow.
    """
    run_stage(name, _WARM_UP, device, implementation)  # starts both frameworks, whose own memory is not the stage's
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = used_bytes(device)
    run_stage(name, shape, device, implementation)
    return used_bytes(device) - before, allocated_peak_bytes(device)


def compare(found: dict[str, int]) -> dict[str, dict[str, float]]:
    """Each contender's peak, and what it saves of the head's and of the whole stage's memory with logits."""
    base = found["logits"]
    return {
        name: {
            "head_bytes": count,
            "stage_bytes": count + REST_OF_STAGE,
            "head_saved": 1 - count / base,
            "stage_saved": 1 - (count + REST_OF_STAGE) / (base + REST_OF_STAGE),
        }
        for name, count in found.items()
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Draws the recorded peaks as bars: measured ones where there are, else those by accounting."""
    from matplotlib.figure import Figure

    how = "measured" if "measured" in record else "counted"
    found = record[how]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    heads = [row["head_bytes"] / 1e9 for row in found.values()]
    axes.barh(list(found), [REST_OF_STAGE / 1e9] * len(found), color="lightgrey", label="rest of the stage")
    axes.barh(list(found), heads, left=REST_OF_STAGE / 1e9, color="tab:blue", label=f"head and loss, {how}")
    for i, row in enumerate(found.values()):
        axes.text(row["stage_bytes"] / 1e9, i, f" {row['stage_bytes'] / 1e9:.1f} GB", va="center")
    if how == "measured":
        counts = [record["counted"][name]["stage_bytes"] / 1e9 for name in found]
        axes.plot(counts, list(found), "k|", markersize=24, label="by accounting")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(row["stage_bytes"] for row in found.values()) / 1e9)
    axes.set_xlabel(f"peak memory of the last stage{'' if how == 'measured' else ' by accounting'} (GB)")
    axes.legend(loc="lower right")
    save_figure(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    """Counts, measures where there is a GPU, prints, writes and draws."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positive, default=4096, help="of a microbatch")
    parser.add_argument("--width", type=positive, default=2048)
    parser.add_argument("--vocabulary", type=positive, default=151_936)
    parser.add_argument("--in-flight", type=positive, default=4)
    parser.add_argument("--implementation", default=None, help="of the fused loss")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="measure there; by default on a GPU if there is one")
    parser.add_argument("--out", type=Path, help=f"by default {RESULTS.name}, for the default case on a GPU alone")
    options = parser.parse_args(words)
    device = options.device or ("cuda" if torch.cuda.is_available() else None)
    shape = {name: getattr(options, name) for name in ("tokens", "width", "vocabulary", "in_flight")}
    published = device == "cuda" and all(parser.get_default(name) == size for name, size in shape.items())
    out = options.out or (RESULTS if published else None)
    record = {
        "command": command("pipeline_memory", words),
        **describe(),
        "torch": torch.__version__,
        "implementation": options.implementation,
        "shape": shape,
        "counted": compare({name: counted(name, shape, options.implementation) for name in contenders()}),
    }
    if device:
        found = {name: apart(measured, name, shape, device, options.implementation) for name in contenders()}
        record["measured"] = compare({name: driver for name, (driver, _) in found.items()})
        record["allocators"] = compare({name: allocated for name, (_, allocated) in found.items()})
    for how in ("counted", "measured", "allocators"):
        for name, row in record.get(how, {}).items():
            print(
                f"{how:11}{name:9}{row['head_bytes'] / 1e9:8.2f} GB head, {row['head_saved']:6.1%} saved"
                f"{row['stage_bytes'] / 1e9:10.2f} GB stage, {row['stage_saved']:6.1%} saved"
            )
    if out is None:
        print("not written: pass --out FILE for another case than the published one on a GPU")
        return
    write_record(out, record)
    plot(record, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
