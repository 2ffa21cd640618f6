"""Compare backward passes with finite differences in float64, by torch.autograd.gradcheck."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.core.device import memory
from runner.core.errors import NotVerified
from runner.core.interfaces.batch import Batch, call_model
from runner.core.interfaces.run import Run
from runner.core.models import modes
from runner.core.preserved_state import preserve_random_state, preserve_state
from runner.core.record.text import summarize_error
from runner.core.schemas.debug import DebugConfig, GradcheckConfig
from runner.diagnose.debug.tool import DebugTool

FILE = "debug/gradcheck.json"
OBJECTIVE = "objective"
PASSED, WRONG, UNCHECKED = "passed", "wrong", "unchecked"
SAMPLES = 4  # from the first batch
# (eps, atol) of the differences; the second pair is for modules that use float32 inside
DIFFERENCE_STEPS = ((1e-6, 1e-5), (1e-3, 1e-4))
KINK_DISTANCE = 0.03  # relative distance by which values are moved off kinks
REPEAT_TOLERANCE = 1e-4  # relative tolerance between two identical calls
MISMATCH = re.compile(r"to input (\d+),\s*numerical:(\S+)\s*analytical:(\S+)")
SLOW_MODE = "torch.autograd.gradcheck._run_slow_mode_and_get_error"
CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


class Inconclusive(Exception):
    """The check gave no result; the message says why."""


@dataclass(frozen=True)
class GradientCheck:
    """The result of checking one backward."""

    name: str  # the module's dotted name, or `objective`
    of: str  # class
    result: str  # passed | wrong | unchecked
    where: str = ""  # the input or weight whose gradient is wrong
    reason: str = ""  # the differing numbers, or why there is no result
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """The fault as a sentence for the history."""
        label = f"{self.name} ({self.of})" if self.name != self.of else self.name
        problem = f"{label}: its backward is not the derivative of its forward"
        return f"{problem}; the gradient of {self.where} is wrong: {self.reason}"


def check_model_gradients(
    model: nn.Module,
    batch: Batch,
    objective: Callable[[Any, Any], Any] | None,
    config: GradcheckConfig,
    name: str = OBJECTIVE,
    train: bool = False,
) -> list[GradientCheck]:
    """Check the objective and modules of non-torch classes, smallest first.

    Uses a float64 CPU copy and a few samples. One module per class and shapes is checked. A module
    that contains a wrong one is not checked, since it would be wrong too. The model, its gradients
    and all random states are unchanged.
    """
    checks: list[GradientCheck] = []
    with preserve_random_state():
        try:
            model_copy = _copy_as_double(model, train)
            calls, output, target = _record_forward(model_copy, batch)
        except Inconclusive as error:
            kind = type(model).__name__
            return [GradientCheck(kind, kind, UNCHECKED, reason=str(error))]
        deadline = time.monotonic() + config.budget_s
        if objective is not None and not {OBJECTIVE, name} & {*config.skip}:
            loss = _FixedTargetLoss(objective, target)
            check = GradientCheck(OBJECTIVE, name, UNCHECKED)
            checks.append(_check_module(loss, ((output,), {}), check, config, deadline))
        for path in _choose_modules(model_copy, calls, config):
            module = model_copy.get_submodule(path)
            wrong = [c.name for c in checks if c.result == WRONG and _contains(path, c.name)]
            kind = type(module).__name__
            check = GradientCheck(path or kind, kind, UNCHECKED)
            if wrong:
                checks.append(replace(check, reason=f"contains {wrong[0]}, which is wrong"))
            else:
                checks.append(_check_module(module, calls[path], check, config, deadline))
    return checks


def _choose_modules(
    model: nn.Module, calls: dict[str, CallArguments], config: GradcheckConfig
) -> list[str]:
    """Return paths of the modules to check, smallest first, one per class and shapes.

    Only modules called in this batch that neither are nor contain a skipped one.
    """
    modules = {path: m for path, m in model.named_modules() if path in calls}
    skipped = [p for p, m in modules.items() if {p, type(m).__name__} & {*config.skip}]
    chosen: dict[Any, str] = {}
    for path, module in modules.items():
        is_user_class = not type(module).__module__.startswith("torch.")
        if is_user_class and not any(_contains(path, part) for part in skipped):
            tensors = [t for t in tree_leaves(calls[path]) if isinstance(t, Tensor)]
            shapes = tuple(tensor.shape for tensor in (*tensors, *module.parameters()))
            chosen.setdefault((type(module), shapes), path)

    def sort_key(path: str) -> tuple[int, int]:
        size = sum(p.numel() for p in modules[path].parameters())
        return size, -path.count(".") - bool(path)

    return sorted(chosen.values(), key=sort_key)


def _contains(path: str, part: str) -> bool:
    """Whether the module at `path` is or contains `part`; the root's path is empty."""
    return part != OBJECTIVE and (not path or f"{part}.".startswith(f"{path}."))


class _FixedTargetLoss(nn.Module):
    """The objective with a fixed target, its class weights and tensors in float64."""

    def __init__(self, objective: Any, target: Any) -> None:
        super().__init__()
        objective_copy = deepcopy(objective)
        for key, value in {"": objective_copy, **getattr(objective_copy, "__dict__", {})}.items():
            if isinstance(value, nn.Module):
                _convert_to_double(value.to("cpu"))
            elif isinstance(value, Tensor):
                setattr(objective_copy, key, _to_double(value))
        # a module's own weights are constants
        self.loss: Callable[[Any], Any] = lambda output: objective_copy(output, target)

    def forward(self, output: Any) -> Any:
        """Return the loss."""
        return self.loss(output)


def _copy_as_double(model: nn.Module, train: bool) -> nn.Module:
    """Return a float64 CPU copy that may be modified. Raises Inconclusive.

    A replaced forward that is not bound to its module is dropped, since it would use the original's
    weights.
    """
    needed_bytes = 2 * 8 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if needed_bytes > 0.5 * memory.available_bytes():
        gib = needed_bytes / 2**30
        raise Inconclusive(f"a float64 copy would take {gib:.1f} GiB of host memory")
    replaced_forwards = {
        module: vars(module).pop("forward")
        for module in model.modules()
        if getattr(vars(module).get("forward"), "__self__", None) is not module
        and "forward" in vars(module)
    }
    try:
        model_copy = deepcopy(model).to("cpu")
    except Exception as error:  # copying fails with many exception types
        raise Inconclusive(f"the model cannot be copied: {summarize_error(error)}") from None
    finally:
        for module, forward in replaced_forwards.items():
            vars(module)["forward"] = forward
    _convert_to_double(model_copy)
    for module in model_copy.modules():
        if getattr(module, "sparse", False) is True:  # an embedding; gradcheck wants dense ones
            vars(module)["sparse"] = False
    return model_copy.train() if train else model_copy


def _record_forward(model: nn.Module, batch: Batch) -> tuple[dict[str, CallArguments], Any, Any]:
    """Return each module's first arguments, the output and the target. Raises Inconclusive."""
    full_batch = tree_map_only(Tensor, _to_double, batch)
    small_batch = tree_map_only(Tensor, lambda t: t[:SAMPLES] if t.ndim else t, full_batch)
    calls: dict[str, CallArguments] = {}

    def record(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(path, (_detach(args), _detach(kwargs)))

    problem = ""
    with ExitStack() as scope:
        scope.enter_context(torch.enable_grad())
        scope.enter_context(torch.compiler.set_stance("force_eager"))
        for path, module in modes.hookable(model):
            hook = partial(record, path)
            handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            scope.callback(handle.remove)
        for inputs, target in (small_batch, full_batch):
            calls.clear()
            _seed_generators()
            try:
                return calls, _detach(call_model(model, inputs)), target
            except Exception as error:  # e.g. of a model that needs the full batch
                problem = summarize_error(error)
    raise Inconclusive(f"the float64 copy of the model does not run: {problem}")


def _detach(nest: Any) -> Any:
    """Copy tensors with their current values and `requires_grad`."""
    return tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), nest)


def _to_double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu()


def _convert_to_double(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _to_double(tensor.data)


def _seed_generators() -> None:
    """Seed all generators, so that each call draws the same dropout."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _check_module(
    module: nn.Module,
    arguments: CallArguments,
    check: GradientCheck,
    config: GradcheckConfig,
    deadline: float,
) -> GradientCheck:
    start = time.monotonic()
    if start > deadline:
        return replace(check, reason=f"budget_s={config.budget_s:g} was used up")
    try:
        where, reason = _find_mismatch(module, arguments, config.tolerance)
    except Inconclusive as error:
        return replace(check, reason=str(error))
    except Exception as problem:  # any exception of a foreign forward or backward
        return replace(check, reason=summarize_error(problem))
    seconds, result = time.monotonic() - start, WRONG if where else PASSED
    return replace(check, result=result, where=where, reason=reason, seconds=seconds)


def _find_mismatch(module: nn.Module, arguments: CallArguments, rtol: float) -> tuple[str, str]:
    """Return the leaf with a wrong gradient, and the numbers; ("", "") if all are right."""
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.requires_grad]
    leaves = {f"input {i}" if i else "input": tensor for i, tensor in enumerate(tensors)}
    leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    leaves = {name: _move_off_kinks(leaf) for name, leaf in leaves.items() if leaf.numel()}
    if not leaves:
        raise Inconclusive("neither its inputs nor its weights need a gradient")

    def compute(*values: Tensor) -> list[Tensor]:
        _seed_generators()
        # cloned, since some functions modify their arguments
        by_name = dict(zip(leaves, (value.clone() for value in values), strict=True))
        new_values = iter([by_name.pop(n, t) for n, t in zip(list(leaves), tensors, strict=False)])
        args, kwargs = tree_map_only(
            Tensor, lambda t: next(new_values) if t.requires_grad else t.clone(), arguments
        )
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        outputs = tree_leaves(functional_call(module, buffers | by_name, args, kwargs))
        floats = [t for t in outputs if isinstance(t, Tensor)]
        return [t for t in floats if t.is_floating_point() or t.is_complex()]

    values = tuple(leaves.values())
    first, second = compute(*values), compute(*values)
    if not any(output.requires_grad for output in first):
        raise Inconclusive("none of its outputs needs a gradient")
    if not all(bool(output.isfinite().all()) for output in first):
        raise Inconclusive("its outputs are not finite")
    if any(not torch.allclose(a, b, REPEAT_TOLERANCE) for a, b in zip(first, second, strict=True)):
        raise Inconclusive("two calls with the same inputs and random numbers differ")
    # normalise, so that small gradients are checked as strictly as large ones
    scales = [float(output.detach().abs().pow(2).mean().sqrt()) or 1.0 for output in first]

    def compute_scaled(*values: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(compute(*values), first, scales, strict=True)
        return tuple(value / scale for value, output, scale in pairs if output.requires_grad)

    options: Any = {"nondet_tol": math.inf, "fast_mode": True, "check_undefined_grad": False}
    text = ""
    for eps, atol in DIFFERENCE_STEPS:
        try:
            # torch would add the whole Jacobian to its message, which may not fit into memory
            with mock.patch(SLOW_MODE, lambda *_: "", create=True):
                gradcheck(compute_scaled, values, eps=eps, atol=atol, rtol=rtol, **options)
            return "", ""
        except GradcheckError as error:
            text = str(error)
    if (match := MISMATCH.search(text)) is None:
        return "an input or weight", text.strip().partition("\n")[0]
    index, numerical, analytical = match.groups()
    numbers = f"analytical {float(analytical):.3g}, numerical {float(numerical):.3g}"
    return list(leaves)[int(index)], numbers


def _move_off_kinks(leaf: Tensor) -> Tensor:
    """Return a nearby leaf, off kinks; signs are kept, zeros become positive."""
    generator = torch.Generator().manual_seed(0)
    value = leaf.detach()
    noise = KINK_DISTANCE * torch.randn(value.shape, dtype=value.dtype, generator=generator)
    rms = float(value.abs().pow(2).mean().sqrt()) or 1.0
    return torch.where(value == 0, rms * noise.abs(), value * (1 + noise)).requires_grad_()


class GradcheckTool(DebugTool):
    """Checks backward passes before the first step, without affecting the run.

    With debug.on_anomaly=raise a wrong one ends the run.
    """

    name: ClassVar[str] = "gradcheck"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.checks: list[GradientCheck] = []
        self.reported: list[str] = []  # names of wrong ones, before a resume too

    def state(self) -> dict[str, Any]:
        """Return the names that are in the history."""
        return {"inspections": 0, "reported": self.reported}

    def load(self, state: Mapping[str, Any]) -> None:
        """Report none of them again."""
        self.reported = state["reported"]

    def due(self, step: int) -> bool:
        """Return False: it inspects no step."""
        return False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Run the checks; raises NotVerified with debug.on_anomaly=raise."""
        config = self.config.gradcheck
        budget_s = min(config.budget_s, self.config.timeout_s or config.budget_s)
        config = replace(config, budget_s=budget_s)
        name = getattr(run.objective, "name", type(run.objective).__name__)
        roots, device = (run.model, run.objective), run.device.torch
        unchanged = run.model.parameters()
        start = time.monotonic()
        with preserve_state(*roots, device=device, safe=unchanged):
            batch = run.train.peek()  # the host waits for it
            given = run.model, batch, run.objective, config, name
            self.checks = check_model_gradients(*given, train=True)
        self.inspections += 1
        self._report(run, time.monotonic() - start)
        yield

    def _report(self, run: Run, seconds: float) -> None:
        wrong = [check for check in self.checks if check.result == WRONG]
        unchecked = sum(check.result == UNCHECKED for check in self.checks)
        self.finding = f"{len(self.checks) - unchecked} checked, {len(wrong)} wrong"
        self.finding += f": {', '.join(check.name for check in wrong)}" if wrong else ""
        self.finding += f"; {unchecked} could not be checked" if unchecked else ""
        ends_run = self.config.on_anomaly.name == "raise"
        for check in wrong:
            if check.name in self.reported and not ends_run:
                continue
            self.reported.append(check.name)
            run.history.add(
                "wrong_gradient",
                check.sentence,
                step=run.progress.step,
                category="numerics",
                severity="error",
                action="the run ends" if ends_run else "",
                say=not ends_run,
            )
        checks = [asdict(check) for check in self.checks]
        self.write_json(run.folder, FILE, {"seconds": round(seconds, 3), "checks": checks})
        if wrong and ends_run:
            sentences = "; ".join(check.sentence for check in wrong)
            fix = f"if intended: debug.gradcheck.skip=[{wrong[0].name}]"
            fix += ", or debug.on_anomaly=record, which trains anyway"
            raise NotVerified(f"debug.gradcheck: {sentences}; {fix}")
