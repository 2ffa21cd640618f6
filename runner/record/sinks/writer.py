"""Send rows to a sink from a background thread, so that it cannot delay or end a run."""

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

WAITING = 10_000  # rows in memory; if they are exceeded the sink is dropped
POLL_S = 0.1
AT_ONCE = 200  # rows per call
FILES = ("report.md", "summary.json")


class SinkWriter:
    """A sink with its thread and queue. `lost` counts accepted rows that were not delivered."""

    def __init__(self, sink: Sink, timeout_s: float) -> None:
        self.sink = sink
        self.timeout_s = timeout_s
        self.queue: queue.Queue[MetricsRow | Event | None] = queue.Queue(WAITING)
        self.failure = ""
        self.given = self.taken = 0  # rows
        self.held: dict[str, int] = {}  # last step by split that an earlier process sent
        self.thread: Thread | None = None

    def start(self, run: RunDescription, size: int) -> None:
        """Open the sink and send it the first `size` bytes of metrics.jsonl."""
        self.thread = Thread(target=self._work, args=(run, size), daemon=True)
        self.thread.start()

    def add(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Queue a row without blocking."""
        self.given += 1
        try:
            self.queue.put_nowait(MetricsRow(step, split, dict(values), time.time()))
        except queue.Full:
            self._fail(f"is slower than the run ({WAITING:,} rows are waiting)")

    @property
    def lost(self) -> int:
        """Number of undelivered rows; at least 1 after a failure."""
        return max(self.given - self.taken, 1) if self.failure else 0

    def flush(self) -> None:
        """Wait up to `timeout_s` until all rows are delivered."""
        delivered, end = Event(), time.monotonic() + self.timeout_s
        with suppress(queue.Full):
            self.queue.put_nowait(delivered)
        while not (self.failure or delivered.wait(POLL_S)):
            if time.monotonic() > end:
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
        except BaseException as error:  # including SystemExit: only the sink ends
            self._fail(f"failed ({summarize_error(error)})")

    def _next(self) -> tuple[list[MetricsRow], Event | None | MetricsRow]:
        """Return waiting rows and the item that ended them: a token, or a row if more wait."""
        rows: list[MetricsRow] = []
        item = self.queue.get()
        while isinstance(item, MetricsRow):
            rows.append(item)
            if len(rows) == AT_ONCE or self.queue.empty():
                break
            item = self.queue.get()
        return rows, item

    def _send(self, rows: Sequence[MetricsRow], live: bool = True) -> None:
        """Write the rows that the sink does not have yet.

        A resumed run repeats rows that were sent before it was killed, with equal values; they are
        skipped up to the first new row of their split.
        """
        fresh = []
        for row in rows:
            if row.step > self.held.get(row.split, -1):
                fresh.append(row)
                if live:
                    self.held.pop(row.split, None)  # so that a rolled-back step is sent again
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
