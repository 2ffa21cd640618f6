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

PREFIX = "events.out.tfevents."
ADDED = ".added"  # how the name of a file ends that is not the run's own
HEAD = 2**20  # bytes; a session starts within so many


@dataclass(frozen=True)
class Session:
    """What a run says about its row in HParams."""

    name: str
    values: dict[str, Scalar] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)


def open_for(folder: Path, purge_step: int | None = None) -> TensorBoard:
    """A further event file of the run in `folder`; with `purge_step`, it goes on from before it.

    Of earlier files the end of the session is removed: readers believe the first one they meet,
    for ever. What others have `added` goes: it was about how the run ended.
    """
    for path in folder.glob(f"{PREFIX}*{ADDED}"):
        path.unlink()
    earlier = sorted(folder.glob(PREFIX + "*"))
    has_session = any([_reopen(path) for path in earlier])
    # readers go through the files in the order of their names
    stamp = max(int(time.time()), _last_stamp(earlier) + 1)
    events = TensorBoard(folder / f"{PREFIX}{stamp:010d}.{os.getpid()}", has_session)
    if purge_step is not None:
        events.purge(purge_step)
    return events


@contextmanager
def added(folder: Path) -> Iterator[TensorBoard]:
    """An event file for what is known only after the run, in place of the last one of the kind.

    Readers see it before the run's own and believe the first thing they are told about a row, so
    it may say more of it. The file is there when the context ends without an error, or not at all.
    """
    earlier = sorted(folder.glob(f"{PREFIX}*{ADDED}"))
    temporary = folder / f".added.{os.getpid()}.tmp"  # not an event file's name
    temporary.unlink(missing_ok=True)
    events = TensorBoard(temporary)
    try:
        yield events
        events.close()
        # a name of its own each time: a TensorBoard that is open has read the last one
        os.replace(temporary, folder / f"{PREFIX}{_last_stamp(earlier) + 1:010d}{ADDED}")
    finally:
        events.close()
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    for path in earlier:
        path.unlink(missing_ok=True)


def _last_stamp(paths: Sequence[Path]) -> int:
    found = (re.match(r".*tfevents\.(\d+)", path.name) for path in paths)
    return max((int(stamp[1]) for stamp in found if stamp), default=0)


def own_session(folder: Path) -> Session | None:
    """The row that the run in `folder` began by itself; None where it has not."""
    for path in sorted(folder.glob(PREFIX + "*")):
        if path.name.endswith(ADDED):
            continue
        with path.open("rb") as file:
            head = file.read(HEAD)
        try:
            session = _session(head)
        except DecodeError:
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
    found = list(records(path.read_bytes()))
    kept = [record for record in found if SESSION_END.encode() not in record]
    if len(kept) < len(found):
        temporary = path.with_name(f".{path.name[len(PREFIX) :]}.tmp")  # not an event file's name
        temporary.write_bytes(b"".join(map(framed, kept)))
        os.replace(temporary, path)
    return any(SESSION_START.encode() in record for record in kept)
