"""`check_model`: planted faults with their place, sound models, and the check of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.utils import parametrizations

from runner import compose, train
from runner.core.build.setup import Components
from runner.core.checks.model import check_model
from runner.core.findings import Severity
from runner.core.interfaces.hook import Report
from runner.core.interfaces.run import Run
from runner.core.jobs import evaluate as job
from runner.core.jobs import run_report as report
from runner.core.record.history import History
from runner.core.record.summary import Summary
from runner.core.techniques.recompute import RecomputedBlocks, RecomputePolicy
from tests.runs import AtSteps, differences, hook, opened, trained, weights

FAULT, WARNING, NOTE = Severity.REFUSAL, Severity.WARNING, Severity.NOTE
Change = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    )


def fill(path: str, value: float, *at: Any) -> Change:
    def plant(model: nn.Module) -> str:
        model.state_dict()[path][at] = value
        return path

    return plant


def no_units(model: nn.Module) -> str:
    model[3] = nn.Linear(8, 0, bias=False)
    return "3.weight"


def two_types(model: nn.Module) -> str:
    model[3].double()
    return ""


PLANTED: dict[str, tuple[Change, str, Severity]] = {
    "NaN": (fill("3.weight", math.nan, 2, 7), "not_finite", FAULT),
    "Inf in a bias": (fill("0.bias", math.inf, 1), "not_finite", FAULT),
    "-Inf in statistics": (fill("1.running_var", -math.inf, 0), "not_finite", FAULT),
    "a size of 0": (no_units, "empty", WARNING),
    "float64 in one layer": (two_types, "dtypes", NOTE),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_named_with_its_place_and_nothing_else_is(what: str) -> None:
    plant, code, severity = PLANTED[what]
    model = net()
    where = plant(model)
    report = check_model(model)
    expected = [(f"weights.{code}", severity, where)]
    assert [(r.code, r.severity, r.where) for r in report.reasons] == expected
    assert report.ok is (severity is NOTE)


def tie(model: nn.Module) -> None:
    model[3].weight = model[2][0].weight


def buffers(model: nn.Module) -> None:
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("min_val", torch.tensor(math.inf))  # of a quantisation observer
    model.register_buffer("ids", torch.full((3, 3), -(2**40)))
    model.register_buffer("none", torch.zeros(0, 4))
    model.register_buffer("wide", torch.full((2,), 1e300, dtype=torch.float64))
    model.register_buffer("waves", torch.randn(3, 3, dtype=torch.complex64))
    model.register_buffer("bytes", torch.randn(4, 4).to(torch.float8_e4m3fn))


SOUND: dict[str, Change] = {
    "tied layers": tie,
    "buffers of any kind": buffers,
    "16 bits": lambda m: m.to(torch.bfloat16),
    "weight norm of torch": lambda m: parametrizations.weight_norm(m[0]),
    "blocks that the runner recomputes": lambda m: RecomputedBlocks(
        RecomputePolicy.full, [m[2]]
    ).wrap(ExitStack()),
    "a script": lambda m: m.append(torch.jit.script(nn.Linear(2, 2))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("what", SOUND)
def test_a_sound_model_is_passed(what: str) -> None:
    model = net()
    SOUND[what](model)
    assert check_model(model).reasons == []


def test_what_has_no_plain_memory_is_passed_over_and_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.LazyLinear(3), nn.Linear(3, 3))
    report = check_model(model)
    assert report.ok
    assert report.facts["not_checked"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.gpu
def test_a_model_on_an_accelerator_is_checked_there() -> None:
    model = net().to("cuda")
    where = fill("3.weight", math.nan, 2, 7)(model)
    assert [reason.where for reason in check_model(model).reasons] == [where]


CLEAN = {"ok": True, "faults": 0, "warnings": 0, "notes": 0, "worst": [], "after_training": True}
SHORT = ["data=cancer", "monitoring=quiet", "training.steps=30"]


def spoil_at_the_end(run: Run, report: Report) -> None:
    """It is above all guards, as a defect of memory is."""
    if report.last == run.total_steps:
        run.model.state_dict()["layers.0.weight"].flatten()[0] = math.nan


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A run whose weights were spoiled at its last step."""
    folder = tmp_path_factory.mktemp("spoiled")
    hooks = [hook(on_report=spoil_at_the_end)]
    return folder, trained(*SHORT, "monitoring=default", folder=folder, hooks=hooks)


def test_a_finding_after_training_is_in_every_record(
    spoiled: tuple[Path, Summary], tmp_path: Path
) -> None:
    folder, summary = spoiled
    assert summary.status == "done" and summary.faults["weights.not_finite"] == 1
    check = Summary.read(folder).model_check
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
    notes = AtSteps(1, lambda run: seen.append(run.model_check))
    model = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].running_var[0] = -math.inf
    with opened(*SHORT, "checkpoint=off", given=Components(model=model, hooks=[notes])) as run:
        train(run)
        severities = {fault.kind: fault.severity for fault in run.history.faults.values()}
    assert seen[0]["faults"] == 1 and not seen[0]["after_training"]
    assert seen[0]["worst"][0]["code"] == "weights.not_finite"
    assert severities["weights.not_finite"] == "error"


def test_a_run_trains_to_the_same_bits_with_and_without() -> None:
    ends, typed = [], [*SHORT, "checkpoint=off", "optimizer.ema=0.9"]
    for enabled, check in (("true", CLEAN), ("false", {})):
        with opened(*typed, f"checks.model.enabled={enabled}") as run:
            assert train(run).model_check == check
            ends.append(weights(run))
    assert differences(*ends) == []


RUNS = {
    "cnn": ["data=digits", "model=cnn", "model.width=8", "model.stages=2", "model.blocks=1"],
    "gpt": ["data=stdlib_text", "model=gpt", "model.width=32", "model.depth=2", "model.heads=2",
            "data.sequence=32", "training.batch_size=8"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_our_own_models_raise_no_alarm(name: str) -> None:
    overrides = [*RUNS[name], "checkpoint=off", "monitoring=quiet", "training.steps=1"]
    assert trained(*overrides).model_check == CLEAN
