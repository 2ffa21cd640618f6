"""The training loop. Hooks observe; only the loop acts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from runner.core.checkpoint.lock import owns_folder
from runner.core.checkpoint.ownership import NOT_FINITE
from runner.core.device.device_errors import is_device_error, suppress_device_errors, translate_oom
from runner.core.device.signals import InterruptHandler
from runner.core.errors import (
    GaveUp,
    Interrupted,
    OutOfMemory,
    RunnerError,
    StorageError,
    UsageError,
    error_text,
)
from runner.core.execution.evaluation import evaluate
from runner.core.findings import Choice
from runner.core.format import count_noun, metric
from runner.core.interfaces.hook import Evaluation, Verdict, check_hooks
from runner.core.interfaces.objective import unknown_direction, unknown_metric
from runner.core.interfaces.processes import StepLimit
from runner.core.interfaces.run import FINISHED_ENDS, Run, check_run
from runner.core.models.modes import enter_training
from runner.core.preserved_state import exclusive_random_state
from runner.core.record.console import restore_logging
from runner.core.record.hydra_files import adopt_resumed_config, has_files, read_small_files
from runner.core.record.summary import FINISHED_STATUSES, Summary
from runner.core.record.text import resume_argument, summarize_error
from runner.core.security.secrets import redact_errors
from runner.core.train.baseline import record_baseline
from runner.core.train.evidence import build_summary, collect_evidence, record_failure
from runner.core.train.run_state import LastState, first_bad_step, save
from runner.core.train.step import (
    call_hooks,
    enter_session,
    make_step,
    overrides_event,
    record_step,
)

log = logging.getLogger("runner")


@exclusive_random_state("train", trains=True)
def train(run: Run) -> Summary:
    """Train from the current step to `run.total_steps`, and return the summary.

    Raises Interrupted after Ctrl-C or SIGTERM and GaveUp when the stability policy is exhausted,
    each after a checkpoint; UsageError at once while another thread of the process trains. The
    summary is written in all other cases.
    """
    check_run("train", run)
    if run.closed:
        raise UsageError("train: the run's `with` block has ended; train inside it")
    check_hooks("train", run.hooks)
    if run.higher_is_better is None:
        raise unknown_direction(run.monitor)
    restore_logging()  # constructors of the user's have run
    _check_early_stopping(run)  # a resumed run may have stopped right before this check
    is_over = run.progress.step >= run.total_steps or run.stop_reason
    previous = run.broadcast_choice(partial(_read_ended_summary, run)) if is_over else None
    if previous is not None:
        log.info("this run already ended at step %d; to continue: training.steps=…", previous.steps)
        return previous  # its record stays as it is
    if run.folder is not None and run.writes:
        adopt_resumed_config(run.folder)
    run.recorder.open(run.progress.step, run.record_offset, run.event_position)
    run.record_offset = run.event_position = None
    run.reader.ended = False
    if run.gain_tests is not None:
        run.gain_tests.plan(run)
    build_summary(run, "running", required=True)
    status, reason, ended_by = "failed", "a hook swallowed an exception", "error"
    try:
        with ExitStack() as stack:
            stack.enter_context(run.own_random_state())
            for hook in run.hooks:
                enter_session(stack, hook, run)
            record, translate = _record_lost_device(run), run.world.translate_lost()
            if run.folder is not None and run.writes:
                run.small_files = read_small_files(run.folder)
            with redact_errors(), translate_oom("while training"), record, translate:
                _train(run)
            collect_evidence(run)
            record_baseline(run)
            _keep_folder(run)
            if run.loss:
                from runner.core.train.lost_folder import check_record  # imported only if needed

                check_record(run)
            status = "stopped" if run.stop_reason else "done"
            reason = "; ".join(filter(None, (run.stop_reason, run.loss)))
            ended_by = _end_of(run)
    except Interrupted as error:
        status, reason, ended_by = "interrupted", str(error), "signal"
        raise
    except BaseException as error:
        reason = summarize_error(error)
        is_memory = isinstance(error, OutOfMemory)
        ended_by = "policy" if isinstance(error, GaveUp) else "memory" if is_memory else "error"
        record_failure(run, reason)  # first: the device, which may be lost, is asked last
        raise
    finally:
        run.reader.ended = True
        restore_logging()
        with suppress_device_errors() if status == "failed" else nullcontext():
            summary = build_summary(run, status, reason, ended_by=ended_by)
    return summary


def _keep_folder(run: Run, all_files: bool = True) -> None:
    """Make the run's folder again if it was removed, with `all_files` also its files.

    Called by all processes of a run. Costs 2 µs for the folder alone.
    """
    lost = run.folder is not None and not owns_folder(run.folder)
    if all_files or run.loss:
        lost |= run.checkpointer.is_lost or run.recorder.is_deleted
        lost |= run.folder is not None and not has_files(run.folder, run.small_files)
    lost = run.holds_for_any(lost)
    if lost:
        from runner.core.train.lost_folder import recover_folder  # imported only if needed

        recover_folder(run)


def _end_of(run: Run) -> str:
    """Return what ended the training; a request to stop at the last step ended nothing."""
    if not run.stop_reason:
        return "done"
    cut_short = run.progress.step < run.total_steps or run.stopped_by in FINISHED_ENDS
    return run.stopped_by or "hook" if cut_short else "done"


@contextmanager
def _record_lost_device(run: Run) -> Iterator[None]:
    """Record an error of the device before hooks and tools end, which may raise by it, too."""
    try:
        yield
    except Exception as error:
        if is_device_error(error):
            run.history.add(
                "exception", error_text(error), step=run.progress.step + 1,
                category="code", severity="error", action="the run ends", error=error, say=False,
            )  # fmt: skip
            record_failure(run, summarize_error(error))
        raise


def _read_ended_summary(run: Run) -> Summary | None:
    """Return the summary of a run that ended at this step; None if there is none."""
    if run.folder is not None:
        with suppress(StorageError):  # missing or damaged
            summary = Summary.read(run.folder)
            if summary.status in FINISHED_STATUSES and summary.steps == run.progress.step:
                return summary
    return None


def _train(run: Run) -> None:
    progress, stopwatch = run.progress, run.stopwatch
    in_step = ("on_gradients", "around")
    in_step_hooks = [h for h in run.hooks if any(overrides_event(h, e) for e in in_step)]
    after_step_hooks = [hook for hook in run.hooks if overrides_event(hook, "on_step")]
    if text := enter_training(run.model):
        run.choices.append(Choice("model.train", "training mode", text))
    distributed = run.is_shared
    make_grace_period = partial(_make_grace_period, run)
    with InterruptHandler(_signal_notice(run), distributed, make_grace_period) as interrupts:
        interrupts.warn_overridden()
        last_state = LastState(run)
        try:
            if run.sanity and not progress.step and run.saved_step < 0:
                _check_sanity(run, interrupts)
            run.objective.write_log = run.log
            batches = run.train.batches(progress.step)
            if run.saved_step < 0:
                # the first rollback restores it; a fork may begin at the best step
                save(run, best=progress.best_step == progress.step > 0)
                if run.parent_best is not None:
                    from runner.core.train.resume import inherit_best  # imported only by a fork

                    inherit_best(run)
            # may be due where a resumed run had stopped
            _validate_and_checkpoint(run, interrupts, last_state)
            while progress.step < run.total_steps and not run.stop_reason:
                stopwatch.start()
                interrupts.begin_wait()
                batch = next(batches)
                interrupts.end_wait()
                number = progress.step + 1
                empty = run.bad_samples is not None and run.bad_samples.record_batch(run.train)
                if run.batch_validator is not None and not empty:
                    batch = run.batch_validator.admit(number, batch)
                    run.stability.vetoed += run.batch_validator.take_vetoed()
                stopwatch.split("data")

                try:
                    step, verdict = make_step(run, batch, in_step_hooks, empty)
                    if run.device.waits_for_steps:  # an error of a kernel is raised here, too
                        run.device.synchronize()  # host sync: device.synchronize=true, each step
                except Exception as error:
                    from runner.core.train.failures import capture_failed_step

                    capture_failed_step(run, number, batch, error)
                    raise

                samples = record_step(run, step)
                last_state.record_update()
                if after_step_hooks:
                    verdict = max(verdict, call_hooks(after_step_hooks, "on_step", run, step))
                if progress.step % run.report_every == 0:
                    run.reader.close(stopwatch.elapsed())
                    verdict = max(verdict, _process_reports(run))
                signal_number = interrupts.received
                interrupts.warn_replaced()
                if distributed:
                    worst, number = run.all_reduce_max(verdict, signal_number or 0)
                    verdict, signal_number = Verdict(worst), number or None
                stopwatch.stop(samples)

                if verdict >= Verdict.ROLLBACK:
                    _stop_or_roll_back(run, verdict)
                if progress.step >= run.stability.due:
                    run.stability.apply_limits(progress.step)
                if signal_number is not None:  # before a validation, which may be slow
                    interrupts.end_grace()
                    _save_and_stop(run, Interrupted(signal_number))
                    raise Interrupted(signal_number, _resume_hint(run))
                _validate_and_checkpoint(run, interrupts, last_state)
            run.reader.close(stopwatch.elapsed())
            _apply_verdict(run, _process_reports(run, wait=True))
            if run.batch_validator is not None:
                run.batch_validator.settle()
        except KeyboardInterrupt:
            interrupts.end_grace()
            run.leave_others(interrupts.error())
            if interrupts.wait_interrupted and not _has_stalled_device(run):
                _save_and_stop(run)  # a second signal saves nothing
            raise interrupts.error(_resume_hint(run)) from None
        except (Interrupted, StorageError):
            raise  # a checkpoint is saved, or saving has just failed
        except (Exception, SystemExit) as error:
            interrupts.end_grace()
            if not isinstance(error, RunnerError) and run.world.means_loss(error):
                raise
            run.leave_others(error)
            # of an unfinished step or validation only buffers and random state have changed
            if _has_stalled_device(run) or not last_state.restore(error):
                raise
            gave_up = isinstance(error, GaveUp)  # raised by all processes at one step
            if run.saved_step < 0 or run.shards is not None and not gave_up:
                raise
            if isinstance(error, RunnerError):
                _save_and_stop(run, only_finite=gave_up, failed=True)
            elif not run.checkpointer.in_memory:
                from runner.core.train.failures import save_after_exception

                flush = partial(_process_reports, run, wait=True)
                save_after_exception(run, flush, partial(_resume_hint, run))
            raise
        finally:
            run.train.close()
            run.validation.close()
            run.objective.write_log = None
        if run.stability.config.guard:
            _check_updates(run)
        else:
            _check_result(run)
        save(run, final=True)
        if run.test is not None and run.stopped_by != "memory":
            _evaluate_test_set(run, interrupts)


def _check_updates(run: Run) -> None:
    """Raise GaveUp if all steps were skipped, unless a loss scale is still being searched."""
    progress = run.progress
    if 0 < progress.step <= progress.skipped and not run.history.counts.get("overflow"):
        run.checkpointer.close()
        steps, fix = count_noun(progress.step, "step"), "to find the first one: debug=anomaly"
        raise GaveUp(f"nothing is trained: all {steps} were bad and skipped; {fix}")


def _check_result(run: Run) -> None:
    """Raise GaveUp if nothing has skipped the bad steps, and the weights are lost."""
    verdict = Verdict.KEEP if run.stability.are_weights_finite() else Verdict.STOP
    if run.worst_verdict(verdict) is Verdict.STOP:
        run.checkpointer.close()
        fix = "stability=basic skips bad steps; to find the first one: debug=anomaly"
        raise GaveUp(f"{NOT_FINITE} after step {run.progress.step}; {fix}")


def _evaluate_test_set(run: Run, interrupts: InterruptHandler) -> None:
    """Evaluate the test set after the last save; if interrupted, a resumed run repeats it."""
    from runner.core.train.resume import evaluate_test_set  # imported only if needed

    try:
        interrupts.begin_wait()
        evaluate_test_set(run)
        interrupts.end_wait()
    except KeyboardInterrupt:
        raise interrupts.error(_resume_hint(run)) from None


def _check_sanity(run: Run, interrupts: InterruptHandler) -> None:
    """Validate one batch; a run that cannot validate ends before its first step and checkpoint."""
    from runner.core.train.sanity import validate_one_batch  # imported only if used

    interrupts.begin_wait()
    validate_one_batch(run)
    interrupts.end_wait()


def _save_and_stop(
    run: Run, error: RunnerError | None = None, only_finite: bool = False, failed: bool = False
) -> None:
    """Report all steps and save a checkpoint before an early end.

    `error` is one that all processes have agreed on. With `only_finite`, non-finite weights are
    not saved: at the last step the same command would take them for the result.
    """
    _process_reports(run, wait=True)
    run.stopwatch.pause()
    if error is not None:
        if run.train.is_stream:
            run.train.state(run)  # of all processes, while they are together
        run.leave_others(error)
    save(run, final=not only_finite, failed=failed)
    run.checkpointer.close()


def _has_stalled_device(run: Run) -> bool:
    """Whether the device may wait forever for a lost process; see `World.has_stalled_device`."""
    return run.world.has_stalled_device


def _signal_notice(run: Run) -> str:
    """Return the message for the first signal; compiling counts as part of its step."""
    text, again = "stopping after the current step or compilation", "again to stop at once"
    if run.checkpointer.in_memory:
        return f"{text}; {again}"
    return f"{text}, with a checkpoint; {again}, without one"


def _resume_hint(run: Run) -> str:
    """Return text with the step of the interruption and the command that resumes the run."""
    position = f" at step {run.progress.step} of {run.total_steps}"
    last = run.checkpointer.last
    if run.saved_step < 0 or run.folder is None or last is None:
        return position
    checkpoint_text = "a checkpoint is written"
    if run.saved_step < run.progress.step:
        checkpoint_text = f"the last checkpoint is {last}"
    return f"{position}; {checkpoint_text}; to resume: {resume_argument(run.folder)}"


def _make_grace_period(run: Run, interrupts: InterruptHandler, number: int) -> StepLimit:
    from runner.core.train.grace import GracePeriod  # imported only if needed

    return GracePeriod(run, interrupts, number, partial(_resume_hint, run))


def _validate_and_checkpoint(run: Run, interrupts: InterruptHandler, last_state: LastState) -> None:
    """Validate and save a checkpoint where due, also if it was due when a resumed run stopped."""
    progress = run.progress
    step, is_last = progress.step, progress.step >= run.total_steps
    improved, verdict = False, Verdict.KEEP
    if is_last:
        run.stopwatch.pause()
        _handle_last_report(run)
    every = run.validate_every  # 0: never
    validates = every > 0 and step > 0 and (is_last or step % every == 0)
    saves = step % run.checkpoint_every == 0
    if validates or saves or not run.is_shared and step % run.report_every == 0:
        _keep_folder(run, validates or saves)
    if validates and progress.validated_step < step:
        run.stopwatch.pause()
        last_state.record_validation()
        interrupts.begin_wait()  # a validation changes nothing, so a signal may end it
        evaluation = evaluate(run)
        interrupts.end_wait()
        last_state.record_validation()
        improved, verdict = _update_best(run, evaluation)
        last_state.end_validation()
    checkpoint_due = step > 0 and step % run.checkpoint_every == 0
    if improved or checkpoint_due:
        run.stopwatch.pause()
        _apply_verdict(run, _process_reports(run, wait=True))  # act on earlier steps first
    if improved or (checkpoint_due and run.saved_step < step):
        save(run, best=improved)
        build_summary(run, "running")  # in case the run is killed later
    _apply_verdict(run, verdict)


def _handle_last_report(run: Run) -> None:
    """Apply the verdict of all reports at the last step; a window without a bad step stays open."""
    verdict = _process_reports(run, wait=True)
    if first_bad_step(run):
        run.reader.close(run.stopwatch.elapsed())
        verdict = max(verdict, _process_reports(run, wait=True))
    _apply_verdict(run, verdict)


def _update_best(run: Run, evaluation: Evaluation) -> tuple[bool, Verdict]:
    """Record the evaluation; return whether it is the best so far, and the hooks' verdict."""
    if evaluation.constant_output and run.progress.validated_step:  # not of a fresh model
        from runner.core.train.constant_output import record_constant_output  # only if used

        record_constant_output(run, evaluation)
    hooks, verdict = run.hooks, Verdict.KEEP
    if run.monitor.startswith("user/"):
        from runner.core.train.user_values import call_logging_hooks

        evaluation, hooks, verdict = call_logging_hooks(run, evaluation, _compare_with_best)
    if run.monitor not in evaluation.metrics:
        _save_and_stop(run)
        names = sorted(evaluation.metrics)
        raise unknown_metric(run.monitor, names, f"; stopped{_resume_hint(run)}")
    watched = {run.monitor: run.monitor, "val/loss": "the validation loss"}
    values = {what: evaluation.metrics.get(name, 0.0) for name, what in watched.items()}
    if bad := " and ".join(f"{what} is {x}" for what, x in values.items() if not math.isfinite(x)):
        run.history.add(
            "validation_not_finite", bad, step=evaluation.step,
            category="numerics", action="it cannot be the best",
        )  # fmt: skip
    evaluation = _compare_with_best(run, evaluation)
    verdict = max(verdict, call_hooks(hooks, "on_validation", run, evaluation))
    _check_early_stopping(run)
    return evaluation.improved, verdict


def _compare_with_best(run: Run, evaluation: Evaluation) -> Evaluation:
    """Update the progress by the monitored metric; return the evaluation with `improved`."""
    progress, metrics = run.progress, evaluation.metrics
    value, best = metrics[run.monitor], progress.best
    better = best is None or (value > best if run.higher_is_better else value < best)
    loss = metrics.get("val/loss", 0.0)
    # of equal metrics that are saved anyway the one with the lower loss is best, which is no
    # improvement for patience
    saved = evaluation.step % run.checkpoint_every == 0 or evaluation.step >= run.total_steps
    best_loss = -math.inf if progress.best_loss is None else progress.best_loss
    is_tie = saved and value == best and loss < best_loss
    improved = (better or is_tie) and math.isfinite(value) and math.isfinite(loss)
    if improved:
        progress.best, progress.best_step = value, evaluation.step
        progress.best_loss = metrics.get("val/loss")
    progress.stale_validations = 0 if improved and better else progress.stale_validations + 1
    progress.metrics = metrics
    progress.validated_step = evaluation.step
    return replace(evaluation, improved=improved)


def _check_early_stopping(run: Run) -> None:
    """Set `stop_reason` if the metric has not improved for `patience` validations."""
    progress = run.progress
    if run.patience is not None and progress.stale_validations >= run.patience:
        best = "none" if progress.best is None else metric(progress.best)
        text = f"has not improved on {best} for {count_noun(run.patience, 'validation')}"
        run.request_stop("patience", f"{run.monitor} {text}")


def _process_reports(run: Run, wait: bool = False) -> Verdict:
    """Pass reports to the stability policy and the hooks; return the worst verdict."""
    restore_logging()
    verdict, process_lost = Verdict.KEEP, None
    if run.step_graph is not None and (wait or run.device.reads_are_free):
        run.step_graph.check()
    for report in run.reader.reports(wait):
        if not report.loss:
            continue
        if run.batch_validator is not None:
            run.batch_validator.read(report.last)  # no wait: those steps have ended
            run.stability.vetoed += run.batch_validator.take_vetoed()
            # each process saw its part of a batch
            if run.is_shared and process_lost is None:
                run.stability.vetoed, process_lost = run.world.union(run.stability.vetoed)
        run.stability.inspect(run, report)
        report.lr = run.update.lr_at(report.last - 1 - run.progress.skipped)
        if run.strict:
            from runner.core.train.failures import enforce_strict  # imported only if used

            enforce_strict(run)
        verdict = max(verdict, call_hooks(run.hooks, "on_report", run, report))
    if process_lost is not None:  # reports taken from the reader had to be recorded first
        raise process_lost
    return verdict if run.stability.decision is None else max(verdict, Verdict.ROLLBACK)


def _apply_verdict(run: Run, verdict: Verdict) -> None:
    """Stop or roll back if a hook of any process or the stability policy asks for it."""
    if (verdict := run.worst_verdict(verdict)) >= Verdict.ROLLBACK:
        _stop_or_roll_back(run, verdict)


def _stop_or_roll_back(run: Run, verdict: Verdict) -> None:
    from runner.core.train.resume import restore_last_good_checkpoint  # imported only if needed

    controller = run.stability
    run.stopwatch.pause()
    if verdict is Verdict.STOP:
        causes = run.gather((run.stopped_by, run.stop_reason))
        # of the first process with one: a limit may be reached in another one than rank 0
        run.stopped_by, run.stop_reason = next(
            (known for known in causes if known[1]), ("hook", "a hook requested a stop")
        )
    else:
        from runner.core.stability.messages import share_decision  # imported only if used

        own = controller.decision
        controller.decision = share_decision(own, run.gather(own), run.progress.step)
    while controller.needs_rollback(run):
        _process_reports(run, wait=True)  # reports in flight concern the weights that are replaced
        if restore_last_good_checkpoint(run):
            controller.record_rollback(run)
        else:
            controller.record_missing_checkpoint()
