"""Start the processes of a distributed run, and restart them when one is lost."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from runner.core.build.setup import Components
from runner.core.checkpoint import folder as folders
from runner.core.config.run_config import RunConfig
from runner.core.device.device import choose_device_kind
from runner.core.errors import ConfigError, Interrupted, ProcessLost, RunnerError, UsageError
from runner.core.findings import Choice
from runner.core.jobs import load_job, train
from runner.core.jobs import run_report as report
from runner.core.record.storage import remove_folder
from runner.core.record.summary import SUMMARY_FILE as SUMMARY
from runner.core.record.summary import CheckpointPaths, Summary
from runner.core.record.text import resume_argument
from runner.core.schemas.device import Backend, DeviceKind, DistributedConfig, DistributedKind
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.training import MICRO_BATCH
from runner.scale.distributed.agent import Agent
from runner.scale.distributed.join import device_type, gpu_index
from runner.scale.distributed.outcome import RANKS_FOLDER, RunVerdict
from runner.scale.distributed.rank import STACKS_FOLDER, run_rank, run_rank_process
from runner.scale.distributed.rank_info import LOOPBACK, RankInfo, detect_rank
from runner.scale.distributed.world import choose_backend, host_local_store, open_store

log = logging.getLogger("runner")

PROCESS_LOST = "process_lost"  # fault kind limited by `distributed.restarts`
RUN_STOPPED = "run_stopped"  # all processes were stopped and continued; restarts are not limited


def main(config: RunConfig, folder: Path) -> Summary | None:
    """Train with several processes; under torchrun or SLURM this is already one of them.

    Returns rank 0's summary; None for job=doctor. Raises the error of the process that failed, with
    its exit code, ProcessLost after more than `distributed.restarts` losses, and Interrupted.
    """
    place = detect_rank()
    if place is not None:
        return _run_as_rank_zero(config, folder, place)
    processes = count_processes(config)
    if processes == 1:
        log.info("distributed: there is one process; distributed.processes=N starts more")
        load_job(config.job.kind)(replace(config, distributed=DistributedConfig()), folder)
        return _read_summary(config, folder)
    components = train.resolve_components(config, folder) or Components()
    losses, mtime_before = list[AttemptLost](), _summary_mtime(folder)
    while True:
        try:
            run_attempt(config, folder, components, processes, losses)
            return _read_summary(config, folder)
        except AttemptLost as loss:
            losses.append(loss)
            if sum(loss.kind == PROCESS_LOST for loss in losses) > config.distributed.restarts:
                fix = "distributed.restarts=N restarts all from the last checkpoint, as does"
                error = ProcessLost(f"{loss}; {fix} {resume_argument(folder)}")
                if _summary_mtime(folder) != mtime_before:
                    _update_summary(folder, "failed", str(error), losses)
                raise error from None
            components = loss.apply_to(components)
            last = folders.link_target(folder / folders.FOLDER, "last")
            log.warning("%s; all processes restart from %s", loss, last or "the beginning")
        # continue from checkpoints of the lost attempt; without any, start as before
        if any(folder.glob("checkpoints/step_*")):
            config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


def _read_summary(config: RunConfig, folder: Path) -> Summary | None:
    return Summary.read(folder) if config.job.kind is JobKind.train else None


def _run_as_rank_zero(config: RunConfig, folder: Path, place: RankInfo) -> Summary | None:
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    store.set(_folder_key(), str(folder.absolute()))  # for rank 0 of the next attempt
    try:
        return run_rank(config, folder, None, place)
    except ProcessLost as error:
        if folders.link_target(folder / folders.FOLDER, "last"):
            error.args = (f"{error}; to resume: {resume_argument(folder)}",)
        _update_summary(folder, "failed", str(error))
        raise error from None
    except UsageError:
        _remove_rank_folders(folder)
        raise


def folder_before_restart(config: RunConfig, place: RankInfo) -> Path | None:
    """Return the run's folder if torchrun has restarted the processes; else None."""
    if not (place.attempt and place.hosted):
        return None
    store = open_store(place, timedelta(seconds=config.distributed.timeout_s))
    return Path(store.get(_folder_key()).decode()) if store.check([_folder_key()]) else None


def _folder_key() -> str:
    return f"runner/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/folder"


class AttemptLost(Exception):
    """The processes have to be restarted, after a fault of this kind."""

    def __init__(
        self, message: str, kind: str = PROCESS_LOST, choices: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.choices = kind, choices or {}
        super().__init__(message)

    def apply_to(self, components: Components) -> Components:
        """Add the choices for the next attempt, such as a smaller micro-batch."""
        kept_choices = [choice for choice in components.chosen if choice.key not in self.choices]
        new_choices = [Choice(key, value, str(self)) for key, value in self.choices.items()]
        choices = {**components.choices, **self.choices}
        return replace(components, choices=choices, chosen=[*kept_choices, *new_choices])


def run_attempt(
    config: RunConfig,
    folder: Path,
    components: Components,
    processes: int,
    losses: Sequence[AttemptLost] = (),
    begin: Callable[..., None] = run_rank_process,
) -> None:
    """Start all processes and wait for their end; each attempt has its own store.

    Raises the error that ended the run, or AttemptLost if a process was lost.
    """
    mtime_before, store = _summary_mtime(folder), host_local_store()
    reasons = tuple((loss.kind, str(loss)) for loss in losses)
    with tempfile.TemporaryDirectory(prefix="runner-") as outcome_folder:
        agent = Agent(
            Path(outcome_folder),
            config.distributed.timeout_s,
            config.checkpoint.grace_s,
            choose_backend(config.distributed, device_type(config).type) == "nccl",
            config.data.timeout_s,
            lambda: _summary_mtime(folder) != mtime_before,
        )
        places = [
            RankInfo(
                rank, processes, rank, processes, LOOPBACK, store.port, True, len(losses), "runner",
                outcome_folder=agent.outcome_folder, losses=reasons,
            )
            for rank in range(processes)
        ]  # fmt: skip
        agent.run(begin, {place.rank: (config, folder, components, place) for place in places})
        verdict = agent.verdict({place.rank: _process_name(config, place) for place in places})
    if verdict.kind == "lost" and agent.stopped_s:
        text = f"{verdict.message}; all processes had been stopped for {agent.stopped_s:.0f} s"
        raise AttemptLost(text, RUN_STOPPED)
    if verdict.kind != "done":
        raise _error_of(verdict, folder, _summary_mtime(folder) != mtime_before)


def _process_name(config: RunConfig, place: RankInfo) -> str:
    index = gpu_index(config, place)
    return f"process {place.rank}" + ("" if index is None else f" (cuda:{index})")


def _summary_mtime(folder: Path) -> int:
    """Return when the record was last written; 0 if there is none."""
    with suppress(OSError):
        return (folder / SUMMARY).stat().st_mtime_ns
    return 0


def _error_of(verdict: RunVerdict, folder: Path, trained: bool) -> Exception:
    """Return the exception for a verdict other than `done`, after updating the record.

    The record is updated only if the run was `trained` in this attempt.
    """
    if verdict.kind == "restart":
        kind = "out_of_memory" if MICRO_BATCH in verdict.choices else "compiler_failed"
        return AttemptLost(verdict.message, kind, verdict.choices)
    if verdict.kind == "lost":
        return AttemptLost(verdict.message)
    error = RunnerError(verdict.message)
    if verdict.kind == "interrupted":
        error = _interruption(folder, verdict.exit_code - 128, trained)
    error.exit_code = verdict.exit_code
    if trained:
        status = "interrupted" if verdict.kind == "interrupted" else "failed"
        _update_summary(folder, status, str(error))
    if error.exit_code == UsageError.exit_code:
        _remove_rank_folders(folder)
    if verdict.log:
        error.args = (f"{error}; the traceback is in {folder.absolute() / verdict.log}",)
    return error


def _remove_rank_folders(folder: Path) -> None:
    """Remove the processes' folders, after an error before the run began."""
    if (folder / SUMMARY).exists():
        return
    remove_folder(folder / RANKS_FOLDER, ignore_errors=True)
    for part in (STACKS_FOLDER, os.path.dirname(STACKS_FOLDER)):
        with suppress(OSError):
            (folder / part).rmdir()


def _interruption(folder: Path, signal_number: int, trained: bool) -> Interrupted:
    """Return how a signal ended the run, with the command to resume."""
    where = " before the first step; no checkpoint is written"
    with suppress(RunnerError):
        if trained:  # else a summary is that of an earlier attempt
            summary = Summary.read(folder)
            where = f" at step {summary.steps}"
            if summary.status == "interrupted":  # written by rank 0
                where = summary.reason.removeprefix(str(Interrupted(signal_number)))
            elif any(folder.glob("checkpoints/step_*")):
                where += f"; to resume: {resume_argument(folder)}"
    return Interrupted(signal_number, where)


def _update_summary(
    folder: Path, status: str, reason: str, losses: Sequence[AttemptLost] = ()
) -> None:
    """Set how the run ended in the summary, if rank 0 could not, or did not know why."""
    root = folder / folders.FOLDER
    try:
        summary = Summary.read(folder)
        if summary.status == status == "interrupted":  # its reason says what was saved
            return
        paths = (folders.link_target(root, name) for name in ("last", "best"))
        summary.faults |= Counter(loss.kind for loss in losses)
        summary.checkpoint = CheckpointPaths(*paths)
        if losses:
            summary.distributed["restarts"] = [str(loss) for loss in losses[:-1]]
        summary.set_end(status, reason)
        summary.write(folder)
        report.write_report(summary, folder)
    except RunnerError:
        log.debug("no summary to end", exc_info=True)


def count_processes(config: RunConfig) -> int:
    """Return the number of processes on this machine. ConfigError if there are too few GPUs."""
    if config.distributed.kind is DistributedKind.none:
        return 1
    requested = config.distributed.processes
    gpus = torch.cuda.device_count() if config.device.kind is not DeviceKind.cpu else 0
    if requested is None:
        return max(1, gpus)
    shares_gpus = gpus and config.distributed.backend is Backend.gloo
    if requested > gpus and (gpus or config.device.kind is DeviceKind.cuda) and not shares_gpus:
        if not gpus:
            choose_device_kind(config.device.kind)
        problem = f"is {requested}, but there are {gpus} GPUs"
        fix = f"use {gpus} or less, or share them by distributed.backend=gloo"
        raise ConfigError("distributed.processes", problem, fix)
    return requested
