"""The `job` config group, and the groups of single jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

LEVELS = ("none", "basic", "advanced", "ultra")


class JobKind(Enum):
    """The job to do."""

    train = "train"
    evaluate = "evaluate"
    predict = "predict"
    doctor = "doctor"
    verify = "verify"
    replay = "replay"
    benchmark = "benchmark"
    scan = "scan"


EVALUATION_JOBS = (JobKind.evaluate, JobKind.predict)
"""Jobs that use a trained model without training."""


class PredictFormat(Enum):
    """The file format of predictions."""

    csv = "csv"
    parquet = "parquet"


class ExportKind(Enum):
    """The format in which job=evaluate exports the model."""

    none = "none"
    torchscript = "torchscript"  # model.ts, by torch.jit.trace
    export = "export"  # model.pt2, by torch.export
    onnx = "onnx"  # model.onnx; needs the extra `onnx`
    weights = "weights"  # model.safetensors, by the model's own names
    quantized = "quantized"  # model.safetensors: int8 weights and their scales


class VerifyKind(Enum):
    """What job=verify checks."""

    parity = "parity"  # techniques leave the results correct
    resume = "resume"  # a killed run continues bit-identically
    distributed = "distributed"  # several processes compute the same as one
    run = "run"  # the run of checkpoint.resume is reproducible


@dataclass
class JobConfig:
    """The job to do."""

    # doctor: check the machine; verify: results; replay: a bad step; scan: files
    kind: JobKind = JobKind.train


@dataclass
class EvaluateConfig:
    """Files of job=evaluate besides the metrics."""

    # exported file: model.ts, model.pt2, model.onnx or (weights, quantized) model.safetensors
    export: ExportKind = ExportKind.none


@dataclass
class PredictConfig(Bounded, key="predict"):
    """Output of job=predict."""

    format: PredictFormat = PredictFormat.csv  # file format of the predictions
    prompt: str | None = None  # a language model continues it, into predictions.txt
    tokens: int = bounded(200, min=1)  # that follow the prompt
    temperature: float = bounded(1.0, min=0)  # they are drawn at; 0: the likeliest
    top_k: int | None = bounded(None, min=1)  # drawn from the likeliest only; null: from all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt == "":
            raise ConfigError("predict.prompt", "is empty", "give the first words of the text")


@dataclass
class VerifyConfig:
    """What job=verify checks, and in how many steps."""

    # parity: techniques; resume: a killed run; distributed: several processes; run: an earlier run
    what: VerifyKind = VerifyKind.parity
    steps: int | None = None  # null: 40 (parity; fewer if large), 20 (resume), 10 (distributed)
    attribute: bool = True  # parity: find the technique that causes a failure

    def __post_init__(self) -> None:
        least = 2 if self.what is VerifyKind.resume else 1  # before the middle and after it
        if self.steps is not None and self.steps < least:
            raise ConfigError("verify.steps", f"must be ≥ {least}, got {self.steps}")


@dataclass
class ScanConfig(Bounded, key="scan"):
    """The files that job=scan examines."""

    path: str | None = None  # a file, or a folder with everything below it
    deep: bool = True  # check stored values, too, not only the structure
    rows: int = bounded(30, min=0)  # rows on the screen, worst first; scan.json has all


@dataclass
class ReplayConfig(Bounded, key="replay"):
    """The captured step that job=replay repeats, and the limits."""

    path: str | None = None  # debug/captures/step_… folder, or a run's folder (first capture)
    attribute: bool = True  # find the techniques that cause it; one process per attempt
    timeout_s: float = bounded(300.0, above=0)  # seconds per attempt; the search gets 6 times that


@dataclass
class BenchmarkConfig(Bounded, key="benchmark"):
    """Settings of job=benchmark: arms, budget, and what to measure besides speed."""

    arms: list[str] = field(default_factory=lambda: list(LEVELS))  # levels or overrides to compare
    reference: str | None = None  # arm that the others are compared with; null: the first
    # seconds to measure and relaunch; the first start, compiling and parity are extra
    budget_s: float = bounded(120.0, above=0)
    processes: int = bounded(5, min=1)  # successive processes per arm; 1 if three exceed the budget
    narrow: float = bounded(0.02, above=0)  # stop once ratios are known to within this share
    block_s: float = bounded(0.25, above=0)  # seconds of steps per arm in each block
    warmup_steps: int = bounded(10, min=1)  # untimed steps at each start of an arm
    control: bool = True  # measure the reference twice, for the noise floor
    parity: bool = True  # check each arm's numerical results
    timeout_s: float = bounded(900.0, above=0)  # seconds to start an arm, and to check its parity
    attribute: bool = False  # measure the gain of each technique of the last arm's level
    attribute_budget_s: float = bounded(300.0, above=0)  # seconds for `attribute`
    baseline: str | None = None  # earlier benchmark.json or its folder to compare with; null: none
    tolerance: float = bounded(0.05, min=0)  # smaller relative changes are no regression
