"""TensorBoard event files, written through tensorboard's own message types.

Not through torch.utils.tensorboard, which takes over a second to import, nor through tensorboard's
EventFileWriter: it writes from a thread, so a full disk would be noticed late, and it looks for
TensorFlow. A record here is one write, and its failure is an OSError at the call.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
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
from runner.record.appending import Appender
from runner.record.columns import Scalar
from runner.record.tfrecord import framed

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        self.file.write(framed(event.SerializeToString()))


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
