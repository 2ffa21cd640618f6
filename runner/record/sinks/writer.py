"""Hands rows to a sink on a background thread, so that no sink delays or ends a run."""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Event, Thread

from runner.masking import masked
from runner.record.recorder import LONGEST_ROW, METRICS
from runner.record.sinks.base import MetricsRow, RunDescription, Sink, row_from_json
from runner.record.storage import open_regular, read_record
from runner.record.text import summarize_error

log = logging.getLogger("runner")

WAITING = 10_000  # rows in memory; a run that makes more than its sink takes loses what is beyond
POLL_S = 0.1
AT_ONCE = 200  # rows in one call
FILES = ("report.md", "summary.json")


class SinkWriter:
    """A sink with its thread and its queue. `lost` rows were accepted and not delivered."""

    def __init__(self, sink: Sink, timeout_s: float) -> None:
        self.sink = sink
        self.timeout_s = timeout_s
        self.queue: queue.Queue[MetricsRow | Event | None] = queue.Queue(WAITING)
        self.failure = ""
        self.given = self.taken = 0  # rows
        self.held: dict[str, int] = {}  # last step by split, of an earlier process
        self.thread: Thread | None = None

    def start(self, run: RunDescription, size: int) -> None:
        """Open the sink, and send it the `size` bytes of metrics.jsonl that are there already."""
        self.thread = Thread(target=self._work, args=(run, size), daemon=True)
        self.thread.start()

    def add(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """A row; never waits."""
        self.given += 1
        try:
            self.queue.put_nowait(MetricsRow(step, split, dict(values), time.time()))
        except queue.Full:
            self._fail(f"takes fewer rows than the run makes ({WAITING:,} are waiting)")

    @property
    def lost(self) -> int:
        """Rows that were not delivered, as far as is known; at least 1 of a sink that failed."""
        return max(self.given - self.taken, 1) if self.failure else 0

    def flush(self) -> None:
        """Wait until all rows are delivered, for `timeout_s` at most."""
        delivered, end = Event(), time.monotonic() + self.timeout_s
        with suppress(queue.Full):
            self.queue.put_nowait(delivered)
        while not (self.failure or delivered.wait(POLL_S)):
            if time.monotonic() > end:
                self._fail(f"hangs: it has not taken all rows within {self.timeout_s:g} s")

    def close(self) -> None:
        """Hand over the report and end the sink, in `timeout_s` at most."""
        if self.thread is None:
            return
        if not self.failure:
            self.queue.put_nowait(None)  # there is room: it was flushed
            self.thread.join(self.timeout_s)
            if self.thread.is_alive():
                self._fail(f"hangs: it has not closed within {self.timeout_s:g} s")
        self.thread = None

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            name, text = self.sink.name, masked(reason)
            log.warning("monitoring.sinks: %s %s; the run continues without it", name, text)

    def _work(self, run: RunDescription, size: int) -> None:
        try:
            self.held = dict(self.sink.open(run))
            recorded = _read_rows(run.folder / METRICS, size)
            while rows := list(islice(recorded, AT_ONCE)):
                self._send(rows, live=False)
            while not self.failure:
                rows, token = self._next()
                self._send(rows)
                if isinstance(token, Event):
                    token.set()
                elif token is None:
                    files = [path for name in FILES if (path := run.folder / name).is_file()]
                    self.sink.close(_status(run.folder), files)
                    return
        except BaseException as error:  # SystemExit of a library, too, ends the sink alone
            self._fail(f"failed ({summarize_error(error)})")

    def _next(self) -> tuple[list[MetricsRow], Event | None | MetricsRow]:
        """Rows that wait, and what ended them: a token, or a row where there are more."""
        rows: list[MetricsRow] = []
        item = self.queue.get()
        while isinstance(item, MetricsRow):
            rows.append(item)
            if len(rows) == AT_ONCE or self.queue.empty():
                break
            item = self.queue.get()
        return rows, item

    def _send(self, rows: Sequence[MetricsRow], live: bool = True) -> None:
        """Write the rows that the sink lacks.

        A resumed run repeats steps that were sent before it was killed; it makes the same numbers,
        so they are left out up to the first new one.
        """
        fresh = []
        for row in rows:
            if row.step > self.held.get(row.split, -1):
                fresh.append(row)
                if live:
                    self.held.pop(row.split, None)  # a step that comes again was rolled back
        if fresh:
            self.sink.write(fresh)
        self.taken += len(rows) if live else 0


def _read_rows(path: Path, size: int) -> Iterator[MetricsRow]:
    now = time.time()
    if not size:
        return
    with open_regular(path) as lines:
        while lines.tell() < size and (line := lines.readline(LONGEST_ROW)):
            entry = json.loads(line)
            if isinstance(entry, dict) and (row := row_from_json(entry, now)) is not None:
                yield row


def _status(folder: Path) -> str:
    try:
        return str(json.loads(read_record(folder / "summary.json"))["status"])
    except (OSError, ValueError, LookupError, TypeError):
        return "failed"
