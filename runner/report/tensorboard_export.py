"""A comparison for TensorBoard: a row of HParams for each job, and the run `comparison`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runner.record.hparams import column_values
from runner.record.hydra_files import overrides_by_key
from runner.record.tensorboard import end_session, event_files, open_event_file
from runner.record.text import escape_control_chars
from runner.report import figures, page
from runner.report.charts import Bar
from runner.report.comparison import BOARD, Comparison
from runner.report.naming import DEFAULT, varied_keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_ROWS = 12  # of one picture; more could not be read


def export_comparison(comparison: Comparison, folder: Path) -> None:
    """Make TensorBoard on `folder` show every job as a row, and the run `comparison`.

    Jobs that train begin and end their rows themselves; here those get one that never began or
    were killed. Runs put together by hand belong to their own sweeps, and get nothing.
    Raises OSError where the disk does not take it.
    """
    if comparison.kind != "runs":
        _end_rows(comparison, folder)
    home = folder / BOARD
    home.mkdir(parents=True, exist_ok=True)
    for earlier in event_files(home):
        earlier.unlink()
    events = open_event_file(home)
    try:
        events.text(f"{BOARD}/report", page.document(comparison), 0)
        for name, picture in draw_pictures(comparison).items():
            events.image(f"{BOARD}/{name}", picture, 0)
    finally:
        events.close()


def _end_rows(comparison: Comparison, folder: Path) -> None:
    typed = [overrides_by_key(row.overrides) for row in comparison.rows]
    columns = {
        key: column_values([job.get(key, DEFAULT) for job in typed]) for key in varied_keys(typed)
    }
    for i, row in enumerate(comparison.rows):
        place = folder / row.folder
        inside = folder.resolve() in place.resolve().parents  # else its row is another sweep's
        if row.finished or row.status == "running" or not row.folder or not inside:
            continue
        name = f"{place.name} of {comparison.title}/{folder.absolute().name}"
        values = {key: column[i] for key, column in columns.items() if key in typed[i]}
        with suppress(OSError):  # another user's folder, or none at all
            place.mkdir(parents=True, exist_ok=True)
            end_session(place, name, values, row.status)


def draw_pictures(comparison: Comparison) -> dict[str, NDArray[np.uint8]]:
    """By name, [height, 640, 3] of all that there are numbers for, for the Images tab."""
    floor = figures.noise_floor(comparison)
    over = f" over {comparison.reference}" if comparison.reference else ""
    drawn = {
        "speed": _draw(f"speed-up{over}", figures.speed_bars(comparison), floor, 0.0),
        "attribution": _draw("what each technique is worth", _effects(comparison), floor, 1.0),
    }
    return {name: picture for name, picture in drawn.items() if picture is not None}


def _effects(comparison: Comparison) -> list[Bar]:
    attribution = comparison.benchmark.attribution if comparison.benchmark else None
    if attribution is None:
        return []
    sides = (("added", "alone"), ("removed", f"within {attribution.level}"))
    bars = [
        [Bar(f"{bar.label}, {where}", bar.value, bar.ends, bar.text, bar.kind) for bar in own]
        for side, where in sides
        for own in [figures.effect_bars(comparison, side)]
    ]
    return [bar for pair in zip(*bars, strict=True) for bar in pair]


def _draw(title: str, bars: Sequence[Bar], floor: float, start: float) -> NDArray[np.uint8] | None:
    from runner.record import plots

    if not any(bar.value is not None for bar in bars):
        return None
    shown = bars
    if len(bars) > 2 * MOST_ROWS:
        shown = sorted(bars, key=lambda bar: -(bar.value or 0.0))[:MOST_ROWS]
        title = f"{title} · {len(shown)} of {len(bars)}"
    colours = {"slower": plots.ORANGE, "fail": plots.RED, "reference": plots.GREY}
    ratios = [
        plots.RatioBar(
            escape_control_chars(bar.label),
            bar.value,
            bar.ends,
            escape_control_chars(bar.text),
            colours.get(bar.kind, plots.BLUE),
        )
        for bar in shown
    ]
    return plots.ratio_bars(escape_control_chars(title), ratios, floor, start)
