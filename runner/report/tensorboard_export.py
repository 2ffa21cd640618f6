"""A comparison for TensorBoard: a row of HParams for each job, and the run `comparison`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from runner.report import page, row_fields
from runner.report.comparison import Comparison, Row
from runner.report.naming import DEFAULT, keys
from runner.report.pictures import MIB, peak_of, pictures

RUN = "comparison"
ARM, STATUS = "arm", "status"
NOT_SWEPT = ("hydra.", "monitoring.", "sweep.", "security.")  # about how jobs run
FIRST = ("result/speedup", "result/samples_per_second", "result/peak_memory_mib")


@dataclass
class Job:
    """A row with the folder of its run, and what that says of itself."""

    row: Row
    folder: Path
    session: Session | None
    values: dict[str, Scalar] = field(default_factory=dict)  # its hyper-parameters
    results: dict[str, float] = field(default_factory=dict)  # by name below `result/`


def write_board(comparison: Comparison, folder: Path) -> None:
    """Make TensorBoard on `folder` show every job as a run with its row, and `comparison`.

    The jobs' own event files are not touched. Each folder gets two more, with what only a
    comparison knows. The first has the row: status, arm, and check boxes for all that was swept.
    The last has results, and the end of a row that did not end itself, for a TensorBoard that is
    open. They go when the job is resumed, and a second call replaces them. Of runs put together by
    hand only `comparison` is written: their rows belong to their own sweeps.
    Raises OSError where the disk does not take it; what is there is whole then.
    """
    if comparison.kind != "runs":
        jobs = list(_jobs(comparison, folder))
        foremost = _hyper_parameters(comparison, jobs)
        kinds = {name: value for job in jobs for name, value in job.values.items()}
        domains = {name: unique_sorted(_values(jobs, name)) for name in foremost}
        metrics = _metrics(comparison, jobs)
        whole = _name_of_all(comparison, folder, jobs)
        for job in jobs:
            ended = job.row.status != "running"  # such a one ends its row itself
            with prepend_events(job.folder) as events:
                events.experiment(kinds, metrics, domains, foremost)
                name = f"{job.folder.name} of {whole}"
                events.session(job.session.name if job.session else name, job.values)
                if ended:
                    events.end(job.row.status)
            if ended:
                with append_events(job.folder) as events:
                    events.scalars(0, "result", job.results)
                    if job.session is None:
                        _final(events, job.row)
                    events.end(job.row.status)
    home = folder / RUN
    home.mkdir(parents=True, exist_ok=True)
    with append_events(home) as events:
        events.text(f"{RUN}/report", page.document(comparison), 0)
        for name, picture in pictures(comparison).items():
            events.image(f"{RUN}/{name}", picture, 0)


def _jobs(comparison: Comparison, folder: Path) -> Iterator[Job]:
    peak, taken = peak_of(comparison), {RUN}
    for row in comparison.rows:
        # an arm that failed before it had a folder gets one, for its row
        place = folder / (row.folder or _free(row.name, taken))
        if folder.resolve() not in place.resolve().parents:
            continue  # not of this sweep: its row is its own sweep's to write
        taken.add(place.name)
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            continue  # another user's
        yield Job(row, place, read_session(place), results=_results(row, peak(row)))


def _free(name: str, taken: set[str]) -> str:
    """A folder's name for a row that has none."""
    made = re.sub(r"[^\w.+=-]+", "_", name).strip("._")[:80] or "job"
    while made in taken:
        made += "_"
    return made


def _results(row: Row, peak: float | None) -> dict[str, float]:
    found = {
        "speedup": row_fields.number(vars(row), "speedup"),
        "step_ms_p50": row_fields.step_ms(row),
        "samples_per_second": row_fields.samples_per_second(row),
        "peak_memory_mib": peak / MIB if peak else None,
    }
    if row.measured is not None:  # the user's own
        found |= {
            name: row_fields.number(row.measured.metrics, name) for name in row.measured.metrics
        }
    return {name: value for name, value in found.items() if value is not None}


def _hyper_parameters(comparison: Comparison, jobs: Sequence[Job]) -> list[str]:
    """Fill in the jobs' `values`, of one kind in each column; says which tell the jobs apart."""
    typed = [keys(job.row.overrides) for job in jobs]
    every = dict.fromkeys(key for row in typed for key in row if not key.startswith(NOT_SWEPT))
    varied = [key for key in every if len({row.get(key) for row in typed}) > 1]
    foremost = [ARM] if comparison.kind == "benchmark" else []
    if any(job.row.status != "done" for job in jobs):
        foremost.append(STATUS)
    foremost += varied
    for job, row in zip(jobs, typed, strict=True):
        known = job.session.values if job.session else {}
        settings = {} if known.keys() >= set(varied) else read_flat_config(job.folder)
        job.values = {ARM: job.row.name, STATUS: job.row.status}
        for key in varied:
            value = _value(key, known, settings, row)
            if value is not None:
                job.values[key] = value
        job.values |= {
            k: v for k, v in (known or common_columns(settings)).items() if k not in job.values
        }
        job.values = {
            k: v for k, v in job.values.items() if k in foremost or k not in (ARM, STATUS)
        }
    for name in dict.fromkeys(name for job in jobs for name in job.values):
        having = [job for job in jobs if name in job.values]
        for job, value in zip(
            having, unify_types([job.values[name] for job in having]), strict=True
        ):
            job.values[name] = value
    return foremost


def _value(
    key: str, known: dict[str, Scalar], settings: dict[str, object], typed: dict[str, str]
) -> Scalar | None:
    """What a job has for a key that is swept: as its run says, as its config does, as typed.

    None of one that did not live to say what the key was by default.
    """
    if key in known:
        return known[key]
    if key in settings:
        return column_value(settings[key])
    if key in typed:
        return column_value(parse_value(typed[key]))
    return DEFAULT if known or settings else None


def _values(jobs: Sequence[Job], name: str) -> list[Scalar]:
    return [job.values[name] for job in jobs if name in job.values]


def _metrics(comparison: Comparison, jobs: Sequence[Job]) -> list[str]:
    """Tags of the columns, each of them in one run at least. TensorBoard shows the first five."""
    own = dict.fromkeys(tag for job in jobs if job.session for tag in job.session.metrics)
    found = (name for job in jobs for name in row_fields.metrics(job.row))
    own |= dict.fromkeys(name for name in found if name.count("/") == 1)  # not of each class
    there = {name for job in jobs for name in row_fields.metrics(job.row)}
    if any(row_fields.best(job.row) is not None for job in jobs):
        there |= {tag for tag in own if tag.startswith("val/best/")}
    there |= {tag for tag in own if tag.startswith("train/")}
    kept = [tag for tag in own if tag in there]
    results = list(dict.fromkeys(f"result/{name}" for job in jobs for name in job.results))
    if comparison.kind == "benchmark":
        return [*results[:4], *kept, *results[4:]]
    first = [tag for tag in FIRST if tag in results]
    return [*kept[:2], *first, *kept[2:], *(tag for tag in results if tag not in first)]


def _name_of_all(comparison: Comparison, folder: Path, jobs: Sequence[Job]) -> str:
    """What the rows' names end with: as the jobs that began theirs have it, no other sweep's."""
    begun = (job.session.name.partition(" of ")[2] for job in jobs if job.session)
    return next(filter(None, begun), f"{comparison.title}/{folder.absolute().name}")


def _final(events: TensorBoard, row: Row) -> None:
    """The metrics of a run that kept no event file."""
    step = int(row_fields.number(row.summary, "steps") or 0)
    for name, value in row_fields.metrics(row).items():
        group, slash, rest = name.partition("/")
        if slash:
            events.scalars(step, group, {rest: value})
