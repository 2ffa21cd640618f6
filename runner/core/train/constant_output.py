"""A model that makes constant predictions."""

from __future__ import annotations

from runner.core.interfaces.hook import Evaluation
from runner.core.interfaces.run import Run

CONSTANT_OUTPUT = "constant_output"


def record_constant_output(run: Run, evaluation: Evaluation) -> None:
    """Add the fault of a model that answers alike for all samples of a validation, once a run."""
    if CONSTANT_OUTPUT in run.history.counts:
        return
    classes = evaluation.confusion
    what = "number"
    if classes is not None:
        number = int(classes.sum(0).argmax())
        names = run.sizes.class_names
        what = f"class ({names[number] if number < len(names) else number})"
    problem = f"the model predicts one {what} for every sample of the validation set"
    run.history.add(
        CONSTANT_OUTPUT, problem, step=evaluation.step, category="model",
        action="the run continues; try a lower optimizer.lr, and check inputs and targets",
    )  # fmt: skip
