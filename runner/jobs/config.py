"""Config of jobs: `job`, `evaluate`, `predict`, `verify`, `scan` and `replay`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError


class JobKind(Enum):
    """What to do with the run."""

    train = "train"
    evaluate = "evaluate"
    predict = "predict"
    doctor = "doctor"
    verify = "verify"
    replay = "replay"
    benchmark = "benchmark"
    scan = "scan"


EVALUATING = (JobKind.evaluate, JobKind.predict)
"""Jobs that read a trained model and train nothing."""


class PredictFormat(Enum):
    """File format of predictions."""

    csv = "csv"
    parquet = "parquet"


class ExportKind(Enum):
    """Format in which job=evaluate exports the model."""

    none = "none"
    torchscript = "torchscript"  # model.ts, by torch.jit.trace
    export = "export"  # model.pt2, by torch.export
    onnx = "onnx"  # model.onnx; needs the extra of that name
    weights = "weights"  # model.safetensors, by the model's own names
    quantized = "quantized"  # model.safetensors: int8 weights and their scales


class VerifyKind(Enum):
    """Property that job=verify checks."""

    parity = "parity"  # whether the techniques leave the numbers right
    resume = "resume"  # whether a run that was killed continues in the same bits
    distributed = "distributed"  # whether several processes compute what one does
    run = "run"  # whether the run that checkpoint.resume names would come out again


@dataclass
class JobConfig:
    """Which job."""

    kind: JobKind = JobKind.train


@dataclass
class EvaluateConfig:
    """What job=evaluate leaves behind besides the metrics."""

    export: ExportKind = ExportKind.none


@dataclass
class PredictConfig:
    """What job=predict writes."""

    format: PredictFormat = PredictFormat.csv


@dataclass
class VerifyConfig:
    """What job=verify compares, and for how long."""

    what: VerifyKind = VerifyKind.parity
    steps: int | None = None  # None: 40 for parity (fewer: large model), 20 resume, 10 distributed
    attribute: bool = True  # parity: look for the technique that a failure is due to

    def __post_init__(self) -> None:
        least = 2 if self.what is VerifyKind.resume else 1  # before the middle and after it
        if self.steps is not None and self.steps < least:
            raise ConfigError("verify.steps", f"must be ≥ {least}, got {self.steps}")


@dataclass
class ScanConfig:
    """Which files job=scan looks at."""

    path: str | None = None  # a file, or a folder with all that is in it
    deep: bool = True  # values too, and not only how the file is made
    rows: int = bounded(30, min=0)  # shown on the screen, the worst first; scan.json has them all

    def __post_init__(self) -> None:
        check_bounds(self, "scan")


@dataclass
class ReplayConfig:
    """Which bad step job=replay looks into, and how far."""

    path: str | None = None  # debug/captures/step_…, or a run's folder: its first capture
    attribute: bool = True  # look for the techniques that make it bad; a process for each try
    timeout_s: float = bounded(300.0, above=0)  # that one try may take

    def __post_init__(self) -> None:
        check_bounds(self, "replay")
