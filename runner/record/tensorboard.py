"""TensorBoard event files, written through tensorboard's own message types.

Not through torch.utils.tensorboard, which takes over a second to import, nor tensorboard's own
writer, which works in a thread and takes half a second to import: a record here is one write, and
its failure is an OSError at the call.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from runner.masking import masked
from runner.record.hparams import Scalar
from runner.record.storage import Appender, read_record, replace_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 256  # bytes of a record whose checksum is computed at once
BUCKETS = 30  # of a histogram, as TensorBoard draws
BOXES = 9  # of a filter; for more values TensorBoard shows a text field, which numbers do not fit
EXPERIMENT = "_hparams_/experiment"
SESSION_START = "_hparams_/session_start_info"
SESSION_END = "_hparams_/session_end_info"
SUCCESS, FAILURE = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE
STATUS = {
    **dict.fromkeys(("done", "stopped"), SUCCESS),
    **dict.fromkeys(("failed", "killed", "timeout", "oom", "skipped"), FAILURE),
}
"""How a row ends. That of an interrupted run does not: the run can be resumed."""
PREFIX = "events.out.tfevents."
MOST = 2**32  # bytes of an event file that is read again


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
        self._tensor(step, tag, "text", _strings(_clean(markdown).encode()))

    def image(self, tag: str, rgb: NDArray[np.uint8], step: int) -> None:
        """A picture [height, width, 3], as PNG, for the Images tab."""
        from PIL import Image

        png = BytesIO()
        Image.fromarray(rgb).save(png, "PNG")
        height, width = rgb.shape[:2]
        parts = (str(width).encode(), str(height).encode(), png.getvalue())
        self._tensor(step, tag, "images", _strings(*parts, shape=[3]))

    def histogram(self, tag: str, values: NDArray[np.floating], step: int) -> None:
        """Counts in buckets of equal width of what is finite in `values`; the Histograms tab."""
        finite = values[np.isfinite(values)].astype(np.float64)
        if not finite.size:
            return
        counts, edges = np.histogram(finite, BUCKETS)
        rows = np.stack([edges[:-1], edges[1:], counts], axis=1)
        shape = _shape(*rows.shape)
        tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=shape, tensor_content=rows.tobytes())
        self._tensor(step, tag, "histograms", tensor)

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
        infos = [
            _info(name, value, domains.get(name, ()), name in foremost)
            for name, value in values.items()
        ]
        names = [api_pb2.MetricName(tag=_clean(tag)) for tag in metrics]
        experiment = api_pb2.Experiment(
            hparam_infos=infos, metric_infos=[api_pb2.MetricInfo(name=name) for name in names]
        )
        self._hparams(EXPERIMENT, experiment=experiment)
        self.start_session(session, values)

    def start_session(self, name: str, values: Mapping[str, Scalar]) -> None:
        """This run's row, which `end` ends; the columns are those of other runs."""
        start = plugin_data_pb2.SessionStartInfo(
            group_name=_clean(name), start_time_secs=time.time()
        )
        for key, value in values.items():
            _set(start.hparams[_clean(key)], value)
        self._hparams(SESSION_START, session_start_info=start)
        self.has_session = True

    def end(self, status: str) -> None:
        """End the row with the run's status; one that is interrupted stays open, as unknown."""
        if status in STATUS:
            end = plugin_data_pb2.SessionEndInfo(status=STATUS[status], end_time_secs=time.time())
            self._hparams(SESSION_END, session_end_info=end)

    def layout(self, charts: Mapping[str, Sequence[str]]) -> None:
        """The Custom Scalars tab: by title, the tags drawn in one chart."""
        drawn = []
        for title, tags in charts.items():
            lines = layout_pb2.MultilineChartContent(tag=[f"^{re.escape(tag)}$" for tag in tags])
            drawn.append(layout_pb2.Chart(title=title, multiline=lines))
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="overview", chart=drawn)])
        tensor = _strings(layout.SerializeToString())
        self._tensor(0, "custom_scalars__config__", "custom_scalars", tensor)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _hparams(self, tag: str, **content: Any) -> None:
        data = plugin_data_pb2.HParamsPluginData(version=0, **content).SerializeToString()
        nothing = TensorProto(dtype=DT_FLOAT, tensor_shape=_shape(0))
        self._tensor(0, tag, "hparams", nothing, data)

    def _tensor(self, step: int, tag: str, plugin: str, tensor: Any, content: bytes = b"") -> None:
        data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        metadata = SummaryMetadata(plugin_data=data)
        event = Event(wall_time=time.time(), step=step)
        value = Summary.Value(tag=_clean(tag), metadata=metadata, tensor=tensor)
        event.summary.value.append(value)
        self._write(event)

    def _write(self, event: Any) -> None:
        self.file.write(frame_record(event.SerializeToString()))


def _shape(*sizes: int) -> Any:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


def _strings(*values: bytes, shape: Sequence[int] = ()) -> Any:
    return TensorProto(dtype=DT_STRING, tensor_shape=_shape(*shape), string_val=values)


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


def open_event_file(folder: Path, purge_step: int | None = None) -> TensorBoard:
    """A further event file of the run in `folder`; with `purge_step`, it goes on from before it.

    Of earlier files the end of the session is removed: readers believe the first one they meet.
    So is the whole row of a run that had not begun it itself (`end_session`).
    """
    has_session = False
    for path in event_files(folder):
        records = list(read_records(read_record(path, MOST)))
        begun = any(EXPERIMENT.encode() in record for record in records)
        ends = (SESSION_END,) if begun or has_session else (SESSION_START, SESSION_END)
        kept = [r for r in records if not any(end.encode() in r for end in ends)]
        if len(kept) < len(records):
            # under a temporary name that is not an event file's
            name = f".{path.name.removeprefix(PREFIX)}.tmp"
            replace_bytes(path, b"".join(map(frame_record, kept)), name)
        has_session |= begun
    events = _new_file(folder, has_session)
    if purge_step is not None:
        events.purge(purge_step)
    return events


def end_session(folder: Path, name: str, values: Mapping[str, Scalar], status: str) -> None:
    """End the row of a run that could not end it itself; one that never began gets a row."""
    data = [read_record(path, MOST) for path in event_files(folder)]
    if any(SESSION_END.encode() in part for part in data):
        return
    events = _new_file(folder, any(SESSION_START.encode() in part for part in data))
    try:
        if not events.has_session:
            events.start_session(name, values)
        events.end(status)
    finally:
        events.close()


def event_files(folder: Path) -> list[Path]:
    """The event files in a folder, in the order in which they are read."""
    return sorted(folder.glob(PREFIX + "*"))


def _new_file(folder: Path, has_session: bool) -> TensorBoard:
    stamps = (re.match(r"\d+", p.name.removeprefix(PREFIX)) for p in event_files(folder))
    last = max((int(stamp[0]) for stamp in stamps if stamp), default=0)
    stamp = max(int(time.time()), last + 1)  # readers go through the files by name
    return TensorBoard(folder / f"{PREFIX}{stamp:010d}.{os.getpid()}", has_session)


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
