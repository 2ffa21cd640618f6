"""The look at the model of a run: when it is made, where it is told; and it changes nothing."""

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
from runner.build import Components
from runner.checks.model.check import ModelCheck
from runner.jobs import evaluate as job
from runner.record.history import History
from runner.report import run as report
from runner.training.hook import Hook, Report
from runner.training.run import Run
from runner.training.summary import Summary

SHORT = ["data=cancer", "monitoring=quiet", "training.steps=30"]


class Spoils(Hook):
    """Plants a fault while the run trains; it is above all guards, as a defect of memory is."""

    def __init__(self, name: str, value: float) -> None:
        self.name, self.value = name, value

    def on_report(self, run: Run, report: Report) -> None:
        if report.last == run.total_steps:
            run.model.state_dict()[self.name].flatten()[0] = self.value


def trained(folder: Path | None, *changes: str, hook: Hook | None = None) -> Summary:
    config = compose([*SHORT, *changes, *(["checkpoint=off"] if folder is None else [])])
    with build(config, folder) as run:
        run.hooks += [hook] if hook else []
        return train(run)


def test_a_sound_run_says_so_and_no_more(tmp_path: Path) -> None:
    summary = trained(tmp_path)
    check = Summary.read(tmp_path).model_check
    assert check == summary.model_check
    assert (check["ok"], check["faults"], check["warnings"], check["worst"]) == (True, 0, 0, [])
    assert check["after_training"] and check["seconds"] > 0
    assert summary.faults == {} and "model check" not in report.markdown(summary, tmp_path)


def test_what_is_found_after_training_is_told_everywhere(tmp_path: Path) -> None:
    summary = trained(tmp_path, "monitoring=default", hook=Spoils("layers.0.weight", 1e30))
    assert summary.status == "done"
    assert summary.faults["weights.huge"] == 1
    check = json.loads((tmp_path / "summary.json").read_text())["model_check"]
    assert not check["ok"] and check["warnings"] >= 1
    assert check["worst"][0]["where"] == "layers.0.weight"
    fault = next(f for f in History.read(tmp_path) if f.kind == "weights.huge")
    assert (fault.category, fault.severity, fault.steps) == ("model", "warning", [30])
    assert "layers.0.weight" in fault.message
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    with console.file:
        console.print(report.terminal(summary, tmp_path))
    shown = console.export_text()
    assert "model check" in shown and "layers.0.weight: values from" in shown
    events = b"".join(p.read_bytes() for p in tmp_path.glob("events.out.*"))
    assert b"checks/model" in events and b"weights.huge" in events


def test_a_fault_is_an_error_of_the_history(tmp_path: Path) -> None:
    summary = trained(tmp_path, hook=Spoils("layers.0.bias", math.nan))
    faults = {f.kind: f.severity for f in History.read(tmp_path)}
    assert faults["weights.not_finite"] == "error" == faults["behaviour.not_finite"]
    assert summary.model_check["faults"] == 2


def test_before_training_weights_and_structure_are_looked_at(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Notes(Hook):
        def on_report(self, run: Run, report: Report) -> None:
            seen.append(run.model_check)

    model = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].running_var[0] = -1.0
    config = compose([*SHORT, "checkpoint=off"])
    with build(config, tmp_path, Components(model=model)) as run:
        run.hooks.append(Notes())
        summary = train(run)
    assert seen[0]["faults"] == 1 and not seen[0]["after_training"]
    assert seen[0]["worst"][0]["code"] == "weights.negative_variance"
    assert summary.faults["weights.negative_variance"] >= 1


def test_a_run_trains_to_the_same_bits_with_and_without(tmp_path: Path) -> None:
    weights = []
    for enabled in ("true", "false"):
        config = compose([*SHORT, "checkpoint=off", f"checks.model.enabled={enabled}",
                          "optimizer.ema=0.9"])  # fmt: skip
        with build(config) as run:
            summary = train(run)
            assert bool(summary.model_check) is (enabled == "true")
            assert run.model.training  # as the loop left it
            weights.append([p.clone() for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_weights_that_are_evaluated_are_looked_at() -> None:
    with build(compose([*SHORT, "checkpoint=off", "optimizer.ema=0.9"])) as run:
        run.update.average[0].flatten()[0] = math.nan
        (hook,) = [hook for hook in run.hooks if isinstance(hook, ModelCheck)]
        found = hook.check(run, probe=False)
        assert found is not None and [r.code for r in found.findings] == ["weights.not_finite"]
        assert all(p.isfinite().all() for p in run.model.parameters())


def test_under_strict_a_class_of_no_trusted_package_is_a_warning() -> None:
    for level, ok in (("standard", True), ("strict", False)):
        model = nn.Sequential(Own())
        config = compose([*SHORT, "checkpoint=off", f"security={level}"])
        with build(config, given=Components(model=model)) as run:
            (hook,) = [hook for hook in run.hooks if isinstance(hook, ModelCheck)]
            found = hook.check(run, probe=False)
        assert found is not None and found.ok is ok
        assert [r.code for r in found.reasons] == ["structure.foreign_class"]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_look_that_fails_is_no_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Own):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            if broken:
                raise RuntimeError("not today")
            return super().named_modules(*args, **kwargs)

    broken = False
    with build(compose([*SHORT, "checkpoint=off"]), given=Components(model=Odd())) as run:
        (hook,) = [hook for hook in run.hooks if isinstance(hook, ModelCheck)]
        broken = True
        assert hook.check(run, probe=True) is None
        assert run.history.counts == {"model_check_failed": 1}


def test_evaluating_a_checkpoint_looks_at_its_model(tmp_path: Path) -> None:
    trained(tmp_path / "run", hook=Spoils("layers.0.weight", 1e30))
    summary = job.main(
        compose([*SHORT, "job=evaluate", f"checkpoint.resume={tmp_path / 'run'}"]),
        tmp_path / "again",
    )
    assert summary.model_check["worst"][0]["where"] == "layers.0.weight"
    assert summary.model_check["after_training"] and summary.faults["weights.huge"] == 1


RUNS = {
    "mlp": ["data=digits", "model=mlp"],
    "cnn": ["data=digits", "model=cnn", "model.width=8", "model.stages=2", "model.blocks=1"],
    "cancer": ["data=cancer", "model=mlp"],
    "gpt": ["data=stdlib_text", "model=gpt", "model.width=32", "model.depth=2", "model.heads=2",
            "data.sequence=32", "training.batch_size=8"],
    "classifier": ["data=stdlib_parts", "model=classifier", "model.width=32", "model.depth=1",
                   "model.heads=2", "data.sequence=48", "training.batch_size=8"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_our_own_models_raise_no_alarm_fresh_or_trained(name: str, seed: int) -> None:
    if seed and name not in ("mlp", "cancer"):
        pytest.skip("its other seeds are in the slow test")
    alarms(RUNS[name], seed, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", range(5))
def test_our_own_models_raise_no_alarm_over_many_seeds(name: str, seed: int) -> None:
    for steps in (1, 40, 400):
        alarms(RUNS[name], seed, steps)


def alarms(overrides: list[str], seed: int, steps: int) -> None:
    config = compose([*overrides, "checkpoint=off", "monitoring=quiet", f"seed={seed}",
                      f"training.steps={steps}"])  # fmt: skip
    with build(config) as run:
        summary = train(run)
    assert summary.model_check["ok"], summary.model_check["worst"]
    assert {w["code"] for w in summary.model_check["worst"]} <= {"behaviour.constant"}  # a note
