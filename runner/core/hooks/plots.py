"""The plots of a run's record, drawn at its end."""

from __future__ import annotations

import logging
from pathlib import Path

from runner import rooms
from runner.core.interfaces.run import Run
from runner.core.record.text import summarize_error

log = logging.getLogger("runner")


def record_plots(run: Run, folder: Path) -> None:
    """Write the plots of the record, which debug tools have completed, and show them."""
    log.info("drawing debug/plots")
    try:
        pictures, notes = rooms.find("plots", "run", "debug/plots")(folder)
    except Exception as error:  # of a link, of matplotlib: the run is finished without plots
        log.warning("debug/plots: not written: %s", summarize_error(error))
        return
    for note in notes:
        log.debug("%s", note)
    for name, picture in pictures.items():
        run.recorder.image(f"plots/{name}", picture, run.progress.step)
