"""Backward passes held against differences, once before training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn

from runner.data.batch import Batch
from runner.debug.config import DebugConfig, GradcheckConfig
from runner.debug.derivatives import Inconclusive, worst_error
from runner.debug.gradcheck_subjects import (
    OBJECTIVE,
    CallRecording,
    Loss,
    Subject,
    copy_model,
    error_line,
    is_foreign,
    module_subject,
    objective_subject,
    record_forward,
    tensors,
)
from runner.debug.tool import Tool
from runner.device import memory
from runner.errors import ConfigError, NotVerified
from runner.models.preserved_state import preserve_random_state, preserve_state
from runner.record.markdown import table
from runner.training.run import Run

log = logging.getLogger("runner")

FILE = "debug/gradcheck.json"
PASSED, WRONG, UNCHECKED, LEFT_OUT = "passed", "wrong", "unchecked", "left out"
COLUMNS = ["what", "class", "kind", "result", "worst relative error", "of the gradient of", "note"]


@dataclass(frozen=True)
class GradientCheck:
    """One backward, and how far it is from the derivative of its forward."""

    name: str  # the module's dotted name, or `objective`
    kind: str  # objective | module
    of: str  # class
    result: str  # passed | wrong | unchecked | left out
    error: float | None = None  # worst relative one: |gradient - difference| over the larger
    where: str = ""  # the input or weight that it is the gradient of
    why: str = ""  # there is no result
    like: int = 1  # how many of the same class and shapes this stands for
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """Name and class."""
        return f"{self.name} ({self.of})" if self.name != self.of else self.name

    @property
    def sentence(self) -> str:
        """What is wrong."""
        return (
            f"{self.label}: its backward is not the derivative of its forward; "
            f"the gradient of {self.where} is off by {self.error:.2g} of the larger value"
        )

    def cells(self) -> list[object]:
        """A row under `COLUMNS`."""
        error = "" if self.error is None else f"{self.error:.1e}"
        stands_for = f"stands for {self.like}" if self.like > 1 else ""
        note = "; ".join(filter(None, [self.why, stands_for]))
        return [self.name, self.of, self.kind, self.result, error, self.where, note]


def check_model(
    model: nn.Module,
    batch: Batch,
    objective: Loss | None,
    config: GradcheckConfig,
    name: str = OBJECTIVE,
    train: bool = False,
) -> list[GradientCheck]:
    """Check the objective and modules on a float64 copy on the CPU, smallest first.

    What contains something wrong is not checked, since it would be wrong too. The model, its
    gradients and every random state stay as they are. Raises ConfigError.
    """
    deadline = time.monotonic() + config.budget_s
    wanted = _choose_modules(model, config.modules)
    checks: list[GradientCheck] = []
    with preserve_random_state(), torch.random.fork_rng(devices=[]):
        try:
            copy = _copy(model, train)
            recording = record_forward(copy, batch, config.samples, config.length)
        except Inconclusive as reason:
            whole = type(model).__name__
            return [GradientCheck(whole, "module", whole, UNCHECKED, why=str(reason))]
        for item in _subjects(recording, objective, name, wanted, config.skip):
            if isinstance(item, GradientCheck):
                checks.append(item)
                continue
            part = _wrong_part(item, checks, model)
            if part is not None:
                checks.append(_unchecked(item, f"contains {part.label}, which is wrong"))
            elif time.monotonic() > deadline:
                checks.append(_unchecked(item, f"{config.budget_s:g} s were over (budget_s)"))
            else:
                checks.append(_check(item, config.tolerance, deadline))
    return checks


def _check(subject: Subject, tolerance: float, deadline: float) -> GradientCheck:
    start = time.perf_counter()
    try:
        evaluate, leaves = subject.prepare()
        error, where = worst_error(evaluate, leaves, tolerance, deadline)
    except Inconclusive as reason:
        return _unchecked(subject, str(reason))
    except Exception as trouble:  # whatever a foreign forward or backward raises
        return _unchecked(subject, error_line(trouble))
    result, seconds = WRONG if error > tolerance else PASSED, time.perf_counter() - start
    check = _unchecked(subject, "")
    return replace(check, result=result, error=error, where=where, seconds=seconds)


def _unchecked(subject: Subject, why: str) -> GradientCheck:
    return GradientCheck(
        subject.name, subject.kind, subject.of, UNCHECKED, why=why, like=subject.like
    )


def _wrong_part(
    subject: Subject, checks: Sequence[GradientCheck], model: nn.Module
) -> GradientCheck | None:
    """A part of it that is wrong."""
    whole = subject.module is not None and subject.name == type(model).__name__
    for check in checks:
        if check.result != WRONG:
            continue
        if OBJECTIVE in (subject.kind, check.name):
            if subject.name == check.name:
                return check
        elif whole or f"{check.name}.".startswith(f"{subject.name}."):
            return check
    return None


def _copy(model: nn.Module, train: bool) -> nn.Module:
    """A copy that may be spoilt; raises Inconclusive where there can be none."""
    needed = 2 * 8 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if needed > 0.5 * memory.available_bytes():
        raise Inconclusive(f"a float64 copy would take {needed / 2**30:.1f} GiB of host memory")
    try:
        copy = copy_model(model)
    except Exception as error:  # what cannot be copied says so in many ways
        raise Inconclusive(f"the model cannot be copied: {error_line(error)}") from None
    return copy.train() if train else copy


def _choose_modules(model: nn.Module, patterns: Sequence[str] | None) -> set[str] | None:
    """The names of modules named by pattern or class; None for none named. Raises ConfigError."""
    if patterns is None:
        return None
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {n for n, module in model.named_modules() if _matches([pattern], n, module)}
        if not matching:
            fix = f"name a class, or one of {', '.join(n for n, _ in model.named_children())}"
            raise ConfigError("debug.gradcheck.modules", f"the model has no {pattern!r}", fix)
        chosen |= matching
    return chosen


def _matches(patterns: Sequence[str], name: str, module: nn.Module) -> bool:
    return any(type(module).__name__ == p or fnmatchcase(name, p) for p in patterns)


def _subjects(
    recording: CallRecording,
    objective: Loss | None,
    name: str,
    wanted: set[str] | None,
    skip: Sequence[str],
) -> Iterator[Subject | GradientCheck]:
    """The objective, then modules from the smallest on."""
    whole, model = type(recording.model).__name__, recording.model
    skipped = [part for part, module in model.named_modules() if _matches(skip, part, module)]
    if objective is not None and not {OBJECTIVE, name} & {*skip}:
        yield objective_subject(objective, name, recording.output, recording.target)
    if wanted is None and not any(is_foreign(type(m)) for m in model.modules()):
        why = "its modules are torch's own; those named in `modules` are checked all the same"
        yield GradientCheck(whole, "module", whole, LEFT_OUT, why=why)
    modules = {
        part: module
        for part, module in model.named_modules()
        if (is_foreign(type(module)) if wanted is None else part in wanted) and part not in skipped
    }
    for part, like in _representatives(modules, recording, wanted is not None):
        inner = [other for other in skipped if not part or other.startswith(f"{part}.")]
        why = f"contains {inner[0]}, which is in skip" if inner and wanted is None else ""
        why = "not called in this batch" if part not in recording.calls else why
        if why:
            of = type(modules[part]).__name__
            yield GradientCheck(part or whole, "module", of, UNCHECKED, why=why, like=like)
        else:
            yield module_subject(part or whole, modules[part], *recording.calls[part], like)


def _representatives(
    modules: dict[str, nn.Module], recording: CallRecording, named: bool
) -> list[tuple[str, int]]:
    """One module of each class and shapes with how many there are of it, the smallest first."""
    alike: dict[Any, list[str]] = {}
    for part, module in modules.items():
        given = [*tensors(recording.calls.get(part)), *module.parameters()]
        own = part if named else ""  # one that is named stands for itself
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        alike.setdefault((type(module), shapes, own), []).append(part)

    def order(parts: list[str]) -> tuple[int, int]:
        size = sum(p.numel() for p in modules[parts[0]].parameters())
        return size, -parts[0].count(".")

    return [(parts[0], len(parts)) for parts in sorted(alike.values(), key=order)]


class Gradcheck(Tool):
    """Holds backward passes against differences before the first step; the run is not touched.

    With debug.on_anomaly=raise a wrong one ends the run there.
    """

    name: ClassVar[str] = "gradcheck"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.checks: list[GradientCheck] = []

    def due(self, step: int) -> bool:
        """At no step."""
        return False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Check, and report; raises NotVerified where that is asked for."""
        own = self.config.gradcheck
        own = replace(own, budget_s=min(own.budget_s, self.config.timeout_s or own.budget_s))
        name = getattr(run.objective, "name", type(run.objective).__name__)
        roots, device = (run.model, run.objective), run.device.torch
        with self.timed(), preserve_state(*roots, device=device, safe=run.model.parameters()):
            # the host waits for weights and batch
            batch = run.train.peek()
            self.checks = check_model(run.model, batch, run.objective, own, name, train=True)
        self._report(run)
        yield

    def _report(self, run: Run) -> None:
        wrong = [check for check in self.checks if check.result == WRONG]
        checked = [check for check in self.checks if check.error is not None]
        unchecked = [check for check in self.checks if check.result == UNCHECKED]
        self.finding = f"{len(checked)} checked, {len(wrong)} wrong"
        if wrong:
            first = max(wrong, key=lambda check: check.error or 0.0)
            self.finding += f": {first.name} off by {first.error:.2g}"
        if unchecked:
            self.finding += f"; {len(unchecked)} could not be checked"
        ends = self.config.on_anomaly.name == "raise"
        for check in wrong:
            run.history.add(
                "wrong_gradient",
                check.sentence,
                step=run.progress.step,
                category="numerics",
                severity="error",
                action="the run ends" if ends else "",
                say=not ends,
            )
        rows = [check.cells() for check in self.checks]
        run.recorder.text("gradcheck", table(COLUMNS, rows), run.progress.step)
        checks = [asdict(check) for check in self.checks]
        self.write_json(run.folder, FILE, {"seconds": round(self.seconds, 3), "checks": checks})
        if wrong and ends:
            raise NotVerified(
                f"debug.gradcheck: {'; '.join(check.sentence for check in wrong)}; "
                "where that is meant (a detach, a straight-through estimator): "
                f"debug.gradcheck.skip=[{wrong[0].name}]; "
                "debug.on_anomaly=record trains all the same"
            )
