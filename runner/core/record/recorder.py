"""Record a run: metrics as JSON lines, mirrored to TensorBoard and other sinks."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from runner.core.record import storage
from runner.core.record.storage import METRICS, RetryingAppender, safe_opener
from runner.core.schemas.monitoring import MonitoringConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runner.core.record.hydra_files import Scalar
    from runner.core.record.sinks.base import SinkWriter
    from runner.core.record.tensorboard import TensorBoard

log = logging.getLogger("runner")

FILE_TITLES = {"metrics": METRICS, "tensorboard": "TensorBoard's file"}


class Recorder:
    """Writes metrics, texts and images into a run's folder; failures never stop the run.

    After an OSError, which is logged once, rows are kept in memory and retried with the next row;
    `faults` counts those not written. With `folder=None` nothing is written.
    """

    def __init__(self, folder: Path | None, config: MonitoringConfig) -> None:
        self.folder = folder
        self.config = config
        self.start_step = 0  # from which this process records
        self.faults: dict[str, int] = {}  # records not written, by kind: metrics, tensorboard
        self.sink_writers: list[SinkWriter] = []  # of `monitoring.sinks`; they receive each row
        self._metrics_file: RetryingAppender | None = None
        self._events: TensorBoard | None = None
        self._position = 0
        self._process = os.getpid()
        self.continues_events = False  # the event file of the checkpoint was truncated to it

    def open(
        self,
        start_step: int = 0,
        offset: int | None = None,
        events: Any = None,
        append: bool = False,
    ) -> None:
        """Open the files to continue after `start_step`; 0 is a new run.

        On resume `offset` is the `position` at the time of the checkpoint: later rows are
        truncated, so that no step occurs twice. If it is None or does not match the file, rows
        after `start_step` are truncated instead. `events` is the `event_position`: later events
        are truncated, too, also those that the end of a session writes for the same step. With
        `append` nothing is truncated or deleted: rows follow those of the folder.
        """
        self.end_copy()
        if self.folder is None:
            return
        self.start_step, path = start_step, self.folder / METRICS
        prepare = partial(_prepare_rows, path, start_step, offset, append)
        self._metrics_file = RetryingAppender(prepare)
        if self._metrics_file.descriptor < 0:  # it is retried
            self._metrics_file.size = offset or 0
        self._position = self._metrics_file.size
        if self.config.tensorboard:
            try:
                from runner.core.record.tensorboard import open_event_file, truncate_events

                is_new_run = start_step == 0  # older files are of a run without a checkpoint
                purge_step = None if is_new_run else start_step + 1
                self.continues_events = not is_new_run and truncate_events(self.folder, events)
                only = is_new_run and not append
                self._events = open_event_file(self.folder, purge_step, only)
            except Exception as error:  # incompatible protobuf versions raise many types
                self._warn("tensorboard", error)

    def scalars(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Write a row: a JSON line, and one TensorBoard event with tags `<split>/<name>`
        (`usage/<name>` for system rows; without `epoch`).

        NaN and Inf become null in JSON, with the original value in `nonfinite`.
        """
        if self._metrics_file is not None:
            line = _encode_row(step, split, values)
            self._write("metrics", self._metrics_file, lambda rows: rows.write(line))
            self._position = self._metrics_file.position
            for mirror in self.sink_writers:
                mirror.add(step, split, values)
        shown = {k: x for k, x in values.items() if (split, k) != ("train", "epoch")}  # a line
        self.show(step, "usage" if split == "system" else split, shown)

    def show(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Write values to TensorBoard only, under `<group>/<name>`."""
        self._show(lambda events: events.scalars(step, group, values))

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Write a text to TensorBoard."""
        self._show(lambda events: events.text(tag, markdown, step))

    def image(self, tag: str, rgb: NDArray[np.uint8], step: int) -> None:
        """Write an image, uint8 [height, width, 3], to TensorBoard."""
        self._show(lambda events: events.image(tag, rgb, step))

    def save_image(self, name: str, rgb: NDArray[np.uint8]) -> None:
        """Save an image as PNG; `name` is the path relative to the run's folder."""
        if self.folder is None:
            return
        from PIL import Image

        path = self.folder / name
        try:
            storage.make_folder(path.parent)
            with open(path, "wb", opener=safe_opener) as file:
                Image.fromarray(rgb).save(file, "PNG")
        except OSError as error:
            log.warning("%s is not written: %s", name, error)

    def hparams(
        self,
        session: str,
        values: Mapping[str, Scalar],
        metrics: Mapping[str, str],
        foremost: Sequence[str] = (),
    ) -> None:
        """Start the HParams row: titles of columns by tag, hyper-parameters to show first."""
        self._show(lambda events: events.hparams(session, values, metrics, foremost))

    def end(self, status: str, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """End the HParams row if the run is done or stopped; other runs may be resumed.

        `metrics` become its columns under `val/best/<name>`; they are not written to metrics.jsonl,
        since summary.json has them.
        """
        if metrics:
            self.show(step, "val/best", metrics)
        if status in ("done", "stopped"):
            self._show(lambda events: events.end())

    @property
    def is_deleted(self) -> bool:
        """Whether one of its files was deleted."""
        return any(file.is_deleted for file in self._appenders().values())

    def recreate(self) -> None:
        """Write files that were deleted or moved again, with all that this process has recorded."""
        for kind, file in self._appenders().items():
            self._write(kind, file, lambda file: file.recreate())

    def _appenders(self) -> dict[str, RetryingAppender]:
        events = None if self._events is None else self._events.file
        files = {"metrics": self._metrics_file, "tensorboard": events}
        return {kind: file for kind, file in files.items() if file is not None}

    def position(self) -> int:
        """Return the size of metrics.jsonl in bytes, with waiting rows; saved for `open`."""
        return self._position

    def event_position(self) -> list[Any] | None:
        """Return the name and the size of TensorBoard's file, with waiting events; for `open`."""
        return None if self._events is None else self._events.position()

    def end_copy(self) -> None:
        """End this process at once if user code has made it by `fork()`: it would write, too."""
        if (process := os.getpid()) != self._process:
            text = "os.fork() in user code copied the run, which continues in process"
            sys.stderr.write(f"error: process {process} ends: {text} {self._process}\n")
            sys.stderr.flush()
            os._exit(1)

    @property
    def writes_images(self) -> bool:
        """Whether texts and images are written."""
        return self._events is not None

    def close(self) -> None:
        """Close all files and sinks; later writes are ignored."""
        for mirror in self.sink_writers:
            mirror.close()
        self.sink_writers = []
        files = {"metrics": self._metrics_file, "tensorboard": self._events}
        self._metrics_file = self._events = None
        for kind, file in files.items():
            if file is not None:
                self._write(kind, file, lambda file: file.close())

    def _show(self, write: Callable[[TensorBoard], None]) -> None:
        if self._events is not None:
            self._write("tensorboard", self._events, write)

    def _write(self, kind: str, file: Any, write: Callable[[Any], None]) -> None:
        """Call `write` on the file, and count what could not be written."""
        self.end_copy()
        try:
            write(file)
        except OSError as error:
            if kind not in self.faults:
                self._warn(kind, error)
            self.faults[kind] = max(file.unwritten, 1)
        else:
            if kind in self.faults and file.unwritten:
                self.faults[kind] = file.unwritten
            elif self.faults.pop(kind, 0):
                log.warning("%s is written again, no data is lost", FILE_TITLES[kind])

    def _warn(self, kind: str, error: Exception) -> None:
        self.faults[kind] = 1
        log.warning("%s cannot be written, the run continues: %s", FILE_TITLES[kind], error)


def _encode_row(step: int, split: str, values: Mapping[str, float]) -> bytes:
    row: dict[str, Any] = {"step": step, "split": split, **values}
    try:
        return json.dumps(row, allow_nan=False).encode() + b"\n"
    except ValueError:
        nonfinite = {name: str(x) for name, x in values.items() if not math.isfinite(x)}
        row.update(dict.fromkeys(nonfinite), nonfinite=nonfinite)
        return json.dumps(row, allow_nan=False).encode() + b"\n"


def _prepare_rows(path: Path, start_step: int, offset: int | None, append: bool) -> Path:
    """Truncate the rows after the resumed checkpoint, or with `append` end the last one."""
    if path.exists() and not path.is_symlink():
        with open(path, "r+b", opener=safe_opener) as file:
            if append:  # a killed process may have left it without its line end
                if not _is_line_end(file, file.seek(0, os.SEEK_END)):
                    file.write(b"\n")
                return path
            if offset is None or not _is_line_end(file, offset):
                offset = _find_end(file, start_step)
            file.truncate(offset)
    return path


def _is_line_end(file: BinaryIO, offset: int) -> bool:
    if not 0 < offset <= file.seek(0, os.SEEK_END):
        return offset == 0
    file.seek(offset - 1)
    return file.read(1) == b"\n"


def _find_end(file: BinaryIO, step: int) -> int:
    """Return the offset after the last row up to `step`, or before a damaged row."""
    end = 0
    file.seek(0)
    while step and (line := file.readline(storage.LONGEST_ROW)):  # at step 0 nothing is kept
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        end += len(line)
    return end
