"""Memory and time of log-probabilities picked from logits, in PyTorch: `python -m experiments.selective_log_softmax`.

Six ways beside ours, at the sizes of the article that made the trick known ("Reducing VRAM Footprint in PPO and GRPO
Using Selective Log-Softmax": 16 sequences of 1024 tokens over 32768 entries; smaller on a CPU), in float32 and
bfloat16:

    naive            log-softmax of everything, then a gather
    take1            gather minus log-sum-exp, all sequences at once
    take2            the same, sequence by sequence
    ablation1        naive, sequence by sequence
    compiled         naive under torch.compile
    compiled_dynamic naive under torch.compile(dynamic=True)
    ours             torch_bridge.selective.selective_log_softmax

Memory is what is allocated at the peak beside the logits; time is taken with the device synchronised before and after,
the methods in turn. Prints ratios to naive and writes, with machine and versions, JSON and a plot of the memory against
the vocabulary, which `--plot FILE.json` draws again.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments.bench import torch_timing
from experiments.bench.results import describe
from experiments.bench.timing import in_turn, of_series
from experiments.command_line import command, parser_of, positive, read_record, save_figure, write_record
from torch_bridge.selective import selective_log_softmax

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Method = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _picked(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, index[..., None])[..., 0]


def naive(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Stores the log-softmax of every entry."""
    return _picked(torch.log_softmax(logits, -1), index)


def take1(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`z_i - lse`; the log-sum-exp stores the exponentials."""
    return _picked(logits, index) - torch.logsumexp(logits, -1)


def take2(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`take1` with the log-sum-exp of one sequence at a time."""
    return _picked(logits, index) - torch.stack([torch.logsumexp(sequence, -1) for sequence in logits])


def ablation1(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`naive` on one sequence at a time."""
    return torch.stack([naive(*sequence) for sequence in zip(logits, index, strict=True)])


def methods(compiled: bool) -> dict[str, Method]:
    """Everything compared, naive first; the compiled ones anew, so that no earlier shape is in their caches."""
    found: dict[str, Method] = {"naive": naive, "take1": take1, "take2": take2, "ablation1": ablation1}
    if compiled:
        torch.compiler.reset()
        found["compiled"] = torch.compile(naive)
        found["compiled_dynamic"] = torch.compile(naive, dynamic=True)
    return found | {"ours": selective_log_softmax}


def forward(method: Method, logits: torch.Tensor, index: torch.Tensor) -> Any:
    """What the method returns; PyTorch records nothing."""
    with torch.no_grad():
        return method(logits, index)


def forward_backward(method: Method, logits: torch.Tensor, index: torch.Tensor) -> Any:
    """The gradient of what it returns."""
    return torch.autograd.grad(method(logits, index).float().sum(), logits)


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """What `run` has allocated at its peak beside what was there before."""
    if device == "cuda":
        return torch_timing.peak_bytes(run)
    profile: Any = torch.profiler.profile
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def measure(
    dtype: str, vocabulary: int, tokens: int, batch: int, device: str, repeats: int, compiled: bool
) -> list[dict[str, Any]]:
    """A row for each method and pass; one whose memory does not suffice has no numbers."""
    generator = torch.Generator(device).manual_seed(42)
    shape = (batch, tokens, vocabulary)
    logits = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(DTYPES[dtype])
    logits.requires_grad_()
    index = torch.randint(0, vocabulary, shape[:2], generator=generator, device=device)
    chosen = methods(compiled)
    with torch.no_grad():
        exact = torch.stack([naive(*sequence) for sequence in zip(logits.float(), index, strict=True)])
    rows = []
    for run_pass in (forward, forward_backward):
        runs = {name: functools.partial(run_pass, method, logits, index) for name, method in chosen.items()}
        found: dict[str, dict[str, Any]] = {}
        for name, run in runs.items():
            found[name] = {"method": name, "pass": run_pass.__name__, "dtype": dtype, "vocabulary": vocabulary}
            try:
                run()  # compiles, and warms up
                found[name]["peak_bytes"] = peak_bytes(run, device)
            except torch.OutOfMemoryError:
                found[name]["out_of_memory"] = True
                torch.cuda.empty_cache()
        fitting = {name: run for name, run in runs.items() if "peak_bytes" in found[name]}
        timed = in_turn(fitting, functools.partial(of_series, wait=torch_timing.synchronize, launches=1), repeats)
        for name, row in found.items():
            if name in timed:
                row["seconds"] = 1e-3 * timed[name]["ms"]
                row["largest_error"] = float((forward(chosen[name], logits, index).float() - exact).abs().max())
            row["logits_bytes"] = logits.nbytes
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, with ratios to naive."""
    lines = [
        f"{'dtype':9}{'vocabulary':>11} {'pass':17}{'method':17}{'MiB':>10}{'ms':>10}{'time ratio':>11}{'error':>9}"
    ]
    base: dict[str, Any] = {}
    for row in rows:
        base = row if row["method"] == "naive" else base  # the first of those that it is compared with
        name = f"{row['dtype']:9}{row['vocabulary']:>11} {row['pass']:17}{row['method']:17}"
        if "seconds" not in row:
            lines.append(name + f"{'out of memory':>20}")
            continue
        ratio = f"{row['seconds'] / base['seconds']:.2f}" if "seconds" in base else "–"
        mib, ms = row["peak_bytes"] / 2**20, row["seconds"] * 1e3
        lines.append(f"{name}{mib:10.1f}{ms:10.2f}{ratio:>11}{row['largest_error']:9.1e}")
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Draws peak memory beside the logits against the vocabulary: a row for each pass, a column for each dtype."""
    rows = record["results"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = Figure(figsize=(5 * len(dtypes), 4 * len(passes)), layout="constrained")
    panels = figure.subplots(len(passes), len(dtypes), squeeze=False, sharex=True)
    for panel_row, pass_name in zip(panels, passes, strict=True):
        for panel, dtype in zip(panel_row, dtypes, strict=True):
            here = [row for row in rows if (row["pass"], row["dtype"]) == (pass_name, dtype) and "peak_bytes" in row]
            sizes = {row["vocabulary"]: row["logits_bytes"] / 2**20 for row in here}
            panel.plot(list(sizes), list(sizes.values()), ":", color="grey", label="the logits themselves")
            for number, method in enumerate(dict.fromkeys(row["method"] for row in here)):
                curve = {row["vocabulary"]: row["peak_bytes"] / 2**20 for row in here if row["method"] == method}
                # Curves that agree hide each other: markers of falling size show them all.
                panel.plot(list(curve), list(curve.values()), "o-", markersize=12 - 1.5 * number, label=method)
            panel.set(title=f"{pass_name.replace('_', ' and ')}, {dtype}", xlabel="vocabulary", ylabel="MiB")
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    figure.suptitle(f"Peak memory beside the logits: {record['batch']} × {record['tokens']} tokens, {record['device']}")
    save_figure(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints, writes and draws."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = device == "cuda"
    parser = parser_of(__doc__)
    vocabularies = [8192, 16384, 32768, 65536, 131072] if large else [2048, 4096, 8192, 16384]
    parser.add_argument("--vocabularies", type=positive, nargs="+", default=vocabularies)
    parser.add_argument("--tokens", type=positive, default=1024 if large else 256, help="of a sequence")
    parser.add_argument("--batch", type=positive, default=16 if large else 8, help="sequences")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--repeats", type=positive, default=20 if large else 5)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="torch.compile too")
    parser.add_argument("--out", type=Path, default=RESULTS / f"selective_log_softmax_{device}.json")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw these results again and measure nothing")
    options = parser.parse_args(words)
    if options.plot is not None:
        plot(read_record(parser, options.plot), options.plot.with_suffix(".png"))
        return
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for vocabulary in options.vocabularies:
            rows += measure(dtype, vocabulary, options.tokens, options.batch, device, options.repeats, options.compiled)
    print(table(rows))
    record = {
        "command": command("selective_log_softmax", words),
        **describe(),
        "device": torch.cuda.get_device_name() if large else "cpu",
        "torch": torch.__version__,
        **{name: getattr(options, name) for name in ("batch", "tokens", "repeats")},
        "results": rows,
    }
    write_record(options.out, record)
    plot(record, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
