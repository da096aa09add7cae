"""Figures of the documentation as SVG, for light and dark pages."""

import io
from collections.abc import Callable, Mapping
from typing import Any

THEMES = {"light": ("#1f2328", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}  # ink, and what is drawn behind it
_OURS, _TILE, _KEPT = "#2f81f7", "#8b949e", "#d29922"
_OTHERS = (
    *("#8250df", "#bf8700", "#cf222e", "#e16f7c", "#1a7f37"),
    *("#d2691e", "#7cb342", "#00897b", "#26a69a", "#6e7781"),
)


def svg(draw: Callable[[], Any], theme: str) -> str:
    """The figure that `draw` makes, without a background, in the theme's colours; the same text from the same data."""
    import matplotlib

    ink, behind = THEMES[theme]
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "pallas-ce",
        "axes.edgecolor": behind,
        "grid.color": behind,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "font.family": "sans-serif",
        "font.size": 10,
    }
    with matplotlib.rc_context(settings | colours):
        buffer = io.StringIO()
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def rivals(time: Mapping[str, Mapping[int, float]], memory: Mapping[str, Mapping[int, float]], title: str) -> Any:
    """Time and memory of each contender against the size of the vocabulary."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    for axes, found, label in zip(
        figure.subplots(1, 2),
        (time, memory),
        ("loss and gradients: time / three products", "MiB beside the inputs, gradients included"),
        strict=True,
    ):
        others = iter(_OTHERS)
        for name, line in found.items():
            ours = name.startswith("pallas-ce")
            colour = _OURS if ours else next(others)
            style = {"linestyle": "--" if name.endswith("recompute") else "-", "linewidth": 2.4 if ours else 1.2}
            axes.plot(list(line), list(line.values()), marker="o", markersize=4, color=colour, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sizes := sorted({v for line in found.values() for v in line}), [f"{v // 1024}k" for v in sizes])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="vocabulary", title=label)
        axes.title.set_fontsize(10)
        axes.grid(axis="y", linewidth=0.6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title, fontsize=10)
    return figure


def statistics() -> Any:
    """Tiles of the vocabulary become partial statistics, which merge."""
    figure, axes = _canvas(9, 2.6)
    for place in range(4):
        x = 0.2 + 1.6 * place
        _box(axes, x, 1.5, 1.3, 0.7, f"tile {place + 1}\nof logits" if place < 3 else "…", _TILE)
        _box(axes, x, 0.2, 1.3, 0.7, "max, Σ exp(z − max),\n…" if place < 3 else "…", _OURS, size=7.5)
        _arrow(axes, (x + 0.65, 1.5), (x + 0.65, 0.9))
        if place < 3:
            _arrow(axes, (x + 1.3, 0.55), (x + 1.6, 0.55))
    _arrow(axes, (6.3, 0.55), (6.7, 0.55))
    _box(axes, 6.7, 0.2, 2.2, 0.7, "row statistics:\nlse, log p, entropy, …", _KEPT)
    axes.text(6.75, 1.85, "one tile at a time\nis in memory", va="center", fontsize=9)
    return figure


def modes() -> Any:
    """What each mode computes in forward and backward, and what it keeps between them."""
    figure, axes = _canvas(9, 2.8)
    for y, name, forward, kept, backward in (
        (
            1.5,
            "in_forward",
            "logits, gradient of hidden,\ngradient of weight",
            "both gradients",
            "multiply by\na scalar",
        ),
        (0.2, "recompute", "logits", "numbers\nfor each row", "logits, gradient of hidden,\ngradient of weight"),
    ):
        axes.text(0.1, y + 0.4, name, va="center", fontweight="bold")
        for x, width, words, colour in (
            (1.5, 2.4, forward, _OURS),
            (4.5, 1.4, kept, _KEPT),
            (6.5, 2.4, backward, _OURS),
        ):
            _box(axes, x, y, width, 0.8, words, colour)
        _arrow(axes, (3.9, y + 0.4), (4.5, y + 0.4))
        _arrow(axes, (5.9, y + 0.4), (6.5, y + 0.4))
    for x, words in ((2.7, "forward"), (5.2, "kept"), (7.7, "backward")):
        axes.text(x, 2.55, words, ha="center", fontsize=9)
    return figure


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _box(axes: Any, x: float, y: float, width: float, height: float, words: str, colour: str, size: float = 9) -> None:
    from matplotlib.patches import FancyBboxPatch

    style: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.08",
        "edgecolor": colour,
        "linewidth": 1.6,
        "fill": False,
    }
    axes.add_patch(FancyBboxPatch((x, y), width, height, **style))
    axes.text(x + width / 2, y + height / 2, words, ha="center", va="center", fontsize=size)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _TILE})
