"""The training loop and the pass over the validation set. Hooks watch; only the loop acts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner import compiler
from runner.batch import Batch, call, count, rows
from runner.errors import (
    ConfigError,
    Interrupted,
    OutOfMemory,
    RunnerError,
    StorageError,
)
from runner.evaluation import evaluate
from runner.hook import Evaluation, Hook, Report, Step, Verdict
from runner.interrupts import Interrupts
from runner.outcome import engagements, look, summarise
from runner.recovery import in_plain_words, is_out_of_memory
from runner.resume import roll_back, save
from runner.run import Run
from runner.seeds import mix
from runner.summary import Summary

if TYPE_CHECKING:
    from runner.optim.whole import WholeStep

log = logging.getLogger("runner")


def train(run: Run) -> Summary:
    """Train up to `run.total_steps`, from wherever the run stands, and say how it went.

    Raises Interrupted after Ctrl-C or SIGTERM and GaveUp when the stability policy is exhausted,
    each after a checkpoint; the summary is written in any case.
    """
    _lose_patience(run)  # a resumed run may have been cut off just then
    over = run.progress.step >= run.total_steps or run.stop_reason
    if over and run.folder is not None and (run.folder / "summary.json").exists():
        ended = Summary.read(run.folder)
        if ended.status in ("done", "stopped") and ended.steps == run.progress.step:
            log.info("this run ended at step %d; to go on: training.steps=…", ended.steps)
            return ended  # its record stays as it is
    run.recorder.open(run.progress.step, run.record_offset)
    run.record_offset = None
    summarise(run, "running")
    status, reason = "failed", "a hook kept an error to itself"
    try:
        with ExitStack() as stack:
            for hook in run.hooks:
                stack.enter_context(hook.session(run))
            with in_plain_words("while training"):
                _train(run)
            look(run)
            status, reason = ("stopped", run.stop_reason) if run.stop_reason else ("done", "")
    except Interrupted as error:
        status, reason = "interrupted", str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        summary = summarise(run, status, reason)
    return summary


def _train(run: Run) -> None:
    progress, watch, update = run.progress, run.watch, run.update
    watchers = [h for h in run.hooks if _has(h, "on_gradients") or _has(h, "around")]
    step_hooks = [hook for hook in run.hooks if _has(hook, "on_step")]
    run.model.train()
    with Interrupts() as interrupts:
        try:
            batches = run.train.batches(progress.step)
            if run.saved_step < 0:
                save(run)  # what the first roll-back goes back to
            _between_steps(run, interrupts)  # what was due when the run was cut off
            while progress.step < run.total_steps and not run.stop_reason:
                watch.start()
                interrupts.waiting = True
                batch = next(batches)
                interrupts.waiting = False
                watch.split("data")

                try:
                    step, verdict = make_step(run, batch, watchers)
                except Exception as error:
                    _keep(run, batch, error)
                    raise

                samples = run.train.samples(progress.step)
                progress.step += 1
                run.reader.add(step, samples)
                if step_hooks:
                    verdict = max(verdict, _ask(step_hooks, "on_step", run, step))
                if progress.step % run.report_every == 0:
                    run.reader.close(watch.elapsed())
                    verdict = max(verdict, _report(run))
                watch.stop(samples)

                if verdict >= Verdict.ROLLBACK:
                    _act(run, verdict)
                if progress.step >= run.guardian.due:
                    run.guardian.turn(progress.step)
                if interrupts.received is not None:  # ahead of a validation, which may take long
                    _leave(run)
                    raise interrupts.error(_whereabouts(run))
                _between_steps(run, interrupts)
            run.reader.close(watch.elapsed())
            _act(run, _report(run, wait=True))
        except KeyboardInterrupt:
            if interrupts.cut_short:  # else it is a second signal, which waits for no checkpoint
                _leave(run)
            raise interrupts.error(_whereabouts(run)) from None
        except (Interrupted, StorageError):
            raise  # saved already; saving would only fail again
        except RunnerError:  # the step in hand, if there is one, has changed nothing but buffers
            update.abandon()
            _leave(run)
            raise
        finally:
            run.train.close()
            run.validation.close()
        save(run, final=True)


def _keep(run: Run, batch: Batch, error: Exception) -> None:
    """Capture a step that ends the run, whose batch is in hand; not for want of memory or disk."""
    refused = isinstance(error, Interrupted | StorageError | OutOfMemory)
    if refused or is_out_of_memory(error):
        return
    run.update.abandon()
    step, message, kept = run.progress.step + 1, f"{type(error).__name__}: {error}", None
    if run.captures is not None:
        kept = run.captures.take(run, step, "exception", message, batch)
    run.history.add(
        "exception", message, step=step, category="code", severity="error", action="the run ends",
        error=error, capture=kept or "", say=False,
    )  # fmt: skip


def _leave(run: Run) -> None:
    """Save what there is before an early end; numbers on their way belong to it."""
    _report(run, wait=True)
    save(run, final=True)


def _whereabouts(run: Run) -> str:
    """Where an interrupted run stands, and how to go on."""
    at = f" at step {run.progress.step} of {run.total_steps}"
    if run.saved_step < 0 or run.folder is None or run.checkpointer.last is None:
        return at
    return f"{at}; a checkpoint is written; to go on: checkpoint.resume={run.folder}"


def make_step(run: Run, batch: Batch, hooks: Sequence[Hook] = ()) -> tuple[Step, Verdict]:
    """One step, its update included, and what `hooks` say to its gradients."""
    due = [hook for hook in hooks if hook.due(run.progress.step + 1)] if hooks else []
    if due:
        return _watched(run, batch, due)
    if run.whole is not None and run.whole.takes(batch):
        step = _whole(run, run.whole, batch)
        if step is not None:
            return step, Verdict.KEEP
    return _ordinary(run, batch, due)


def _watched(run: Run, batch: Batch, due: list[Hook]) -> tuple[Step, Verdict]:
    """A step that hooks are around, or whose gradients they see: never in one graph."""
    with ExitStack() as stack:
        if any(hook.eager for hook in due):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for hook in due:
            stack.enter_context(hook.around(run))
        return _ordinary(run, batch, [hook for hook in due if _has(hook, "on_gradients")])


def _ordinary(run: Run, batch: Batch, due: list[Hook]) -> tuple[Step, Verdict]:
    step, verdict = _attempt(run, batch), Verdict.KEEP
    if due:
        verdict = _ask(due, "on_gradients", run, step)
        if verdict >= Verdict.SKIP:
            step.skipped = torch.ones_like(step.skipped)
            run.guardian.vetoed.append(step.number)
    run.update.apply(step.grad_norm, step.skipped)
    run.watch.split("optimizer")
    return step, verdict


def _whole(run: Run, whole: WholeStep, batch: Batch) -> Step | None:
    """The step in one graph; None, from then on too, where there can be no such graph."""
    number = run.progress.step + 1
    run.device.reseed(mix(run.seed, number))
    if not whole.steps:
        log.info("compiling the step, which takes seconds, and up to a minute the first time")
    try:
        loss, norm, skipped = whole(batch)
    except Exception as error:
        if not compiler.is_at_fault(error) and (whole.steps or compiler.was_running(error)):
            raise  # some weights may have changed already
        run.whole = None
        run.fallen["whole_step"] = reason = compiler.why(error)
        log.warning("optimization.whole_step: fell back: %s", reason)
        if run.compilation is not None:
            run.compilation.start()
        return None
    run.watch.split("whole_step")
    return Step(number, loss, norm, skipped)


def _attempt(run: Run, batch: Batch) -> Step:
    """The step; one that fails is tried again for as long as something can be done about it."""
    while True:
        try:
            return backward(run, batch)
        except Exception as error:
            run.update.abandon()
            if not any(recover(run, error) for recover in run.recoveries):
                raise
        # tried again out here, where no traceback holds on to the activations


def backward(run: Run, batch: Batch) -> Step:
    """Forward and backward over one batch; gradients are in `.grad`, the update is not made."""
    number = run.progress.step + 1
    run.device.reseed(mix(run.seed, number))  # dropout depends on the step alone: resume is exact
    run.update.begin()
    if run.micro_batch >= count(batch[1]):
        loss = _forward(run, batch)
        run.watch.split("forward")
        (loss if run.update.scale is None else loss * run.update.scale.value).backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        run.watch.split("backward")
    else:
        loss = _accumulate(run, batch)
    norm, skipped = run.update.measure(loss)
    return Step(number, loss, norm, skipped)


def _accumulate(run: Run, batch: Batch) -> Tensor:
    """The large batch's mean loss and its gradient, a micro-batch at a time.

    Each part counts by its share of the samples or tokens, so a ragged last part and masked
    targets come out as in the large batch.
    """
    whole = run.objective.weight(batch[1])
    total = torch.zeros((), device=run.device.torch)
    for start in range(0, count(batch[1]), run.micro_batch):
        part: Batch = rows(batch, slice(start, start + run.micro_batch))
        share = run.objective.weight(part[1]) / whole
        loss = _forward(run, part)
        # a part whose targets are all masked has the mean 0/0 and no share
        loss = (
            loss * share if isinstance(share, float) else torch.where(share > 0, loss, 0.0) * share
        )
        run.watch.split("forward")
        (loss if run.update.scale is None else loss * run.update.scale.value).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        run.watch.split("backward")
    return total


def _forward(run: Run, batch: Batch) -> Tensor:
    odd = run.compilation is not None and count(batch[1]) != run.micro_batch
    if not run.contexts and not odd:
        return run.objective(call(run.forward, batch[0]), batch[1])
    with ExitStack() as stack:
        if odd:  # the last of an epoch: compiling once more, for its size, would take longer
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in run.contexts:
            stack.enter_context(context())
        return run.objective(call(run.forward, batch[0]), batch[1])


def _between_steps(run: Run, interrupts: Interrupts) -> None:
    """Validate and save, where that is due; a resumed run makes up for what it was cut off from."""
    progress = run.progress
    step, last = progress.step, progress.step >= run.total_steps
    improved, verdict = False, Verdict.KEEP
    if step and (last or step % run.validate_every == 0) and progress.validated_step < step:
        interrupts.waiting = True  # nothing changes while validating, so it may be cut short
        evaluation = evaluate(run)
        interrupts.waiting = False
        improved, verdict = _judge(run, evaluation)
    due = step > 0 and step % run.checkpoint_every == 0
    if improved or due:
        _act(run, _report(run, wait=True))  # what is on its way belongs before the checkpoint
    if improved or (due and run.saved_step < step):
        save(run, best=improved)
        summarise(run, "running")  # what a killed run leaves behind
    _act(run, verdict)


def _judge(run: Run, evaluation: Evaluation) -> tuple[bool, Verdict]:
    """Whether this is the best so far, and what the hooks say to it."""
    progress, metrics = run.progress, evaluation.metrics
    if run.monitor not in metrics:
        known = ", ".join(sorted(metrics))
        raise ConfigError(
            "training.monitor", f"there is no metric {run.monitor!r}", f"one of {known}"
        )
    value = metrics[run.monitor]
    best = progress.best
    better = best is None or (value > best if run.higher_is_better else value < best)
    improved = better and math.isfinite(value)
    if improved:
        progress.best, progress.best_step = value, evaluation.step
        progress.stale_validations = 0
    else:
        progress.stale_validations += 1
    progress.metrics = metrics
    progress.validated_step = evaluation.step
    evaluation = Evaluation(evaluation.step, metrics, evaluation.confusion, improved)
    verdict = _ask(run.hooks, "on_validation", run, evaluation)
    _lose_patience(run)
    return improved, verdict


def _lose_patience(run: Run) -> None:
    """Stop a run that no longer improves."""
    progress = run.progress
    if run.patience is not None and progress.stale_validations >= run.patience:
        run.stop_reason = (
            f"{run.monitor} has not improved on {progress.best} for {run.patience} validations"
        )


def _report(run: Run, wait: bool = False) -> Verdict:
    """Hand the numbers that have reached the host to the guardian and the hooks."""
    verdict = Verdict.KEEP
    if run.whole is not None and (wait or run.device.reads_are_free):
        run.whole.check()
    for report in run.reader.reports(wait):
        if not report.loss:
            continue
        run.guardian.look(run, report)
        report.lr = run.update.lr_at(report.last - 1 - run.progress.skipped)
        if run.strict:
            _prove(run)
        verdict = max(verdict, _ask(run.hooks, "on_report", run, report))
    return verdict if run.guardian.decision is None else max(verdict, Verdict.ROLLBACK)


def _prove(run: Run) -> None:
    """Under optimization.strict: every technique asked for has taken hold, or the run ends."""
    run.strict = False  # once is enough
    look(run)
    for row in engagements(run):
        if row.requested and not row.engaged:
            raise ConfigError(
                f"optimization.{row.name}",
                f"did not take hold: {row.reason}",
                "switch it off or set optimization.strict=false",
            )


def _act(run: Run, verdict: Verdict) -> None:
    """Do what a hook asks for, or what the guardian has decided on."""
    if verdict < Verdict.ROLLBACK:
        return
    guardian = run.guardian
    if verdict is Verdict.STOP:
        run.stop_reason = run.stop_reason or "a hook asked to stop"
    elif guardian.decision is None:
        guardian.ask(run)
    while (rule := guardian.carry_out(run)) is not None:
        _report(run, wait=True)  # what is on its way is about the weights that go
        if roll_back(run, rule.factor):
            guardian.rolled_back(run)
        else:
            guardian.stuck(run)


def _ask(hooks: list[Hook], event: str, run: Run, what: Step | Report | Evaluation) -> Verdict:
    """The worst of the hooks' verdicts."""
    worst = Verdict.KEEP
    for hook in hooks:
        if isinstance(what, Step) and not hook.due(what.number):
            continue
        worst = max(worst, getattr(hook, event)(run, what) or Verdict.KEEP)
    return worst


def _has(hook: Hook, event: str) -> bool:
    return getattr(type(hook), event) is not getattr(Hook, event)
