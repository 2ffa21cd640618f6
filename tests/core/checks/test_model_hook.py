"""The model check of a run: when it is made and where it is recorded; it changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from runner import build, compose, train
from runner.core.build.setup import Components
from runner.core.interfaces.hook import Hook, Report
from runner.core.interfaces.run import Run
from runner.core.jobs import evaluate as job
from runner.core.jobs import run_report as report
from runner.core.record.history import History
from runner.core.record.summary import Summary

CLEAN = {"ok": True, "faults": 0, "warnings": 0, "notes": 0, "worst": [], "after_training": True}
SHORT = ["data=cancer", "monitoring=quiet", "training.steps=30"]


class Spoils(Hook):
    """Plants a fault while the run trains; it is above all guards, as a defect of memory is."""

    def on_report(self, run: Run, report: Report) -> None:
        if report.last == run.total_steps:
            run.model.state_dict()["layers.0.weight"].flatten()[0] = math.nan


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A run whose weights were spoiled at its last step."""
    folder = tmp_path_factory.mktemp("spoiled")
    with build(compose([*SHORT, "monitoring=default"]), folder) as run:
        run.hooks.append(Spoils())
        return folder, train(run)


def test_a_finding_after_training_is_in_every_record(
    spoiled: tuple[Path, Summary], tmp_path: Path
) -> None:
    folder, summary = spoiled
    assert summary.status == "done" and summary.faults["weights.not_finite"] == 1
    check = json.loads((folder / "summary.json").read_text())["model_check"]
    assert not check["ok"] and check["faults"] == 1 and check["after_training"]
    assert check["worst"][0]["where"] == "layers.0.weight"
    fault = next(f for f in History.read(folder) if f.kind == "weights.not_finite")
    assert (fault.category, fault.severity, fault.steps) == ("model", "error", [30])
    assert "layers.0.weight" in fault.message
    with (tmp_path / "out").open("w") as file:
        console = Console(width=100, record=True, file=file)
        console.print(report.RunSummaryTable(summary, folder))
    shown = console.export_text()
    assert "model check" in shown and "layers.0.weight: 1 NaN of" in shown


def test_evaluating_a_checkpoint_checks_its_model(
    spoiled: tuple[Path, Summary], tmp_path: Path
) -> None:
    config = compose([*SHORT, "job=evaluate", f"checkpoint.resume={spoiled[0]}/checkpoints/last"])
    summary = job.main(config, tmp_path / "again")
    assert summary.model_check["worst"][0]["where"] == "layers.0.weight"
    assert summary.model_check["after_training"] and summary.faults["weights.not_finite"] == 1


def test_before_training_weights_are_checked() -> None:
    seen: list[dict[str, Any]] = []

    class Notes(Hook):
        def on_report(self, run: Run, report: Report) -> None:
            seen.append(run.model_check)

    model = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].running_var[0] = -math.inf
    with build(compose([*SHORT, "checkpoint=off"]), given=Components(model=model)) as run:
        run.hooks.append(Notes())
        train(run)
        severities = {fault.kind: fault.severity for fault in run.history.faults.values()}
    assert seen[0]["faults"] == 1 and not seen[0]["after_training"]
    assert seen[0]["worst"][0]["code"] == "weights.not_finite"
    assert severities["weights.not_finite"] == "error"


def test_a_run_trains_to_the_same_bits_with_and_without() -> None:
    weights = []
    for enabled in ("true", "false"):
        config = compose([*SHORT, "checkpoint=off", f"checks.model.enabled={enabled}",
                          "optimizer.ema=0.9"])  # fmt: skip
        with build(config) as run:
            check = train(run).model_check
            weights.append([p.clone() for p in run.model.parameters()])
        if enabled == "true":
            assert check == CLEAN
        else:
            assert check == {}
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


RUNS = {
    "cnn": ["data=digits", "model=cnn", "model.width=8", "model.stages=2", "model.blocks=1"],
    "gpt": ["data=stdlib_text", "model=gpt", "model.width=32", "model.depth=2", "model.heads=2",
            "data.sequence=32", "training.batch_size=8"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_our_own_models_raise_no_alarm(name: str) -> None:
    overrides = [*RUNS[name], "checkpoint=off", "monitoring=quiet", "training.steps=1"]
    with build(compose(overrides)) as run:
        assert train(run).model_check == CLEAN
