"""A search's study in a file that processes can share: Optuna's storage, sampler and pruner."""

from __future__ import annotations

import fcntl
import logging
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from runner.core.checkpoint.lock import is_locked
from runner.core.device.signals import PRUNED
from runner.core.errors import ConfigError, SecurityError, StorageError
from runner.core.format import count_noun
from runner.core.record.digests import DataFiles, change_problem
from runner.core.record.library_files import refuse_links
from runner.core.record.storage import make_folder, safe_opener
from runner.core.schemas.data import DataChanged
from runner.core.schemas.sweep import Pruner, Sampler, SearchConfig, storage_path
from runner.scale.sweep.search_space import SearchPlan, parameter_text

log = logging.getLogger("runner")
JOURNAL_SUFFIXES = (".journal", ".log")  # suffixes of Optuna's journal format
WAIT_S = 60  # for another process to finish writing
DATA_ATTR = "data"  # user attribute of the study: the digest of its files
SWEEP_ATTR, JOB_ATTR, REASON_ATTR, COMMAND_ATTR = "sweep", "job", "reason", "command"
"""User attributes of a trial."""
STATES = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}


class StudyFile:
    """The trials of a search. Asking takes a lock, so that no two trials are equal."""

    def __init__(self, plan: SearchPlan, folder: Path) -> None:
        """Open or create the study; `folder` is the sweep's. Raises StorageError."""
        self.plan, self.folder = plan, folder.absolute()
        storage = plan.settings.storage
        self.path = Path(storage_path(storage)) if storage else folder / "search.db"
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        try:
            make_folder(self.path.parent)
            if not storage:
                refuse_links(self.path)
            with self._locked():
                self.study = optuna.create_study(
                    storage=_storage(self.path),
                    study_name=plan.name,
                    direction="maximize" if plan.maximize else "minimize",
                    pruner=_pruner(plan.settings),
                    load_if_exists=True,
                )
                self._check_data()
        except (ConfigError, SecurityError):
            raise
        except Exception as error:  # SQLAlchemy, alembic and Optuna raise all kinds
            reason = " ".join(str(error).split())[:200]
            raise StorageError(f"search.storage: {self.path}: cannot be used: {reason}") from error

    def _check_data(self) -> None:
        """Raise ConfigError if earlier trials were trained on files with another digest."""
        files, data = DataFiles(self.plan.data), self.plan.data
        if not files.paths:
            return
        then, now = self.study.user_attrs.get(DATA_ATTR), files.digest["sha256"]
        count = len(self.study.get_trials(deepcopy=False))
        if count and then is None:
            log.warning("%s: %d trials have no digest of their data: not checked", self.path, count)
        elif count and then != now:
            problem = change_problem(files, f"the study's {count_noun(count, 'trial')}", str(then))
            if getattr(data, "changed", None) is not DataChanged.accept:
                fix = "restore the file, name another study (name=…), or data.changed=accept"
                raise ConfigError("data.path", problem, fix)
            log.warning("data.path: %s (data.changed=accept)", problem)
        if then != now:
            self.study.set_user_attr(DATA_ATTR, now)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials that count, by number."""
        return self.study.get_trials(deepcopy=False, states=tuple(STATES))

    def unfinished_trials(self) -> list[Trial]:
        """Return the trials that an earlier process of this sweep's folder left running."""
        running = [trial for trial in self.trials() if trial.state is TrialState.RUNNING]
        own = [trial for trial in running if trial.user_attrs.get(SWEEP_ATTR) == str(self.folder)]
        return [Trial(self.study, trial._trial_id) for trial in own]

    def ask(self) -> Trial | None:
        """Return a trial with new values; None if all trials have been asked for."""
        with self._locked():
            self._end_lost_trials()
            trials, space = self.trials(), self.plan.space
            tried = {_params_key(trial.params) for trial in trials}
            is_exhausted = space.points is not None and len(tried) >= space.points
            if is_exhausted or len(trials) >= self.plan.settings.trials:
                return None
            number = len(self.study.get_trials(deepcopy=False))
            values = self._propose(number)
            if _params_key(values) in tried and space.points is not None:
                untried = [point for point in space.all_points() if _params_key(point) not in tried]
                values = random.Random(number).choice(untried)  # noqa: S311  # no secret
            self.study.enqueue_trial(values)
            trial = self.study.ask(space.parameters)
            trial.set_user_attr(SWEEP_ATTR, str(self.folder))
            return trial

    def record_end(self, trial: Trial, status: str, value: float | None, reason: str) -> None:
        """Record the end of a trial: done with its value, pruned, or failed."""
        if reason:
            trial.set_user_attr(REASON_ATTR, reason)
        if status == "done":
            self.study.tell(trial, value)
        else:
            pruned = status == "pruned" and bool(self._intermediate_values(trial))
            self.study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)

    def report(self, trial: Trial, validation: int, value: float) -> str:
        """Record the metric at a validation; returns why to end the trial, or ""."""
        if validation not in self._intermediate_values(trial) and math.isfinite(value):
            trial.report(value, validation)
        pruner, metric = self.plan.settings.pruner, self.plan.metric
        if pruner is Pruner.none or not trial.should_prune():
            return ""
        return f"{PRUNED} at validation {validation}: {metric} {value:.4g} ({pruner.name})"

    def as_record(self) -> dict[str, Any]:
        """Return the contents of `search.json`."""
        plan, trials = self.plan, self.trials()
        done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        return {
            "metric": plan.metric,
            "direction": "maximize" if plan.maximize else "minimize",
            "sampler": plan.settings.sampler.name,
            "pruner": plan.settings.pruner.name,
            "storage": str(self.path),
            "study": plan.name,
            "wanted": plan.settings.trials,
            "points": plan.space.points,
            "best": self.study.best_trial.number if done else None,
            "parameters": [
                {"key": k, "text": parameter_text(distribution)}
                for k, distribution in plan.space.parameters.items()
            ],
            "trials": [_trial_entry(trial, self.folder) for trial in trials],
        }

    def _intermediate_values(self, trial: Trial) -> Mapping[int, float]:
        return self.study._storage.get_trial(trial._trial_id).intermediate_values

    def _propose(self, number: int) -> dict[str, Any]:
        """Return the sampler's next values.

        Determined by the trials so far, the search's seed and the trial's number.
        """
        settings, trial = self.plan.settings, optuna.trial.create_trial(state=TrialState.RUNNING)
        sampler, trial.number = _sampler(settings.sampler, settings.seed + number), number
        return {
            key: sampler.sample_independent(self.study, trial, key, distribution)
            for key, distribution in self.plan.space.parameters.items()
        }

    def _end_lost_trials(self) -> None:
        """Fail trials of processes that no longer run, or that ended within `ask`."""
        for trial in self.trials():
            sweep = trial.user_attrs.get(SWEEP_ATTR)
            lost = sweep is None or (Path(sweep).is_dir() and not is_locked(Path(sweep)))
            if trial.state is TrialState.RUNNING and lost:
                open_trial = Trial(self.study, trial._trial_id)
                self.record_end(open_trial, "failed", None, "its process ended")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """While entered, no other process can ask."""
        # .lock is the journal's own
        with open(f"{self.path}.ask", "ab", opener=safe_opener) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _storage(path: Path) -> Any:
    if path.suffix in JOURNAL_SUFFIXES:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        return JournalStorage(JournalFileBackend(str(path)))
    options = {"connect_args": {"timeout": WAIT_S}}
    return optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}", engine_kwargs=options)


def _sampler(kind: Sampler, seed: int) -> Any:
    if kind is Sampler.tpe:  # running trials count as bad, so that parallel ones spread out
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed=seed)


def _pruner(settings: SearchConfig) -> Any:
    if settings.pruner is Pruner.median:
        return optuna.pruners.MedianPruner(settings.startup, settings.warmup + 1)
    if settings.pruner is Pruner.halving:
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=settings.warmup + 1)
    return optuna.pruners.NopPruner()


def _params_key(values: Mapping[str, object]) -> str:
    return repr(sorted(values.items()))


def _trial_entry(trial: FrozenTrial, folder: Path) -> dict[str, Any]:
    is_ours = trial.user_attrs.get(SWEEP_ATTR) == str(folder)
    return {
        "number": trial.number,
        "status": STATES[trial.state],
        "value": trial.value,
        "values": dict(trial.params),
        "reason": trial.user_attrs.get(REASON_ATTR, ""),
        "command": trial.user_attrs.get(COMMAND_ATTR, ""),
        "folder": trial.user_attrs.get(JOB_ATTR, "") if is_ours else "",
        "seconds": trial.duration.total_seconds() if trial.duration else None,
    }
