"""What went wrong, gradients and memory, drawn by matplotlib: import this only to draw.

Each function returns pixels [height, width, 3], 640 wide. Names are shown as they are, without
mathematics in them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
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

SIDE, DPI = 640, 100  # pixels across; TensorBoard shows 320 of them at first
BLUE, GREEN, RED, ORANGE = "#0d47a1", "#1b7a33", "#c01c28", "#d97706"
INK, GREY = "#212529", "#6c757d"
SEVERITY = {"info": BLUE, "warning": ORANGE, "error": RED}
STYLE: Any = {
    "text.parse_math": False,
    "font.size": 13,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dee2e6",
    "axes.axisbelow": True,
    "axes.edgecolor": "#dee2e6",
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": INK,
}
MOST_ROWS = 12
NAME = 28  # letters of a name


class _Picture:
    """A figure of one row of axes; `pixels` draws it."""

    def __init__(self, height: float, title: str, columns: int = 1, **keywords: Any) -> None:
        self.figure = Figure(figsize=(SIDE / DPI, height / DPI), dpi=DPI, layout="constrained")
        self.canvas: Any = FigureCanvasAgg(self.figure)
        self.figure.suptitle(title, fontsize=16 if len(title) < 48 else 12)
        self.axes: list[Axes] = list(self.figure.subplots(1, columns, squeeze=False, **keywords)[0])

    def legend(self, colours: Mapping[str, str]) -> None:
        """Names and their colours, below the axes."""
        handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
        self.figure.legend(
            handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=11
        )

    def pixels(self) -> NDArray[np.uint8]:
        """RGB of the figure."""
        with warnings.catch_warnings():  # about letters that the font has not
            warnings.simplefilter("ignore")
            self.canvas.draw()
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()


def _power(value: float, position: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _shorten(name: str) -> str:
    """A name without its middle: first and last part tell modules apart."""
    half = NAME // 2
    return name if len(name) <= NAME else f"{name[: half - 1]}…{name[-half:]}"


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """One row for each name, the first at the top."""
    axes.set_yticks(range(len(names)), [_shorten(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def fault_timeline(
    lanes: Mapping[str, Collection[int]],
    counts: Mapping[str, int],
    severities: Mapping[str, str],
    last: int,
) -> NDArray[np.uint8]:
    """A lane for each kind of fault, a mark for each step at which it was; up to step `last`.

    Where not all of its `counts` steps are known, a lighter bar goes from the first to the last.
    """
    shown = list(lanes.items())[:MOST_ROWS]
    with rc_context(STYLE):
        picture = _Picture(110 + 54 * len(shown), "faults by step")
        axes = picture.axes[0]
        names = [f"{kind} · {counts.get(kind, len(steps)):,}" for kind, steps in shown]
        _rows(axes, names)
        for i, (kind, steps) in enumerate(shown):
            colour = SEVERITY[severities[kind]]
            if counts.get(kind, 0) > len(steps) > 1:
                axes.barh(i, max(steps) - min(steps), 0.3, min(steps), color=colour, alpha=0.3)
            axes.scatter(list(steps), [i] * len(steps), 260, colour, marker="|", linewidths=3)
        axes.set_xlim(-0.02 * last, 1.02 * max(last, 1))
        axes.set_xlabel("step")
        return picture.pixels()


def gradient_flow(
    names: Sequence[str],
    norms: Sequence[float | None],
    updates: Sequence[float | None],
    colours: Sequence[str],
    legend: Mapping[str, str],
    step: int,
) -> NDArray[np.uint8]:
    """Bars for the gradient norm and the relative update of each layer, from input to output.

    The dashed line is an update of a thousandth of the weight, the rule of thumb of CS231n.
    """
    with rc_context(STYLE | {"font.size": 11}):
        picture = _Picture(170 + 32 * len(names), f"gradient flow, step {step:,}", 2, sharey=True)
        panels = (("gradient norm", norms, None), ("update / weight", updates, 1e-3))
        for axes, (title, values, mark) in zip(picture.axes, panels, strict=True):
            axes.set_title(title, fontsize=12, color=GREY)
            _logarithmic_bars(axes, values, colours, mark)
        _rows(picture.axes[0], names)
        picture.legend({**legend, "0.001: a rule of thumb": GREEN})
        return picture.pixels()


def _logarithmic_bars(
    axes: Axes, values: Sequence[float | None], colours: Sequence[str], mark: float | None
) -> None:
    finite = [value for value in (*values, mark) if value is not None and 0 < value < math.inf]
    low, high = min(finite, default=0.1) / 10, max(finite, default=1.0)
    axes.set_xscale("log")
    axes.set_xlim(low, 2 * high)
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_major_formatter(_power)
    axes.xaxis.set_minor_formatter(NullFormatter())
    for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
        if value is None or value == 0:
            axes.text(low, i, " none" if value is None else " 0", color=colour, va="center")
            continue
        axes.barh(i, (value if value < math.inf else high) - low, 0.6, low, color=colour)
        if not math.isfinite(value):
            axes.text(low, i, " not finite", color="white", va="center", fontsize=9)
    if mark is not None:
        axes.axvline(mark, color=GREEN, linestyle="--")
    axes.grid(axis="y", visible=False)
