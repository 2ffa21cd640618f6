"""The best row of a comparison by the monitored metric, and what can be done with it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from runner.core.checkpoint.folder import FOLDER as CHECKPOINTS
from runner.core.format import short_path
from runner.core.module_path import python_command
from runner.core.record.hydra_files import SWEEP, read_flat_config
from runner.core.record.text import quote_for_shell, resume_argument
from runner.measure.comparison import Comparison, metric_rises
from runner.measure.comparison_row import BEST_KEY, ComparisonRow, number_at

STARTS = ("checkpoint.resume", "model.weights")


def winner_commands(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield what can be done with the best run, as labels and commands; nothing without one."""
    if comparison.root is None or metric_rises(comparison) is None:
        return
    row = comparison.rows[0]  # of a configuration that ran several times its best run
    if not row.finished or row.best is None or not row.folder:
        return
    folder = Path(os.path.normpath(comparison.root / row.folder))
    start, run = shlex.join(python_command("runner")), Path(short_path(folder))
    label, doubt = "the winner:  ", ""
    if _overlaps_others(comparison, row):
        label, doubt = "best run:    ", "; not proved to be better: the intervals overlap"
    yield label, f"{row.name}, in {run}{doubt}"
    if not (folder / CHECKPOINTS).is_dir():
        return
    predict = "job=predict"
    if "val/perplexity" in row.metrics:
        predict += " predict.prompt=…"
    elif read_flat_config(folder).get("data.path"):  # without it the file of the training
        predict += " data.path=…"
    # a run that was continued itself starts anew, from the weights
    kept = [x for x in row.overrides if x.lstrip("+").partition("=")[0] not in STARTS]
    steps, overrides = number_at(row.summary, "steps"), shlex.join(kept)
    longer = f"{run.parent}-{run.name}" if (folder.parent / SWEEP).exists() else run
    commands = {
        "  predict:   ": f"{predict} {resume_argument(run)}",
        "  evaluate:  ": f"job=evaluate {resume_argument(run)}",
        # in a folder of its own beside the sweep's, which stays as it is compared
        "  resume:    ": f"{resume_argument(run)} training.steps={2 * int(steps or 1)} "
        f"{quote_for_shell('hydra.run.dir', f'{longer}-longer')}",
        "  train on:  ": f"{overrides} {quote_for_shell('model.weights', run)}".strip(),
    }
    yield from ((label, f"{start} {command}") for label, command in commands.items())


def _overlaps_others(comparison: Comparison, best: ComparisonRow) -> bool:
    """Whether the interval of the run's configuration overlaps that of another one."""
    merged = [row for row in comparison.by_configuration.rows if BEST_KEY in row.estimates]
    own = [row.estimates[BEST_KEY].interval for row in merged if best.name in row.run_names]
    others = [row.estimates[BEST_KEY].interval for row in merged if best.name not in row.run_names]
    return any(low <= end and start <= high for start, end in own for low, high in others)
