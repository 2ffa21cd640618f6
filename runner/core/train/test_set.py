"""Evaluation of the test set, once after training, with the best checkpoint's weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from runner.core.checkpoint.snapshot import Copier
from runner.core.errors import CheckpointError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.run import Run
from runner.core.train.resume import load_weights
from runner.core.train.run_state import weights

log = logging.getLogger("runner")


def evaluate_test_set(run: Run) -> None:
    """Record `test/…` metrics of the best checkpoint, or of the last weights without one.

    The run's weights are restored. Does nothing without a test set.
    """
    if run.test is None:
        return
    run.wait_for_others()  # until rank 0 has written the best one
    with _best_weights(run) as step:
        run.test_metrics = evaluate(run, test=True).metrics
    run.tested = {"step": step, "samples": len(run.test.fetch.order.indices)}
    values = {name.removeprefix("test/"): x for name, x in run.test_metrics.items()}
    run.recorder.scalars(step, "test", values)


@contextmanager
def _best_weights(run: Run) -> Iterator[int]:
    """Load the weights of the best checkpoint while entered; yield their step."""
    step, best = run.progress.step, run.checkpointer.best
    restored = None
    if best is not None and run.folder is not None and run.progress.best_step != step:
        from runner.core.checkpoint.state_schema import check_state

        try:
            restored = run.checkpointer.restore(run.folder / best, check_state)
        except CheckpointError as error:
            log.warning("testing the last weights, not the best: %s", error)
    if restored is None:
        yield step
        return
    last = Copier(reuse=False).take(weights(run), {"update": run.update.state()})
    try:
        load_weights(run, restored.path, restored.model, restored.state["update"])
        yield restored.step
    finally:
        load_weights(run, restored.path, last.model, last.state["update"])
