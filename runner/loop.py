"""The training loop. Hooks watch; only the loop acts."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack

from runner.batch import Batch
from runner.errors import (
    ConfigError,
    Interrupted,
    OutOfMemory,
    RunnerError,
    StorageError,
)
from runner.evaluation import evaluate
from runner.hook import Evaluation, Verdict
from runner.interrupts import Interrupts
from runner.objective import unknown
from runner.outcome import engagements, look, summarise
from runner.random_state import exclusive_random_state
from runner.record import noted
from runner.record.raised import gist
from runner.record.typed import resuming
from runner.recovery import in_plain_words, is_out_of_memory
from runner.resume import roll_back, save, trouble
from runner.run import Run, check_run
from runner.security.secrets import told_by_name
from runner.step import ask, count_in, has, make_step
from runner.summary import Summary

log = logging.getLogger("runner")


@exclusive_random_state("train", trains=True)
def train(run: Run) -> Summary:
    """Train up to `run.total_steps`, from wherever the run stands, and say how it went.

    Raises Interrupted after Ctrl-C or SIGTERM and GaveUp when the stability policy is exhausted,
    each after a checkpoint; the summary is written in any case. UsageError, before anything is
    done, while another thread of the process trains.
    """
    check_run("train", run)
    _lose_patience(run)  # a resumed run may have been cut off just then
    over = run.progress.step >= run.total_steps or run.stop_reason
    if over and run.folder is not None and (run.folder / "summary.json").exists():
        ended = Summary.read(run.folder)
        if ended.status in ("done", "stopped") and ended.steps == run.progress.step:
            log.info("this run ended at step %d; to go on: training.steps=…", ended.steps)
            return ended  # its record stays as it is
    if run.folder is not None:
        noted.adopt(run.folder)
    run.recorder.open(run.progress.step, run.record_offset)
    run.record_offset = None
    summarise(run, "running", must=True)
    status, reason = "failed", "a hook kept an error to itself"
    try:
        with ExitStack() as stack:
            for hook in run.hooks:
                stack.enter_context(hook.session(run))
            with told_by_name(), in_plain_words("while training"):
                _train(run)
            look(run)
            status, reason = ("stopped", run.stop_reason) if run.stop_reason else ("done", "")
    except Interrupted as error:
        status, reason = "interrupted", str(error)
        raise
    except BaseException as error:
        reason = gist(error)
        raise
    finally:
        summary = summarise(run, status, reason)
    return summary


def _train(run: Run) -> None:
    progress, watch, update = run.progress, run.watch, run.update
    watchers = [h for h in run.hooks if has(h, "on_gradients") or has(h, "around")]
    step_hooks = [hook for hook in run.hooks if has(hook, "on_step")]
    run.model.train()
    with Interrupts(_on_a_signal(run)) as interrupts:
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
                number = progress.step + 1
                if run.inputs is not None:
                    batch = run.inputs.admit(number, batch)
                    run.guardian.vetoed += run.inputs.take_vetoed()
                watch.split("data")

                try:
                    step, verdict = make_step(run, batch, watchers)
                except Exception as error:
                    _keep(run, number, batch, error)
                    raise

                samples = count_in(run, step)
                if step_hooks:
                    verdict = max(verdict, ask(step_hooks, "on_step", run, step))
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
            if run.inputs is not None:
                run.inputs.settle()
        except KeyboardInterrupt:
            if interrupts.cut_short:  # else it is a second signal, which waits for no checkpoint
                _leave(run)
            raise interrupts.error(_whereabouts(run)) from None
        except (Interrupted, StorageError):
            raise  # saved already; saving would only fail again
        except RunnerError:  # a step in hand has changed nothing but buffers, or was counted in
            update.abandon()
            _leave(run)
            raise
        finally:
            run.train.close()
            run.validation.close()
        save(run, final=True)


def _keep(run: Run, step: int, batch: Batch, error: Exception) -> None:
    """Capture the step that ends the run; not if memory, disk or a config key is to blame."""
    refused = isinstance(error, Interrupted | StorageError | OutOfMemory | ConfigError)
    if refused or is_out_of_memory(error):
        return
    run.update.abandon()
    message, kept = f"{type(error).__name__}: {error}", None
    if run.captures is not None:
        kept = run.captures.take(run, step, "exception", message, batch)
        run.captures.tell()  # the fault's own line is the last of the run
    run.history.add(
        "exception", message, step=step, category="code", severity="error", action="the run ends",
        error=error, capture=kept or "", say=False,
    )  # fmt: skip


def _leave(run: Run) -> None:
    """Save what there is before an early end; numbers on their way belong to it."""
    _report(run, wait=True)
    save(run, final=True)


def _on_a_signal(run: Run) -> str:
    """What is said at once, wherever the run is; a compiler belongs to the step it compiles for."""
    if run.checkpointer.in_memory:
        return "stopping after the step in hand, or its compilation; once more to end at once"
    return (
        "stopping after the step in hand, or its compilation, with a checkpoint; once more to end "
        "at once, without one"
    )


def _whereabouts(run: Run) -> str:
    """Where an interrupted run stands, and how to go on."""
    at = f" at step {run.progress.step} of {run.total_steps}"
    if run.saved_step < 0 or run.folder is None or run.checkpointer.last is None:
        return at
    return f"{at}; a checkpoint is written; to go on: {resuming(run.folder)}"


def _between_steps(run: Run, interrupts: Interrupts) -> None:
    """Validate and save, where that is due; a resumed run makes up for what it was cut off from."""
    progress = run.progress
    step, last = progress.step, progress.step >= run.total_steps
    improved, verdict = False, Verdict.KEEP
    if last:
        _settle(run)
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


def _settle(run: Run) -> None:
    """At the last step, act on what is wrong before what comes of it is validated and saved.

    Where nothing is, the stretch in hand stays open: it goes on if the run is lengthened.
    """
    verdict = _report(run, wait=True)
    if trouble(run):
        run.reader.close(run.watch.elapsed())
        verdict = max(verdict, _report(run, wait=True))
    _act(run, verdict)


def _judge(run: Run, evaluation: Evaluation) -> tuple[bool, Verdict]:
    """Whether this is the best so far, and what the hooks say to it."""
    progress, metrics = run.progress, evaluation.metrics
    if run.monitor not in metrics:
        _leave(run)
        raise unknown(run.monitor, sorted(metrics), f"; stopped{_whereabouts(run)}")
    value = metrics[run.monitor]
    best = progress.best
    better = best is None or (value > best if run.higher_is_better else value < best)
    loss = metrics.get("val/loss", 0.0)
    improved = better and math.isfinite(value) and math.isfinite(loss)
    if not math.isfinite(loss):
        run.history.add(
            "validation_not_finite", f"the validation loss is {loss}", step=evaluation.step,
            category="numerics", action="it cannot be the best",
        )  # fmt: skip
    if improved:
        progress.best, progress.best_step = value, evaluation.step
        progress.stale_validations = 0
    else:
        progress.stale_validations += 1
    progress.metrics = metrics
    progress.validated_step = evaluation.step
    evaluation = Evaluation(evaluation.step, metrics, evaluation.confusion, improved)
    verdict = ask(run.hooks, "on_validation", run, evaluation)
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
        if run.inputs is not None:
            run.inputs.read(report.last)  # those steps are made: nothing is waited for
            run.guardian.vetoed += run.inputs.take_vetoed()
        run.guardian.look(run, report)
        report.lr = run.update.lr_at(report.last - 1 - run.progress.skipped)
        if run.strict:
            _prove(run)
        verdict = max(verdict, ask(run.hooks, "on_report", run, report))
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
