"""job=train: build the run, train it, write a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from runner import rooms
from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.config.run_config import RunConfig
from runner.core.interfaces.run import Run, check_run
from runner.core.jobs import run_report as report
from runner.core.record.summary import SUMMARY_FILE, Summary
from runner.core.train import loop


def main(config: RunConfig, folder: Path, components: Components | None = None) -> Summary:
    """Train in `folder`; the report is written however the run ends."""
    given = components or resolve_components(config, folder)
    with build(config, folder, given) as run, _report_at_end(run):
        return loop.train(run)


def train(run: Run, *, progress: bool = False) -> Summary:
    """Train from the current step to `run.total_steps`, and return the summary.

    With a folder it is as the command line leaves it, with report.md and curves.svg. With
    `progress`, lines say how far the run is: on stderr, or in a notebook one that is rewritten.
    Raises Interrupted after Ctrl-C or SIGTERM and GaveUp when the stability policy is exhausted,
    each after a checkpoint; UsageError at once while another thread of the process trains. The
    summary is written in all other cases.
    """
    check_run("train", run)
    scope: AbstractContextManager[None] = nullcontext()
    if progress:
        from runner.core.hooks.plain_progress import print_progress  # imported only if used

        scope = print_progress(run)
    with scope, _report_at_end(run):
        return loop.train(run)


@contextmanager
def _report_at_end(run: Run) -> Iterator[None]:
    """Write the report of what was trained while entered."""
    try:
        yield
    finally:
        # else it ended before training
        if run.folder is not None and run.writes and (run.folder / SUMMARY_FILE).exists():
            report.write_recorded_report(run.folder)


def resolve_components(config: RunConfig, folder: Path) -> Components | None:
    """Resolve `optimization=auto`; None for any other level."""
    if config.optimization.level != "auto":
        return None
    components: Components = rooms.find("auto", "resolve", "optimization=auto")(config, folder)
    return components
