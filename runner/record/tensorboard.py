"""TensorBoard event files, written through tensorboard's own message types.

Not through torch.utils.tensorboard, which takes over a second to import, nor through tensorboard's
EventFileWriter: it writes from a thread, so a full disk would be noticed late, and it looks for
TensorFlow. A record here is one write, and its failure is an OSError at the call.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from runner.masking import masked
from runner.record.hparams import Scalar
from runner.record.jsonl import Appender
from runner.record.storage import open_regular, read_record, replace_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 256  # bytes of a record whose checksum is computed at once
BUCKETS = 30  # of a histogram, as TensorBoard draws
BOXES = 9  # of a filter; for more values TensorBoard shows a text field, which numbers do not fit
EXPERIMENT = "_hparams_/experiment"
SESSION_START = "_hparams_/session_start_info"
SESSION_END = "_hparams_/session_end_info"
STATUS = {
    "done": api_pb2.STATUS_SUCCESS,
    "stopped": api_pb2.STATUS_SUCCESS,
    **dict.fromkeys(("failed", "killed", "timeout", "oom", "skipped"), api_pb2.STATUS_FAILURE),
}
"""How a row ends. That of an interrupted run does not: the run can be resumed."""
PREFIX = "events.out.tfevents."
ADDED = ".added"  # how the name of a file ends that is not the run's own
BEFORE = f"{PREFIX}{0:010d}{ADDED}"  # readers go through the files in the order of their names
HEAD = 2**20  # bytes; a session starts within so many
MOST = 2**32  # bytes of an event file that is gone on with


class TensorBoard:
    """One event file. Several of them in a run's folder, from resumes, read as one run."""

    def __init__(self, path: Path, has_session: bool = False) -> None:
        self.has_session = has_session
        self.file = Appender(path, new=True)
        self.tags: dict[tuple[str, str], str] = {}
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def purge(self, step: int) -> None:
        """What earlier files say about that step and later ones is void."""
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step, session_log=start))

    def scalars(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """All of a row's values in one event, under `<split>/<name>`."""
        event = Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            tag = self.tags.get((split, name))
            if tag is None:
                tag = self.tags[split, name] = _clean(f"{split}/{name}")
            event.summary.value.add(tag=tag, simple_value=value)
        self._write(event)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Markdown, for the Text tab."""
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(),
            string_val=[_clean(markdown).encode()],
        )
        self._value(step, tag, "text", b"", tensor)

    def image(self, tag: str, rgb: NDArray[np.uint8], step: int) -> None:
        """A picture [height, width, 3], as PNG, for the Images tab."""
        from PIL import Image

        png = BytesIO()
        Image.fromarray(rgb).save(png, "PNG")
        height, width = rgb.shape[:2]
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=3)]),
            string_val=[str(width).encode(), str(height).encode(), png.getvalue()],
        )
        self._value(step, tag, "images", b"", tensor)

    def histogram(self, tag: str, values: NDArray[np.floating], step: int) -> None:
        """Counts in buckets of equal width of what is finite in `values`; the Histograms tab."""
        finite = values[np.isfinite(values)].astype(np.float64)
        if not finite.size:
            return
        counts, edges = np.histogram(finite, BUCKETS)
        rows = np.stack([edges[:-1], edges[1:], counts], axis=1)
        dimensions = [TensorShapeProto.Dim(size=size) for size in rows.shape]
        tensor = TensorProto(
            dtype=DT_DOUBLE,
            tensor_shape=TensorShapeProto(dim=dimensions),
            tensor_content=rows.tobytes(),
        )
        self._value(step, tag, "histograms", b"", tensor)

    def hparams(
        self,
        session: str,
        values: Mapping[str, Scalar],
        metrics: Sequence[str],
        domains: Mapping[str, Sequence[Scalar]],
        foremost: Sequence[str] = (),
    ) -> None:
        """Start this run's one row in the HParams tab.

        `session` names the row; rows of one name are merged. `metrics` are tags of scalars, whose
        latest values become columns. A hyper-parameter with a domain gets check boxes, and rows
        with a value outside it are hidden: a domain must name every value there can be.
        TensorBoard shows five columns unasked; those said to differ, `foremost`, come first.
        """
        if self.has_session:
            return
        self.experiment(values, metrics, domains, foremost)
        self.session(session, values)

    def experiment(
        self,
        columns: Mapping[str, Scalar],
        metrics: Sequence[str],
        domains: Mapping[str, Sequence[Scalar]],
        foremost: Sequence[str] = (),
    ) -> None:
        """The columns of the HParams tab, each with a value that says of which kind it is.

        TensorBoard takes those of any one run for all of them.
        """
        infos = [
            _info(name, value, domains.get(name, ()), name in foremost)
            for name, value in columns.items()
        ]
        names = [api_pb2.MetricName(tag=_clean(tag)) for tag in metrics]
        experiment = api_pb2.Experiment(
            hparam_infos=infos, metric_infos=[api_pb2.MetricInfo(name=name) for name in names]
        )
        self._hparams(EXPERIMENT, experiment=experiment)

    def session(self, name: str, values: Mapping[str, Scalar]) -> None:
        """This run's row, which `end` ends."""
        start = plugin_data_pb2.SessionStartInfo(
            group_name=_clean(name), start_time_secs=time.time()
        )
        for key, value in values.items():
            _set(start.hparams[_clean(key)], value)
        self._hparams(SESSION_START, session_start_info=start)
        self.has_session = True

    def end(self, status: str) -> None:
        """End the row with the run's status; one that is interrupted stays open, as unknown.

        Readers believe the first end that they are told of, for as long as they are open.
        """
        if status not in STATUS:
            return
        end = plugin_data_pb2.SessionEndInfo(status=STATUS[status], end_time_secs=time.time())
        self._hparams(SESSION_END, session_end_info=end)

    def layout(self, charts: Mapping[str, Sequence[str]]) -> None:
        """The Custom Scalars tab: by title, the tags drawn in one chart."""
        layout = layout_pb2.Layout(
            category=[
                layout_pb2.Category(
                    title="overview",
                    chart=[
                        layout_pb2.Chart(
                            title=title,
                            multiline=layout_pb2.MultilineChartContent(
                                tag=[f"^{re.escape(tag)}$" for tag in tags]
                            ),
                        )
                        for title, tags in charts.items()
                    ],
                )
            ]
        )
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(),
            string_val=[layout.SerializeToString()],
        )
        self._value(0, "custom_scalars__config__", "custom_scalars", b"", tensor)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _hparams(self, tag: str, **content: Any) -> None:
        data = plugin_data_pb2.HParamsPluginData(version=0, **content).SerializeToString()
        nothing = TensorProto(
            dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)])
        )
        self._value(0, tag, "hparams", data, nothing)

    def _value(self, step: int, tag: str, plugin: str, content: bytes, tensor: Any) -> None:
        data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        event = Event(wall_time=time.time(), step=step)
        event.summary.value.append(
            Summary.Value(
                tag=_clean(tag), metadata=SummaryMetadata(plugin_data=data), tensor=tensor
            )
        )
        self._write(event)

    def _write(self, event: Any) -> None:
        self.file.write(frame_record(event.SerializeToString()))


def _info(name: str, value: Scalar, domain: Sequence[Scalar], differs: bool) -> Any:
    kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    kind = kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64)
    info = api_pb2.HParamInfo(name=_clean(name), type=kind, differs=differs)
    if isinstance(value, bool):
        domain = (False, True)
    elif not isinstance(value, str) and len(domain) > BOXES:
        domain = ()  # a range from and to
    for choice in domain:
        _set(info.domain_discrete.values.add(), choice)
    return info


def _set(slot: Any, value: Scalar) -> None:
    """Fill a protobuf `Value`, which knows no integers."""
    if isinstance(value, bool):
        slot.bool_value = value
    elif isinstance(value, str):
        slot.string_value = _clean(value)
    else:
        slot.number_value = value


def _clean(text: str) -> str:
    """Text that protobuf takes: no lone surrogates, which file names may bring; and no secrets."""
    return masked(text).encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Session:
    """What a run says about its row in HParams."""

    name: str
    values: dict[str, Scalar] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)


def open_event_file(folder: Path, purge_step: int | None = None) -> TensorBoard:
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
def prepend_events(folder: Path) -> Iterator[TensorBoard]:
    """An event file that readers see before the run's own, in place of the last one of the kind.

    They believe the first thing they are told about a row, so it may say more of it; but one that
    is open already has passed it. It is there when the context ends without an error, or not at
    all.
    """
    with _made(folder, folder / BEFORE) as events:
        yield events


@contextmanager
def append_events(folder: Path) -> Iterator[TensorBoard]:
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


def read_session(folder: Path) -> Session | None:
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
    for record in read_records(head):
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
    found = list(read_records(read_record(path, MOST)))
    kept = [record for record in found if SESSION_END.encode() not in record]
    if len(kept) < len(found):
        _replace(path, b"".join(map(frame_record, kept)))
    return any(SESSION_START.encode() in record for record in kept)


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of an event file, up to the first one that is torn."""
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length
        if end + 4 > len(data):
            return
        yield data[start + 12 : end]
        start = end + 4


def frame_record(data: bytes) -> bytes:
    """A record as in TFRecord files: length, its checksum, data, its checksum."""
    return _header(len(data)) + data + _checksum(data)


@lru_cache(1024)  # rows of metrics are of a few lengths
def _header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + _checksum(packed)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), a chunk at a time: the bytes of a chunk add up by exclusive or.

    4 µs for a row of metrics, where a loop over its bytes takes 14.
    """
    table = _table()
    values = np.frombuffer(data, np.uint8)
    crc = 0xFFFFFFFF
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK].copy()
        n = len(chunk)
        chunk[:4] ^= np.frombuffer(crc.to_bytes(4, "little")[: min(n, 4)], np.uint8)
        crc = (crc >> 8 * n) ^ int(np.bitwise_xor.reduce(table[np.arange(n - 1, -1, -1), chunk]))
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> NDArray[np.uint32]:
    """[k, b]: what a byte `b` adds to the checksum when `k` more bytes follow it."""
    row: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = (row >> np.uint32(1)) ^ ((row & np.uint32(1)) * np.uint32(0x82F63B78))
    rows = [row]
    for _ in range(CHUNK - 1):
        rows.append((rows[-1] >> 8) ^ row[rows[-1] & 0xFF])
    return np.stack(rows)
