"""The interface of a sink, and the thread that feeds one, so that it cannot delay or end a run."""

from __future__ import annotations

import json
import logging
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

from runner.core.masking import mask_secrets
from runner.core.record.storage import LONGEST_ROW, METRICS, open_regular, read_record
from runner.core.record.text import summarize_error

log = logging.getLogger("runner")

MAX_QUEUED_ROWS = 10_000  # rows in memory; if they are exceeded the sink is dropped
POLL_S = 0.1
ROWS_PER_CALL = 200  # rows per call
UPLOADED_FILES = ("report.md", "summary.json")


@dataclass(frozen=True)
class MetricsRow:
    """A row of metrics.jsonl, with the time at which it was sent, in seconds."""

    step: int
    split: str
    values: Mapping[str, float]
    time: float

    @property
    def tagged(self) -> dict[str, float]:
        """The values by `<split>/<name>`, NaN and Inf included."""
        return {f"{self.split}/{name}": float(value) for name, value in self.values.items()}


@dataclass(frozen=True)
class RunDescription:
    """Facts about the run for `Sink.open`; secrets are masked."""

    name: str
    label: str  # name within the experiment: that of the folder
    folder: Path
    params: Mapping[str, Any] = field(default_factory=dict)  # the config, with dotted keys
    tags: Mapping[str, str] = field(default_factory=dict)  # name, config_hash, git_commit


class Sink(ABC):
    """Receives a run's rows on its own thread; an exception ends only the sink."""

    name = "sink"

    @abstractmethod
    def open(self, run: RunDescription) -> Mapping[str, int]:
        """Begin a run, or continue the one an earlier process began for this folder.

        Returns the last step already stored, by split; rows up to it are not sent again.
        """

    @abstractmethod
    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Store rows, in order."""

    @abstractmethod
    def close(self, status: str, files: Sequence[Path]) -> None:
        """End the run with its status (`done`, `failed`, …); upload its report and summary."""


def row_from_json(entry: Mapping[str, Any], sent: float) -> MetricsRow | None:
    """Return a line of metrics.jsonl as a row; None if it is not one."""
    step, split = entry.get("step"), entry.get("split")
    if not isinstance(step, int) or not isinstance(split, str):
        return None
    values = {k: v for k, v in entry.items() if k not in ("step", "split", "nonfinite")}
    values |= {name: float(text) for name, text in entry.get("nonfinite", {}).items()}
    values = {name: math.nan if value is None else value for name, value in values.items()}
    return MetricsRow(step, split, values, sent)


class SinkWriter:
    """A sink with its thread and queue; `undelivered_rows` counts accepted rows that are lost."""

    def __init__(self, sink: Sink, timeout_s: float) -> None:
        self.sink = sink
        self.timeout_s = timeout_s
        self.queue: queue.Queue[MetricsRow | Event | None] = queue.Queue(MAX_QUEUED_ROWS)
        self.failure = ""
        self.accepted_rows = self.delivered_rows = 0
        self.last_steps: dict[str, int] = {}  # last step by split that an earlier process sent
        self.thread: Thread | None = None

    def start(self, run: RunDescription, size: int) -> None:
        """Open the sink and send it the first `size` bytes of metrics.jsonl."""
        self.thread = Thread(target=self._run, args=(run, size), daemon=True)
        self.thread.start()

    def add(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Queue a row without blocking."""
        self.accepted_rows += 1
        try:
            self.queue.put_nowait(MetricsRow(step, split, dict(values), time.time()))
        except queue.Full:
            self._fail(f"is slower than the run ({MAX_QUEUED_ROWS:,} rows are waiting)")

    @property
    def undelivered_rows(self) -> int:
        """Number of undelivered rows; at least 1 after a failure."""
        return max(self.accepted_rows - self.delivered_rows, 1) if self.failure else 0

    def flush(self) -> None:
        """Wait up to `timeout_s` until all rows are delivered."""
        delivered, deadline = Event(), time.monotonic() + self.timeout_s
        with suppress(queue.Full):
            self.queue.put_nowait(delivered)
        while not (self.failure or delivered.wait(POLL_S)):
            if time.monotonic() > deadline:
                self._fail(f"hangs: rows are still waiting after {self.timeout_s:g} s")

    def close(self) -> None:
        """Close the sink, which receives the report, within `timeout_s`."""
        if self.thread is None:
            return
        if not self.failure:
            self.queue.put_nowait(None)  # not full, after a flush
            self.thread.join(self.timeout_s)
            if self.thread.is_alive():
                self._fail(f"hangs: it is still open after {self.timeout_s:g} s")
        self.thread = None

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            name, text = self.sink.name, mask_secrets(reason)
            log.warning("monitoring.sinks: %s %s; the run continues without it", name, text)

    def _run(self, run: RunDescription, size: int) -> None:
        try:
            self.last_steps = dict(self.sink.open(run))
            recorded = _read_rows(run.folder / METRICS, size)
            while rows := list(islice(recorded, ROWS_PER_CALL)):
                self._send_new_rows(rows, live=False)
            while not self.failure:
                rows, token = self._next_rows()
                self._send_new_rows(rows)
                if isinstance(token, Event):
                    token.set()
                elif token is None:
                    paths = [run.folder / name for name in UPLOADED_FILES]
                    files = [path for path in paths if path.is_file()]
                    self.sink.close(_read_status(run.folder), files)
                    return
        except BaseException as error:  # including SystemExit: only the sink ends
            self._fail(f"failed ({summarize_error(error)})")

    def _next_rows(self) -> tuple[list[MetricsRow], Event | None | MetricsRow]:
        """Return waiting rows and the item that ended them: a token, or a row if more wait."""
        rows: list[MetricsRow] = []
        item = self.queue.get()
        while isinstance(item, MetricsRow):
            rows.append(item)
            if len(rows) == ROWS_PER_CALL or self.queue.empty():
                break
            item = self.queue.get()
        return rows, item

    def _send_new_rows(self, rows: Sequence[MetricsRow], live: bool = True) -> None:
        """Write the rows that the sink lacks.

        Rows that a resumed run repeats are skipped, up to the first new row of their split.
        """
        new_rows = []
        for row in rows:
            if row.step > self.last_steps.get(row.split, -1):
                new_rows.append(row)
                if live:
                    self.last_steps.pop(row.split, None)  # so that a rolled-back step is sent again
        if new_rows:
            self.sink.write(new_rows)
        self.delivered_rows += len(rows) if live else 0


def _read_rows(path: Path, size: int) -> Iterator[MetricsRow]:
    now = time.time()
    if not size:
        return
    with open_regular(path) as lines:
        while lines.tell() < size and (line := lines.readline(LONGEST_ROW)):
            entry = json.loads(line)
            if isinstance(entry, dict) and (row := row_from_json(entry, now)) is not None:
                yield row


def _read_status(folder: Path) -> str:
    try:
        return str(json.loads(read_record(folder / "summary.json"))["status"])
    except (OSError, ValueError, LookupError, TypeError):
        return "failed"
