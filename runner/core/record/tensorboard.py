"""Write TensorBoard event files with tensorboard's protobuf messages.

torch.utils.tensorboard takes over a second to import; tensorboard's own writer uses a thread and
takes half a second. Here each event is one write, whose failure is an OSError at the call.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from runner.core.masking import mask_secrets
from runner.core.record.hydra_files import Scalar
from runner.core.record.storage import RetryingAppender, remove_file, safe_opener
from runner.core.record.text import limit_length

PREFIX = "events.out.tfevents."
OWN_NAME = re.compile(re.escape(PREFIX) + r"(\d{10,})\.\d+")  # time, process
UNPREFIXED_GROUPS = ("val", "user", "about", "comparison", "_hparams_")
"""Tag groups that keep their names. TensorBoard sorts by name and opens the first; all others
(train, test, usage, gradients, memory, faults, …) become `watch_…`, to sort below these."""
HPARAM_TYPES = {
    bool: (api_pb2.DATA_TYPE_BOOL, "bool_value"),
    str: (api_pb2.DATA_TYPE_STRING, "string_value"),
}
"""HParams column types and their protobuf `Value` fields; all other types are numbers."""
HPARAM_NUMBER = (api_pb2.DATA_TYPE_FLOAT64, "number_value")


class TensorBoard:
    """One event file. TensorBoard reads several in one folder, after resumes, as one run."""

    def __init__(self, make_path: Callable[[], Path]) -> None:
        self.file = RetryingAppender(make_path, exclusive=True)
        self.tags: dict[tuple[str, str], str] = {}
        with suppress(OSError):  # the next write raises it
            self._write(file_version="brain.Event:2")

    def purge(self, step: int) -> None:
        """Invalidate earlier files' events at that step and later."""
        with suppress(OSError):
            self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Write all values of a row in one event, under `<split>/<name>`."""
        summary = Summary()
        for name, value in values.items():
            tag = self.tags.get((split, name))
            if tag is None:
                tag = self.tags[split, name] = stored_tag(f"{split}/{name}")
            summary.value.add(tag=tag, simple_value=value)
        self._write(step=step, summary=summary)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Write Markdown for the Text tab."""
        self._tensor(step, tag, "text", _strings(_clean(markdown).encode()))

    def image(self, tag: str, rgb: NDArray[np.uint8], step: int) -> None:
        """Write a uint8 image [height, width, 3] as PNG for the Images tab."""
        from PIL import Image

        png = BytesIO()
        Image.fromarray(rgb).save(png, "PNG")
        height, width = rgb.shape[:2]
        parts = (str(width).encode(), str(height).encode(), png.getvalue())
        self._tensor(step, tag, "images", _strings(*parts, shape=[3]))

    def hparams(
        self,
        session: str,
        values: Mapping[str, Scalar],
        metrics: Mapping[str, str],
        foremost: Sequence[str] = (),
    ) -> None:
        """Start the run's row in the HParams tab; after a resume TensorBoard uses the first.

        `session` names the row; rows of equal names are merged. `metrics` are scalar tags, whose
        latest values become columns, with titles. TensorBoard shows five columns by default:
        `foremost` are flagged as differing, so that they come first.
        """
        types = {name: HPARAM_TYPES.get(type(v), HPARAM_NUMBER) for name, v in values.items()}
        experiment = api_pb2.Experiment()
        for name, (kind, _) in types.items():
            experiment.hparam_infos.add(name=_clean(name), type=kind, differs=name in foremost)
        for tag, title in metrics.items():
            experiment.metric_infos.add(name={"tag": stored_tag(tag)}, display_name=_clean(title))
        group, now = _clean(session), time.time()
        start = plugin_data_pb2.SessionStartInfo(group_name=group, start_time_secs=now)
        for name, value in values.items():
            value = _clean(limit_length(value)) if isinstance(value, str) else value
            setattr(start.hparams[_clean(name)], types[name][1], value)
        try:
            self._hparams("experiment", experiment=experiment)
        finally:  # also if the first one has to wait for space
            self._hparams("session_start_info", session_start_info=start)

    def end(self) -> None:
        """End the row of a finished run. Others stay open, since TensorBoard uses the first end."""
        success = api_pb2.STATUS_SUCCESS
        end = plugin_data_pb2.SessionEndInfo(status=success, end_time_secs=time.time())
        self._hparams("session_end_info", session_end_info=end)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    @property
    def unwritten(self) -> int:
        """Number of events that are not in the file."""
        return self.file.unwritten

    def position(self) -> list[Any]:
        """Return the name of the file, and its size with the events that wait."""
        return [self.file.path.name, self.file.position]

    def _hparams(self, name: str, **content: Any) -> None:
        data = plugin_data_pb2.HParamsPluginData(version=0, **content).SerializeToString()
        empty_tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=_shape(0))
        self._tensor(0, f"_hparams_/{name}", "hparams", empty_tensor, data)

    def _tensor(self, step: int, tag: str, plugin: str, tensor: Any, content: bytes = b"") -> None:
        metadata = SummaryMetadata(plugin_data={"plugin_name": plugin, "content": content})
        value = Summary.Value(tag=stored_tag(tag), metadata=metadata, tensor=tensor)
        self._write(step=step, summary=Summary(value=[value]))

    def _write(self, **content: Any) -> None:
        """Append a TFRecord: length, masked CRC of it, data, masked CRC of it."""
        data = Event(wall_time=time.time(), **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        self.file.write(length + _checksum(length) + data + _checksum(data))


def open_event_file(folder: Path, purge_step: int | None = None, only: bool = False) -> TensorBoard:
    """Open another event file in `folder`; with `only`, delete the existing ones.

    `purge_step` invalidates earlier events at that step and later.
    """

    def make_path() -> Path:
        last_time, existing = 0, list(folder.glob(PREFIX + "*"))
        for path in existing:
            if only:
                remove_file(path)
            elif stamp := re.match(r"\d+", path.name.removeprefix(PREFIX)):
                last_time = max(last_time, int(stamp[0]))
        now = max(int(time.time()), last_time + 1)  # TensorBoard reads files in order of name
        return folder / f"{PREFIX}{now:010d}.{os.getpid()}"

    events = TensorBoard(make_path)
    if purge_step is not None:
        events.purge(purge_step)
    return events


def truncate_events(folder: Path, position: Any) -> bool:
    """Remove the events after a `TensorBoard.position`, and our later files; files of others stay.

    Returns whether the file was there; otherwise purging by step has to do.
    """
    match position:
        case [str(name), int(size)] if size > 0 and (stamp := OWN_NAME.fullmatch(name)):
            pass
        case _:  # of an older run, of one without TensorBoard, or forged
            return False
    for path in folder.glob(PREFIX + "*"):
        other = OWN_NAME.fullmatch(path.name)
        if other is not None and int(other[1]) > int(stamp[1]):
            remove_file(path)
    try:
        with open(folder / name, "r+b", opener=safe_opener) as file:
            if file.seek(0, os.SEEK_END) >= size:  # else its end was lost
                file.truncate(size)
    except FileNotFoundError:
        return False
    return True


def _shape(*sizes: int) -> Any:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


def _strings(*values: bytes, shape: Sequence[int] = ()) -> Any:
    return TensorProto(dtype=DT_STRING, tensor_shape=_shape(*shape), string_val=values)


def stored_tag(tag: str) -> str:
    """Return the tag as stored: `usage/step_ms` becomes `watch_usage/step_ms`."""
    return _clean(tag if tag.partition("/")[0] in UNPREFIXED_GROUPS else f"watch_{tag}")


def _clean(text: str) -> str:
    """Return text that protobuf accepts, without lone surrogates and secrets."""
    return mask_secrets(text).encode("utf-8", "replace").decode()


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli). 10 µs for a row of metrics, 3 ms for an image."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ (crc & 1) * 0x82F63B78 for crc in table]
    return table
