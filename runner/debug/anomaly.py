"""Autograd's anomaly mode: find the operation, line and module that made a gradient NaN."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.nested import tensors
from runner.debug.config import DebugConfig
from runner.debug.source_line import line_at, place_in_text
from runner.debug.tool import Tool
from runner.errors import GaveUp
from runner.models import modes
from runner.training.hook import Cost, Step
from runner.training.run import Run
from runner.training.timing import SETTLING

RAISED = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
WARNED = "Error detected in "


class AnomalyTool(Tool):
    """Runs steps in anomaly mode; a NaN in backward is reported, and recorded or raised.

    A failed step is repeated with each operation's gradients recorded; if a NaN is only recorded,
    the guard skips the step as usual. These steps run uncompiled. Autograd reads every gradient in
    this mode, which synchronises an accelerator at each operation.
    """

    name = "anomaly"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.anomaly.every or 1)
        self.raises = config.on_anomaly.name == "raise"
        self.trace: ModuleTrace | None = None
        self.active = False
        self.warned = ""  # autograd's last warning, with the forward trace of the failed operation
        self.failed: Exception | None = None  # the error of the step's first attempt
        self.culprits: Counter[str] = Counter()
        self.suspicious = False  # the last checked step was not finite
        self.first = 0  # step before the first of this process
        self.shared: set[int] = set()  # steps that other tools inspected too

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Capture autograd's warnings, and register the recovery of failed steps."""
        self.trace, self.first = ModuleTrace(run.model), run.progress.step
        run.recoveries.insert(0, self._recover)
        try:
            with warnings.catch_warnings():  # once per run: entering makes Python repeat warnings
                warnings.filterwarnings("always", message=WARNED)
                warnings.showwarning = self._listen(warnings.showwarning)
                yield
        finally:
            self.active = False
            run.recoveries.remove(self._recover)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Run the step in anomaly mode, with hooks on every module."""
        self.looks += 1
        step = run.progress.step + 1
        if any(isinstance(h, Tool) and h is not self and h.due(step) for h in run.hooks):
            self.shared.add(step)
        self.warned, self.failed = "", None
        trace = self.trace or ModuleTrace(run.model)
        with trace.watching(), torch.autograd.set_detect_anomaly(True):
            # an Inf raises nothing, so the operation of the next Inf is recorded
            trace.operations_too = self.suspicious
            self.active = True
            try:
                yield
            finally:
                self.active = False

    def on_gradients(self, run: Run, step: Step) -> None:
        """Report the culprit, also for an Inf that did not become NaN in backward."""
        failed, self.failed = self.failed, None
        self.suspicious = not math.isfinite(step.grad_norm.item())  # waits, as autograd has
        if self.trace is None or (failed is None and not self.suspicious):
            return
        in_forward = self._find_in_forward(run, self.trace)
        if failed is None and run.update.scale is not None and in_forward is None:
            return  # fp16 overflows are part of loss scaling
        # a bad batch is not a module's fault
        message, key = in_forward or self._find_in_backward(run, self.trace, failed)
        self._add_fault(run, message, key, in_forward is not None, failed)

    def _listen(self, show: Callable[..., None]) -> Callable[..., None]:
        def listen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if self.active and str(message).startswith(WARNED):
                self.warned = str(message)
            else:
                show(message, *args, **kwargs)

        return listen

    def _recover(self, run: Run, error: Exception) -> bool:
        """On a NaN, repeat the step without raising, recording every operation."""
        if not self.active or self.trace is None:
            return False
        self.trace.forget()  # every recovery repeats the step
        if RAISED.search(str(error)) is None:
            return False
        self.active, self.failed = False, error
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # `around` restores it
        self.trace.operations_too = True
        return True

    def _find_in_backward(
        self, run: Run, trace: ModuleTrace, error: Exception | None
    ) -> tuple[str, str]:
        """Return a message on a non-finite backward, and the key to count it by."""
        raised, origin = RAISED.search(str(error)), trace.origin()  # waits
        if origin is not None:
            operation, kind = origin[0].name, origin[1]
            text, module = origin[0].trace, _label(origin[0].module)
        elif raised is not None:  # every operation of the model received NaN or Inf
            operation, kind, text, module = raised[1], "NaN", self.warned, "the loss"
        else:
            name = _bad_parameter(run)
            culprit = f"the gradient of {name}" if name else "the loss"
            return f"{culprit} is not finite, but backward produced no NaN", culprit
        place = place_in_text(text)
        message = f"{operation} gave {kind} in backward, in {module}"
        if place is None:
            return message, operation
        line = line_at(place).short
        return f"{message}, {line}", f"{operation} at {line}"

    def _find_in_forward(self, run: Run, trace: ModuleTrace) -> tuple[str, str] | None:
        """Return message and key for a non-finite batch or forward output; None for neither."""
        name, bad = "input", trace.bad_input()  # waits
        culprit = None if bad is not None else trace.first_bad_output()  # waits
        if bad is None and culprit is None:
            name, bad = "target", _count(_bad_rows(run.train.at(run.progress.step)[1]))
        if bad is not None:
            return f"the {name} is not finite: {bad[0]:,} of {bad[1]:,} samples", f"bad {name}"
        key = f"{_label(culprit[0])} in forward" if culprit else ""
        return (f"{culprit[1]} first from {key}", key) if culprit else None

    def _add_fault(
        self, run: Run, message: str, key: str, in_forward: bool, error: Exception | None
    ) -> None:
        step = run.progress.step + 1
        self.culprits[key] += 1
        (worst, times), others = self.culprits.most_common(1)[0], len(self.culprits) - 1
        self.finding = f"{times} × {worst}" + (f", {others} others" if others else "")
        ends = self.raises and (run.update.scale is None or in_forward)
        if run.update.scale:
            message += f", at a loss scale of {run.update.scale.value.item():g}"  # waits
        run.history.explained.add(step)
        run.history.add(
            "anomaly",
            message,
            step=step,
            category="numerics",
            severity="error" if ends else "warning",
            action="the run ends" if ends else "skipped" if run.update.guard else "",
            error=error,
            say=not ends and step not in run.history.causes,  # else it was reported with its batch
        )
        if ends:
            raise GaveUp(f"step {step}: {message} (debug.on_anomaly=raise)") from None

    def cost(self, run: Run) -> Cost | None:
        """Return the findings, and the slowdown of its steps."""
        times, self.seconds = self._slowdown(run)
        finding = self.finding or "no NaN or Inf" if self.looks else "no step was checked"
        finding += "; every step" if self.every == 1 else f"; every {self.every} steps"
        if run.whole is not None or (run.compilation is not None and run.compilation.mode):
            finding += ", uncompiled"
        if times:
            finding += f"; such a step takes {times:.1f} times as long"
        return Cost(self.name, self.looks, self.seconds, finding)

    def _slowdown(self, run: Run) -> tuple[float, float]:
        """Return (slowdown factor, total seconds) of its steps against the others; 0 if unknown.

        Steps that other tools inspected are excluded.
        """
        alone: list[float] = []
        others: list[float] = []
        laps = run.watch.laps()
        for step, seconds in enumerate(laps.tolist(), self.first + run.watch.count - len(laps) + 1):
            if step > self.first + SETTLING and step not in self.shared:
                (alone if step % self.every == 0 else others).append(seconds)
        if not alone or not others:
            return 0.0, 0.0
        usual, more = median(others), median(alone) - median(others)
        return max(1.0, 1 + more / usual), max(0.0, more * self.looks)


def _label(name: str) -> str:
    return name or "the model itself"


def _bad_parameter(run: Run) -> str | None:
    """Return the last parameter with a non-finite gradient; synchronises for each."""
    for name, parameter in reversed(list(run.model.named_parameters())):
        if parameter.grad is not None and not math.isfinite(peak([parameter.grad]).item()):
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
    """Records the largest value of each module's output on the device, within `watching`.

    With `operations_too` also those of each backward operation, assigned to the innermost module
    whose forward created its node. Values are read only by the query methods.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inputs: list[Tensor] = []  # per micro-batch: mask of non-finite samples
        self.outputs: list[tuple[str, Tensor]] = []  # largest absolute value, in order
        self.operations_too = False
        self.operations: list[TracedOperation] = []  # in order of backward
        self.inside: list[str] = []  # modules whose forward is running
        self.nodes: set[Any] = {None}  # graph nodes already assigned to a module

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install hooks on every module; the records remain afterwards."""
        self.forget()
        self.operations_too = False
        with ExitStack() as stack:
            for name, module in modes.hookable(self.model):
                stack.callback(module.register_forward_pre_hook(self._before(name)).remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            hook = self.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
            stack.callback(hook.remove)
            yield
        self.nodes = {None}

    def forget(self) -> None:
        """Discard the records of a step that is repeated."""
        self.inputs, self.outputs, self.operations = [], [], []

    def bad_input(self) -> tuple[int, int] | None:
        """Return (non-finite samples, samples) of the model's inputs, or None; synchronises."""
        return _count(self.inputs)

    def first_bad_output(self) -> tuple[str, str] | None:
        """Return the first module with a non-finite output, and NaN or Inf; synchronises."""
        peaks = _read([largest for _, largest in self.outputs])  # waits
        for (name, _), largest in zip(self.outputs, peaks, strict=True):
            if not math.isfinite(largest):
                return name, _kind(largest)
        return None

    def origin(self) -> tuple[TracedOperation, str] | None:
        """Return the first operation that made NaN or Inf from finite gradients; synchronises.

        Anomaly mode checks only for NaN, and so reports the operation after the one that made an
        Inf: that of `x * 0`, say, instead of the square root before it.
        """
        incoming = _read([operation.incoming for operation in self.operations])  # waits
        outgoing = _read([operation.outgoing for operation in self.operations])  # waits
        for operation, before, after in zip(self.operations, incoming, outgoing, strict=True):
            if not math.isfinite(before):
                return None  # it comes from the loss
            if not math.isfinite(after):
                return operation, _kind(after)
        return None

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if module is self.model:
                self.inside, self.nodes = [], {None}
            elif self.operations_too:  # earlier nodes belong to the enclosing module
                self._record_operations(inputs, self.inside[-1] if self.inside else "")
            self.inside.append(name)

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self.outputs.append((name, peak([tensor])))
            if self.operations_too:
                self._record_operations(output, name)
            if name in self.inside:  # a forward that raised has left its entries
                del self.inside[self.inside.index(name) :]

        return hook

    def _record_inputs(self, module: nn.Module, inputs: Any, by_name: dict[str, Any]) -> None:
        self.inputs += _bad_rows((inputs, by_name))

    def _record_operations(self, values: Any, module: str) -> None:
        """Hook the graph nodes behind `values` that belong to no module yet."""
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors(values)]
        while waiting:
            node = waiting.pop()
            if node not in self.nodes:
                self.nodes.add(node)
                node.register_hook(self._recorder(node, module))
                waiting.extend(next_ for next_, _ in node.next_functions)

    def _recorder(self, node: Any, module: str) -> Any:
        name, trace = node.name(), "".join(node.metadata.get("traceback_", ()))  # of anomaly mode

        def hook(outgoing: Any, incoming: Any) -> None:
            peaks = peak(tensors(incoming)), peak(tensors(outgoing))
            self.operations.append(TracedOperation(name, trace, module, *peaks))

        return hook


def _bad_rows(value: Any) -> list[Tensor]:
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


def _count(bad: Sequence[Tensor]) -> tuple[int, int] | None:
    few = sum(int(rows.sum()) for rows in bad)  # waits
    return (few, sum(map(len, bad))) if few else None


def peak(values: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value, 0-d, on the tensors' device; NaN if any value is."""
    dense = [v.detach().coalesce().values() if v.is_sparse else v.detach() for v in values]
    largest = [torch.linalg.vector_norm(v, math.inf).float() for v in dense if v.numel()]
    return torch.stack(largest).amax() if largest else torch.zeros(())


def _read(peaks: Sequence[Tensor]) -> list[float]:
    if not peaks:
        return []
    return torch.stack([value.to(peaks[-1].device) for value in peaks]).tolist()


def _kind(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf"
