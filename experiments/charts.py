"""The one chart of the experiments: panels of lines, as PNG or, for light and dark pages, as SVG."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.files import write_atomically

_THEMES = {"light": ("#1f2328", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}  # ink, and the lines behind it
_PLAIN = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 10,
    "axes.titlesize": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "pallas-ce",
}


class Panel(NamedTuple):
    """One pair of axes: y by x, which may be words, for each label. `log` names axes: "", "x", "y" or "xy"."""

    lines: Mapping[str, Mapping[Any, float]]
    x: str = ""
    y: str = ""
    title: str = ""
    log: str = ""
    marked: bool = True


def chart(path: Path, panels: Sequence[Panel], title: str = "", theme: str = "light", width: float = 4.9) -> Path:
    """Draws the panels, each of this many inches, side by side with one legend; returns the path, whose suffix counts.

    Lines whose labels begin with "pallas-ce" are thick, before all others. The same numbers give the same file.
    """
    import matplotlib
    from matplotlib.figure import Figure

    ink, behind = _THEMES[theme]
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    settings: dict[Any, Any] = _PLAIN | colours | {"axes.edgecolor": behind, "grid.color": behind}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width * max(2, len(panels)), 4.4), layout="constrained")
        legend: dict[str, Any] = {}
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel, legend)
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)
        figure.suptitle(title, fontsize=10)
        buffer = io.BytesIO()
        format_ = path.suffix.removeprefix(".")
        undated = {"metadata": {"Date": None, "Creator": None}} if format_ == "svg" else {"dpi": 110}
        figure.savefig(buffer, format=format_, transparent=format_ == "svg", **undated)
    write_atomically(path, buffer.getvalue())
    return path


def _draw(axes: Any, panel: Panel, legend: dict[str, Any]) -> None:
    places = list(dict.fromkeys(x for line in panel.lines.values() for x in line))
    named = any(isinstance(x, str) for x in places)
    for number, (label, line) in enumerate(panel.lines.items()):
        ours = label.startswith("pallas-ce")
        (drawn,) = axes.plot(
            [places.index(x) for x in line] if named else list(line),
            list(line.values()),
            # Curves that agree hide each other: each second one is dashed. There are ten colours.
            ("-", "--")[number % 2] if number < 10 else ":",
            color=legend[label].get_color() if label in legend else f"C{number % 10}",
            marker="o" if panel.marked else None,
            markersize=3,
            linewidth=3 if ours else 1.2,
            zorder=3 if ours else 2,
            label=label,
        )
        legend.setdefault(label, drawn)
    if named:
        turned = {"rotation": 60, "ha": "right"} if max(map(len, places)) > 6 else {}
        axes.set_xticks(range(len(places)), places, **turned)
    for axis in panel.log:
        getattr(axes, f"set_{axis}scale")("log", base=2)
        getattr(axes, f"{axis}axis").set_major_formatter("{x:g}")
    if "x" in panel.log:
        axes.set_xticks(places)
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    axes.grid(axis="y", linewidth=0.6)
