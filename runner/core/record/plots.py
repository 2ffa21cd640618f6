"""Plot the records of a run with matplotlib; import only to plot."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

WIDTH, DPI = 640, 100  # pixels of width; TensorBoard shows 320 at first
BLUE, GREEN, RED, ORANGE = "#0d47a1", "#1b7a33", "#c01c28", "#d97706"
GREY = "#6c757d"
MARKS = (RED, ORANGE, GREEN)  # of kinds of bad steps
STYLE: Any = {
    "text.parse_math": False,
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "grid.color": "#dee2e6",
    "axes.edgecolor": "#dee2e6",
    "axes.titlesize": 12,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.major.size": 0,
}
MAX_NAME_CHARS = 28  # maximum characters of a name
PANEL_HEIGHT = 260  # pixels
FEW_ROWS = 100  # up to which a histogram's counts have a linear axis
Points = Sequence[tuple[float, float]]


@contextmanager
def _figure(height: int, style: Mapping[str, Any]) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure so many pixels high and its canvas, in our style."""
    with rc_context(STYLE | style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs missing in the font
        figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, layout="constrained")
        yield figure, FigureCanvasAgg(figure)


def draw_panels(title: str, panels: Sequence[Callable[[Axes], None]]) -> tuple[str, Any]:
    """Return a figure of panels, one below the other, as SVG text and as RGB uint8.

    Each function draws into its axes. The SVG has neither date nor random names.
    """
    style = {"axes.grid.axis": "both", "font.size": 9, "svg.hashsalt": title}
    with _figure(60 + PANEL_HEIGHT * len(panels), style) as (figure, canvas):
        figure.suptitle(title, fontsize=13)
        for axes, draw in zip(figure.subplots(len(panels), squeeze=False), panels, strict=True):
            draw(axes[0])
        canvas.draw()
        picture = np.asarray(canvas.buffer_rgba())[..., :3].copy()
        svg = io.StringIO()
        writer: Any = FigureCanvasSVG(figure)
        writer.print_svg(svg, metadata={"Date": None})
    return svg.getvalue(), picture


def draw_lines(
    axes: Axes,
    title: str,
    lines: Mapping[str, Points],
    marks: Mapping[str, Points],
    from_zero: bool = False,
) -> None:
    """Draw points by step as lines and, by kind, as marks; logarithmic over two decades.

    Marks that are not finite are at the upper edge. With `from_zero` the axis begins at 0.
    """
    axes.set_title(title)
    axes.set_xlabel("step")
    values = [y for points in (*lines.values(), *marks.values()) for _, y in points]
    finite = [y for y in values if math.isfinite(y)]
    if finite and min(finite) > 0 and max(finite) > 100 * min(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    for name, points in lines.items():
        marker = "o" if len(points) == 1 else None
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker=marker, label=_shorten(name), linewidth=1.2)
    for i, (name, points) in enumerate(marks.items()):
        steps = [x for x, _ in points]
        heights = [y if math.isfinite(y) else max(finite, default=1.0) for _, y in points]
        axes.scatter(steps, heights, s=18, marker="x", label=name, color=MARKS[i % 3])
    if from_zero:
        axes.set_ylim(0)
    if len(lines) + len(marks) > 1:  # below the axes, where it covers no line
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, fontsize=8, ncols=3
        )


def draw_histogram(axes: Axes, title: str, groups: Mapping[str, Sequence[float]]) -> None:
    """Draw how often values occur, by group, in common bins; logarithmic over two decades."""
    axes.set_title(title)
    axes.set_ylabel("rows of the record")
    finite = {name: [x for x in xs if math.isfinite(x)] for name, xs in groups.items()}
    every = [x for xs in finite.values() for x in xs]
    if every and min(every) > 0 and max(every) > 100 * min(every):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        bins = np.geomspace(min(every), max(every), 30).tolist()
    else:
        bins = np.linspace(min(every, default=0.0), max(every, default=1.0), 30).tolist()
    if len(every) > FEW_ROWS:
        axes.set_yscale("log", nonpositive="clip")  # a few bad steps among many good ones
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for i, (name, values) in enumerate(finite.items()):
        if values:
            label, colour = f"{name} ({len(values):,})", (BLUE, RED)[i]
            axes.hist(values, bins, label=label, color=colour, alpha=0.7)
    axes.set_ylim(0.5 if len(every) > FEW_ROWS else 0)
    axes.legend(frameon=False, fontsize=8)


def gradient_flow(
    names: Sequence[str],
    norms: Sequence[float | None],
    updates: Sequence[float | None],
    colours: Sequence[str],
    legend: Mapping[str, str],
    step: int,
) -> NDArray[np.uint8]:
    """Plot gradient norm and relative update of each layer as bars, from input to output.

    Returns RGB uint8 [height, width, 3], 640 wide. Names are not parsed as mathematics. The dashed
    line at 1e-3 is the rule of thumb of CS231n for the relative update.
    """
    with _figure(170 + 32 * len(names), {}) as (figure, canvas):
        figure.suptitle(f"gradient flow, step {step:,}", fontsize=16)
        axes_pair: Any = figure.subplots(1, 2, sharey=True)
        panels = (("gradient norm", norms, None), ("update / weight", updates, 1e-3))
        for axes, (title, values, reference) in zip(axes_pair, panels, strict=True):
            axes.set_title(title)
            _logarithmic_bars(axes, values, colours, reference)
        axes_pair[0].set_yticks(range(len(names)), [_shorten(name) for name in names])
        axes_pair[0].set_ylim(len(names) - 0.4, -0.6)
        colours_by_name = {**legend, "0.001: a rule of thumb": GREEN}
        handles = [Patch(color=colour, label=name) for name, colour in colours_by_name.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _shorten(name: str) -> str:
    """Cut out a long name's middle, since start and end distinguish modules."""
    half = MAX_NAME_CHARS // 2
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: half - 1]}…{name[-half:]}"


def _logarithmic_bars(
    axes: Axes, values: Sequence[float | None], colours: Sequence[str], reference: float | None
) -> None:
    finite = [value for value in (*values, reference) if value is not None and 0 < value < math.inf]
    low, high = min(finite, default=0.1) / 10, max(finite, default=1.0)
    axes.set_xscale("log")
    axes.set_xlim(low, 2 * high)
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_major_formatter("{x:.0e}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
        if value is None or value == 0:
            axes.text(low, i, " none" if value is None else " 0", color=colour, va="center")
            continue
        axes.barh(i, (value if value < math.inf else high) - low, 0.6, low, color=colour)
        if not math.isfinite(value):
            axes.text(low, i, " not finite", color="white", va="center", fontsize=9)
    if reference is not None:
        axes.axvline(reference, color=GREEN, linestyle="--")
