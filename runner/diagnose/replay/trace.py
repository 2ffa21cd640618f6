"""Trace a step to the module, operation and line where it goes bad, and their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.core.data.order import mix
from runner.core.format import join_names, metric
from runner.core.interfaces.batch import Batch, batch_size_of, call_model, slice_rows
from runner.core.interfaces.nested import named_leaves
from runner.core.interfaces.run import Run
from runner.core.models.modes import enter_training
from runner.core.techniques import compiler
from runner.core.train.step import forward_backward
from runner.diagnose.replay.reopen import Capture, one_line_error
from runner.diagnose.replay.results import (
    Cause,
    Ratio,
    StepPhase,
    finiteness,
    location_in_trace,
    non_finite_samples,
    non_finite_state,
    raising_line,
    read_source_line,
    tensor_stats,
)
from runner.diagnose.replay.tracer import ModuleFrame, NonFiniteEvent, Tracer, name_arguments

MAX_SAMPLES = 4096  # above this number, losses per sample are not computed
MAX_LISTED = 10  # samples
HIGH_LOSS = 3.0  # ratio of a sample's loss to the batch's median above which it is named

TrackModules = Callable[[Tracer], AbstractContextManager[None]]


def trace_step(run: Run, batch: Batch, track_modules: TrackModules = Tracer.track_modules) -> Cause:
    """Make the step with every operation traced, then restore the run.

    The phase is `nowhere` if loss and gradients are finite. `track_modules` is a context around the
    step in which the tracer learns which module runs.
    """
    cause = find_bad_weights(run.model)
    if cause is not None:
        return cause
    enter_training(run.model)
    tracer = Tracer(run.model, _batch_tensors(batch))
    bad_gradients: list[str] = []  # parameters with a bad gradient, in backward order

    def record_gradient(name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and finiteness(gradient) and name not in bad_gradients:
            bad_gradients.append(name)

    try:
        with ExitStack() as stack:
            for name, parameter in run.model.named_parameters():
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    stack.callback(register(partial(record_gradient, name)).remove)
            stack.enter_context(track_modules(tracer))
            stack.enter_context(tracer)
            step = forward_backward(run, batch)
        return _find_cause(run, batch, tracer, step.loss, step.grad_norm, bad_gradients)
    except Exception as error:
        return _exception_cause(error, tracer)
    finally:
        run.update.abandon()  # restores the buffers
        for parameter in run.model.parameters():
            parameter.grad = None


def find_bad_weights(model: nn.Module) -> Cause | None:
    """Return the cause if weights or buffers were non-finite before the step; else None."""
    bad = non_finite_state(model)
    if not bad:
        return None
    cause = _state_cause(StepPhase.weights, model, "was not finite before the step")
    if others := [f"{what} of {owner or 'the model'}" for what, owner, _ in bad[1:]]:
        cause.notes.append(f"not finite either: {join_names(others)}")
    return cause


def explain_spike(run: Run, batch: Batch, capture: Capture) -> Cause:
    """State loss and gradient norm against their medians, and the samples with the highest loss."""
    numbers = {"loss": capture.loss, "grad_norm": capture.grad_norm}
    values = [Ratio(n, x, capture.medians.get(n)) for n, x in numbers.items() if x is not None]
    texts = [f"{r.name} {metric(r.bad)} (median {metric(r.healthy)})" for r in values]
    losses = _sample_losses(run, batch)
    highest = sorted(losses.items(), key=lambda pair: -pair[1])[:MAX_LISTED]
    usual = median(losses.values()) if losses else 0.0
    return Cause(
        StepPhase.spike,
        f"loss and gradients are finite but large: {', '.join(texts)}",
        samples=[i for i, loss in highest if loss > HIGH_LOSS * usual],
        losses=[Ratio(f"sample {i}", loss, usual) for i, loss in highest],
        values=values,
    )


def _sample_losses(run: Run, batch: Batch) -> dict[int, float]:
    """Return the loss per sample, from one forward; {} if it cannot be computed."""
    samples, losses = batch_size_of(batch[1]), dict[int, float]()
    if samples > MAX_SAMPLES:
        return {}
    enter_training(run.model)
    run.device.reseed(mix(run.seed, run.progress.step + 1))
    run.update.begin()  # saves the buffers
    try:
        with torch.no_grad(), ExitStack() as stack, suppress(Exception):  # needs all samples
            for context in run.contexts:
                stack.enter_context(context())
            output = call_model(run.forward, batch[0])
            for i in range(samples):
                row = slice(i, i + 1)
                losses[i] = float(run.objective(slice_rows(output, row), slice_rows(batch[1], row)))
    finally:
        run.update.abandon()
    complete = len(losses) == samples
    return {i: x for i, x in losses.items() if math.isfinite(x)} if complete else {}


def _module_label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """Return the batch's tensors by name; inputs are named as in the model's call."""
    inputs: Any = batch[0]
    if not isinstance(inputs, dict):
        inputs = name_arguments(inputs if isinstance(inputs, tuple | list) else [inputs], {})
    return dict([*named_leaves(inputs), *named_leaves({"target": batch[1]})])


def _state_cause(phase: StepPhase, model: nn.Module, problem: str) -> Cause:
    what, owner, numbers = non_finite_state(model)[0]
    module = model.get_submodule(owner)
    values = f"{numbers.not_finite} of {math.prod(numbers.shape)} values"
    text = f"{what} of {_module_label(owner, module)} {problem}: {values}"
    return Cause(phase, text, owner, type(module).__name__, outputs=[numbers])


def _exception_cause(error: Exception, tracer: Tracer) -> Cause:
    frame = tracer.backward_frame if tracer.raised is None else tracer.raised[1]
    text = one_line_error(error)
    cause = Cause(StepPhase.exception, f"outside the model: {text}")
    if frame is not None:
        text += " in the backward" if tracer.raised is None else ""
        cause.cause = f"{_module_label(frame.name, frame.module)} raised {text}"
        _add_module(cause, frame)
    cause.line = raising_line(error.__traceback__)
    return cause


def _find_cause(
    run: Run, batch: Batch, tracer: Tracer, loss: Tensor, norm: Tensor, bad_gradients: list[str]
) -> Cause:
    """Trace a non-finite loss, gradient, norm or buffer back to its origin."""
    parameters = dict(run.model.named_parameters())
    gradients = [gradient for n in bad_gradients if (gradient := parameters[n].grad) is not None]
    if finiteness(loss):
        cause = Cause(StepPhase.loss, "the loss is not finite, but no operation produced it")
        event = tracer.origin(loss)
    elif bad_gradients:
        cause = Cause(StepPhase.backward, f"the gradient of {bad_gradients[0]} is not finite")
        event = next(filter(None, map(tracer.origin, gradients)), None)
    elif finiteness(norm):
        reason = "loss and gradients are finite, but the gradient norm is not: its squares overflow"
        return Cause(StepPhase.norm, reason)
    elif non_finite_state(run.model):  # corrupted by the forward, with a finite loss
        problem = "is not finite after the forward, while loss and gradients are"
        cause = _state_cause(StepPhase.forward, run.model, problem)
        if cause.module in tracer.calls:
            _add_module(cause, tracer.calls[cause.module])
        return cause
    else:
        return Cause(StepPhase.nowhere, "loss and gradients are finite")
    cause = cause if event is None else _event_cause(batch, event)
    cause.parameters = bad_gradients
    scale = run.update.scale
    if scale is not None and cause.phase in (StepPhase.backward, StepPhase.loss):
        note = f"the loss was scaled by {float(scale.value):g} for float16"
        cause.notes.append(f"{note}: an occasional overflow calibrates the scale, and is skipped")
    return cause


def _event_cause(batch: Batch, event: NonFiniteEvent) -> Cause:
    if event.batch_tensor:
        return _input_cause(batch, event.batch_tensor)
    frame, numbers = event.frame, event.outputs[0]
    owner = "the objective" if frame is None else _module_label(frame.name, frame.module)
    values = math.prod(numbers.shape)
    made = event.kind + (f" ({numbers.not_finite} of {values} values)" if values > 1 else "")
    if event.backward:
        phase = StepPhase.backward
        text = f"the gradient through {owner} becomes {made} in the backward, of {event.source}"
    else:
        phase = StepPhase.loss if frame is None else StepPhase.forward
        text = f"{owner} makes {made} of {event.source}"
    cause = Cause(phase, text, operation=event.operation, outputs=event.outputs)
    if numbers.shape and numbers.shape[0] == batch_size_of(batch[1]) > len(event.samples):
        cause.samples = event.samples
    if event.location is not None:
        cause.line = read_source_line(event.location)
    if frame is not None:
        _add_module(cause, frame)
    return cause


def _add_module(cause: Cause, frame: ModuleFrame) -> None:
    cause.module, cause.kind = frame.name, type(frame.module).__name__
    cause.inputs = frame.inputs


def _input_cause(batch: Batch, name: str) -> Cause:
    tensor = _batch_tensors(batch)[name]
    samples = non_finite_samples(tensor)
    rows = ", ".join(map(str, samples[:10])) + (" …" if len(samples) > 10 else "")
    return Cause(
        StepPhase.input,
        f"{name} is not finite in {len(samples)} of {len(tensor) if tensor.ndim else 1} samples: "
        f"number {rows} of the batch",
        inputs=[tensor_stats(name, tensor)],
        samples=samples,
    )


# -- compiled code: the compiler's graph is run node by node under the tracer ----------------------


def trace_compiled(run: Run, batch: Batch) -> Cause:
    """Like `trace_step`, for a run that is good uncompiled but bad compiled."""
    cause = trace_step(run, batch, partial(_compile_forward, run))
    if cause.phase is StepPhase.nowhere:
        cause.cause = "only the compiler's generated code is bad: its graph is good"
    else:
        cause.notes.append("only in the model traced by the compiler: uncompiled, the step is good")
    return cause


@contextmanager
def _compile_forward(run: Run, tracer: Tracer) -> Iterator[None]:
    """Let the compiler trace the run's forward, and execute its graphs under `tracer`."""
    forward = run.forward
    names = {str(id(module)): name for name, module in run.model.named_modules()}

    def backend(graph: fx.GraphModule, examples: object) -> Callable[..., Any]:
        def interpret(*inputs: Any) -> Any:
            with tracer:
                return _Interpreter(graph, tracer, names).run(*inputs)

        return interpret

    compiled = torch.compile(lambda *args, **kwargs: forward(*args, **kwargs), backend=backend)
    with ExitStack() as scope:
        compiler.prepare(scope)
        scope.callback(torch._dynamo.reset)
        scope.callback(setattr, run, "forward", forward)
        run.forward = _disable_current_modes()(compiled)  # nothing is traced under a dispatch mode
        yield


class _Interpreter(fx.Interpreter):
    """Runs a graph; tells the tracer the source module and line of each node."""

    def __init__(self, graph: fx.GraphModule, tracer: Tracer, names: dict[str, str]) -> None:
        super().__init__(graph)
        self.tracer, self.names = tracer, names

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        modules = [str(key).partition("@")[0] for key in n.meta.get("nn_module_stack") or {}]
        known = [self.names[module] for module in modules if module in self.names]
        inputs = name_arguments(*self.fetch_args_kwargs_from_env(n)) if known else {}
        frame = self.tracer.frame(known[-1], inputs) if known else None
        with self.tracer.assign_to(frame, location_in_trace(n.meta.get("stack_trace") or "")):
            return super().run_node(n)
