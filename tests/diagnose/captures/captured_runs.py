"""Runs whose steps are captured at will, with numbers that are finite and so can be compared."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from runner import Summary
from runner.core.captures.manifest import list_captures
from runner.core.interfaces.hook import Hook, Report, Step, Verdict
from runner.core.interfaces.run import Run
from runner.diagnose.replay.reopen import Capture, open_capture
from tests import runs

TRUSTED = ["my_package", "captured_models"]
OURS = [
    f"security.trusted=[{','.join(TRUSTED)}]",
    "data._target_=my_package.Noisy",
    "model._target_=captured_models.Chancy",
    "training.batch_size=20",
    "training.steps=24",
    "training.validate_every=8",
    "schedule=cosine",
]
SKIPPED = (11, 17, 18, 19, 20)


class Taker(Hook):
    """Skips some steps that are perfectly healthy, and captures some once they are reported."""

    def __init__(self, take: list[int], skip: tuple[int, ...] = ()) -> None:
        self.wanted, self.skip = take, skip
        self.weights: dict[int, list[Tensor]] = {}  # at the beginning of a step
        self.taken: dict[int, str | None] = {}

    def due(self, step: int) -> bool:
        return step in self.skip or step in self.wanted

    def on_gradients(self, run: Run, step: Step) -> Verdict | None:
        self.weights[step.number] = [p.detach().clone() for p in run.model.parameters()]
        return Verdict.SKIP if step.number in self.skip else None

    def on_report(self, run: Run, report: Report) -> None:
        for step in self.wanted:
            if report.first <= step <= report.last and run.captures is not None:
                self.taken[step] = run.captures.take(run, step, "spike", "as if it were one")


def trained(folder: Path, hook: Hook | None, *overrides: str) -> Summary:
    return runs.trained(*OURS, *overrides, folder=folder, hooks=[hook] if hook else [])


def taken(folder: Path, *overrides: str) -> tuple[Capture, Capture, Taker]:
    """Of step 13, after which weights moved on, and of step 17, after which they did not."""
    hook = Taker([13, 17], SKIPPED)
    trained(folder, hook, *overrides)
    moved, stayed = map(open_capture, list_captures(folder))
    return moved, stayed, hook
