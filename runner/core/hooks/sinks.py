"""`monitoring.sinks`: copies of the record for MLflow, W&B or a user's class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from runner.core.errors import ConfigError, install_command
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.masking import mask_nested
from runner.core.record import provenance
from runner.core.record.sinks.base import RunDescription, Sink, SinkWriter
from runner.core.security.registry import instantiate_nested

KEY = "monitoring.sinks"
PACKAGES = {"mlflow": ("mlflow", "sqlalchemy"), "wandb": ("wandb",)}


class Sinks(Hook):
    """Sends all rows of the record to sinks; the writers close after the report."""

    monitors = True

    def __init__(
        self, sinks: Sequence[Sink], timeout_s: float, settings: Mapping[str, Any]
    ) -> None:
        self.writers = [SinkWriter(sink, timeout_s) for sink in sinks]
        self.settings = settings

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Mirror the recorder's rows to all writers; count rows that were not delivered."""
        if run.folder is None:
            yield
            return
        commit = str((provenance.git_state() or {}).get("commit", ""))
        tags = {"name": run.name, "config_hash": run.config_hash, "git_commit": commit}
        tags = {key: value for key, value in tags.items() if value}
        folder = run.folder.absolute()
        description = RunDescription(run.name, folder.name, folder, dict(self.settings), tags)
        description = mask_nested(description)
        for writer in self.writers:
            writer.start(description, run.recorder.position())
            run.recorder.sink_writers.append(writer)
        try:
            yield
        finally:
            for writer in self.writers:
                writer.flush()
                if writer.undelivered_rows:
                    run.recorder.faults[f"sink_{writer.sink.name}"] = writer.undelivered_rows


def make_sinks(items: Sequence[Any], resolve_target: Callable[[str, str], Any]) -> list[Sink]:
    """Create sinks from names, or classes: `{_target_: package.Class, …}`. Raises ConfigError."""
    return [_make_sink(item, f"{KEY}.{i}", resolve_target) for i, item in enumerate(items)]


def _make_sink(item: Any, key: str, resolve_target: Callable[[str, str], Any]) -> Sink:
    if isinstance(item, Mapping):
        sink = instantiate_nested(item, resolve_target, key)
        if not isinstance(sink, Sink):
            fix = "inherit from runner.core.record.sinks.base.Sink"
            raise ConfigError(key, f"{type(sink).__name__} is not a Sink", fix)
        return sink
    missing = [name for name in PACKAGES[item] if find_spec(name) is None]
    if missing:
        problem = f"{item} needs {', '.join(missing)}, which is not installed"
        raise ConfigError(KEY, problem, install_command(item))
    if item == "mlflow":
        from runner.core.record.sinks.mlflow_sink import MlflowSink

        return MlflowSink()
    from runner.core.record.sinks.wandb_sink import WandbSink

    return WandbSink()
