"""Hyper-parameter search: trials are jobs of a sweep, proposed by a study."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from runner.core.config.run_config import RunConfig
from runner.core.device.signals import PRUNED, request_stop, take_stop_request
from runner.core.errors import StorageError, UsageError, install_command
from runner.core.record.hydra_files import overrides_by_key
from runner.core.record.storage import LONGEST_ROW, METRICS, open_regular, write_or_log
from runner.core.record.summary import FINISHED_STATUSES, Summary
from runner.core.record.text import json_safe
from runner.core.schemas.sweep import LauncherConfig, SearchSweeperConfig
from runner.scale.sweep.job_starter import JobStarter, open_sweep, plan_job
from runner.scale.sweep.plan import JobPlan, Planner
from runner.scale.sweep.schedule import Schedule
from runner.scale.sweep.search_record import SEARCH_FILE
from runner.scale.sweep.state import RUNNING, Job, current_session

if TYPE_CHECKING:
    from optuna.trial import Trial

    from runner.scale.sweep.search_space import SearchPlan
    from runner.scale.sweep.study import StudyFile

log = logging.getLogger("runner")

RUN_MODE = "hydra.mode=RUN"  # for trials, whose recipe would start another search


def is_search(config: DictConfig) -> bool:
    """Whether the config's sweeper is a search."""
    return OmegaConf.get_type(config.hydra.sweeper) is SearchSweeperConfig


def plan_search(overrides: Sequence[str], config: RunConfig, typed_hash: str) -> SearchPlan:
    """Return the plan of a search. Raises ConfigError, or UsageError if Optuna is missing."""
    if find_spec("optuna") is None:
        fix = install_command("search")
        raise UsageError(f"experiment=search needs optuna, which is not installed: {fix}")
    from runner.scale.sweep.search_space import SearchPlan, read_space, resolve_metric, trial_mode

    space = read_space(overrides, config.search)
    metric, maximize = resolve_metric(config)
    space = replace(space, shared=(*space.shared, *trial_mode(config, metric, maximize)))
    name = f"{config.name}-{typed_hash[:12]}"
    return SearchPlan(space, config.search, metric, maximize, name, config.data)


def run_search(config: DictConfig, compose: Callable[[DictConfig, list[str]], DictConfig]) -> None:
    """Run trials until there are enough, each in its own process.

    Raises UsageError if another process writes to the sweep's folder, StorageError, Interrupted.
    """
    from runner.scale.sweep.study import StudyFile

    session = current_session()
    plan: SearchPlan = session.search_plan
    launcher: Any = OmegaConf.to_object(config.hydra.launcher)
    settings: LauncherConfig = replace(launcher, jobs=plan.settings.parallel or launcher.jobs)
    with open_sweep(config, settings) as starter:
        starter.start_fork_server()
        starter.sweep.jobs = [*session.earlier_jobs]
        starter.hydra_overrides.append(RUN_MODE)
        study = StudyFile(plan, session.folder)
        trials = TrialJobs(study, starter, lambda overrides: compose(config, overrides))
        trials.resume()
        try:
            schedule = Schedule(starter.sweep, session.folder, settings, starter.start, trials)
            schedule.shared = overrides_by_key(plan.space.shared)
            schedule.run()
        finally:
            trials.write_record()


@dataclass
class RunningTrial:
    """A running trial, and how much of its record was read."""

    trial: Trial
    position: int = 0  # offset in metrics.jsonl
    validations: int = 0
    asked_to_stop: bool = False


@dataclass
class TrialJobs:
    """Source of a search's jobs: each job is the next trial of the study."""

    study: StudyFile
    starter: JobStarter
    compose: Callable[[list[str]], DictConfig]
    running: dict[int, RunningTrial] = field(default_factory=dict)  # by job number
    unfinished: list[Trial] = field(default_factory=list)  # unfinished trials of an earlier process

    def __post_init__(self) -> None:
        self.folder = self.starter.session.folder  # the sweep's

    def resume(self) -> None:
        """Take over the trials that an earlier process of this sweep left unfinished."""
        self.unfinished = self.study.unfinished_trials()
        self._record_ended_jobs()
        if trial_count := len(self.study.trials()):
            target, unfinished = self.study.plan.settings.trials, len(self.unfinished)
            text = f"{trial_count - unfinished} of {target} trials are done"
            text += f", {unfinished} that were cut off are run again" if unfinished else ""
            log.info("%s: %s", self.study.path, text)

    def _record_ended_jobs(self) -> None:
        """Settle jobs that had ended before a killed process could record that."""
        space = self.study.plan.space
        open_trials = {tuple(space.overrides(trial.params)): trial for trial in self.unfinished}
        for job in self.starter.sweep.jobs:
            trial = open_trials.get(tuple(job.overrides))
            try:
                summary = Summary.read(self.folder / job.folder)
            except StorageError:
                continue
            if job.status != RUNNING or (not summary.finished and trial is not None):
                continue
            job.status, job.reason = summary.status, summary.reason
            if trial is not None:
                self._record_trial(trial, job)
                self.unfinished.remove(trial)

    def next_job(self) -> JobPlan | None:
        """Return the next trial's job; None if there are no more trials."""
        trial = self.unfinished.pop(0) if self.unfinished else self.study.ask()
        return None if trial is None else self._plan_trial(trial)

    def on_poll(self, plan: JobPlan) -> None:
        """Report the trial's validations, and ask it to stop if it is pruned."""
        running, folder = self.running[plan.job.number], self.folder / plan.job.folder
        for value in self._new_values(running, folder / METRICS):
            running.validations += 1
            reason = self.study.report(running.trial, running.validations, value)
            if reason and not running.asked_to_stop and plan.job.status == RUNNING:
                request_stop(folder, reason)
                running.asked_to_stop = True

    def on_end(self, plan: JobPlan) -> None:
        """Report the end to the study; an interrupted trial stays open for the next process."""
        self.on_poll(plan)  # reads the last validations
        running, job = self.running.pop(plan.job.number), plan.job
        take_stop_request(self.folder / job.folder)  # in case the job ended before reading it
        if job.status != "interrupted":
            self._record_trial(running.trial, job)
            self.write_record()

    def _record_trial(self, trial: Trial, job: Job) -> None:
        value = self._final_value(job)
        pruned = job.status in FINISHED_STATUSES and job.reason.startswith(PRUNED)
        status = "pruned" if pruned else "done" if value is not None else "failed"
        self.study.record_end(trial, status, value, job.reason)

    def take_remaining(self) -> list[Job]:
        """Return []: the study knows the remaining trials."""
        return []

    def write_record(self) -> None:
        """Write `search.json`, from which the page is made; an OSError is logged."""
        text = json.dumps(json_safe(self.study.as_record()), indent=2, allow_nan=False)
        write_or_log(self.folder / SEARCH_FILE, text + "\n")

    def _plan_trial(self, trial: Trial) -> JobPlan:
        """Return the job of a trial: a new one, or the one that an earlier process started."""
        from runner.scale.sweep.study import COMMAND_ATTR, JOB_ATTR

        sweep, overrides = self.starter.sweep, self.study.plan.space.overrides(trial.params)
        earlier_jobs = [job for job in sweep.jobs if job.overrides == overrides]
        number = 1 + max((job.number for job in sweep.jobs), default=-1)
        number = earlier_jobs[0].number if earlier_jobs else number
        plan = plan_job(self.compose(overrides), overrides, number)
        Planner(self.folder, earlier_jobs, [overrides]).match(plan)
        others = [job for job in sweep.jobs if job not in earlier_jobs]
        sweep.jobs = sorted([*others, plan.job], key=lambda job: job.number)
        plan.job.command = self.starter.command(overrides)
        trial.set_user_attr(JOB_ATTR, plan.job.folder)
        trial.set_user_attr(COMMAND_ATTR, plan.job.command)
        self.running[number] = RunningTrial(trial)
        return plan

    def _final_value(self, job: Job) -> float | None:
        """Return the monitored metric; None, with the job's status set, if it is not comparable."""
        if job.status not in FINISHED_STATUSES:
            return None
        metric = self.study.plan.metric
        try:
            summary = Summary.read(self.folder / job.folder)
            value, problem = summary.monitored, f"{metric} is {summary.monitored}: not comparable"
            if summary.monitor != metric:
                problem = f"its run monitors {summary.monitor or 'nothing'}, not {metric}"
            elif value is not None and math.isfinite(value):
                return value
        except StorageError as error:
            problem = str(error)
        job.status, job.reason = "failed", problem
        return None

    def _new_values(self, running: RunningTrial, path: Path) -> list[float]:
        """Return the metric of validations added to the run's record since the last call."""
        values, name = [], self.study.plan.metric.removeprefix("val/")
        try:
            with open_regular(path) as lines:
                lines.seek(running.position)
                while (line := lines.readline(LONGEST_ROW)).endswith(b"\n"):
                    running.position += len(line)
                    row = json.loads(line) if b'"val"' in line else {}
                    if row.get("split") == "val":
                        value = row.get(name)
                        values.append(math.nan if value is None else float(value))
        except (OSError, ValueError, TypeError):  # not there yet, or damaged
            return values
        return values
