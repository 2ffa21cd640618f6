"""Results of benchmarks with known numbers, and folders as runs and sweeps leave them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.core.interfaces.technique import TechniqueStatus
from runner.core.record.summary import MemoryPeaks, StepTime, Summary, Throughput
from runner.measure.benchmark.result import (
    ArmResult,
    Attribution,
    BenchmarkResult,
    Control,
    Effect,
    Load,
)
from runner.measure.comparison import Comparison
from runner.measure.verdicts import conclusion

PLAIN_MS = 1.28
SAMPLES = 64


def technique(name: str, state: str = "engaged", reason: str = "", **evidence: Any) -> Any:
    asked, engaged = state != "not requested", state == "engaged"
    return asdict(TechniqueStatus(name, asked, engaged, reason, evidence, status=state))


def arm(
    name: str, speedup: float, claim: str = "faster", half: float = 0.02, **more: Any
) -> ArmResult:
    """An arm so many times as fast as the plain one, the interval being `half` to both sides."""
    step = PLAIN_MS / speedup
    techniques = more.pop("techniques", [])
    values: dict[str, Any] = {
        "name": name,
        "overrides": [f"optimization={name}"],
        "status": "done",
        "folder": name,
        "command": f"python -m runner optimization={name}",
        "summary": {
            "status": "done",
            "name": "digits-mlp",
            "techniques": techniques,
            "device": {"name": "a processor"},
        },
        "samples_per_step": SAMPLES,
        "step_ms": step,
        "step_ms_interval": (step * math.exp(-half), step * math.exp(half)),
        "step_ms_p95": step * 1.4,
        "samples_per_second": SAMPLES / step * 1000,
        "speedup": speedup,
        "speedup_interval": (speedup * math.exp(-half), speedup * math.exp(half)),
        "claim": claim,
        "blocks": 24,
        "compile_seconds": 0.0,
        "peak_process_bytes": 500 * 2**20,
        "data_wait": 0.03,
        "parity": "exact",
        "losses": [2.3 - 0.01 * step for step in range(40)],
    }
    return ArmResult(**{**values, **more})


def reference(name: str = "none") -> ArmResult:
    return arm(name, 1.0, "", speedup_interval=None)


def failed(name: str, status: str = "failed", reason: str = "") -> ArmResult:
    return ArmResult(name, [f"optimization={name}"], status, reason, command=f"runner {name}")


def result(*arms: ArmResult, **more: Any) -> BenchmarkResult:
    values: dict[str, Any] = {
        "name": "digits-mlp",
        "reference": arms[0].name,
        "arms": list(arms),
        "control": Control(1.003, (0.988, 1.018)),
        "noise_floor": 0.02,
        "blocks": 24,
        "seconds": 31.2,
        "stopped": "every ratio is known to within 2 %",
        "machine": {"cpu": "a processor", "cores": 4},
        "load": Load(others=0.07),
        "command": "python -m runner job=benchmark",
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "started": "2026-11-21T10:02:03+00:00",
    }
    return BenchmarkResult(**{**values, **more})


def levels() -> BenchmarkResult:
    """The usual four: ultra is no faster than advanced, which computes in bf16."""
    low = "explained by precision"
    amp = technique("amp", layer_outputs={"bfloat16": 4})
    fell = technique("channels_last", "skipped", "the model has no 2-d convolution")
    compiled = {"compile_seconds": 11.8, "break_even_steps": 21_400}
    advanced = arm("advanced", 1.83, parity=low, techniques=[amp, fell], **compiled)
    ultra = arm("ultra", 1.85, parity=low, techniques=[amp, fell], **compiled)
    return result(reference(), arm("basic", 1.21), advanced, ultra)


def attribution() -> Attribution:
    effects = [
        Effect("compile", 1.30, (1.27, 1.33), 1.04, (0.99, 1.09), 0.80, (0.75, 0.85), 2**20, 0),
        Effect("amp", 1.20, (1.17, 1.23), 1.10, (1.07, 1.13), 0.92, (0.9, 0.94), -(2**24), 0),
        Effect("channels_last", None, None, 0.96, (0.94, 0.98), note="nothing to change alone"),
    ]
    said = ["ultra without channels_last is 4 % faster here"]
    return Attribution("ultra", effects, said, "the budget is spent")


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
