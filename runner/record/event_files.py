"""The event files in a run's folder: a run's own, and what others add to them afterwards."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import plugin_data_pb2

from runner.record.columns import Scalar
from runner.record.tensorboard import EXPERIMENT, SESSION_END, SESSION_START, TensorBoard
from runner.record.tfrecord import framed, records
from runner.storage import open_regular, read_record, replace_bytes

PREFIX = "events.out.tfevents."
ADDED = ".added"  # how the name of a file ends that is not the run's own
BEFORE = f"{PREFIX}{0:010d}{ADDED}"  # readers go through the files in the order of their names
HEAD = 2**20  # bytes; a session starts within so many
MOST = 2**32  # bytes of an event file that is gone on with


@dataclass(frozen=True)
class Session:
    """What a run says about its row in HParams."""

    name: str
    values: dict[str, Scalar] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)


def open_for(folder: Path, purge_step: int | None = None) -> TensorBoard:
    """A further event file of the run in `folder`; with `purge_step`, it goes on from before it.

    Of earlier files the end of the session is removed: readers believe the first one they meet,
    for ever. What others have added is taken back: it was about how the run ended.
    """
    found = sorted(folder.glob(PREFIX + "*"))
    stamp = max(int(time.time()), _last_stamp(found) + 1)
    for path in found:
        if path.name.endswith(ADDED):
            _empty(path)
    has_session = any([_reopen(path) for path in found if not path.name.endswith(ADDED)])
    events = TensorBoard(folder / f"{PREFIX}{stamp:010d}.{os.getpid()}", has_session)
    if purge_step is not None:
        events.purge(purge_step)
    return events


@contextmanager
def added_before(folder: Path) -> Iterator[TensorBoard]:
    """An event file that readers see before the run's own, in place of the last one of the kind.

    They believe the first thing they are told about a row, so it may say more of it; but one that
    is open already has passed it. It is there when the context ends without an error, or not at
    all.
    """
    with _made(folder, folder / BEFORE) as events:
        yield events


@contextmanager
def added_after(folder: Path) -> Iterator[TensorBoard]:
    """The same, seen after the run's own, also by a TensorBoard that is open: for the scalars of
    a run that has ended. One that is still written would not be read any further.
    """
    found = sorted(folder.glob(PREFIX + "*"))
    # a name of its own each time: a TensorBoard that is open has read the last one
    with _made(folder, folder / f"{PREFIX}{_last_stamp(found) + 1:010d}{ADDED}") as events:
        yield events
    earlier = [path for path in found if path.name.endswith(ADDED) and path.name != BEFORE]
    for path in earlier[-1:]:
        _empty(path)
    for path in earlier[:-1]:
        path.unlink(missing_ok=True)


def _empty(path: Path) -> None:
    """Take back what a file said. A TensorBoard that is open would wait for ever for one that it
    was reading and that is gone; from an empty one it goes on to the next.
    """
    _replace(path, b"")


def _replace(path: Path, data: bytes) -> None:
    replace_bytes(path, data, f".{path.name[len(PREFIX) :]}.tmp")  # not an event file's name


@contextmanager
def _made(folder: Path, final: Path) -> Iterator[TensorBoard]:
    temporary = folder / f".added.{os.getpid()}.tmp"  # not an event file's name
    temporary.unlink(missing_ok=True)
    events = TensorBoard(temporary)
    try:
        yield events
        events.close()
        os.replace(temporary, final)
    finally:
        events.close()
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _last_stamp(paths: Sequence[Path]) -> int:
    found = (re.match(r".*tfevents\.(\d+)", path.name) for path in paths)
    return max((int(stamp[1]) for stamp in found if stamp), default=0)


def own_session(folder: Path) -> Session | None:
    """The row that the run in `folder` began by itself; None where it has not."""
    for path in sorted(folder.glob(PREFIX + "*")):
        if path.name.endswith(ADDED):
            continue
        try:
            with open_regular(path) as file:
                session = _session(file.read(HEAD))
        except (OSError, DecodeError, AttributeError):  # a value of no kind
            continue
        if session is not None:
            return session
    return None


def _session(head: bytes) -> Session | None:
    start, metrics = None, []
    for record in records(head):
        if b"_hparams_/" not in record:
            continue
        for value in Event.FromString(record).summary.value:
            data = plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
            if value.tag == EXPERIMENT:
                metrics = [info.name.tag for info in data.experiment.metric_infos]
            elif value.tag == SESSION_START:
                start = data.session_start_info
    if start is None:
        return None
    values = {name: getattr(v, str(v.WhichOneof("kind"))) for name, v in start.hparams.items()}
    return Session(start.group_name, values, metrics)


def _reopen(path: Path) -> bool:
    """Make an ended file open again; says whether it starts a session of the HParams tab."""
    found = list(records(read_record(path, MOST)))
    kept = [record for record in found if SESSION_END.encode() not in record]
    if len(kept) < len(found):
        _replace(path, b"".join(map(framed, kept)))
    return any(SESSION_START.encode() in record for record in kept)
