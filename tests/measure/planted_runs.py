"""Folders as runs and sweeps leave them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from runner.core.record.summary import MemoryPeaks, StepTime, Summary, Throughput
from runner.measure.comparison import Comparison
from runner.measure.verdicts import conclusion


def run(
    folder: Path, overrides: list[str], rate: float = 1000.0, status: str = "done", **more: Any
) -> Path:
    """A run's folder, as a run leaves it."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))  # JSON is YAML
    values: dict[str, Any] = {
        "status": status,
        "steps": 100,
        "metrics": {"val/accuracy": 0.9, "val/loss": math.nan},
        "throughput": Throughput(rate, None, StepTime(64 / rate * 1000, 80 / rate * 1000)),
        "memory": MemoryPeaks(500 * 2**20, 0),
        "command": "python -m runner " + " ".join(overrides),
        "name": "digits-mlp",
        "monitor": "val/accuracy",
        "best": 0.91,
    }
    Summary(**{**values, **more}).write(folder)
    return folder


def sweep(folder: Path, jobs: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"command": "python -m runner -m optimization=none,basic,ultra", "jobs": jobs}
    (folder / "sweep.json").write_text(json.dumps(told))
    return folder


def job(number: int, level: str, status: str = "done", reason: str = "") -> dict[str, Any]:
    overrides = [f"optimization={level}"]
    return {"overrides": overrides, "folder": str(number), "status": status, "reason": reason}


def texts(comparison: Comparison) -> list[str]:
    return [sentence.text for sentence in conclusion(comparison)]
