"""The best row of a comparison by the monitored metric, and what can be done with it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from runner.core.checkpoint.folder import FOLDER as CHECKPOINTS
from runner.core.format import short_path
from runner.core.module_path import python_command
from runner.core.record.hydra_files import SWEEP
from runner.core.record.text import quote_for_shell, resume_argument
from runner.measure.comparison import Comparison, metric_rises
from runner.measure.comparison_row import number_at

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
    yield "the winner:  ", f"{row.name}, in {run}"
    if not (folder / CHECKPOINTS).is_dir():
        return
    is_text = "val/perplexity" in row.metrics
    predict = "job=predict predict.prompt=…" if is_text else "job=predict"
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
