"""Backward passes held against differences, once before training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn

from runner.data.batch import Batch
from runner.debug.config import DebugConfig, GradcheckConfig
from runner.debug.derivatives import LEAST, Inconclusive, worst
from runner.debug.gradcheck_subjects import (
    OBJECTIVE,
    Loss,
    Recording,
    Subject,
    copy_model,
    error_line,
    function_subject,
    is_foreign,
    module_subject,
    objective_subject,
    preserve_random_state,
    record_forward,
    tensors,
)
from runner.debug.tool import Tool
from runner.device import memory
from runner.errors import ConfigError, NotVerified
from runner.models.preserved_state import preserve_state
from runner.record.markdown import table
from runner.training.run import Run

log = logging.getLogger("runner")

FILE = "debug/gradcheck.json"
PASSED, WRONG, UNCHECKED, LEFT_OUT = "passed", "wrong", "unchecked", "left out"
ON_PURPOSE = (
    "where that is meant (a detach, a straight-through estimator): debug.gradcheck.skip=[{}]"
)
COLUMNS = ["what", "class", "kind", "result", "worst relative error", "of the gradient of", "note"]


@dataclass(frozen=True)
class Check:
    """One backward, and how far it is from the derivative of its forward."""

    name: str  # the module's dotted name, or `objective`
    kind: str  # function | objective | module
    of: str  # class
    result: str  # passed | wrong | unchecked | left out
    error: float | None = None  # worst relative one: |gradient - difference| over the larger
    where: str = ""  # the input or weight that it is the gradient of
    why: str = ""  # no result, or only a less exact one
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
    names = None if modules is None else list(modules)
    config = GradcheckConfig(True, names, list(skip), samples, length, budget_s, tolerance)
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    given: Batch = (batch[0], batch[1]) if pair else (batch, None)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return check_all(model, given, loss_fn, name, config, train=False)


def check_all(
    model: nn.Module,
    batch: Batch,
    objective: Loss | None,
    name: str,
    config: GradcheckConfig,
    train: bool,
) -> list[Check]:
    """Smallest first; what contains something wrong is not checked, since it would be wrong too."""
    deadline = time.monotonic() + config.budget_s
    wanted = _choose_modules(model, config.modules)
    checks: list[Check] = []
    with preserve_random_state(), torch.random.fork_rng(devices=[]):
        try:
            copy = _copy(model, train)
            recording = record_forward(copy, batch, objective, config.samples, config.length)
        except Inconclusive as reason:
            whole = type(model).__name__
            return [Check(whole, "module", whole, UNCHECKED, why=str(reason))]
        for item in _subjects(recording, objective, name, wanted, config.skip):
            if isinstance(item, Check):
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


def _check(subject: Subject, tolerance: float, deadline: float) -> Check:
    """In float64; in float32 where that is all that it computes in."""
    start, why = time.perf_counter(), ""
    for dtype in (torch.float64, torch.float32):
        least = max(tolerance, LEAST[dtype])
        try:
            evaluate, leaves = subject.prepare(dtype)
            error = worst(evaluate, leaves, least, deadline)
        except Inconclusive as reason:
            why = str(reason)
            break
        except Exception as trouble:  # whatever a foreign forward or backward raises
            why = why or error_line(trouble)
            continue
        note = f"in float32, since in float64: {why}" if why else ""
        return replace(
            _unchecked(subject, note, time.perf_counter() - start),
            result=WRONG if error.relative > least else PASSED,
            error=error.relative,
            where=error.where,
        )
    return _unchecked(subject, why, time.perf_counter() - start)


def _unchecked(subject: Subject, why: str, seconds: float = 0.0) -> Check:
    kind, like = subject.kind, subject.like
    return Check(subject.name, kind, subject.of, UNCHECKED, why=why, like=like, seconds=seconds)


def _wrong_part(subject: Subject, checks: Sequence[Check], model: nn.Module) -> Check | None:
    """A part of it that is wrong."""
    if subject.kind == "function":
        return None
    whole = subject.module is not None and subject.name == type(model).__name__
    for check in checks:
        if check.result != WRONG:
            continue
        if subject.kind == "objective" or check.name == OBJECTIVE:
            if subject.name == check.name:
                return check
        elif whole or check.name == subject.name or check.name.startswith(f"{subject.name}."):
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


def _choose_modules(
    model: nn.Module, patterns: Sequence[str] | None
) -> dict[str, nn.Module] | None:
    """The modules named, by pattern or class; None for none named. Raises ConfigError."""
    if patterns is None:
        return None
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        named = list(model.named_modules())
        matching = {
            name: module
            for name, module in named
            if fnmatchcase(name, pattern) or type(module).__name__ == pattern
        }
        if not matching:
            known = {n for n, _ in named} - {""} | {type(module).__name__ for _, module in named}
            near = get_close_matches(pattern, known, 1)
            fix = f"did you mean {near[0]}?" if near else "a dotted name, a pattern or a class"
            raise ConfigError("debug.gradcheck.modules", f"the model has no {pattern!r}", fix)
        chosen |= matching
    return chosen


def _matches(patterns: Sequence[str], name: str, value: Any) -> bool:
    cls = value if isinstance(value, type) else type(value)
    return any(cls.__name__ == p or (name and fnmatchcase(name, p)) for p in patterns)


def _subjects(
    recording: Recording,
    objective: Loss | None,
    name: str,
    wanted: dict[str, nn.Module] | None,
    skip: Sequence[str],
) -> Iterator[Subject | Check]:
    """Functions, the objective, modules from the smallest on."""
    whole, model = type(recording.model).__name__, recording.model
    users: dict[type, list[str]] = {}
    for function, owner in recording.functions:
        users.setdefault(function, []).append(owner or whole)
    skipped = [owner for function, owner in recording.functions if _matches(skip, owner, function)]
    skipped += [part for part, module in model.named_modules() if _matches(skip, part, module)]
    for (function, owner), args in recording.functions.items():
        if users[function][0] == (owner or whole) and owner not in skipped:
            yield function_subject(function, owner or whole, args, len(users[function]))
    if objective is not None and not {OBJECTIVE, name} & {*skip, *skipped}:
        yield objective_subject(objective, name, recording.output, recording.target)
    if wanted is None and not any(is_foreign(type(m)) for m in model.modules()):
        why = "its modules are torch's own; those named in `modules` are checked all the same"
        yield Check(whole, "module", whole, LEFT_OUT, why=why)
    modules = {
        part: module
        for part, module in model.named_modules()
        if (is_foreign(type(module)) if wanted is None else part in wanted) and part not in skipped
    }
    for part, like in _representatives(modules, recording, wanted is not None):
        inner = [other for other in skipped if not part or other.startswith(f"{part}.")]
        why = f"contains {inner[0]}, which is in skip" if inner and wanted is None else ""
        if part not in recording.calls:
            why = "not called in this batch"
        if why:
            of = type(modules[part]).__name__
            yield Check(part or whole, "module", of, UNCHECKED, why=why, like=like)
        else:
            yield module_subject(part or whole, modules[part], *recording.calls[part], like)


def _representatives(
    modules: dict[str, nn.Module], recording: Recording, named: bool
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
        self.checks: list[Check] = []

    def due(self, step: int) -> bool:
        """At no step."""
        return False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Check, and report; raises NotVerified where that is asked for."""
        with self.looking():
            self._check_run(run)
        self._report(run)
        yield

    def _check_run(self, run: Run) -> None:
        config = self.config.gradcheck
        budget_s = min(config.budget_s, self.config.timeout_s or config.budget_s)
        name = getattr(run.objective, "name", type(run.objective).__name__)
        batch, config = run.train.peek(), replace(config, budget_s=budget_s)
        roots, device = (run.model, run.objective), run.device.torch
        with preserve_state(
            *roots, device=device, safe=run.model.parameters()
        ):  # hooks of the copy
            # the host waits for weights and batch
            self.checks = check_all(run.model, batch, run.objective, name, config, train=True)

    def _report(self, run: Run) -> None:
        wrong = [check for check in self.checks if check.result == WRONG]
        passed = [check for check in self.checks if check.result == PASSED]
        unchecked = [check for check in self.checks if check.result == UNCHECKED]
        self.finding = f"{len(passed) + len(wrong)} checked, {len(wrong)} wrong"
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
        rows = [_cells(check) for check in self.checks]
        run.recorder.text("gradcheck", table(COLUMNS, rows), run.progress.step)
        checks = [asdict(check) for check in self.checks]
        self.write_json(run.folder, FILE, {"seconds": round(self.seconds, 3), "checks": checks})
        if wrong and ends:
            raise NotVerified(
                f"debug.gradcheck: {'; '.join(check.sentence for check in wrong)}; "
                f"{ON_PURPOSE.format(wrong[0].name)}; debug.on_anomaly=record trains all the same"
            )


def _cells(check: Check) -> list[object]:
    error = "" if check.error is None else f"{check.error:.1e}"
    notes = [check.why, f"stands for {check.like}" if check.like > 1 else ""]
    note = "; ".join(filter(None, notes))
    return [check.name, check.of, check.kind, check.result, error, check.where, note]
