"""Writes what happens in a run to its record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.checks.config import OutputsConfig
from runner.device import memory
from runner.device.resources import Machine
from runner.errors import Interrupted
from runner.hooks.predictions import Predictions
from runner.record import hparams, hydra_files, markdown, provenance
from runner.record.config import MonitoringConfig
from runner.record.provenance import describe_git
from runner.record.storage import read_record
from runner.training.hook import Evaluation, Hook, Report
from runner.training.run import Run

log = logging.getLogger("runner")

GIB = 2**30
SYSTEM_ROW_S = 0.5  # rates over less time are noise
PICTURES_S = 5.0  # between two looks at the model's predictions, which take some 30 ms
QUALITY = {
    "classification": {"accuracy": ["val/accuracy"]},
    "language_modelling": {"bits": ["val/bits_per_byte", "val/bits_per_token"]},
    "regression": {"R²": ["val/r2"]},
}


class Recording(Hook):
    """Rows of metrics, the config and the origin as text, and pictures of what is being learned.

    `settings` is the config, flat: `optimizer.lr` and so on.
    """

    def __init__(
        self,
        config: MonitoringConfig,
        settings: Mapping[str, Any],
        machine: Machine | None = None,
        outputs: OutputsConfig | None = None,
    ) -> None:
        self.config = config
        self.machine = machine or Machine(every_s=config.system_every_s)
        self.settings = settings
        self.predictions = Predictions(outputs)
        self.seconds, self.samples, self.steps = 0.0, 0, 0  # since the last system row
        self.last_step = 0
        self.epoch = (0, 0.0)  # the number of the latest that ended, and when
        self.epoch_seconds: float | None = None  # of that one, until it is in a row
        self.row_due = self.load_due = self.pictures_due = 0.0
        self.unseen: Evaluation | None = None  # an improvement that came too soon after the last

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Open with where the run comes from; close with how it ended."""
        self.machine.open(run.device)
        now = time.monotonic()
        self.row_due, self.pictures_due = now + SYSTEM_ROW_S, now + PICTURES_S
        self._introduce(run)
        epoch, steps = divmod(run.progress.step, run.train.steps_per_epoch)
        self.epoch = (epoch, math.nan if steps else now)  # one that is under way is not timed
        status = "failed"
        try:
            yield
            status = "stopped" if run.stop_reason else "done"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self._conclude(run, status)

    def on_report(self, run: Run, report: Report) -> None:
        """A train row at the stretch's last step; now and then a row on the system."""
        values = {
            "loss": _mean(report.loss),
            "grad_norm": _mean(report.grad_norm),
            "lr": report.lr,
            "epoch": report.last / run.train.steps_per_epoch,
            "skipped": sum(report.skipped),
        }
        run.recorder.scalars(report.last, "train", values)
        self.seconds += report.seconds
        self.samples += report.samples
        self.steps += len(report.loss)
        self.last_step = report.last
        self._time_epoch(report.last // run.train.steps_per_epoch)
        if time.monotonic() >= self.row_due:
            self._system(run)

    def _time_epoch(self, epoch: int) -> None:
        """Note the seconds of an epoch that ended in this stretch, validation included."""
        before, since = self.epoch
        if epoch > before:
            self.epoch = epoch, time.monotonic()
            seconds = (self.epoch[1] - since) / (epoch - before)
            self.epoch_seconds = seconds if math.isfinite(seconds) else None

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """A row, and when it is the best so far, what the model makes of some samples."""
        values = {name.removeprefix("val/"): value for name, value in evaluation.metrics.items()}
        run.recorder.scalars(evaluation.step, "val", values)
        if not evaluation.improved or not run.recorder.showing:
            return
        self.unseen = evaluation
        now = time.monotonic()
        if now >= self.pictures_due:
            self.pictures_due = now + PICTURES_S
            self._show(run, evaluation)

    def _introduce(self, run: Run) -> None:
        recorder = run.recorder
        if run.folder is None:
            return
        try:
            origin = provenance.record(run.folder)
        except OSError as error:
            log.warning("no provenance.json: %s", error)
            origin = {}
        domains = self.config.domains
        values, choices = hparams.swept_columns(
            self.settings,
            hydra_files.overrides_by_key(hydra_files.recorded_overrides(run.folder)),
            domains,
        )
        recorder.hparams(
            _row_name(run.name, run.folder),
            hparams.common_columns(self.settings) | values,
            _metrics(run),
            choices,
            list(values) or hparams.SHOWN_FIRST,
        )
        recorder.layout(_charts(run))
        step = run.progress.step
        config = run.folder / ".hydra" / "config.yaml"  # environment variables are unresolved in it
        if config.is_file():
            text = read_record(config).decode("utf-8", "replace")
            recorder.text("about/config", markdown.code(text, "yaml"), step)
        if origin:
            recorder.text("about/origin", _origin(origin), step)

    def _system(self, run: Run) -> None:
        """Rates over the steps since the last such row, and what the machine is doing."""
        now = time.monotonic()
        self.row_due = now + SYSTEM_ROW_S
        if self.seconds <= 0:
            return
        values = {
            "samples_per_second": self.samples / self.seconds,
            "step_ms": self.seconds / self.steps * 1e3,
            "process_gib": memory.process_bytes() / GIB,
        }
        if run.objective.unit == "tokens" and run.sizes.sequence:
            values["tokens_per_second"] = values["samples_per_second"] * run.sizes.sequence
        if self.epoch_seconds is not None:
            values["epoch_seconds"], self.epoch_seconds = self.epoch_seconds, None
        if peak := memory.peak_device_bytes(run.device):
            values["device_peak_gib"] = peak / GIB
        if now >= self.load_due:
            self.load_due = now + self.config.system_every_s
            values |= self.machine.sample().row()
        run.recorder.scalars(self.last_step, "system", values)
        self.seconds, self.samples, self.steps = 0.0, 0, 0

    def _show(self, run: Run, evaluation: Evaluation) -> None:
        self.unseen = None
        self._confusion(run, evaluation)
        try:
            self.predictions.show(run, evaluation.step)
        except Exception as error:  # a model of the user's may take no other batch than its own
            log.warning("no sample predictions: %s: %s", type(error).__name__, error)
            self.pictures_due = math.inf

    def _confusion(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.confusion is None or not evaluation.confusion.sum():
            return
        from runner.record.plots import confusion_matrix

        counts = evaluation.confusion.long().numpy()
        run.recorder.image(
            "val/confusion", confusion_matrix(counts, run.sizes.class_names), evaluation.step
        )

    def _conclude(self, run: Run, status: str) -> None:
        if self.steps:
            self._system(run)
        late = self.unseen
        if late is not None and status in ("done", "stopped"):
            if late.step == run.progress.step:
                self._show(run, late)
            else:  # the weights have moved on
                self._confusion(run, late)
        name, value = run.monitor.removeprefix("val/"), run.progress.best
        best = {} if value is None else {name: value}
        run.recorder.end(status, run.progress.step, best)


def _mean(values: list[float]) -> float:
    """Over those that are finite; NaN if none is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _row_name(name: str, folder: Path) -> str:
    """Of the run's row. Rows of one name are merged, so a job of a sweep says of which one."""
    parent = folder.absolute().parent.name
    if parent == name:
        return f"{name}/{folder.name}"
    return f"{folder.name} of {name}/{parent}"  # TensorBoard shows the beginning


def _metrics(run: Run) -> list[str]:
    """Tags that become columns of HParams."""
    rate = (
        "usage/tokens_per_second" if run.objective.unit == "tokens" else "usage/samples_per_second"
    )
    best = f"val/best/{run.monitor.removeprefix('val/')}"
    tags = [best, run.monitor, "val/loss", "train/loss", rate]
    return list(dict.fromkeys(tags))


def _charts(run: Run) -> dict[str, list[str]]:
    """TensorBoard joins the layouts of all runs, so a title must name the same tags in each."""
    tokens = {"tokens per second": ["usage/tokens_per_second"]}
    return {
        "loss": ["train/loss", "val/loss"],
        **QUALITY.get(run.sizes.task, {}),
        "learning rate": ["train/lr"],
        "gradient norm": ["train/grad_norm"],
        **(tokens if run.objective.unit == "tokens" else {}),
        "samples per second": ["usage/samples_per_second"],
        "step time, ms": ["usage/step_ms"],
        "epoch, seconds": ["usage/epoch_seconds"],
        "memory, GiB": ["usage/process_gib", "usage/device_peak_gib"],
    }


def _origin(origin: Mapping[str, Any]) -> str:
    git = origin["git"]
    code = "not in a git repository"
    if git is not None:
        code = f"{describe_git(git)}, {git.get('untracked', '?')} files untracked"
    rows = [("started", origin["started"]), ("code", code), *origin["versions"].items()]
    return f"{markdown.code(origin['command'], 'sh')}\n\n{markdown.table(('what', 'which'), rows)}"
