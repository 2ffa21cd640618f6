"""Every picture of a run, drawn by matplotlib: import this module only where something is drawn.

Each function returns pixels [height, width, 3], 640 wide. Names are shown as they are, without
mathematics in them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

SIDE, DPI = 640, 100  # pixels across; TensorBoard shows 320 of them at first, so letters are large
BLUE, GREEN, RED, ORANGE = "#0d47a1", "#1b7a33", "#c01c28", "#d97706"
INK, GREY, PALE, PURPLE = "#212529", "#6c757d", "#a6bddb", "#783ca0"
COLOURS = (BLUE, ORANGE, GREEN, RED, GREY, PURPLE)
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
MOST_CLASSES = 24  # in one picture; more could not be read
MOST_ROWS = 12
NAME = 28  # letters of a name
LETTERS = 62  # of a line as wide as the picture
LARGEST = 1e6  # of a ratio that is drawn


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


def _shorten(name: str, most: int = NAME) -> str:
    """A name without its middle: first and last part tell modules apart."""
    half = most // 2
    return name if len(name) <= most else f"{name[: most - half - 1]}…{name[-half:]}"


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """One row for each name, the first at the top."""
    axes.set_yticks(range(len(names)), [_shorten(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def confusion_matrix(counts: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.uint8]:
    """Counts [true, predicted] as a table, shaded by the share of each true class.

    Of many classes only those with the most mistakes are drawn, and the title says so.
    """
    kept = _most_mistaken(counts)
    title = f"{int(np.trace(counts)):,} of {int(counts.sum()):,} right"
    if len(kept) < len(counts):
        title += f" · {len(kept)} worst of {len(counts)} classes"
    shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))[np.ix_(kept, kept)]
    shown = counts[np.ix_(kept, kept)]
    labels = [_shorten(str(names[i]) if i < len(names) else str(i), 14) for i in kept]
    shade = LinearSegmentedColormap.from_list("shade", ["white", BLUE])
    size = 13 if len(kept) <= 12 else 8
    with rc_context(STYLE | {"axes.grid": False, "font.size": size}):
        picture = _Picture(SIDE, title)
        axes = picture.axes[0]
        axes.imshow(shares, cmap=shade, vmin=0, vmax=1)
        turned = 90 if max(map(len, labels)) * len(kept) > 40 else 0
        axes.set_xticks(range(len(kept)), labels, rotation=turned)
        axes.set_yticks(range(len(kept)), labels)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
        for row, column in np.argwhere(shown):  # zeros would only be noise
            colour = "white" if shares[row, column] > 0.5 else INK
            text = str(shown[row, column])
            axes.text(column, row, text, ha="center", va="center", color=colour)
        return picture.pixels()


def _most_mistaken(counts: NDArray[np.int64]) -> NDArray[np.intp]:
    """The classes to draw, in order: all, or those most often mistaken or mistaken for."""
    if len(counts) <= MOST_CLASSES:
        return np.arange(len(counts))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)
    return np.sort(np.argsort(-wrong, kind="stable")[:MOST_CLASSES])


def image_grid(
    images: NDArray[np.floating], true: Sequence[str], predicted: Sequence[str]
) -> NDArray[np.uint8]:
    """Images [N, C, H, W] in rows of four: a right one with its class, a wrong one framed in red.

    Values may have any range.
    """
    low, high = images.min(), images.max()
    pixels = ((images - low) / (high - low or 1.0)).transpose(0, 2, 3, 1)
    pixels = pixels if pixels.shape[3] == 3 else np.repeat(pixels[..., :1], 3, axis=3)
    deep = -(-len(images) // 4)
    style = STYLE | {"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}
    with rc_context(style):
        picture = _Picture(deep * 200, "", 1)
        picture.axes[0].remove()
        for i, image in enumerate(pixels):
            axes = picture.figure.add_subplot(deep, 4, i + 1)
            axes.imshow(image, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            right = true[i] == predicted[i]
            name = _shorten(true[i], 16)
            wrong = f"said {_shorten(predicted[i], 12)}\nis {name}"
            axes.set_xlabel(name if right else wrong, color=GREEN if right else RED)
            for spine in axes.spines.values():
                spine.set(visible=not right, color=RED, linewidth=4)
        return picture.pixels()


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


def fault_counts(
    counts: Mapping[str, int], severities: Mapping[str, str], steps: int
) -> NDArray[np.uint8]:
    """How often each kind of fault was, as bars; the most frequent first."""
    shown = sorted(counts.items(), key=lambda item: -item[1])[:MOST_ROWS]
    with rc_context(STYLE):
        picture = _Picture(90 + 54 * len(shown), f"faults in {steps:,} steps")
        axes = picture.axes[0]
        _rows(axes, [kind for kind, _ in shown])
        colours = [SEVERITY[severities.get(kind, "info")] for kind, _ in shown]
        bars = axes.barh(range(len(shown)), [count for _, count in shown], 0.6, color=colours)
        axes.bar_label(bars, [f" {count:,}" for _, count in shown])
        axes.margins(x=0.15)
        axes.set_xticks([])
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


Line = Sequence[tuple[int, float]]


def memory_timeline(
    lines: Mapping[str, Line], dots: Mapping[str, Line], last: int, unit: str
) -> NDArray[np.uint8]:
    """Lines and dots over the steps, from nothing up; a later one is drawn over an earlier."""
    with rc_context(STYLE):
        picture = _Picture(430, f"memory, {unit}")
        axes = picture.axes[0]
        legend = dict(zip([*lines, *dots], COLOURS, strict=False))
        for width, (name, line) in zip((6, 3, 2), lines.items(), strict=False):
            mark = "o" if len(line) == 1 else None
            axes.plot(*_columns(line), color=legend[name], linewidth=width, marker=mark)
        for name, line in dots.items():
            axes.scatter(*_columns(line), 30, legend[name], zorder=3)
        values = [value for line in (*lines.values(), *dots.values()) for _, value in line]
        axes.set_ylim(0, 1.1 * max(values, default=0.0) or 1.0)
        axes.set_xlim(0, 1.02 * max(last, 1))
        axes.set_xlabel("step")
        picture.legend(legend)
        return picture.pixels()


def _columns(line: Line) -> tuple[list[int], list[float]]:
    return [step for step, _ in line], [value for _, value in line]


def memory_modules(names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> NDArray[np.uint8]:
    """A bar for each module, in a colour for each part of its memory, in MiB."""
    shown = {part: np.array(held) for part, held in parts.items() if any(held)}
    with rc_context(STYLE):
        picture = _Picture(150 + 42 * len(names), "memory of a step by module, MiB")
        axes = picture.axes[0]
        _rows(axes, names)
        legend = dict(zip(shown, COLOURS, strict=False))
        start = np.zeros(len(names))
        for part, held in shown.items():
            axes.barh(range(len(names)), held, 0.6, start, color=legend[part])
            start += held
        for i, total in enumerate(start):
            axes.text(total, i, f" {total:,.3g}", va="center")
        axes.set_xlim(0, 1.15 * max(start, default=0.0) or 1.0)
        picture.legend(legend)
        return picture.pixels()


@dataclass(frozen=True)
class RatioBar:
    """A ratio with its interval and the text beside it; without a value, the text says why."""

    name: str
    value: float | None
    ends: tuple[float, float] | None
    text: str
    colour: str = BLUE


def ratio_bars(
    title: str, bars: Sequence[RatioBar], floor: float = 0.0, start: float = 0.0
) -> NDArray[np.uint8]:
    """A name above each bar, which goes from `start` to the ratio; a line marks 1.

    The band around 1 is the noise floor.
    """
    drawn = [x for bar in bars for x in (bar.value, *(bar.ends or ())) if x is not None]
    drawn = [x for x in drawn if x < LARGEST]
    low, high = min([start, 1.0, *drawn]), max([start, 1.0, *drawn])
    room = max(len(bar.text) for bar in bars if bar.value is not None) / LETTERS
    with rc_context(STYLE | {"font.size": 14}):
        picture = _Picture(70 + 66 * len(bars), title)
        axes = picture.axes[0]
        axes.axvspan(max(1 - floor, low), 1 + floor, color="#dee2e6", linewidth=0)
        for i, bar in enumerate(bars):
            axes.text(low, i - 0.36, _shorten(bar.name, LETTERS), va="center")
            if bar.value is None or not 0 <= bar.value < LARGEST:
                axes.text(low, i, f" {_shorten(bar.text, LETTERS)}", va="center", color=RED)
                continue
            axes.barh(i, bar.value - start, 0.36, start, color=bar.colour)
            end = max(bar.value, start)
            if bar.ends is not None and bar.ends[1] < LARGEST:
                low_end, end = bar.ends[0], max(end, bar.ends[1])
                axes.plot([low_end, bar.ends[1]], [i, i], color=INK, marker="|", linewidth=2)
            axes.text(end, i, f" {bar.text}", va="center")
        axes.axvline(1.0, color=GREY, linewidth=1.5)
        axes.set_xlim(low, low + max(high - low, 1e-6) / max(1 - room, 0.3))
        axes.set_ylim(len(bars) - 0.6, -0.7)
        axes.set_axis_off()
        return picture.pixels()
