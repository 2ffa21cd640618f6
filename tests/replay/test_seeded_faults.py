"""Faults put into real runs: what the guard did, the module that is named, and the technique.

Each row is one run. All are survived: the run ends as it was meant to, with finite weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import build, compose, train
from runner.captures.manifest import captures
from runner.jobs.replay import main as replay
from runner.training.summary import Summary

TRUSTED = "security.trusted=[faulty_models,seeded_models]"
RUN = [
    TRUSTED,
    "device.threads=2",
    "monitoring.progress=false",
    "data.workers=0",
    "data._target_=faulty_models.Poisoned",
    "model._target_=faulty_models.Net",
    "training.batch_size=8",
    "training.steps=40",
    "monitoring.every=5",
    "training.validate_every=5",
    "optimization=none",
]
ONE = "+data.poison=[21]"  # sample 21 sets the fault off, once an epoch


@dataclass(frozen=True)
class Seeded:
    """A fault, and what has to be said of it."""

    overrides: list[str]
    kind: str  # in the history
    action: str  # begins so
    names: str = ""  # in the fault's message
    module: str = ""  # named by job=replay
    phase: str = ""
    technique: str | None = None  # None: no technique is to blame; empty: none could be
    marks: list[Any] = field(default_factory=list)


FAULTS = {
    "NaN in one batch": Seeded(
        ["+data.nan=[21]"], "non_finite", "skipped", module="", phase="input"
    ),
    "NaN weights": Seeded(
        ["debug.hooks=[{_target_: seeded_models.Ruin, at: 12}]"],
        "weights",
        "rolling back",
        module="first",
        phase="weights",
        technique="",
    ),
    "exploding gradient": Seeded(
        [
            ONE,
            "+model.part=grows",
            "training.steps=80",
            "stability.spike.at_least=10",
            "stability.spike.floor=0",
            "stability.spike.watch=grad_norm",
            "data.shuffle=false",
        ],
        "spike",
        "skipped",
        "gradient",
        module="part",
        phase="spike",
    ),
    "fp16 overflow": Seeded(
        [
            ONE,
            "+model.part=overflows",
            "optimization.amp.enabled=true",
            "optimization.amp.dtype=fp16",
        ],
        "overflow",
        "skipped",
        module="part",
        phase="forward",
        technique="amp",
        marks=[pytest.mark.slow],
    ),
    "NaN only in bfloat16": Seeded(
        [
            ONE,
            "+model.part=cancels",
            "optimization.amp.enabled=true",
            "optimization.amp.dtype=bf16",
        ],
        "non_finite",
        "skipped",
        module="part",
        phase="forward",
        technique="amp",
    ),
    "NaN only when compiled": Seeded(
        [ONE, "+model.part=compiled", "optimization.compile.enabled=true"],
        "non_finite",
        "skipped",
        module="part",
        phase="forward",
        technique="compile",
        marks=[pytest.mark.slow],
    ),
    "BatchNorm's buffers": Seeded(
        [ONE, "model._target_=seeded_models.Normalised"],
        "buffers",
        "skipped",
        "buffer",
        module="norm",
        phase="forward",
    ),
}
CASES = [pytest.param(fault, id=name, marks=fault.marks) for name, fault in FAULTS.items()]


@pytest.mark.parametrize("fault", CASES)
def test_a_seeded_fault_is_survived_and_named_right(fault: Seeded, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with build(compose([*RUN, *fault.overrides]), folder) as run:
        summary = train(run)
        weights = [*run.model.parameters(), *run.model.buffers()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights)
    assert summary.status == "done"
    rows = json.loads((folder / "debug" / "history.json").read_text())["faults"]
    ours = [row for row in rows if row["kind"] == fault.kind]
    assert ours, [(row["kind"], row["message"]) for row in rows]
    assert any(row["action"].startswith(fault.action) for row in ours), ours
    assert any(fault.names in row["message"] for row in ours), ours
    assert summary.faults[fault.kind] >= 1

    kept = [path for path in captures(folder) if _kind(path) == fault.kind]
    found = _replayed(kept[0], tmp_path / "replay")
    assert found.reproduced
    assert (found.found.phase.value, found.found.module) == (fault.phase, fault.module)
    if fault.technique == "":
        assert found.blame is None
    else:
        assert found.blame is not None
        assert found.blame.techniques == ([] if fault.technique is None else [fault.technique])
    assert Summary.read(tmp_path / "replay").status == "done"


def _kind(path: Path) -> str:
    kind: str = json.loads((path / "manifest.json").read_text())["kind"]
    return kind


def _replayed(path: Path, folder: Path) -> Any:
    folder.mkdir()
    return replay(compose(["job=replay", f"replay.path={path}", TRUSTED]), folder)
