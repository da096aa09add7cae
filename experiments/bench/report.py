"""The pages that show result files; every number and line in them comes from a file."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.bench import paper_table, programs, training_evidence
from experiments.bench.results import DRY, Record, ResultError, load
from experiments.bench.tables import COLUMNS, Row, entry, left_out, machine_line, rows_of, table
from experiments.bench.targets import Documents, missed_table, targets_table
from experiments.charts import Panel, chart
from experiments.files import write_atomically

DOCS = Path(__file__).parents[2] / "docs"
ROWS = 8192  # of the points that the figure shows
_REPORTS = {paper_table.NAME: paper_table, training_evidence.NAME: training_evidence}
Line = dict[int, float]  # by vocabulary

# As the figure names them, and the program in the result files.
_OURS = {
    "pallas-ce, in_forward": programs.IN_FORWARD,
    "pallas-ce, recompute": programs.RECOMPUTE,
    "stored logits (JAX)": programs.CANONICAL,
}
_PEERS = dict.fromkeys(
    (
        *("torch, bfloat16 logits", "torch.compile", "torch, chunked", "CCE", "CCE, exact gradients"),
        *("Liger", "Liger, C 16", "Liger CuTe, stored logits", "Liger CuTe, streamed", "quack"),
    )
)

_MADE = "% Made by `python -m experiments.bench site`."

# Of these, the figure's: five rivals, each second one dashed.
_DRAWN = ("pallas-ce, in_forward", "pallas-ce, recompute", "torch.compile", "quack", "Liger", "Liger, C 16", "CCE")


def write(folder: Path) -> Iterator[Path]:
    """Writes `gpu_report.md`, and the reports of the paper's table and of trainings with their plots."""
    documents = _loaded(folder)
    yield _written(folder / "gpu_report.md", markdown(documents))
    for name, module in _REPORTS.items():
        if document := documents.get(name):
            path = folder / f"{name}.md"
            yield _written(path, module.markdown(document))
            machine = document["machine"]
            title = f"{machine['device']}{', DRY RUN' if machine.get(DRY) else ''}"
            yield chart(path.with_suffix(".png"), module.panels(document), title)


def write_site(folder: Path) -> Iterator[Path]:
    """Writes the documentation's tables, and its figure for light and dark pages."""
    documents = Complete(folder, _loaded(folder))
    for name, page in SITE.items():
        yield _written(DOCS / "generated" / f"{name}.md", page(documents))
    title = f"{documents['gpu_head_grid']['machine']['device']}, {ROWS} rows of width 4096, bfloat16"
    for theme in ("light", "dark"):  # narrow, so that a phone does not make the letters small
        yield chart(DOCS / "_static" / f"rivals-{theme}.svg", rival_panels(documents), title, theme, width=3.3)


class Complete(dict[str, Record]):
    """Result files, whose first one that is looked for in vain is named."""

    def __init__(self, folder: Path, documents: dict[str, Record]) -> None:
        super().__init__(documents)
        self._folder = folder

    def __missing__(self, name: str) -> Record:
        command = name.replace("gpu_head_", "gpu_head ")
        raise ResultError(
            f"{self._folder} has no {name}.json, which the documentation's pages show: "
            f"run `python -m experiments.bench {command}` first"
        )


def _loaded(folder: Path) -> dict[str, Record]:
    if documents := load(folder):
        return documents
    raise ResultError(f"{folder} holds no results: run `python -m experiments.bench gpu_head` first")


def _written(path: Path, text: str) -> Path:
    write_atomically(path, text + "\n")
    return path


def markdown(documents: Documents) -> str:
    """Targets, and a table for each file that has no report of its own."""
    parts = ["# The head on a GPU", "Made from the result files by `python -m experiments.bench gpu_report`."]
    if any(document["machine"].get(DRY) for document in documents.values()):
        parts.append("**DRY RUN: sizes were shrunk. These are not the published measurements.**")
    parts += ["## Targets", targets_table(documents), devices_line(documents)]
    for name, document in documents.items():
        if name not in _REPORTS:
            parts += [f"## {name}", machine_line(document), section(name, document), *left_out(document)]
    return "\n\n".join(parts)


def section(name: str, document: Row) -> str:
    """A file's table."""
    found = [columns for prefix, columns in COLUMNS.items() if name.startswith(prefix)]
    return table(rows_of(document), found[0]) if found else _by_point(document)


def _by_point(document: Row) -> str:
    """A row a point: of each program milliseconds, the ratio in brackets, temporary memory."""
    programs = dict.fromkeys(program for point in document["points"].values() for program in point["results"])
    rows = [
        {"point": name, **point, **{program: _cell(result) for program, result in point["results"].items()}}
        for name, point in document["points"].items()
    ]
    fixed = {"point": "{point}", "N": "{n}", "V": "{v}", "H": "{h}"}
    return table(rows, {**fixed, **{program: entry(program) for program in programs}})


def _cell(result: Mapping[str, Any]) -> str:
    if "compile_seconds" in result:
        return f"{result['compile_seconds']:.2f} s, {result['untuned_seconds']:.2f} s without autotuning"
    ratio = f" ({result['ratio']:.3f})" if "ratio" in result else ""
    if "share" in result:
        ratio = f" ({result['share']:.2f} of a copy's rate)"
    return f"{result['ms']:.3f} ms{ratio}, {result.get('temporary_mib', result.get('peak_mib', 0.0)):.0f} MiB"


def devices_line(documents: Documents) -> str:
    """The device that most files were measured on, and the others' devices."""
    devices = {name: document["machine"]["device"] for name, document in documents.items()}
    most = statistics.mode(devices.values())
    return f"Device: {most}{''.join(f'; {name}: {device}' for name, device in devices.items() if device != most)}."


def performance_page(documents: Documents) -> str:
    """The tables of the performance page."""
    time, memory = lines(documents)
    models = documents["huggingface_table"]
    runs = [{**document, "facts": machine_line(document).partition(": ")[2]} for document in documents.values()]
    spans = {name: (min(time[name].values()), max(time[name].values())) for name in _OURS}
    parts = [
        _MADE,
        "On an {device} with jax {jax}, {date}, loss and gradients take `in_forward` {:.2f} to {:.2f} times as long as "
        "three bare products of the same sizes, and `recompute` {:.2f} to {:.2f} times.".format(
            *spans["pallas-ce, in_forward"], *spans["pallas-ce, recompute"], **documents["gpu_head_grid"]["machine"]
        ),
        "## Beside other implementations",
        f"{ROWS} rows, width 4096, bfloat16; by size of the vocabulary. Time over three bare products:",
        _by_vocabulary(time, ".2f"),
        "MiB beside the inputs, gradients included:",
        _by_vocabulary(memory, ".0f"),
        "## Hugging Face models",
        "Training steps of Qwen3 with random weights, a vocabulary of 151936, bfloat16 and PyTorch's fused AdamW, in "
        "eager mode, by transformers' own loss (plain), with Liger's kernels and with `patch_causal_lm` (fused).",
        section("huggingface_table", models),
        *left_out(models),
        *(f"{name}: {p['mib']:.0f} MiB by the driver's count." for name, p in models["points"].items() if "mib" in p),
        "## On a CPU",
        "2048 rows, width 512, vocabulary 32768, float32; canonical is stored logits.",
        section("cpu_head", documents["cpu_head"]),
        "## Missed targets",
        missed_table(documents),
        "## Runs",
        devices_line(documents),
        table(runs, {"command": "`{command}`", "machine and versions": "{facts}"}),
    ]
    return "\n\n".join(parts)


def adopting_page(documents: Documents) -> str:
    """The tables of what adopting costs: compiling, the host's time, memory."""
    compiled, bridge = documents["gpu_head_compile"], documents["torch_gpu"]
    parts = [
        _MADE,
        "## Seconds to compile",
        "The head alone, on an {device} with jax {jax}, {date}; canonical stores the logits. Autotuning is XLA's, of "
        "its own products.".format(**compiled["machine"]),
        table(rows_of(compiled), COLUMNS["cost_compile"]),
        "## The host's time",
        "Microseconds until a call returns, while an {device} is busy; jax {jax}, {date}.".format(**bridge["machine"]),
        _costs(bridge, "host"),
        "## Memory",
        "MiB of a process that takes loss and gradients, by the driver's count, on the same day.",
        _costs(bridge, "memory"),
    ]
    return "\n\n".join(parts)


def _costs(bridge: Row, kind: str) -> str:
    """The bridge's points of a kind."""
    points = ((name.partition(" "), point) for name, point in bridge["points"].items())
    rows = ({**point, "call": call} for (start, _, call), point in points if start == kind)
    return table(rows, COLUMNS[f"cost_{kind}"])


SITE = {"performance": performance_page, "adopting": adopting_page}


def lines(documents: Documents) -> tuple[dict[str, Line], dict[str, Line]]:
    """Each contender's time of loss and gradients over three bare products, and its MiB beside the inputs.

    The time is relative to products of the same process, since a GPU's clocks differ between processes. XLA counts
    memory without a program's results, PyTorch with them, so the gradients are added to XLA's.
    """
    time: dict[str, Line] = {name: {} for name in (*_OURS, *_PEERS)}
    memory: dict[str, Line] = {name: {} for name in (*_OURS, *_PEERS)}
    for name, document in documents.items():
        contenders = _OURS if name == "gpu_head_grid" else _PEERS if name.startswith("peers") else {}
        for key, point in document["points"].items():
            if key != f"{ROWS}x{point.get('v')}":
                continue
            gradients = (point["n"] + point["v"]) * point["h"] * 2 / 2**20
            for shown, program in contenders.items():
                if result := point["results"].get(program or shown):
                    time[shown][point["v"]] = result["ratio"]
                    peak = result.get("peak_mib")
                    memory[shown][point["v"]] = result["temporary_mib"] + gradients if peak is None else peak
    return time, memory


def rival_panels(documents: Documents) -> list[Panel]:
    """Time and memory against the size of the vocabulary."""
    time, memory = (
        {name: {f"{v // 1024}k": y for v, y in found[name].items()} for name in _DRAWN} for found in lines(documents)
    )
    return [
        Panel(time, "vocabulary", title="time / three bare products", log="y"),
        Panel(memory, "vocabulary", title="MiB, gradients included", log="y"),
    ]


def _by_vocabulary(found: dict[str, Line], form: str) -> str:
    sizes = sorted({v for line in found.values() for v in line})
    rows: list[dict[Any, Any]] = [{"name": name, **line} for name, line in found.items() if line]
    return table(rows, {"": "{name}", **{str(v): entry(v, form) for v in sizes}})
