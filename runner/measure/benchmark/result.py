"""The result of a benchmark as dataclasses: `benchmark.json`."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.core.device import capabilities
from runner.core.errors import StorageError
from runner.core.record import provenance
from runner.core.record.storage import make_folder, read_record, write_json
from runner.core.record.text import dataclass_from_json

FILE = "benchmark.json"
SCHEMA = 1
NEGLIGIBLE = 0.02  # a difference too small to matter
DONE = "done"
"""Other statuses: failed, killed, timeout, oom, interrupted."""
ENGAGED, TRIED = "engaged", "tried"
MEDIAN, MEAN = "median step", "mean step"


def machine_facts(summaries: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return facts about this machine, with the device of the first summary that names one."""
    facts: dict[str, Any] = {
        "cpu": capabilities.cpu_name(),
        "cores": capabilities.usable_cores(),
        "memory_gib": round(capabilities.usable_memory() / 2**30),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": provenance.versions().get("torch", ""),
    }
    device = next((s["device"] for s in summaries if s.get("device")), None)
    if device is not None:
        facts["device"] = device.get("kind")
        facts["device_name"] = device.get("name")
        facts["device_memory_gib"] = round((device.get("memory_bytes") or 0) / 2**30)
        facts["threads"] = device.get("threads")
    return facts


@dataclass
class ArmResult:
    """One arm. Values that could not be measured are None, with the reason in `notes`."""

    name: str
    overrides: list[str]
    status: str
    reason: str = ""
    folder: str | None = None  # run folder, relative to the benchmark's
    command: str = ""  # trains the same config outside the benchmark
    config: dict[str, Any] = field(default_factory=dict)  # keys that affect the run, dotted
    summary: dict[str, Any] = field(default_factory=dict)  # the run's summary.json
    samples_per_step: int = 0
    # speed: medians over blocks of the compared step (`BenchmarkResult.compared`)
    step_ms: float | None = None
    step_ms_interval: tuple[float, float] | None = None
    step_ms_p95: float | None = None  # of all steps measured; on accelerators, of the turns' means
    samples_per_second: float | None = None  # over all steps measured, slow ones included
    speedup: float | None = None  # reference's time per sample over this one's: above 1 is faster
    speedup_interval: tuple[float, float] | None = None  # 95 %, valid under the stopping rule
    claim: str = ""  # faster | slower | same | "": no claim
    blocks: int = 0
    per_sample_ms: list[float] = field(default_factory=list)  # of each block
    # set-up
    setup_seconds: float | None = None  # from the start of its process to its first step
    compile_seconds: float | None = None  # by the compiler's own count; 0 without one
    break_even_steps: int | None = None  # steps after which a slower start is paid back
    peak_process_bytes: int | None = None  # without data workers
    peak_device_bytes: int | None = None
    data_wait: float | None = None  # share of a step
    # correctness
    parity: str | None = None  # exact | explained by precision | FAIL; against its own plain run
    parity_reason: str = ""
    other_work: list[str] = field(default_factory=list)  # what it trains unlike the reference
    problems: list[str] = field(default_factory=list)  # signs that the model does not learn
    losses: list[float] = field(default_factory=list)  # of the first steps
    notes: list[str] = field(default_factory=list)
    # technique → engaged, tried (measured in the run, kept if faster), or why a run of the typed
    # length skips it; {} if that is what was measured
    planned: dict[str, str] = field(default_factory=dict)


@dataclass
class Control:
    """The reference measured against itself."""

    ratio: float
    interval: tuple[float, float]


@dataclass
class Effect:
    """Speedups of one technique: added alone to the reference, and left out of the level."""

    name: str
    added: float | None = None  # speedup of reference + technique over reference
    added_interval: tuple[float, float] | None = None
    removed: float | None = None  # speedup of the level over the level without it
    removed_interval: tuple[float, float] | None = None
    interaction: float | None = None  # removed / added; above 1: more within the level than alone
    interaction_interval: tuple[float, float] | None = None
    added_memory_bytes: int | None = None  # difference of peaks; positive is worse
    removed_memory_bytes: int | None = None
    processes: int = 1  # per arm
    note: str = ""  # why a value is missing


@dataclass
class Attribution:
    """The techniques of a level, with the effect of each."""

    level: str
    effects: list[Effect] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)  # summary for people
    stopped: str = ""


@dataclass
class Load:
    """How busy the machine was during the measurement."""

    others: float | None = None  # share of the CPUs used by other processes; median over blocks


@dataclass
class BenchmarkResult:
    """All arms, and how they were measured."""

    name: str
    reference: str  # name of the arm that the others are compared with
    arms: list[ArmResult]
    control: Control | None = None
    noise_floor: float | None = 0.0  # of the control; 0 without one, None if unknown
    blocks: int = 0
    seconds: float = 0.0  # of measuring
    stopped: str = ""  # why it stopped, e.g. narrow intervals or the budget
    machine: dict[str, Any] = field(default_factory=dict)  # facts that make machines comparable
    load: Load = field(default_factory=Load)
    notes: list[str] = field(default_factory=list)
    attribution: Attribution | None = None
    baseline: dict[str, Any] | None = None  # comparison with a stored result
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    started: str = ""  # ISO 8601
    process_starts: list[int] = field(default_factory=lambda: [0])  # first block of each launch
    processes: int = 1  # per arm; with one, intervals are too narrow
    compared: str = MEDIAN  # step of a turn that is compared; the mean if any arm has data workers
    schema: int = SCHEMA

    def arm(self, name: str) -> ArmResult:
        """Return the arm of that name. Raises KeyError."""
        return {arm.name: arm for arm in self.arms}[name]

    @property
    def claim_threshold(self) -> float | None:
        """Ratios within 1 ± this are not claimed (at least 2 %); None: no ratio is."""
        return None if self.noise_floor is None else max(self.noise_floor, NEGLIGIBLE)

    def write(self, folder: Path) -> None:
        """Write `benchmark.json` atomically, with NaN and Inf as null. Raises StorageError."""
        with suppress(OSError):  # write_json reports it
            make_folder(folder)
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, path: Path) -> BenchmarkResult:
        """Read a result from a file or folder; keys that a newer version added are dropped.

        Raises StorageError if it is missing or damaged, naming the first wrong value.
        """
        path = path / FILE if path.is_dir() else path
        try:
            values = json.loads(read_record(path))
            if not isinstance(values, dict) or not {"arms", "reference", "schema"} <= set(values):
                raise StorageError(f"{path}: not a result of job=benchmark")
            if isinstance(values["schema"], int) and values["schema"] > SCHEMA:
                raise StorageError(f"{path}: was written by a newer version of the runner")
            return dataclass_from_json(cls, values)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
