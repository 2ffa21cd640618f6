"""Autograd's anomaly mode: find the operation, line and module that made a gradient NaN."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.errors import GaveUp
from runner.core.interfaces.hook import Cost, Step
from runner.core.interfaces.nested import tensors
from runner.core.interfaces.run import Run
from runner.core.models import modes
from runner.core.schemas.debug import DebugConfig
from runner.diagnose.debug.source_line import location_in_trace, read_source_line
from runner.diagnose.debug.tool import DebugTool

NAN_ERROR = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
NAN_WARNING = "Error detected in "


class AnomalyTool(DebugTool):
    """Runs steps in anomaly mode; a NaN in backward is reported, and recorded or raised.

    A failed step is repeated with each operation's gradients recorded; if a NaN is only recorded,
    the guard skips the step as usual. These steps run uncompiled. Autograd reads every gradient in
    this mode, which synchronises an accelerator at each operation.
    """

    name = "anomaly"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.anomaly.every or 1)
        self.raise_on_anomaly = config.on_anomaly.name == "raise"
        self.trace: ModuleTrace | None = None
        self.active = False
        self.last_warning = ""  # of autograd, with the forward trace of the failed operation
        self.first_error: Exception | None = None  # the error of the step's first attempt
        self.culprits: Counter[str] = Counter()
        self.last_step_non_finite = False

    def state(self) -> dict[str, Any]:
        """Return how often each operation or module was at fault."""
        return {"culprits": self.culprits, "non_finite": self.last_step_non_finite}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self.culprits, self.last_step_non_finite = Counter(state["culprits"]), state["non_finite"]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Capture autograd's warnings, and register the recovery of failed steps."""
        self.trace = ModuleTrace(run.model)
        run.recoveries.insert(0, self._recover)
        try:
            with warnings.catch_warnings():  # once per run: entering makes Python repeat warnings
                warnings.filterwarnings("always", message=NAN_WARNING)
                warnings.showwarning = self._divert_warnings(warnings.showwarning)
                yield
        finally:
            self.active = False
            run.recoveries.remove(self._recover)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Run the step in anomaly mode, with hooks on every module."""
        self.inspections += 1
        self.last_warning, self.first_error = "", None
        trace = self.trace or ModuleTrace(run.model)
        with trace.install_hooks(), torch.autograd.set_detect_anomaly(True):
            # an Inf raises nothing, so the operation of the next Inf is recorded
            trace.traces_operations = self.last_step_non_finite
            self.active = True
            try:
                yield
            finally:
                self.active = False

    def on_gradients(self, run: Run, step: Step) -> None:
        """Report the culprit, also for an Inf that did not become NaN in backward."""
        error, self.first_error = self.first_error, None
        norm = step.grad_norm.item()  # waits, as autograd has
        self.last_step_non_finite = not math.isfinite(norm)
        if self.trace is None or (error is None and not self.last_step_non_finite):
            return
        forward_fault = self._find_forward_fault(run, self.trace)
        if error is None and run.update.scale is not None and forward_fault is None:
            return  # fp16 overflows are part of loss scaling
        # a bad batch is not a module's fault
        message, key = forward_fault or self._find_backward_fault(run, self.trace, error)
        self._add_fault(run, message, key, forward_fault is not None, error)

    def _divert_warnings(self, show_warning: Callable[..., None]) -> Callable[..., None]:
        def listen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if self.active and str(message).startswith(NAN_WARNING):
                self.last_warning = str(message)
            else:
                show_warning(message, *args, **kwargs)

        return listen

    def _recover(self, run: Run, error: Exception) -> bool:
        """On a NaN, repeat the step without raising, recording every operation."""
        if not self.active or self.trace is None:
            return False
        self.trace.clear()  # every recovery repeats the step
        if NAN_ERROR.search(str(error)) is None:
            return False
        self.active, self.first_error = False, error
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # `around` restores it
        self.trace.traces_operations = True
        return True

    def _find_backward_fault(
        self, run: Run, trace: ModuleTrace, error: Exception | None
    ) -> tuple[str, str]:
        """Return a message on a non-finite backward, and the key to count it by."""
        match, origin = NAN_ERROR.search(str(error)), trace.first_bad_operation()  # waits
        if origin is not None:
            operation, nan_or_inf = origin[0].name, origin[1]
            text, module = origin[0].trace, _module_label(origin[0].module)
        elif match is not None:  # every operation of the model received NaN or Inf
            operation, nan_or_inf, text, module = match[1], "NaN", self.last_warning, "the loss"
        else:
            name = _last_bad_parameter(run)
            culprit = f"the gradient of {name}" if name else "the loss"
            return f"{culprit} is not finite, but backward produced no NaN", culprit
        location = location_in_trace(text)
        message = f"{operation} gave {nan_or_inf} in backward, in {module}"
        if location is None:
            return message, operation
        line = read_source_line(location).short
        return f"{message}, {line}", f"{operation} at {line}"

    def _find_forward_fault(self, run: Run, trace: ModuleTrace) -> tuple[str, str] | None:
        """Return message and key for a non-finite batch or forward output; None for neither."""
        name, bad_samples = "input", _count_bad_samples(trace.inputs)  # waits
        culprit = None if bad_samples is not None else trace.first_bad_output()  # waits
        if bad_samples is None and culprit is None:
            target = run.train.at(run.progress.step)[1]
            name, bad_samples = "target", _count_bad_samples(_bad_sample_masks(target))
        if bad_samples is not None:
            count = f"{bad_samples[0]:,} of {bad_samples[1]:,} samples"
            return f"the {name} is not finite: {count}", f"bad {name}"
        key = f"{_module_label(culprit[0])} in forward" if culprit else ""
        return (f"{culprit[1]} first from {key}", key) if culprit else None

    def _add_fault(
        self, run: Run, message: str, key: str, in_forward: bool, error: Exception | None
    ) -> None:
        step = run.progress.step + 1
        self.culprits[key] += 1
        (most_common, count), others = self.culprits.most_common(1)[0], len(self.culprits) - 1
        self.finding = f"{count} × {most_common}" + (f", {others} others" if others else "")
        ends_run = self.raise_on_anomaly and (run.update.scale is None or in_forward)
        if run.update.scale:
            message += f", at a loss scale of {run.update.scale.value.item():g}"  # waits
        run.history.explained_steps.add(step)
        run.history.add(
            "anomaly",
            message,
            step=step,
            category="numerics",
            severity="error" if ends_run else "warning",
            action="the run ends" if ends_run else "skipped" if run.update.guard else "",
            error=error,
            # else it was reported with its batch
            say=not ends_run and step not in run.history.causes,
        )
        if ends_run:
            raise GaveUp(f"step {step}: {message} (debug.on_anomaly=raise)") from None

    def cost(self, run: Run) -> Cost | None:
        """Return the findings; how much longer its steps take is not known."""
        finding = self.finding or "no NaN or Inf" if self.inspections else "no step was checked"
        finding += "; every step" if self.every == 1 else f"; every {self.every} steps"
        if run.step_graph is not None or (run.compilation is not None and run.compilation.mode):
            finding += ", uncompiled"
        return Cost(self.name, self.inspections, None if self.inspections else 0.0, finding)


def _module_label(name: str) -> str:
    return name or "the model itself"


def _last_bad_parameter(run: Run) -> str | None:
    """Return the last parameter with a non-finite gradient; synchronises for each."""
    for name, parameter in reversed(list(run.model.named_parameters())):
        gradient = parameter.grad
        if gradient is not None and not math.isfinite(largest_magnitude([gradient]).item()):
            return name
    return None


# -- tracing the model -------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedOperation:
    """An operation of the backward pass; `incoming` and `outgoing` are on the device."""

    name: str
    trace: str  # Python trace of its forward
    module: str  # whose forward created it; "" for the root model
    incoming: Tensor  # largest absolute gradient, 0-d
    outgoing: Tensor


class ModuleTrace:
    """Records the largest value of each module's output on the device, within `install_hooks`.

    With `traces_operations` also those of each backward operation, assigned to the innermost module
    whose forward created its node. Values are read only by the query methods.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inputs: list[Tensor] = []  # per micro-batch: mask of non-finite samples
        self.outputs: list[tuple[str, Tensor]] = []  # largest absolute value, in order
        self.traces_operations = False
        self.operations: list[TracedOperation] = []  # in order of backward
        self.running_modules: list[str] = []  # modules whose forward is running
        self.assigned_nodes: set[Any] = {None}  # graph nodes already assigned to a module

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Install hooks on every module; the records remain afterwards."""
        self.clear()
        self.traces_operations = False
        with ExitStack() as stack:
            for name, module in modes.hookable(self.model):
                stack.callback(
                    module.register_forward_pre_hook(self._pre_forward_hook(name)).remove
                )
                stack.callback(module.register_forward_hook(self._forward_hook(name)).remove)
            hook = self.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
            stack.callback(hook.remove)
            yield
        self.assigned_nodes = {None}

    def clear(self) -> None:
        """Discard the records of a step that is repeated."""
        self.inputs, self.outputs, self.operations = [], [], []

    def first_bad_output(self) -> tuple[str, str] | None:
        """Return the first module with a non-finite output, and NaN or Inf; synchronises."""
        peaks = _read_values([largest for _, largest in self.outputs])  # waits
        for (name, _), largest in zip(self.outputs, peaks, strict=True):
            if not math.isfinite(largest):
                return name, _nan_or_inf(largest)
        return None

    def first_bad_operation(self) -> tuple[TracedOperation, str] | None:
        """Return the first operation that made NaN or Inf from finite gradients; synchronises.

        Anomaly mode checks only for NaN, and so reports the operation after the one that made an
        Inf: that of `x * 0`, say, instead of the square root before it.
        """
        incoming = _read_values([operation.incoming for operation in self.operations])  # waits
        outgoing = _read_values([operation.outgoing for operation in self.operations])  # waits
        for operation, before, after in zip(self.operations, incoming, outgoing, strict=True):
            if not math.isfinite(before):
                return None  # it comes from the loss
            if not math.isfinite(after):
                return operation, _nan_or_inf(after)
        return None

    def _pre_forward_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if module is self.model:
                self.running_modules, self.assigned_nodes = [], {None}
            elif self.traces_operations:  # earlier nodes belong to the enclosing module
                self._record_operations(inputs, (self.running_modules or [""])[-1])
            self.running_modules.append(name)

        return hook

    def _forward_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self.outputs.append((name, largest_magnitude([tensor])))
            if self.traces_operations:
                self._record_operations(output, name)
            if name in self.running_modules:  # a forward that raised has left its entries
                del self.running_modules[self.running_modules.index(name) :]

        return hook

    def _record_inputs(self, module: nn.Module, inputs: Any, by_name: dict[str, Any]) -> None:
        self.inputs += _bad_sample_masks((inputs, by_name))

    def _record_operations(self, values: Any, module: str) -> None:
        """Hook the graph nodes behind `values` that belong to no module yet."""
        pending: list[Any] = [tensor.grad_fn for tensor in tensors(values)]
        while pending:
            node = pending.pop()
            if node not in self.assigned_nodes:
                self.assigned_nodes.add(node)
                node.register_hook(self._backward_hook(node, module))
                pending.extend(next_ for next_, _ in node.next_functions)

    def _backward_hook(self, node: Any, module: str) -> Any:
        name, trace = node.name(), "".join(node.metadata.get("traceback_", ()))  # of anomaly mode

        def hook(outgoing: Any, incoming: Any) -> None:
            peaks = largest_magnitude(tensors(incoming)), largest_magnitude(tensors(outgoing))
            self.operations.append(TracedOperation(name, trace, module, *peaks))

        return hook


def _bad_sample_masks(value: Any) -> list[Tensor]:
    """Return a mask of non-finite samples on the device; empty for a nest without floats."""
    result: list[Tensor] = []
    for tensor in tensors(value):
        if tensor.is_floating_point() and tensor.dim() and tensor.layout is torch.strided:
            bad = (~tensor.detach().isfinite()).unsqueeze(-1).flatten(1).any(1)
            if not result:
                result = [bad]
            elif result[0].shape == bad.shape:
                result[0] |= bad.to(result[0].device)
    return result


def _count_bad_samples(masks: Sequence[Tensor]) -> tuple[int, int] | None:
    count = sum(int(mask.sum()) for mask in masks)  # waits
    return (count, sum(map(len, masks))) if count else None


def largest_magnitude(values: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value, 0-d, on the tensors' device; NaN if any value is."""
    dense = [v.detach().coalesce().values() if v.is_sparse else v.detach() for v in values]
    largest = [torch.linalg.vector_norm(v, math.inf).float() for v in dense if v.numel()]
    return torch.stack(largest).amax() if largest else torch.zeros((), dtype=torch.float32)


def _read_values(peaks: Sequence[Tensor]) -> list[float]:
    if not peaks:
        return []
    return torch.stack([value.to(peaks[-1].device) for value in peaks]).tolist()


def _nan_or_inf(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf"
