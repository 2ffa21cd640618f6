"""The result of a benchmark as plain data: `benchmark.json`."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import StorageError
from runner.record.storage import read_record, write_json
from runner.record.text import dataclass_from_json

FILE = "benchmark.json"
SCHEMA = 1
SAME = 0.02  # a difference too small to matter
DONE = "done"
"""Any other status of an arm is how it ended: failed, killed, timeout, oom, interrupted."""
MEDIAN, MEAN = "median step", "mean step"


@dataclass
class ArmResult:
    """One arm. What could not be measured is None, and `notes` says why."""

    name: str
    overrides: list[str]
    status: str
    reason: str = ""
    folder: str | None = None  # of its run, relative to the benchmark's
    command: str = ""  # trains the same by itself
    config: dict[str, Any] = field(default_factory=dict)  # what shapes it, by dotted key
    summary: dict[str, Any] = field(default_factory=dict)  # the run's summary.json
    samples_per_step: int = 0
    # speed: medians over blocks, of the step of each that was compared (`BenchmarkResult.compared`)
    step_ms: float | None = None
    step_ms_interval: tuple[float, float] | None = None
    step_ms_p95: float | None = None  # of all steps measured; on accelerators, of the turns' means
    samples_per_second: float | None = None  # of all steps measured, slow ones included
    speedup: float | None = None  # reference's time per sample over this one's: above 1 is faster
    speedup_interval: tuple[float, float] | None = None  # 95 %, through the stopping rule
    claim: str = ""  # faster | slower | same | "" where none can be made
    blocks: int = 0
    per_sample_ms: list[float] = field(default_factory=list)  # of each block: what all rests on
    # what it takes to get there
    setup_seconds: float | None = None  # from the start of its process to its first step
    compile_seconds: float | None = None  # by the compiler's own count; 0 without one
    break_even_steps: int | None = None  # from how many on a slower start is paid back
    peak_process_bytes: int | None = None  # without that of its data workers
    peak_device_bytes: int | None = None
    data_wait: float | None = None  # share of a step
    # whether it is the same training
    parity: str | None = None  # exact | explained by precision | FAIL; against its own plain run
    parity_reason: str = ""
    other_work: list[str] = field(default_factory=list)  # in what it trains unlike the reference
    problems: list[str] = field(default_factory=list)  # signs that it does not train
    losses: list[float] = field(default_factory=list)  # of the first steps
    notes: list[str] = field(default_factory=list)


@dataclass
class Control:
    """The reference against itself."""

    ratio: float
    interval: tuple[float, float]


@dataclass
class Effect:
    """What one technique is worth: added alone to the plain run, and left out of the level."""

    name: str
    added: float | None = None  # speedup of plain + it over plain
    added_interval: tuple[float, float] | None = None
    removed: float | None = None  # speedup of the level over the level without it
    removed_interval: tuple[float, float] | None = None
    interaction: float | None = (
        None  # removed / added: above 1: it gains more within the level than alone
    )
    interaction_interval: tuple[float, float] | None = None
    added_memory_bytes: int | None = None  # difference of peaks: more is worse
    removed_memory_bytes: int | None = None
    processes: int = 1  # of each arm, over which the intervals are
    note: str = ""  # why something is missing


@dataclass
class Attribution:
    """What the techniques of a level are worth, one by one."""

    level: str
    effects: list[Effect] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)  # what a person should take away
    stopped: str = ""


@dataclass
class Load:
    """How busy the machine was while it was measured."""

    others: float | None = None  # share of the CPUs that other processes took; median over blocks


@dataclass
class BenchmarkResult:
    """All arms, and how they were measured."""

    name: str
    reference: str  # the name of the arm that the others are compared with
    arms: list[ArmResult]
    control: Control | None = None
    noise_floor: float | None = 0.0  # the control's; 0 without one, None where it is not known
    blocks: int = 0
    seconds: float = 0.0  # of measuring
    stopped: str = ""  # why it ended: narrow enough, or the budget
    machine: dict[str, Any] = field(default_factory=dict)  # what makes machines comparable
    load: Load = field(default_factory=Load)
    notes: list[str] = field(default_factory=list)
    attribution: Attribution | None = None
    baseline: dict[str, Any] | None = None  # what it was compared with, and the outcome
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""
    started: str = ""  # ISO 8601
    process_starts: list[int] = field(default_factory=lambda: [0])  # blocks that new ones began at
    processes: int = 1  # of each arm, over which intervals are; of one they are too narrow
    compared: str = MEDIAN  # of each turn; with data workers in any arm the mean one, in all arms
    schema: int = SCHEMA

    def arm(self, name: str) -> ArmResult:
        """The arm of that name; KeyError if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)

    @property
    def unclaimed(self) -> float | None:
        """No ratio within 1 ± this is claimed, at least 2 %; None: no ratio at all is."""
        return None if self.noise_floor is None else max(self.noise_floor, SAME)

    def write(self, folder: Path) -> None:
        """Replace `benchmark.json`; NaN and Inf become null. Raises StorageError."""
        with suppress(OSError):  # as writing says
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, path: Path) -> BenchmarkResult:
        """The result in a file or folder; keys that a newer version added are left out.

        StorageError where there is none or it is damaged; it names the first value that is wrong.
        """
        path = path / FILE if path.is_dir() else path
        try:
            values = json.loads(read_record(path))
            if not isinstance(values, dict) or not {"arms", "reference", "schema"} <= set(values):
                raise StorageError(f"{path}: is no result of job=benchmark")
            if isinstance(values["schema"], int) and values["schema"] > SCHEMA:
                raise StorageError(f"{path}: was written by a newer version of the runner")
            return dataclass_from_json(cls, values)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
