"""Backward passes compared with differences in float64, once before training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from runner.data.batch import Batch
from runner.debug.config import DebugConfig, GradcheckConfig
from runner.debug.gradcheck_calls import (
    OBJECTIVE,
    CheckedCall,
    Inconclusive,
    double_copy,
    module_calls,
    objective_call,
    record_forward,
)
from runner.debug.tool import Tool
from runner.device import memory
from runner.errors import ConfigError, NotVerified
from runner.models.preserved_state import preserve_random_state, preserve_state
from runner.record.text import summarize_error
from runner.training.run import Run

FILE = "debug/gradcheck.json"
PASSED, WRONG, UNCHECKED = "passed", "wrong", "unchecked"
# How far each element moves, as a share of the tensor's root mean square. The best one counts:
# rounding spoils short steps where something computes in 32 bits, curvature spoils long ones.
STEPS = (1e-6, 1e-4, 1e-3)
POINTS = 3  # a kink is one point; two near it must be wrong as well
ALONG = 10.0  # share of the gradient in a direction, of an element of its random part
APART = 0.03  # of those points, as a share of each element
ROUNDING = 100 * torch.finfo(torch.float64).eps  # by which a sum of outputs may be off
REPEATS = 1e-4  # relative, by which two calls that do the same may differ


@dataclass(frozen=True)
class GradientCheck:
    """One backward, and how far it is from the derivative of its forward."""

    name: str  # the module's dotted name, or `objective`
    of: str  # class
    result: str  # passed | wrong | unchecked
    error: float | None = None  # worst relative one: |gradient - difference| over the larger
    where: str = ""  # the input or weight that it is the gradient of
    why: str = ""  # there is no result
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """What is wrong."""
        label = f"{self.name} ({self.of})" if self.name != self.of else self.name
        return (
            f"{label}: its backward is not the derivative of its forward; "
            f"the gradient of {self.where} is off by {self.error:.2g} of the larger value"
        )


def check_model(
    model: nn.Module,
    batch: Batch,
    objective: Callable[[Any, Any], Any] | None,
    config: GradcheckConfig,
    name: str = OBJECTIVE,
    train: bool = False,
) -> list[GradientCheck]:
    """Check the objective and modules on a float64 copy on the CPU, smallest first.

    Of modules of one class with equal shapes one is checked. What contains something wrong is not,
    since it would be wrong too. The model, its gradients and every random state stay as they are.
    Raises ConfigError.
    """
    chosen = _choose_modules(model, config)
    checks: list[GradientCheck] = []
    with preserve_random_state(), torch.random.fork_rng(devices=[]):
        try:
            recording = record_forward(_copy(model, train), batch)
        except Inconclusive as reason:
            whole = type(model).__name__
            return [GradientCheck(whole, whole, UNCHECKED, why=str(reason))]
        deadline = time.monotonic() + config.budget_s
        calls = module_calls(recording, chosen, alike=config.modules is None)
        if objective is not None and not {OBJECTIVE, name} & {*config.skip}:
            calls.insert(0, objective_call(objective, name, recording))
        for call in calls:
            checks.append(_check(call, checks, config, deadline))
    for part in (part for part in chosen if part not in recording.calls):
        of = type(recording.model.get_submodule(part)).__name__
        checks.append(GradientCheck(part or of, of, UNCHECKED, why="not called in this batch"))
    return checks


def _choose_modules(model: nn.Module, config: GradcheckConfig) -> list[str]:
    """The modules to check: those named, else all but torch's own. Raises ConfigError.

    Left out is what is in `skip`, and unless it is named, what contains that.
    """
    modules = dict(model.named_modules())

    def matching(pattern: str) -> set[str]:
        fits = {n for n, m in modules.items() if pattern == type(m).__name__}
        return fits | {n for n in modules if fnmatchcase(n, pattern)}

    skipped = set[str]().union(*map(matching, config.skip))
    if config.modules is None:
        own = {n for n, m in modules.items() if not type(m).__module__.startswith("torch.")}
        return [n for n in own if not any(_contains(n, part) for part in skipped)]
    chosen: set[str] = set()
    for pattern in config.modules:
        if not (fits := matching(pattern)):
            fix = f"name a class, or one of {', '.join(n for n, _ in model.named_children())}"
            raise ConfigError("debug.gradcheck.modules", f"the model has no {pattern!r}", fix)
        chosen |= fits
    return list(chosen - skipped)


def _contains(name: str, part: str) -> bool:
    """Whether the module of that name is, or contains, the other; the model's own is empty."""
    return not name or f"{part}.".startswith(f"{name}.")


def _copy(model: nn.Module, train: bool) -> nn.Module:
    """A copy that may be spoilt; raises Inconclusive where there can be none."""
    needed = 2 * 8 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if needed > 0.5 * memory.available_bytes():
        raise Inconclusive(f"a float64 copy would take {needed / 2**30:.1f} GiB of host memory")
    try:
        copy = double_copy(model)
    except Exception as error:  # what cannot be copied says so in many ways
        raise Inconclusive(f"the model cannot be copied: {summarize_error(error)}") from None
    return copy.train() if train else copy


def _check(
    call: CheckedCall, earlier: Sequence[GradientCheck], config: GradcheckConfig, deadline: float
) -> GradientCheck:
    start = time.perf_counter()
    check = GradientCheck(call.name, call.of, UNCHECKED)
    wrong = [c.name for c in earlier if c.result == WRONG and _contains(call.path, c.name)]
    if wrong and call.name != OBJECTIVE and wrong[0] != OBJECTIVE:
        return replace(check, why=f"contains {wrong[0]}, which is wrong")
    if time.monotonic() > deadline:
        return replace(check, why=f"{config.budget_s:g} s were over (budget_s)")
    try:
        evaluate, leaves = call.prepare()
        error, where = worst_error(evaluate, leaves, config.tolerance, deadline)
    except Inconclusive as reason:
        return replace(check, why=str(reason))
    except Exception as problem:  # anything that a foreign forward or backward raises
        return replace(check, why=summarize_error(problem))
    result, seconds = WRONG if error > config.tolerance else PASSED, time.perf_counter() - start
    return replace(check, result=result, error=error, where=where, seconds=seconds)


# -- differences ------------------------------------------------------------------------------


def worst_error(
    evaluate: Callable[[], Sequence[Tensor]],
    leaves: Mapping[str, Tensor],
    tolerance: float,
    deadline: float,
) -> tuple[float, str]:
    """The largest |gradient - difference| over the larger of the two, and the leaf it is of.

    As in the fast mode of torch.autograd.gradcheck, gradients are compared along a random
    direction, which takes two forwards a leaf however large it is. Other than there the measure
    is relative (an absolute one does not see a small gradient that is wrong), and float32 inside
    and kinks are told from a wrong gradient. `evaluate` computes float64 outputs from the leaves
    as they are, the same each time; they are moved in place, and restored. Raises Inconclusive.
    """
    draw = torch.Generator().manual_seed(0)
    origin = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    errors = dict.fromkeys(leaves, math.inf)
    try:
        for point in range(POINTS):
            doubtful = [name for name, error in errors.items() if error > tolerance]
            for name, leaf in leaves.items():
                leaf.detach().copy_(_near(origin[name], draw) if point else origin[name])
            try:
                slopes = _Slopes(evaluate, [leaves[name] for name in doubtful], draw)
            except Inconclusive:
                if not point:
                    raise
                continue  # beside it nothing can be computed, such as the root of less than 0
            for name, gradient in zip(doubtful, slopes.gradients, strict=True):
                if time.monotonic() > deadline:
                    raise Inconclusive("no time was left")
                error = slopes.error(leaves[name].detach(), gradient, tolerance, draw)
                errors[name] = min(errors[name], error)
            if max(errors.values()) <= tolerance:
                break
    finally:
        for name, leaf in leaves.items():
            leaf.detach().copy_(origin[name])
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


class _Slopes:
    """A random sum of the outputs at one point, and its gradients with respect to some leaves."""

    def __init__(
        self,
        evaluate: Callable[[], Sequence[Tensor]],
        leaves: list[Tensor],
        draw: torch.Generator,
    ) -> None:
        self.evaluate = evaluate
        with torch.enable_grad():
            outputs = {i: out for i, out in enumerate(evaluate()) if out.requires_grad}
            if not outputs:
                raise Inconclusive("none of its outputs needs a gradient")
            self.weights = {i: _normal(out, draw) for i, out in outputs.items()}
            weights = [*self.weights.values()]
            given = torch.autograd.grad([*outputs.values()], leaves, weights, allow_unused=True)
        self.gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient.detach().to_dense()
            for leaf, gradient in zip(leaves, given, strict=True)
        ]
        size = sum(float((w * outputs[i].detach()).abs().sum()) for i, w in self.weights.items())
        if not math.isfinite(size):
            raise Inconclusive("its outputs are not finite")
        if abs(self.total() - self.total()) > REPEATS * size:
            raise Inconclusive("two calls with the same inputs and random numbers differ")
        self.rounding = ROUNDING * size

    def total(self) -> float:
        """The sum, from the leaves as they are now."""
        with torch.no_grad():
            outputs = self.evaluate()
        return sum(_inner(weight, outputs[i]) for i, weight in self.weights.items())

    def error(
        self, leaf: Tensor, gradient: Tensor, tolerance: float, draw: torch.Generator
    ) -> float:
        """The relative error along a random direction, by the step at which it is least.

        The random part sees what the gradient leaves out, its own part by how much it is off.
        """
        origin, size, steepest = leaf.clone(), _size(leaf), _norm(gradient)
        if not math.isfinite(steepest):
            return math.inf
        direction = (_normal(leaf, draw) + ALONG * gradient / (steepest or 1.0)) * size
        slope, flat = _inner(gradient, direction), steepest * size
        errors = []
        for step in STEPS:
            leaf.copy_(origin + step * direction)
            ahead = self.total()
            leaf.copy_(origin - step * direction)
            measured = (ahead - self.total()) / (2 * step)
            scale = max(abs(slope), abs(measured), flat)
            if not math.isfinite(measured):
                errors.append(math.inf)
            elif self.rounding / step <= tolerance * scale:  # else it shows nothing but rounding
                errors.append(abs(slope - measured) / scale if scale else 0.0)
            if errors and errors[-1] <= tolerance:
                break
        leaf.copy_(origin)
        return min(errors, default=0.0)


def _near(tensor: Tensor, draw: torch.Generator) -> Tensor:
    """A point close by; signs stay, and zeros become positive."""
    noise = _normal(tensor, draw)
    spread = APART * _size(tensor)
    return torch.where(tensor == 0, spread * noise.abs(), tensor * (1 + APART * noise))


def _normal(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=draw)


def _inner(a: Tensor, b: Tensor) -> float:
    """Of complex numbers, as autograd has it: real and imaginary parts are two numbers."""
    return float((torch.conj(a) * b).real.sum()) if a.is_complex() else float((a * b).sum())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _size(tensor: Tensor) -> float:
    """Root mean square, or 1 where all is 0."""
    return (_norm(tensor) / max(tensor.numel(), 1) ** 0.5) or 1.0


# -- the tool ---------------------------------------------------------------------------------


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
        """Check, and report; raises NotVerified with debug.on_anomaly=raise."""
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
        self.finding = self._summary(wrong)
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
        checks = [asdict(check) for check in self.checks]
        self.write_json(run.folder, FILE, {"seconds": round(self.seconds, 3), "checks": checks})
        if wrong and ends:
            raise NotVerified(
                f"debug.gradcheck: {'; '.join(check.sentence for check in wrong)}; "
                "where that is meant (a detach, a straight-through estimator): "
                f"debug.gradcheck.skip=[{wrong[0].name}]; "
                "debug.on_anomaly=record trains all the same"
            )

    def _summary(self, wrong: Sequence[GradientCheck]) -> str:
        checked = sum(check.error is not None for check in self.checks)
        text = f"{checked} checked, {len(wrong)} wrong"
        if wrong:
            worst = max(wrong, key=lambda check: check.error or 0.0)
            text += f": {worst.name} off by {worst.error:.2g}"
        unchecked = sum(check.result == UNCHECKED for check in self.checks)
        return text + (f"; {unchecked} could not be checked" if unchecked else "")
