"""One training step: forward, backward and update, as one graph or separately."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from runner.core.data.order import mix
from runner.core.device.device_errors import (
    is_device_error,
    is_out_of_memory,
    suppress_device_errors,
)
from runner.core.errors import UsageError, error_text
from runner.core.interfaces.batch import Batch, batch_size_of, call_model, slice_rows
from runner.core.interfaces.hook import Evaluation, Hook, Report, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.record.text import summarize_error

if TYPE_CHECKING:
    from runner.core.optim.whole_step import StepGraph

log = logging.getLogger("runner")


def make_step(
    run: Run, batch: Batch, hooks: Sequence[Hook] = (), empty: bool = False
) -> tuple[Step, Verdict]:
    """Make one step with its update; return it with the worst verdict of `hooks`.

    An `empty` batch has no usable sample in any process: its step changes nothing.
    """
    if empty and run.bad_samples is not None:
        return run.bad_samples.make_skipped_step(), Verdict.KEEP
    due = [hook for hook in hooks if hook.due(run.progress.step + 1)] if hooks else []
    tests = run.gain_tests
    if tests is None or tests.finished:
        return _make_step(run, batch, due)
    start, full_size = run.device.clock(), run.train.batch_size
    result = _make_step(run, batch, due)
    tests.end(run, start, regular=not due and run.train.samples(run.progress.step) == full_size)
    return result


def _make_step(run: Run, batch: Batch, due: list[Hook]) -> tuple[Step, Verdict]:
    if run.uninspected and (run.step_graph is not None or run.compilation is not None):
        from runner.core.train.first_call import inspect_before_graph  # imported only if used

        inspect_before_graph(run, batch)
    if due:
        return _hooked_step(run, batch, due)
    if run.step_graph is not None and run.step_graph.takes(batch):
        step = _graph_step(run, run.step_graph, batch)
        if step is not None:
            return step, Verdict.KEEP
    return _eager_step(run, batch, due)


def _hooked_step(run: Run, batch: Batch, due: list[Hook]) -> tuple[Step, Verdict]:
    """Make a step within the hooks' contexts; never as one graph, as hooks may read gradients."""
    result: tuple[Step, Verdict] | None = None
    try:
        with ExitStack() as stack:
            if any(hook.eager for hook in due):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for hook in due:
                stack.enter_context(_around_step(hook, run))
            result = _eager_step(run, batch, [h for h in due if overrides_event(h, "on_gradients")])
        return result
    except BaseException:
        if result is not None:  # the update was made: a run that continues must not repeat it
            record_step(run, result[0])
        raise


@contextmanager
def _around_step(hook: Hook, run: Run) -> Iterator[None]:
    """Enter the hook's `around`; raise UsageError if it swallows an exception of the step."""
    failure: BaseException | None = None
    with hook.around(run):
        try:
            yield
        except BaseException as error:
            failure = error
            raise
    if failure is not None:
        name = f"{type(hook).__module__}.{type(hook).__qualname__}"
        problem = f"swallowed an exception of the step ({error_text(failure)})"
        raise UsageError(f"{name}.around {problem}; let it propagate") from failure


def record_step(run: Run, step: Step) -> int:
    """Count the step and pass its numbers to the reader; return its number of samples."""
    samples = run.train.samples(run.progress.step)
    run.progress.step += 1
    run.reader.add(step, samples)
    return samples


def _eager_step(run: Run, batch: Batch, due: list[Hook]) -> tuple[Step, Verdict]:
    step, verdict = _backward_with_recovery(run, batch), Verdict.KEEP
    if due:
        verdict = run.worst_verdict(call_hooks(due, "on_gradients", run, step))
        measured = _measure(run, step.number, step.loss, again=True)  # hooks may change gradients
        step.grad_norm, step.skipped = measured.grad_norm, measured.skipped
        if verdict >= Verdict.SKIP:
            step.skipped = torch.ones_like(step.skipped)
            run.stability.vetoed.append(step.number)
    validator = run.batch_validator
    if not run.is_shared and validator is not None and validator.veto is not None:
        step.skipped = torch.maximum(step.skipped, validator.veto)
    run.update.apply(step.grad_norm, step.skipped)
    run.stopwatch.split("optimizer")
    return step, verdict


def _graph_step(run: Run, graph: StepGraph, batch: Batch) -> Step | None:
    """Make the step as one graph; if the graph fails, return None and drop it for good."""
    number = run.progress.step + 1
    run.device.reseed(step_seed(run, number))
    if not graph.steps:
        log.info("compiling the step: seconds, or up to a minute the first time")
    try:
        veto = None if run.batch_validator is None else run.batch_validator.veto
        loss, norm, skipped = graph(batch, veto)
    except Exception as error:
        from runner.core.techniques import compiler

        if compiler.is_compiler_error(error):
            compiler.replace_whole_step(run, compiler.log_compiler_error(error))
        elif is_out_of_memory(error):  # a graph writes no weight before its last allocation
            if not any(recover(run, error) for recover in run.recoveries):
                raise
        elif graph.steps or compiler.is_from_compiled_code(error) or is_device_error(error):
            raise  # some weights may have changed already
        else:
            compiler.replace_whole_step(run, compiler.log_compiler_error(error))
        return None
    run.stopwatch.split("whole_step")
    return Step(number, loss, norm, skipped)


def _backward_with_recovery(run: Run, batch: Batch) -> Step:
    """Run forward and backward; repeat after a failure that one of `run.recoveries` handles."""
    while True:
        try:
            return forward_backward(run, batch)
        except Exception as error:
            if is_device_error(error):
                raise  # whatever touches the device would raise again
            run.update.abandon()
            if not any(recover(run, error) for recover in run.recoveries):
                from runner.core.train.failures import add_error_note  # imported only if used

                add_error_note(run, batch, error)
                raise
            if run.reader.user is not None:
                run.reader.user.discard_open_step(run.progress.step)
        # repeated outside of `except`, where no traceback references the activations


def forward_backward(run: Run, batch: Batch) -> Step:
    """Run forward and backward over one batch; gradients are in `.grad`, without an update."""
    number = run.progress.step + 1
    run.device.reseed(step_seed(run, number))  # dropout depends on this alone, so resume is exact
    run.update.begin()
    if not run.is_shared and run.micro_batch >= batch_size_of(batch[1]):
        loss = _forward(run, batch)
        run.stopwatch.split("forward")
        (loss if run.update.scale is None else loss * run.update.scale.value).backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        if run.compilation is not None and run.compilation.uses_cuda_graphs:
            loss = loss.clone()  # an output of the graph, which the next step overwrites
        run.stopwatch.split("backward")
    else:
        loss = _accumulate(run, batch)
    return _measure(run, number, loss)


def _measure(run: Run, number: int, loss: Tensor, again: bool = False) -> Step:
    veto = None if run.batch_validator is None else run.batch_validator.veto
    return Step(number, *run.world.measure_step(run.update, loss, veto, again))


def step_seed(run: Run, number: int) -> int:
    """Return the random seed of a step; it differs by process."""
    own = (run.rank,) if run.is_shared else ()
    return mix(run.seed, number, *own)


def _accumulate(run: Run, batch: Batch) -> Tensor:
    """Compute the mean loss of the batch and its gradient, one micro-batch at a time.

    Each part is weighted by its share of samples or tokens, so parts of different sizes and masked
    targets give the same mean as the whole batch.
    """
    samples = own_samples = batch_size_of(batch[1])
    batch_weight: Tensor | float = run.objective.weight(batch[1])
    if run.is_shared:
        samples = run.train.samples(run.progress.step)
        own_samples = 0 if run.train.empty else own_samples
        # other processes may drop some of their samples
        if run.bad_samples is not None and not isinstance(batch_weight, Tensor):
            dtype = torch.promote_types(run.update.parameters[0].dtype, torch.float32)
            # filled on the device: a copy from pageable memory is a host wait
            batch_weight = torch.full((), batch_weight, dtype=dtype, device=run.device.torch)
        batch_weight = run.world.total_weight(batch_weight, own_samples, samples)
    parts = run.world.micro_batch_slices(samples, run.micro_batch, own_samples)
    total = torch.zeros((), dtype=torch.float32, device=run.device.torch)
    for number, part_slice in enumerate(parts, 1):
        empty = part_slice.start == part_slice.stop
        part: Batch = slice_rows(batch, slice(0, 1) if empty else part_slice)
        weight = run.update.zero if empty else run.objective.weight(part[1])
        run.world.begin_micro_batch(samples, run.micro_batch, number - 1, is_stand_in=empty)
        # gradients are synchronised with the last part alone
        with nullcontext() if number == len(parts) else run.world.no_sync():
            loss = _weighted_loss(_forward(run, part), weight, batch_weight)
            run.stopwatch.split("forward")
            summed = loss * run.world.size if run.is_shared else loss  # gradients are averaged
            (summed if run.update.scale is None else summed * run.update.scale.value).backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
        run.stopwatch.split("backward")
    return total


def _weighted_loss(loss: Tensor, weight: Tensor | float, batch_weight: Tensor | float) -> Tensor:
    """Return the part's contribution to the mean loss of the batch, in the loss's precision."""
    if not isinstance(weight, Tensor):
        return loss * (weight / batch_weight)
    # integers are divided in fp32 or better, for any dtype of the loss
    share = weight.to(torch.promote_types(loss.dtype, torch.float32)) / batch_weight
    # a part with all targets masked has the mean 0/0 and the share 0
    return torch.where(share > 0, loss, 0.0) * share


def _forward(run: Run, batch: Batch) -> Tensor:
    irregular = run.compilation is not None and not _is_regular_size(run, batch_size_of(batch[1]))
    if not run.contexts and not irregular:
        return _compute_loss(run, batch)
    with ExitStack() as stack:
        if irregular:  # the last batch of an epoch: compiling for its size would take longer
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in run.contexts:
            stack.enter_context(context())
        return _compute_loss(run, batch)


def _compute_loss(run: Run, batch: Batch) -> Tensor:
    had_gradients = torch.is_grad_enabled()
    output = call_model(run.forward, batch[0])
    run.recorder.end_copy()  # before autograd's threads, which a fork does not have
    if had_gradients:
        warn_gradients_off("model: its forward")
    if run.uninspected and batch_size_of(batch[1]) > 1:
        from runner.core.train.first_call import inspect_first_call  # imported once

        return inspect_first_call(run, batch, output)
    return run.objective(output, batch[1])


def warn_gradients_off(code: str) -> None:
    """Log that user code has left torch's gradients off."""
    if not torch.is_grad_enabled():
        problem = "%s leaves torch's gradients off (torch.set_grad_enabled(False))"
        log.warning(f"{problem}; use `with torch.no_grad():`", code)


def _is_regular_size(run: Run, samples: int) -> bool:
    """Whether a full batch or one of its micro-batches has this number of samples."""
    full_size = run.train.batch_size
    parts = run.world.micro_batch_slices(full_size, run.micro_batch, full_size)
    return samples in {part.stop - part.start for part in parts}


def call_hooks(
    hooks: list[Hook], event: str, run: Run, payload: Step | Report | Evaluation
) -> Verdict:
    """Call the event on the hooks; return their worst verdict."""
    worst = Verdict.KEEP
    for hook in hooks:
        if isinstance(payload, Step) and not hook.due(payload.number):
            continue
        with _tolerate_system_errors(hook, run):
            verdict = getattr(hook, event)(run, payload)
            if verdict is not None and not isinstance(verdict, Verdict):
                call = f"{type(hook).__name__}.{event}"
                raise UsageError(f"{call} must return runner.Verdict or None, got {verdict!r}")
            worst = max(worst, verdict or Verdict.KEEP)
    return worst


def enter_session(stack: ExitStack, hook: Hook, run: Run) -> None:
    """Enter the hook's session, to be exited with the stack."""
    session = hook.session(run)

    def exit_session(*error: Any) -> bool | None:
        swallowed = None
        device_lost = error[1] is not None and is_device_error(error[1])
        secondary = suppress_device_errors() if device_lost else nullcontext()
        with _tolerate_system_errors(hook, run), secondary:
            swallowed = session.__exit__(*error)
        return swallowed

    with _tolerate_system_errors(hook, run):
        session.__enter__()
        stack.push(exit_session)


@contextmanager
def _tolerate_system_errors(hook: Hook, run: Run) -> Iterator[None]:
    """Record a system error in the history, not raise it, if the hook only monitors."""
    try:
        yield
    except (OSError, ImportError, psutil.Error) as error:
        if not hook.monitors:
            raise
        run.history.add(
            "monitoring", f"{type(hook).__name__}: {summarize_error(error)}",
            step=run.progress.step, category="resources", action="the run continues",
        )  # fmt: skip


def overrides_event(hook: Hook, event: str) -> bool:
    """Whether the hook's class overrides the event."""
    return getattr(type(hook), event) is not getattr(Hook, event)
