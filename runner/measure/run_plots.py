"""Plots of a run from its records alone: `python -m runner.report RUN --plots`.

The same plots are made at the end of a run with debug tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from runner.core.masking import mask_secrets
from runner.core.record.storage import link_refusal, make_folder, replace_text
from runner.measure.curves import downsample_curve
from runner.measure.run_tables import read_rows

FOLDER = "debug/plots"
MAX_DRAWN = 1e100  # larger numbers have no ticks
MAX_LAYERS = 12  # lines of a plot
VALUES = {"loss": "loss", "gradient norm": "grad_norm"}  # by title
Panel = Callable[[Any], None]
Rows = list[dict[str, Any]]


def write_plots(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the plots of a run as SVG; returns pictures (RGB uint8) by name, and notes.

    A note says why a plot is not made, or what is damaged. Raises SecurityError for a link, and
    OSError.
    """
    if (folder / FOLDER).is_symlink():
        raise link_refusal(folder / FOLDER)
    notes = list[str]()
    names = ("metrics", "anomalies", "gradients")
    rows = {name: list(read_rows([folder], name, notes)) for name in names}
    pictures: dict[str, Any] = {}
    for name, make in PLOTS.items():
        if not (panels := list(make(rows))):
            notes.append(f"{name}: not drawn, fewer than two points are recorded")
            continue
        from runner.core.record import plots  # imports matplotlib

        svg, pictures[name] = plots.draw_panels(name.replace("_", " "), panels)
        make_folder(folder / FOLDER)
        replace_text(folder / FOLDER / f"{name}.svg", svg)
    return pictures, notes


def _timeline(rows: Mapping[str, Rows]) -> Iterator[Panel]:
    """Loss and gradient norm by step, with the bad steps by kind and their limits."""
    for title, name in VALUES.items():
        line = _points(rows["metrics"], name, "train")
        marks = dict[str, list[tuple[float, float]]]()
        for row in rows["anomalies"]:
            if _is_number(row.get("step")):
                height = float(row[name]) if _is_number(row.get(name)) else math.inf
                marks.setdefault(str(row.get("kind")), []).append((row["step"], height))
        if len(line) + sum(map(len, marks.values())) > 1:
            limits = _points(rows["anomalies"], f"{name}_limit")
            lines = {title: line, "limit": limits if len(limits) > 1 else []}
            yield partial(_draw_lines, title=title, lines=lines, marks=marks)


def _memory(rows: Mapping[str, Rows]) -> Iterator[Panel]:
    """Memory of the process and peak of the device, by step."""
    names = {"process, GiB": "process_gib", "device peak, GiB": "device_peak_gib"}
    for label, name in names.items():
        # one is drawn, too: how many there are depends on the time
        if points := _points(rows["metrics"], name, "system"):
            yield partial(_draw_lines, title=label, lines={label: points}, marks={}, from_zero=True)


def _gradient_norms(rows: Mapping[str, Rows]) -> Iterator[Panel]:
    """A line a layer; of many layers every n-th."""
    layers = dict[str, Rows]()
    for row in rows["gradients"]:
        layers.setdefault(str(row.get("layer")), []).append(row)
    names = list(layers)[:: -(-len(layers) // MAX_LAYERS) or 1]
    lines = {mask_secrets(name): _points(layers[name], "norm") for name in names}
    if any(len(points) > 1 for points in lines.values()):
        yield partial(_draw_lines, title="gradient norm", lines=lines, marks={})


def _distribution(rows: Mapping[str, Rows]) -> Iterator[Panel]:
    """How often losses and norms occur in good steps, as recorded means, and in bad ones."""
    for title, name in VALUES.items():
        good = [y for _, y in _points(rows["metrics"], name, "train")]
        bad = [y for _, y in _points(rows["anomalies"], name)]
        if len(good) + len(bad) > 1:
            yield partial(_draw_histogram, title=title, groups={"good": good, "bad": bad})


PLOTS: dict[str, Callable[[Mapping[str, Rows]], Iterator[Panel]]] = {
    "timeline": _timeline,
    "memory": _memory,
    "gradient_norms": _gradient_norms,
    "distribution": _distribution,
}


def _draw_lines(
    axes: Any,
    title: str,
    lines: Mapping[str, Any],
    marks: Mapping[str, Any],
    from_zero: bool = False,
) -> None:
    from runner.core.record import plots

    drawn = {name: downsample_curve(points) for name, points in lines.items() if points}
    plots.draw_lines(axes, title, drawn, marks, from_zero)


def _draw_histogram(axes: Any, title: str, groups: Mapping[str, list[float]]) -> None:
    from runner.core.record import plots

    plots.draw_histogram(axes, title, groups)


def _points(rows: Rows, name: str, split: str | None = None) -> list[tuple[float, float]]:
    """Return step and value of the rows with a finite value; only those of `split` if given."""
    chosen = (row for row in rows if split is None or row.get("split") == split)
    pairs = ((row.get("step"), row.get(name)) for row in chosen)
    return [(x, float(y)) for x, y in pairs if _is_number(x) and _is_number(y)]


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number that matplotlib can draw."""
    return type(value) in (int, float) and abs(value) <= MAX_DRAWN
