"""job=train: build the run, train it, write a report."""

from __future__ import annotations

from pathlib import Path

from runner import rooms
from runner.core.build.build import Components, build
from runner.core.config.run_config import RunConfig
from runner.core.jobs import run_report as report
from runner.core.record.summary import SUMMARY_FILE, Summary
from runner.core.train.loop import train


def main(config: RunConfig, folder: Path, components: Components | None = None) -> Summary:
    """Train in `folder`; the report is written however the run ends."""
    with build(config, folder, components or resolve_components(config, folder)) as run:
        try:
            return train(run)
        finally:
            if run.writes and (folder / SUMMARY_FILE).exists():  # else it ended before training
                report.write_recorded_report(folder)


def resolve_components(config: RunConfig, folder: Path) -> Components | None:
    """Resolve `optimization=auto`; None for any other level."""
    if config.optimization.level != "auto":
        return None
    components: Components = rooms.find("auto", "resolve", "optimization=auto")(config, folder)
    return components
