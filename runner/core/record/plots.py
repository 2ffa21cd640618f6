"""Plot the gradients of all layers with matplotlib; import only to plot."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

WIDTH, DPI = 640, 100  # pixels of width; TensorBoard shows 320 at first
BLUE, GREEN, RED, ORANGE = "#0d47a1", "#1b7a33", "#c01c28", "#d97706"
GREY = "#6c757d"
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
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs missing in the font
        size = (WIDTH / DPI, (170 + 32 * len(names)) / DPI)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        canvas: Any = FigureCanvasAgg(figure)
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
