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

from runner.record.appending import Appender

if TYPE_CHECKING:
    from numpy.typing import NDArray

Scalar = bool | int | float | str

PREFIX = "events.out.tfevents."
BUCKETS = 30  # of a histogram, as TensorBoard draws
SESSION_START = "_hparams_/session_start_info"
SESSION_END = "_hparams_/session_end_info"
STATUS = {
    "done": api_pb2.STATUS_SUCCESS,
    "stopped": api_pb2.STATUS_SUCCESS,
    "failed": api_pb2.STATUS_FAILURE,
}  # an interrupted run is neither: it can be resumed


class TensorBoard:
    """One event file in a run's folder; several of them, from resumes, read as one run.

    With `purge_step`, what earlier files say about that step and later ones is void, and their
    end of the session is removed: readers believe the first one they meet, for ever.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        earlier = sorted(folder.glob(PREFIX + "*"))
        self.has_session = any([_reopen(path) for path in earlier])
        # readers go through the files in the order of their names
        stamps = [int(m[1]) for path in earlier if (m := re.match(r".*tfevents\.(\d+)", path.name))]
        stamp = max([int(time.time()), *(s + 1 for s in stamps)])
        self.file = Appender(folder / f"{PREFIX}{stamp:010d}.{os.getpid()}", new=True)
        self.tags: dict[tuple[str, str], str] = {}
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))

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
            string_val=[markdown.encode("utf-8", "replace")],
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
        infos = [
            _info(name, value, domains.get(name), name in foremost)
            for name, value in values.items()
        ]
        experiment = api_pb2.Experiment(
            hparam_infos=infos,
            metric_infos=[
                api_pb2.MetricInfo(name=api_pb2.MetricName(tag=_clean(tag))) for tag in metrics
            ],
        )
        start = plugin_data_pb2.SessionStartInfo(
            group_name=_clean(session), start_time_secs=time.time()
        )
        for name, value in values.items():
            _set(start.hparams[_clean(name)], value)
        self._hparams("_hparams_/experiment", experiment=experiment)
        self._hparams(SESSION_START, session_start_info=start)
        self.has_session = True

    def end(self, status: str) -> None:
        """End the row with the run's status: done, stopped, failed or interrupted."""
        end = plugin_data_pb2.SessionEndInfo(
            status=STATUS.get(status, api_pb2.STATUS_UNKNOWN), end_time_secs=time.time()
        )
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
        self.file.write(_framed(event.SerializeToString()))


def _info(name: str, value: Scalar, domain: Sequence[Scalar] | None, differs: bool) -> Any:
    kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    kind = kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64)
    info = api_pb2.HParamInfo(name=_clean(name), type=kind, differs=differs)
    if isinstance(value, bool):
        domain = (False, True)
    for choice in domain or ():
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
    """Text that protobuf takes: no lone surrogates, which file names may bring."""
    return text.encode("utf-8", "replace").decode()


def _reopen(path: Path) -> bool:
    """Make an ended file open again; says whether it starts a session of the HParams tab."""
    records = list(_records(path.read_bytes()))
    kept = [record for record in records if SESSION_END.encode() not in record]
    if len(kept) < len(records):
        temporary = path.with_name(f".{path.name[len(PREFIX) :]}.tmp")  # not an event file's name
        temporary.write_bytes(b"".join(map(_framed, kept)))
        os.replace(temporary, path)
    return any(SESSION_START.encode() in record for record in kept)


def _records(data: bytes) -> Iterator[bytes]:
    """The records of an event file, up to the first one that is torn."""
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length
        if end + 4 > len(data):
            return
        yield data[start + 12 : end]
        start = end + 4


def _framed(data: bytes) -> bytes:
    """A record as in TFRecord files: length, its checksum, data, its checksum."""
    return _header(len(data)) + data + _checksum(data)


@lru_cache(1024)  # rows of metrics are of a few lengths
def _header(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + _checksum(packed)


def _checksum(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


CHUNK = 256


def _crc32c(data: bytes) -> int:
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
