"""MLflow sink: experiments by run name, in a database under `outputs/` by default."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.core.record.library_files import refuse_links
from runner.core.record.sinks.base import MetricsRow, RunDescription, Sink
from runner.core.record.storage import read_record, replace_text

RUN_ID = "mlflow-run-id"  # a file in the run's folder
STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "running": "RUNNING"}
MAX_PARAM_CHARS = 6000  # characters of a parameter
PARAMS_PER_CALL, METRICS_PER_CALL = 100, 1000  # of one request


class MlflowSink(Sink):
    """Logs to MLflow; `MLFLOW_TRACKING_URI` selects another store or server."""

    name = "mlflow"

    def __init__(self) -> None:
        self.client: Any = None
        self.run_id = ""

    def open(self, run: RunDescription) -> dict[str, int]:
        """Create a run, or continue the one with the id stored in the folder."""
        from mlflow import MlflowClient

        database = f"sqlite:///{_store_folder(run.folder)}/mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or database
        refuse_links(_store_folder(run.folder) / "mlflow")
        self.client = MlflowClient(tracking_uri=uri)
        id_file = run.folder / RUN_ID
        if id_file.is_file():
            self.run_id = read_record(id_file, 100).decode().strip()
            self.client.update_run(self.run_id, status="RUNNING")
            return self._last_steps()
        self.run_id = self._create(run, uri)
        replace_text(id_file, self.run_id + "\n")
        return {}

    def _create(self, run: RunDescription, uri: str) -> str:
        from mlflow.entities import Param

        experiment = self.client.get_experiment_by_name(run.name)
        if experiment is None:
            local = uri.startswith("sqlite:")
            store = _store_folder(run.folder)
            location = f"{store.as_uri()}/mlflow-artifacts" if local else None
            experiment_id = self.client.create_experiment(run.name, artifact_location=location)
        else:
            experiment_id = experiment.experiment_id
        created = self.client.create_run(experiment_id, tags=dict(run.tags), run_name=run.label)
        params = [Param(_allowed_key(k), str(v)[:MAX_PARAM_CHARS]) for k, v in run.params.items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            chunk = params[start : start + PARAMS_PER_CALL]
            self.client.log_batch(created.info.run_id, params=chunk)
        return str(created.info.run_id)

    def _last_steps(self) -> dict[str, int]:
        """Return the last logged step of each split, over all its metrics."""
        last_steps: dict[str, int] = {}
        for key in self.client.get_run(self.run_id).data.metrics:
            split = key.partition("/")[0]
            history = self.client.get_metric_history(self.run_id, key)
            last_steps[split] = max([last_steps.get(split, -1), *(entry.step for entry in history)])
        return last_steps

    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Log the rows' finite values under `<split>/<name>`."""
        metrics = list(_metrics(rows))
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + METRICS_PER_CALL])

    def close(self, status: str, files: Sequence[Path]) -> None:
        """Upload the files and end the run."""
        for path in files:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_terminated(self.run_id, STATUS.get(status, "FAILED"))


def _metrics(rows: Sequence[MetricsRow]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for row in rows:
        for name, value in row.tagged.items():
            if math.isfinite(value):  # MLflow's databases turn Inf into a large number
                yield Metric(_allowed_key(name), value, int(row.time * 1000), row.step)


def _allowed_key(name: str) -> str:
    """Replace characters that MLflow does not allow."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _store_folder(folder: Path) -> Path:
    """Return the `outputs` folder above the run's, else the run's, so that runs share a store."""
    folder = folder.absolute()
    return next((path for path in folder.parents if path.name == "outputs"), folder)
