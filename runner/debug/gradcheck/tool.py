"""Backward passes of the user's own, checked once before training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from runner.batch import Batch
from runner.debug.config import DebugConfig, GradcheckConfig
from runner.debug.gradcheck.checks import PASSED, UNCHECKED, WRONG, Check, check_all
from runner.debug.gradcheck.observed import Loss
from runner.debug.tool import Tool
from runner.errors import NotVerified
from runner.record.markdown import table
from runner.run import Run
from runner.storage import replace_text
from runner.untouched import untouched

log = logging.getLogger("runner")

FILE = "debug/gradcheck.json"
ON_PURPOSE = (
    "where that is meant (a detach, a straight-through estimator): debug.gradcheck.skip=[{}]"
)


def gradcheck_model(
    model: nn.Module,
    batch: Any,
    loss_fn: Loss | None = None,
    *,
    modules: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    samples: int = 4,
    length: int = 16,
    budget_s: float = 10.0,
    tolerance: float = 1e-3,
) -> list[Check]:
    """Check custom autograd functions, the loss, and modules on a float64 copy, on the CPU.

    `batch` is (inputs, target), or the inputs alone where there is no `loss_fn(output, target)`.
    Arguments are as in the config's `debug.gradcheck`; each module is in the mode that it is in.
    torch's own modules are taken to be right: they are checked where `modules` names them.
    The model, its gradients and every random state stay as they are. Raises ConfigError.
    """
    config = GradcheckConfig(
        True, None if modules is None else list(modules), list(skip), samples, length, budget_s,
        tolerance,
    )  # fmt: skip
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    given: Batch = (batch[0], batch[1]) if pair else (batch, None)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return check_all(model, given, loss_fn, name, config, budget_s, train=False)


class Gradcheck(Tool):
    """Holds backward passes against differences before the first step; the run is not touched.

    With debug.on_anomaly=raise a wrong one ends the run there.
    """

    name: ClassVar[str] = "gradcheck"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.checks: list[Check] = []

    def due(self, step: int) -> bool:
        """At no step."""
        return False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Look, and say what was found; raises NotVerified where that is asked for."""
        with self.looking():
            self._look(run)
        self._tell(run)
        yield

    def _look(self, run: Run) -> None:
        config = self.config.gradcheck
        budget = min(config.budget_s, self.config.timeout_s or config.budget_s)
        name = getattr(run.objective, "name", type(run.objective).__name__)
        batch = run.train.peek()
        roots, device = (run.model, run.objective), run.device.torch
        with untouched(*roots, device=device, safe=run.model.parameters()):  # hooks of the copy
            self.checks = check_all(
                run.model, batch, run.objective, name, config, budget, train=True
            )  # the host waits for weights and batch

    def _tell(self, run: Run) -> None:
        wrong = [check for check in self.checks if check.result == WRONG]
        done = [check for check in self.checks if check.result in (PASSED, WRONG)]
        left = [check for check in self.checks if check.result == UNCHECKED]
        self.finding = f"{len(done)} checked, {len(wrong)} wrong"
        if wrong:
            first = max(wrong, key=lambda check: check.error or 0.0)
            self.finding += f": {first.name} off by {first.error:.2g}"
        if left:
            self.finding += f"; {len(left)} could not be checked"
        ends = self.config.on_anomaly.name == "raise"
        for check in wrong:
            run.history.add(
                "wrong_gradient", _sentence(check), step=run.progress.step, category="numerics",
                severity="error", action="the run ends" if ends else "", say=not ends,
            )  # fmt: skip
        rows = [_row(check) for check in self.checks]
        run.recorder.text("gradcheck", table(HEADER, rows), run.progress.step)
        if run.folder is not None:
            _write(run.folder, self.checks, self.seconds)
        if wrong and ends:
            raise NotVerified(
                f"debug.gradcheck: {'; '.join(_sentence(check) for check in wrong)}; "
                f"{ON_PURPOSE.format(wrong[0].name)}; debug.on_anomaly=record trains all the same"
            )


HEADER = ["what", "class", "kind", "result", "worst relative error", "of the gradient of", "note"]


def _row(check: Check) -> list[object]:
    error = "" if check.error is None else f"{check.error:.1e}"
    note = f"{check.why}; " if check.why and check.like > 1 else check.why
    note += f"stands for {check.like}" if check.like > 1 else ""
    return [check.name, check.of, check.kind, check.result, error, check.where, note]


def _sentence(check: Check) -> str:
    return (
        f"{check.label}: its backward is not the derivative of its forward; "
        f"the gradient of {check.where} is off by {check.error:.2g} of the larger value"
    )


def _write(folder: Path, checks: Sequence[Check], seconds: float) -> None:
    """Replace debug/gradcheck.json; a full disk is no fault of the run."""
    path = folder / FILE
    record = {"seconds": round(seconds, 3), "checks": [asdict(check) for check in checks]}
    try:
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        log.warning("no %s: %s", FILE, error)
