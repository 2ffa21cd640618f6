"""job=evaluate: the metrics of a saved model on the validation set."""

from __future__ import annotations

from pathlib import Path

from runner import report
from runner.build import build
from runner.config import RunConfig
from runner.errors import ConfigError
from runner.loop import evaluate
from runner.outcome import summarise
from runner.summary import Summary


def main(config: RunConfig, folder: Path) -> Summary:
    """Evaluate the checkpoint that `checkpoint.resume` names."""
    if config.checkpoint.resume in ("none", "auto"):
        raise ConfigError(
            "checkpoint.resume",
            "job=evaluate needs to know which model",
            "name a run's folder or one of its checkpoints/step_… folders",
        )
    with build(config, folder) as run:
        run.recorder.open(run.progress.step)
        evaluation = evaluate(run)
        run.progress.metrics = evaluation.metrics
        bare = {name.removeprefix("val/"): x for name, x in evaluation.metrics.items()}
        run.recorder.scalars(run.progress.step, "val", bare)
        run.techniques.clear()  # they are about training
        summary = summarise(run, "done")
    report.write(summary, folder)
    return summary
