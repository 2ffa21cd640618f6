"""Faults put into real runs: what the guard did, the module that is named, and the technique.

Each row is one run. All are survived: the run ends as it was meant to, with finite weights.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from runner import train
from runner.core.captures.manifest import list_captures, read_manifest
from runner.core.record.summary import Summary
from tests import runs
from tests.diagnose.replay.replays import OVERRIDES, replay

RUN = [*OVERRIDES, "training.steps=20", "monitoring.every=5", "training.validate_every=5"]
ONE = "+data.poison=[21]"  # sample 21 sets the fault off, once an epoch

SPIKE = ["stability.spike.at_least=10", "stability.spike.floor=0"]


@dataclass(frozen=True)
class Seeded:
    """A fault, and what has to be said of it."""

    overrides: list[str]
    kind: str  # in the history
    action: str  # begins so
    module: str  # named by job=replay
    phase: str

    words: str = ""  # in the fault's message


FAULTS = {
    "NaN in one batch": Seeded(["+data.nan=[21]"], "non_finite", "skipped", "", "input"),
    "NaN weights": Seeded(
        ["debug.hooks=[{_target_: seeded_models.Ruin, at: 12}]"],
        "weights", "rolling back", "first", "weights",
    ),
    "exploding gradient": Seeded(
        [ONE, "+model.part=grows", "training.steps=80", *SPIKE,
         "stability.spike.watch=grad_norm", "data.shuffle=false"],
        "spike", "skipped", "", "spike", words="gradient",
    ),

    "BatchNorm's buffers": Seeded(
        [ONE, "model._target_=seeded_models.Normalised"],
        "buffers", "skipped", "norm", "forward", words="buffer",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_survived_and_named_right(name: str, tmp_path: Path) -> None:
    fault, folder = FAULTS[name], tmp_path / "run"
    with runs.opened(*RUN, *fault.overrides, folder=folder) as run:
        summary = train(run)
        weights = [*run.model.parameters(), *run.model.buffers()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights)
    assert summary.status == "done"
    ours = runs.faults(folder, fault.kind)
    assert ours, runs.faults(folder)
    assert any(row["action"].startswith(fault.action) for row in ours), ours
    assert any(fault.words in row["message"] for row in ours), ours
    assert summary.faults[fault.kind] >= 1

    kept = [path for path in list_captures(folder) if read_manifest(path).kind == fault.kind]
    result = replay(kept[0], tmp_path / "replay")
    assert result.reproduced
    assert (result.found.phase.value, result.found.module) == (fault.phase, fault.module)
    if fault.phase == "weights":  # the fault is of an older step
        assert result.blame is None
    else:
        assert result.blame.techniques == []
    assert Summary.read(tmp_path / "replay").status == "done"
