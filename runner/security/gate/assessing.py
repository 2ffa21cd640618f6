"""The verdict on a thing: every byte of it hashed once, what can be loaded looked at, then trust.

Files are read and hashed by threads, some ahead of the one that is looked at; foreign ones go to
one limited process, started when the first of them is met, which looks while they are hashed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple, Self

from runner.errors import CheckpointError
from runner.security.gate.child import Child
from runner.security.gate.folder import Thing, is_loadable, thing_of
from runner.security.gate.glance import refusal
from runner.security.gate.held import Peeked, Watched, digest
from runner.security.gate.policy import Policy, Whose
from runner.security.gate.provenance import Recorded, is_own, recorded, vouch
from runner.security.trust import OTHER, Assessment, FileFacts, Reason, Severity

THREADS = max(2, min(4, os.cpu_count() or 2))
AHEAD = 2 * THREADS  # files that are hashed before it is their turn


class Unread(NamedTuple):
    """A file of which the ends were enough."""

    size: int
    reason: Reason


Read = Watched | FileFacts | Unread


class Assessor:
    """A context manager; one for all that is looked at together, so that it needs one process."""

    def __init__(self, policy: Policy, deep: bool = True) -> None:
        self.policy, self.deep = policy, deep
        self.child = Child()
        self.stop = Event()
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="hash")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.child.close()
        self.pool.shutdown(cancel_futures=True)

    def assess(self, thing: Thing, told: Callable[[int], None] | None = None) -> Assessment:
        """The verdict; `told` is given the bytes of each file that is done."""
        start = time.perf_counter()
        found = Assessment(str(thing.path))
        found.refuse(thing.odd)
        known = _Known(thing, self.policy)
        for name, path, read in self._read(thing):
            alone = thing.kind == "file"
            if isinstance(read, CheckpointError):
                _refuse_unread(found, name, path, read)
                continue
            if isinstance(read, FileFacts):
                found.files[name] = read
            elif isinstance(read, Unread):
                found.files[name] = FileFacts("", read.size, "unknown")
                found.refuse([read.reason if alone else _placed(read.reason, name)])
            else:
                try:
                    with read:
                        self._look(found, name, read, known.says(name, read), alone)
                except CheckpointError as error:
                    _refuse_unread(found, name, path, error)
                    continue
            if told is not None:
                told(found.files[name].size)
        vouch(found, thing.path, self.policy)
        found.seconds = time.perf_counter() - start
        return found

    def _look(self, found: Assessment, name: str, held: Watched, whose: Whose, alone: bool) -> None:
        """Examine one file here if it is known, else apart."""
        if whose is not Whose.FOREIGN:
            from runner.security.gate.examine import examine  # brings torch, which few need

            last = Path(name).name
            examined = examine(held.view, last, self.policy, self.deep, whose, held.place)
            kind, reasons = examined.format, examined.reasons
        else:
            kind, reasons = self.child.examine(held, Path(name).name, self.policy, self.deep)
        sha256 = held.sha256  # of what was looked at, unless it has changed
        if held.changed():
            reasons = [Reason(
                "file.changed", Severity.REFUSAL, name, "it changed while it was looked at",
                "look again once nobody writes to it",
            )]  # fmt: skip
        found.files[name] = FileFacts(sha256, held.size, kind)
        if not alone:
            reasons = [_placed(reason, name) for reason in reasons]
        found.refuse(reasons)

    def _watch(self, path: Path) -> Read:
        with Peeked(path) as data:
            reason = refusal(data, path.name, self.policy)
            if reason is not None:
                return Unread(data.size, reason)
        watched = Watched(path)
        watched.hashing = self.pool.submit(watched.hash, self.stop)
        return watched

    def _digest(self, path: Path) -> Read:
        return FileFacts(*digest(path, self.stop), OTHER)

    def _read(self, thing: Thing) -> Iterator[tuple[str, Path, Read | CheckpointError]]:
        """Each file in turn; the threads are some files ahead."""
        waiting: deque[tuple[str, Path, Future[Read]]] = deque()
        alone = thing.kind == "file"  # it was named, or chosen for its name

        def first() -> tuple[str, Path, Read | CheckpointError]:
            name, path, future = waiting.popleft()
            try:
                return name, path, future.result()
            except CheckpointError as error:
                return name, path, error
            except BaseException:  # Ctrl-C while waiting for it
                waiting.append((name, path, future))
                raise

        try:
            for name, path in thing.files.items():
                loads = alone or is_loadable(path)
                future = self.pool.submit(self._watch if loads else self._digest, path)
                waiting.append((name, path, future))
                if len(waiting) > AHEAD:
                    yield first()
            while waiting:
                yield first()
        finally:  # cut short: what was opened ahead is let go
            for _, _, future in waiting:
                if not future.cancel():
                    future.add_done_callback(_let_go)


class _Known:
    """Which files this run tree wrote, or the user pinned: they need no limited process."""

    def __init__(self, thing: Thing, policy: Policy) -> None:
        self.policy, self.path = policy, thing.path
        self.folder = thing.path if thing.path.is_dir() else thing.path.parent
        self.records: dict[Path, Recorded | None] = {}

    def says(self, name: str, held: Watched) -> Whose:
        """Waits for the digest where one is recorded or pinned, else not."""
        place = (self.folder / name).parent
        if place not in self.records:
            self.records[place] = recorded(place) if is_own(place, self.policy) else None
        record = self.records[place]
        written = record.files.get(Path(name).name) if record is not None else None
        if written is not None and written.sha256 == held.sha256:
            return Whose.OWN
        pinned = self.policy.pinned
        return Whose.PINNED if pinned and held.sha256 in pinned else Whose.FOREIGN


def assess_folder(folder: Path, policy: Policy, deep: bool = True) -> Assessment:
    """The verdict on one folder as a whole, such as a checkpoint's, before it is loaded."""
    with Assessor(policy, deep) as assessor:
        return assessor.assess(thing_of(folder))


def _refuse_unread(found: Assessment, name: str, path: Path, error: CheckpointError) -> None:
    loads = is_loadable(path)  # one that is gone meanwhile goes by its name
    found.refuse([Reason(
        "file.unreadable", Severity.REFUSAL if loads else Severity.NOTE, name,
        str(error), "make it readable, or leave it out",
    )])  # fmt: skip


def _let_go(future: Future[Read]) -> None:
    if not future.cancelled() and future.exception() is None:
        read = future.result()
        if isinstance(read, Watched):
            read.close()


def _placed(reason: Reason, name: str) -> Reason:
    where = f"{name}: {reason.where}" if reason.where and reason.where != name else name
    return Reason(reason.code, reason.severity, where, reason.evidence, reason.way_out)
