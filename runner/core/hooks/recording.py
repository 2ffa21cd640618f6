"""The hook that writes a run's metrics, config and faults to its record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner import rooms
from runner.core.device import memory
from runner.core.device.resources import SystemMonitor
from runner.core.device.signals import PRUNED, take_stop_request
from runner.core.errors import Interrupted
from runner.core.interfaces.hook import Evaluation, Hook, Report, Verdict
from runner.core.interfaces.run import Run
from runner.core.record import history, hydra_files, markdown, provenance
from runner.core.record.digests import DataFiles, user_packages
from runner.core.record.storage import read_record
from runner.core.schemas.monitoring import MonitoringConfig

log = logging.getLogger("runner")
GIB = 2**30
SYSTEM_ROW_S = 0.5  # rates over less time are noise
HISTORY_S = 1.0  # between two writings of history.json
MOST_CLASSES = 24  # of a readable confusion matrix


class Recording(Hook):
    """Records metrics, the config as text, the confusion matrix, and the history of faults.

    `settings` is the config by dotted keys: `optimizer.lr` etc. With `write_empty`, a run without
    faults writes an empty history.json and anomalies.json.
    """

    monitors = True

    def __init__(
        self,
        config: MonitoringConfig,
        settings: Mapping[str, Any],
        system_monitor: SystemMonitor | None = None,
        write_empty: bool = False,
        data_files: DataFiles | None = None,
    ) -> None:
        self.config = config
        self.system_monitor = system_monitor or SystemMonitor(every_s=config.system_every_s)
        self.settings, self.data_files = settings, data_files
        self.write_empty = write_empty
        self.origin: dict[str, Any] = {}  # this session in provenance.json
        self.seconds, self.samples, self.steps = 0.0, 0, 0  # since the last system row
        self.last_step = 0
        self.row_due = self.load_due = self.history_due = 0.0

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record provenance and config at the start, faults and status at the end."""
        self.system_monitor.open(run.device)
        self.row_due = time.monotonic() + SYSTEM_ROW_S
        if run.folder is not None:
            self._record_start(run, run.folder)
        status = "failed"
        try:
            yield
            status = "stopped" if run.stop_reason else "done"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self._write_faults(run)
            if run.reader.user is not None and (status != "failed" or run.device.reads_are_free):
                run.reader.user.write(run.recorder, wait=True)  # a resumed run writes it again
            self._record_end(run, status)

    def on_report(self, run: Run, report: Report) -> Verdict | None:
        """Write a train row at the last step, and a system row when due; STOP if requested."""
        now = time.monotonic()
        if now >= self.history_due:
            self.history_due = now + HISTORY_S
            run.history.write()
        if run.reader.user is not None:
            run.reader.user.write(run.recorder)
        values = {
            "loss": _finite_mean(report.loss),
            "grad_norm": _finite_mean(report.grad_norm),
            "lr": report.lr,
            "epoch": run.train.epochs_before(report.last),
            "skipped": sum(report.skipped),
        }
        run.recorder.scalars(report.last, "train", values)
        self.seconds += report.seconds
        self.samples += report.samples
        self.steps += len(report.loss)
        self.last_step = report.last
        if now >= self.row_due:
            self._write_system_row(run)
        return _check_stop_request(run)

    def on_validation(self, run: Run, evaluation: Evaluation) -> Verdict | None:
        """Write a validation row, and the confusion matrix if it is the best so far."""
        if run.reader.user is not None:
            run.reader.user.write(run.recorder, wait=True)
        values = {name.removeprefix("val/"): value for name, value in evaluation.metrics.items()}
        run.recorder.scalars(evaluation.step, "val", values)
        if evaluation.improved and run.recorder.writes_images:
            # immediately: the next checkpoint does not contain it, and the run may be killed
            _record_confusion(run, evaluation)
        return _check_stop_request(run)

    def _record_start(self, run: Run, folder: Path) -> None:
        continues = run.recorder.continues_events
        if not continues:  # TensorBoard uses the first row
            typed = hydra_files.overrides_by_key(hydra_files.recorded_overrides(folder))
            in_sweep = (folder.absolute().parent / hydra_files.SWEEP).exists()
            shared = rooms.find("hparams", "sweep")(folder) if in_sweep else {}
            values, first = hydra_files.hparam_columns(self.settings, typed, shared)
            run.recorder.hparams(_row_name(run.name, folder), values, _hparam_metrics(run), first)
        config = folder / hydra_files.CONFIG  # with environment variables unresolved
        if config.is_file() and (run.changed_keys or not continues):
            text = read_record(config).decode("utf-8", "replace")
            run.recorder.text("about/config", markdown.code(text, "yaml"), run.progress.step)
        try:
            packages = user_packages(self.settings)
            start = {"step": run.progress.step, "changed_keys": run.changed_keys}
            self.origin = provenance.record(folder, self.data_files, packages, **start)
        except OSError as error:
            log.warning("provenance.json not written: %s", error)

    def _write_system_row(self, run: Run) -> None:
        """Write rates over the steps since the last system row, memory, and load when due."""
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
        if peak := memory.peak_device_bytes(run.device):
            values["device_peak_gib"] = peak / GIB
        if now >= self.load_due:
            self.load_due = now + self.config.system_every_s
            values |= self.system_monitor.sample().row()
        run.recorder.scalars(self.last_step, "system", values)
        self.seconds, self.samples, self.steps = 0.0, 0, 0

    def _write_faults(self, run: Run) -> None:
        run.history.unwritten |= self.write_empty
        run.stability.anomalies.unwritten |= self.write_empty
        run.history.write()
        run.stability.anomalies.write(run.folder)
        if faults := list(run.history.faults.values()):
            run.recorder.text("faults/history", history.fault_table(faults), run.progress.step)

    def _record_end(self, run: Run, status: str) -> None:
        packages = user_packages(self.settings)
        if run.folder is not None and self.origin and packages:
            with suppress(OSError):
                provenance.add_loaded_modules(run.folder, self.origin, packages)
        if self.steps:
            self._write_system_row(run)
        elif self.write_empty:  # so that the plot of the memory does not depend on resuming
            values = {"process_gib": memory.process_bytes() / GIB}
            run.recorder.scalars(run.progress.step, "system", values)
        if run.folder is not None and self.write_empty:
            from runner.core.hooks.plots import record_plots  # imported only with debug tools

            record_plots(run, run.folder)
        name, value = run.monitor.removeprefix("val/"), run.progress.best
        best = {} if value is None else {name: value}
        run.recorder.end(status, run.progress.step, best)


def _check_stop_request(run: Run) -> Verdict | None:
    """Return STOP, and set the reason, if a file in the run's folder requests it; else None."""
    if run.folder is None or (reason := take_stop_request(run.folder)) is None:
        return None
    run.request_stop("pruned" if reason.startswith(PRUNED) else "stop_file", reason)
    return Verdict.STOP


def _finite_mean(values: list[float]) -> float:
    """Return the mean of the finite values; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _record_confusion(run: Run, evaluation: Evaluation) -> None:
    """Write counts by true and predicted class as a table in the Text tab."""
    counts = evaluation.confusion
    if counts is None or not counts.sum() or len(counts) > MOST_CLASSES:
        return
    class_names = run.sizes.class_names
    names = [class_names[i] if i < len(class_names) else str(i) for i in range(len(counts))]
    rows = counts.long().tolist()  # host sync: none, evaluation has moved the counts
    cells = [[name, *row] for name, row in zip(names, rows, strict=True)]
    table = markdown.table(("true \\ predicted", *map(markdown.escape, names)), cells)
    run.recorder.text("val/confusion", table, evaluation.step)


def _row_name(name: str, folder: Path) -> str:
    """Return the name of the run's row, with that of its sweep: rows of equal name are merged."""
    parent = folder.absolute().parent.name
    if parent == name:
        return f"{name}/{folder.name}"
    return f"{folder.name} of {name}/{parent}"  # TensorBoard shows the beginning


def _hparam_metrics(run: Run) -> dict[str, str]:
    """Return the tags that become columns of HParams, with titles that name the checkpoint."""
    best = f"val/best/{run.monitor.removeprefix('val/')}"
    rate = f"{'tokens' if run.objective.unit == 'tokens' else 'samples'}_per_second"
    last = {tag: f"{tag} (last)" for tag in (run.monitor, "val/loss", "train/loss")}
    return {best: f"{run.monitor} (best)", **last, f"usage/{rate}": rate}
