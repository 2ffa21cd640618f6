"""A comparison for TensorBoard: a row of HParams for each job, and the run `comparison`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runner.record.hparams import (
    Scalar,
    column_value,
    common_columns,
    parse_value,
    unify_types,
    unique_sorted,
)
from runner.record.hydra_files import read_flat_config
from runner.record.tensorboard import (
    Session,
    TensorBoard,
    append_events,
    prepend_events,
    read_session,
)
from runner.record.text import escape_control_chars
from runner.report import figures, page, row_fields
from runner.report.charts import Bar
from runner.report.comparison import Comparison, Row
from runner.report.curves import axis_top, read_losses
from runner.report.naming import DEFAULT, keys, labels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RUN = "comparison"
ARM, STATUS = "arm", "status"
NOT_SWEPT = ("hydra.", "monitoring.", "sweep.", "security.")  # about how jobs run
FIRST = ("result/speedup", "result/samples_per_second", "result/peak_memory_mib")
MIB = 2**20
MOST_ROWS = 12  # of one picture; more could not be read
MOST_CURVES = 8
NAME = 46  # letters of a name below a picture


@dataclass
class Job:
    """A row with the folder of its run, and what the run's own event file says."""

    row: Row
    folder: Path
    session: Session | None
    values: dict[str, Scalar] = field(default_factory=dict)  # its hyper-parameters
    results: dict[str, float] = field(default_factory=dict)  # by name below `result/`


def export_comparison(comparison: Comparison, folder: Path) -> None:
    """Make TensorBoard on `folder` show every job as a run with its row, and `comparison`.

    The jobs' own event files are not touched. Each folder gets two more, with what only a
    comparison knows. The first has the row: status, arm, and check boxes for all that was swept.
    The last has results, and the end of a row that did not end itself, for a TensorBoard that is
    open. They go when the job is resumed, and a second call replaces them. Of runs put together by
    hand only `comparison` is written: their rows belong to their own sweeps.
    Raises OSError where the disk does not take it; what is there is whole then.
    """
    if comparison.kind != "runs":
        _export_jobs(comparison, folder)
    home = folder / RUN
    home.mkdir(parents=True, exist_ok=True)
    with append_events(home) as events:
        events.text(f"{RUN}/report", page.document(comparison), 0)
        for name, picture in draw_pictures(comparison).items():
            events.image(f"{RUN}/{name}", picture, 0)


def _export_jobs(comparison: Comparison, folder: Path) -> None:
    jobs = list(_jobs(comparison, folder))
    shown_first = _fill_hyper_parameters(comparison, jobs)
    kinds = {name: value for job in jobs for name, value in job.values.items()}
    domains = {
        name: unique_sorted([job.values[name] for job in jobs if name in job.values])
        for name in shown_first
    }
    metrics = _metrics(comparison, jobs)
    title = _title(comparison, folder, jobs)
    for job in jobs:
        ended = job.row.status != "running"  # such a one ends its row itself
        with prepend_events(job.folder) as events:
            events.experiment(kinds, metrics, domains, shown_first)
            name = f"{job.folder.name} of {title}"
            events.session(job.session.name if job.session else name, job.values)
            if ended:
                events.end(job.row.status)
        if ended:
            with append_events(job.folder) as events:
                events.scalars(0, "result", job.results)
                if job.session is None:
                    _final_metrics(events, job.row)
                events.end(job.row.status)


def _jobs(comparison: Comparison, folder: Path) -> Iterator[Job]:
    peak, taken = _peak_memory(comparison), {RUN}
    for row in comparison.rows:
        # an arm that failed before it had a folder gets one, for its row
        place = folder / (row.folder or _free_name(row.name, taken))
        if folder.resolve() not in place.resolve().parents:
            continue  # not of this sweep: its row is its own sweep's to write
        taken.add(place.name)
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            continue  # another user's
        yield Job(row, place, read_session(place), results=_results(row, peak(row)))


def _free_name(name: str, taken: set[str]) -> str:
    """A folder's name for a row that has none."""
    free = re.sub(r"[^\w.+=-]+", "_", name).strip("._")[:80] or "job"
    while free in taken:
        free += "_"
    return free


def _peak_memory(comparison: Comparison) -> Callable[[Row], float | None]:
    """The field of a row's peak memory in bytes: the device's, where any row has one."""
    on_device = any(row_fields.device_bytes(row) for row in comparison.rows)
    return row_fields.device_bytes if on_device else row_fields.process_bytes


def _results(row: Row, peak: float | None) -> dict[str, float]:
    results = {
        "speedup": row_fields.number(vars(row), "speedup"),
        "step_ms_p50": row_fields.step_ms(row),
        "samples_per_second": row_fields.samples_per_second(row),
        "peak_memory_mib": peak / MIB if peak else None,
    }
    if row.measured is not None:  # the user's own
        own = row.measured.metrics
        results |= {name: row_fields.number(own, name) for name in own}
    return {name: value for name, value in results.items() if value is not None}


def _fill_hyper_parameters(comparison: Comparison, jobs: Sequence[Job]) -> list[str]:
    """Fill in the jobs' `values`, of one type in each column; says which tell the jobs apart."""
    typed = [keys(job.row.overrides) for job in jobs]
    every = dict.fromkeys(key for row in typed for key in row if not key.startswith(NOT_SWEPT))
    varied = [key for key in every if len({row.get(key) for row in typed}) > 1]
    shown_first = [ARM] if comparison.kind == "benchmark" else []
    if any(job.row.status != "done" for job in jobs):
        shown_first.append(STATUS)
    shown_first += varied
    for job, row in zip(jobs, typed, strict=True):
        job.values = _job_values(job, row, varied, shown_first)
    for name in dict.fromkeys(name for job in jobs for name in job.values):
        having = [job for job in jobs if name in job.values]
        unified = unify_types([job.values[name] for job in having])
        for job, value in zip(having, unified, strict=True):
            job.values[name] = value
    return shown_first


def _job_values(
    job: Job, typed: dict[str, str], varied: Sequence[str], shown_first: Sequence[str]
) -> dict[str, Scalar]:
    known = job.session.values if job.session else {}
    settings = {} if known.keys() >= set(varied) else read_flat_config(job.folder)
    fixed: dict[str, Scalar] = {ARM: job.row.name, STATUS: job.row.status}
    values = {name: value for name, value in fixed.items() if name in shown_first}
    for key in varied:
        value = _value(key, known, settings, typed)
        if value is not None:
            values[key] = value
    others = known or common_columns(settings)
    return values | {k: v for k, v in others.items() if k not in values and k not in fixed}


def _value(
    key: str, known: dict[str, Scalar], settings: dict[str, object], typed: dict[str, str]
) -> Scalar | None:
    """A job's value of a key that is swept: as its run says, as its config does, as typed.

    None of a job that ended before it could say what the key was by default.
    """
    if key in known:
        return known[key]
    if key in settings:
        return column_value(settings[key])
    if key in typed:
        return column_value(parse_value(typed[key]))
    return DEFAULT if known or settings else None


def _metrics(comparison: Comparison, jobs: Sequence[Job]) -> list[str]:
    """Tags of the columns, each of them in one run at least. TensorBoard shows the first five."""
    own = dict.fromkeys(tag for job in jobs if job.session for tag in job.session.metrics)
    final = dict.fromkeys(name for job in jobs for name in row_fields.metrics(job.row))
    own |= {name: None for name in final if name.count("/") == 1}  # not of each class
    present = set(final) | {tag for tag in own if tag.startswith("train/")}
    if any(row_fields.best(job.row) is not None for job in jobs):
        present |= {tag for tag in own if tag.startswith("val/best/")}
    shown = [tag for tag in own if tag in present]
    results = list(dict.fromkeys(f"result/{name}" for job in jobs for name in job.results))
    if comparison.kind == "benchmark":
        return [*results[:4], *shown, *results[4:]]
    first = [tag for tag in FIRST if tag in results]
    return [*shown[:2], *first, *shown[2:], *(tag for tag in results if tag not in first)]


def _title(comparison: Comparison, folder: Path, jobs: Sequence[Job]) -> str:
    """The end of the rows' names: as the jobs that began theirs have it, no other sweep's."""
    begun = (job.session.name.partition(" of ")[2] for job in jobs if job.session)
    return next(filter(None, begun), f"{comparison.title}/{folder.absolute().name}")


def _final_metrics(events: TensorBoard, row: Row) -> None:
    """The metrics of a run that wrote no event file."""
    step = int(row_fields.number(row.summary, "steps") or 0)
    for name, value in row_fields.metrics(row).items():
        group, slash, rest = name.partition("/")
        if slash:
            events.scalars(step, group, {rest: value})


def draw_pictures(comparison: Comparison) -> dict[str, NDArray[np.uint8]]:
    """By name, [height, 640, 3] of all that there are numbers for, for the Images tab."""
    drawings = (
        ("speed", _draw_speed),
        ("memory", _draw_memory),
        ("attribution", _draw_attribution),
        ("loss", _draw_losses),
    )
    drawn = {name: draw(comparison) for name, draw in drawings}
    return {name: picture for name, picture in drawn.items() if picture is not None}


def _heading(title: str, shown: int, total: int) -> str:
    title = escape_control_chars(title)
    return title if shown == total else f"{title} · {shown} of {total}"


def _short_names(names: Sequence[str]) -> list[str]:
    return labels([escape_control_chars(name) for name in names], NAME)


def _draw_bars(
    title: str, bars: Sequence[Bar], floor: float, start: float
) -> NDArray[np.uint8] | None:
    from runner.record import plots

    if not any(bar.value is not None for bar in bars):
        return None
    shown = list(bars)
    if len(bars) > 2 * MOST_ROWS or (start == 0 and len(bars) > MOST_ROWS):
        shown = sorted(bars, key=lambda bar: -(bar.value or 0.0))[:MOST_ROWS]
    colours = {"slower": plots.ORANGE, "fail": plots.RED, "reference": plots.GREY}
    ratios = [
        plots.RatioBar(
            name,
            bar.value,
            bar.ends,
            escape_control_chars(bar.text),
            colours.get(bar.kind, plots.BLUE),
        )
        for bar, name in zip(shown, _short_names([bar.label for bar in shown]), strict=True)
    ]
    return plots.ratio_bars(_heading(title, len(shown), len(bars)), ratios, floor, start)


def _draw_speed(comparison: Comparison) -> NDArray[np.uint8] | None:
    title = f"speed-up over {comparison.reference}" if comparison.reference else "speed-up"
    bars = figures.speed_bars(comparison)
    return _draw_bars(title, bars, figures.noise_floor(comparison), 0.0)


def _draw_attribution(comparison: Comparison) -> NDArray[np.uint8] | None:
    attribution = comparison.benchmark.attribution if comparison.benchmark else None
    if attribution is None:
        return None
    alone = figures.effect_bars(comparison, "added")
    within = figures.effect_bars(comparison, "removed")
    bars = []
    for one, other in zip(alone, within, strict=True):
        bars.append(Bar(f"{one.label}, alone", one.value, one.ends, one.text, one.kind))
        name = f"{other.label}, within {attribution.level}"
        bars.append(Bar(name, other.value, other.ends, other.text, other.kind))
    return _draw_bars("what each technique is worth", bars, figures.noise_floor(comparison), 1.0)


def _draw_memory(comparison: Comparison) -> NDArray[np.uint8] | None:
    from runner.record import plots

    peak, points = _peak_memory(comparison), {}
    by_ratio = any(row.speedup is not None for row in comparison.rows)
    for row in comparison.rows:
        speed = row.speedup if by_ratio else row_fields.samples_per_second(row)
        held = peak(row)
        if speed is not None and math.isfinite(speed) and held:
            points[row.name] = speed, held / MIB
    if not points:
        return None
    shown = dict(zip(_short_names(list(points)[:MOST_ROWS]), points.values(), strict=False))
    title = _heading("memory and speed", len(shown), len(points))
    unit = "× as fast" if by_ratio else "samples/s"
    return plots.named_points(title, shown, unit, "peak memory, MiB")


def _draw_losses(comparison: Comparison) -> NDArray[np.uint8] | None:
    from runner.record import plots

    curves = read_losses(comparison)
    if not curves:
        return None
    shown = dict(list(curves.items())[:MOST_CURVES])
    named = dict(zip(_short_names(list(shown)), shown.values(), strict=True))
    title = _heading("training loss", len(shown), len(curves))
    return plots.loss_curves(title, named, axis_top(comparison, shown))
