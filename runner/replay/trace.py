"""Where a step goes bad: the module, the operation and the line, and what went into it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, nn

from runner.data.batch import Batch, count
from runner.debug.source_line import line_at, raising_line
from runner.record.text import shorten
from runner.replay.findings import Cause, StepPhase
from runner.replay.statistics import bad_samples, bad_state, level, state_of, stats, tensors
from runner.replay.tracer import Event, Frame, Tracer, named
from runner.training.run import Run
from runner.training.step import forward_backward


def trace_step(run: Run, batch: Batch, prepare: Callable[[Tracer], object] | None = None) -> Cause:
    """Make the step with every operation watched, and leave the run as it was.

    The phase is `nowhere` where loss and gradients come out finite. `prepare`, if given, sees to
    it that the tracer learns what module runs.
    """
    found = bad_weights(run.model)
    if found is not None:
        return found
    run.model.train()
    tracer = _prepared(run, batch)
    first: list[str] = []  # parameters with a bad gradient, in the order they got it
    try:
        with ExitStack() as stack:
            for name, parameter in run.model.named_parameters():
                if parameter.requires_grad:
                    hook = _noting(name, first)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            if prepare is None:
                stack.enter_context(tracer.watching(run.model))
            else:
                prepare(tracer)
            stack.enter_context(tracer)
            step = forward_backward(run, batch)
        return _found(run, batch, tracer, step.loss, step.grad_norm, first)
    except Exception as error:
        return exception(error, tracer)
    finally:
        leave(run)


def leave(run: Run) -> None:
    """Buffers as before the step, and no gradients."""
    run.update.abandon()
    for parameter in run.model.parameters():
        parameter.grad = None


def bad_weights(model: nn.Module) -> Cause | None:
    """What was not finite before the step began, if anything was."""
    bad = bad_state(model)
    if not bad:
        return None
    what, owner, numbers = bad[0]
    module = model.get_submodule(owner)
    values = math.prod(numbers.shape)
    found = Cause(
        StepPhase.weights,
        f"{what} of {label(owner, module)} was not finite before the step: "
        f"{numbers.not_finite} of {values} values",
        owner,
        type(module).__name__,
        state=state_of(module),
    )
    others = [f"{what} of {owner or 'the model'}" for what, owner, _ in bad[1:6]]
    if others:
        more = f" and {len(bad) - 6} more" if len(bad) > 6 else ""
        found.notes.append(f"not finite either: {', '.join(others)}{more}")
    return found


def exception(error: Exception, tracer: Tracer) -> Cause:
    """Where it was raised."""
    where = raising_line(error.__traceback__)
    said = shorten(f"{type(error).__name__}: {error}".strip().splitlines()[0], 300)
    frame = tracer.backward_of if tracer.raised is None else tracer.raised[1]
    if frame is None:
        return Cause(StepPhase.exception, f"outside the model: {said}", line=where)
    said += " in the backward" if tracer.raised is None else ""
    found = _at(
        frame, Cause(StepPhase.exception, f"{label(frame.name, frame.module)} raised {said}")
    )
    found.line = where
    return found


def label(name: str, module: nn.Module) -> str:
    """A module as it is spoken of."""
    return f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def batch_tensors(batch: Batch) -> list[tuple[str, Tensor]]:
    """The batch's tensors by name; the inputs as the model is called with them."""
    inputs = batch[0]
    if isinstance(inputs, tuple | list):
        inputs = named(inputs, {})
    found = list(tensors(inputs if isinstance(inputs, dict) else {"input": inputs}))
    return found + list(tensors({"target": batch[1]}))


def _prepared(run: Run, batch: Batch) -> Tracer:
    """A tracer that knows what was there before the step."""
    tracer = Tracer(run.model)
    for buffer in run.model.buffers():
        tracer.on_purpose(buffer)  # `bad_weights` has checked them: what is left is a mask
    for name, tensor in batch_tensors(batch):
        tracer.seed(name, tensor)
    return tracer


def _noting(name: str, first: list[str]) -> object:
    def note(parameter: Tensor) -> None:
        if parameter.grad is not None and level(parameter.grad) and name not in first:
            first.append(name)

    return note


def _found(
    run: Run, batch: Batch, tracer: Tracer, loss: Tensor, norm: Tensor, first: list[str]
) -> Cause:
    """From what the loss or else a gradient ended up with, back to where that began."""
    named_parameters = dict(run.model.named_parameters())
    if level(loss):
        event = tracer.origin(loss)
        if event is None:
            found = Cause(StepPhase.loss, "the loss is not finite, and no operation made it so")
        else:
            found = _from_event(batch, event)
    elif first:
        gradients = [named_parameters[name].grad for name in first]
        events = [tracer.origin(gradient) for gradient in gradients if gradient is not None]
        event = next((event for event in events if event is not None), None)
        if event is None:
            found = Cause(StepPhase.backward, f"the gradient of {first[0]} is not finite")
        else:
            found = _from_event(batch, event)
    elif level(norm):
        return Cause(
            StepPhase.norm,
            "loss and gradients are finite, and the gradient norm is not: its squares overflow",
        )
    else:
        return _buffers(run.model, tracer)
    found.parameters = first
    scale = run.update.scale
    if scale is not None and found.phase in (StepPhase.backward, StepPhase.loss):
        found.notes.append(
            f"the loss was scaled by {float(scale.value):g} for float16: an overflow now and then "
            "is how the scale finds its value, and the update is left out"
        )
    return found


def _buffers(model: nn.Module, tracer: Tracer) -> Cause:
    """What the forward left behind, where the loss says nothing."""
    bad = bad_state(model)
    if not bad:
        return Cause(StepPhase.nowhere, "loss and gradients are finite")
    what, owner, numbers = bad[0]
    module = model.get_submodule(owner)
    found = Cause(
        StepPhase.forward,
        f"{what} of {label(owner, module)} is not finite after the forward, in "
        f"{numbers.not_finite} of {math.prod(numbers.shape)} values; loss and gradients are finite",
    )
    return _at(tracer.calls.get(owner, Frame(owner, module, [])), found)


def _from_event(batch: Batch, event: Event) -> Cause:
    if event.seed:
        return _of_input(batch, event.seed)
    if event.backward:
        phase = StepPhase.backward
    else:
        phase = StepPhase.loss if event.frame is None else StepPhase.forward
    place = "the objective" if event.frame is None else label(event.frame.name, event.frame.module)
    numbers = event.outputs[0]
    values = math.prod(numbers.shape)
    made = event.made + (f" ({numbers.not_finite} of {values} values)" if values > 1 else "")
    if phase is StepPhase.backward:
        cause = f"the gradient through {place} becomes {made} in the backward, of {event.of}"
    else:
        cause = f"{place} makes {made} of {event.of}"
    found = Cause(phase, cause, operation=event.operation, outputs=event.outputs)
    if numbers.shape and numbers.shape[0] == count(batch[1]) > len(event.samples):
        found.samples = event.samples
    if event.place is not None:
        found.line = line_at(event.place)
    return found if event.frame is None else _at(event.frame, found)


def _at(frame: Frame, found: Cause) -> Cause:
    """The same with what is known of the module."""
    found.module, found.kind = frame.name, type(frame.module).__name__
    found.inputs, found.state = frame.inputs, state_of(frame.module)
    return found


def _of_input(batch: Batch, name: str) -> Cause:
    tensor = dict(batch_tensors(batch))[name]
    samples = bad_samples(tensor)
    numbers = stats(name, tensor)
    rows = ", ".join(map(str, samples[:10])) + (" …" if len(samples) > 10 else "")
    return Cause(
        StepPhase.input,
        f"{name} is not finite in {len(samples)} of {len(tensor) if tensor.ndim else 1} samples: "
        f"number {rows} of the batch",
        inputs=[numbers],
        samples=samples,
    )
