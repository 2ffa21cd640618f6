"""The profiler's window, the verdict in words: in real runs, shaped to be so."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from runner import Hook, Summary, profile, train
from runner.core.build.setup import Components
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.schemas.debug import DebugConfig
from runner.diagnose.debug.module_times import is_operator, operator_name
from runner.diagnose.debug.profile import (
    ProfilerWindow,
    ProfileTool,
    StepMeasurements,
    find_bottlenecks,
)
from runner.diagnose.debug.tool import DebugTool
from tests import runs

SMALL = (
    "debug=profile data=cancer optimization=none training.steps=40 training.validate_every=1000"
).split()
OWN = ["security.trusted=[my_package]", "data._target_=my_package.Noisy"]
FUSED = "optimization.fused_optimizer.enabled=true"
pytestmark = pytest.mark.usefixtures("my_package")


def profiled(
    *overrides: str,
    folder: Path | None = None,
    model: nn.Module | None = None,
    hook: Hook | None = None,
) -> tuple[ProfileTool, Summary, Run]:
    with runs.opened(*SMALL, *overrides, folder=folder, given=Components(model=model)) as run:
        if hook is not None:
            run.hooks.append(hook)
        summary = train(run)
        (tool,) = (hook for hook in run.hooks if isinstance(hook, ProfileTool))
        return tool, summary, run


class Dawdling(Hook):
    """Works between the steps."""

    def on_step(self, run: Run, step: Step) -> None:
        for _ in range(200):
            torch.linalg.vector_norm(torch.ones(64, 64) @ torch.ones(64, 64))


@pytest.mark.parametrize(
    ("shape", "hook", "expected"),
    [
        (
            [*OWN, "data.workers=0", "+data.seconds=0.0005"],
            None,
            "step time waits for data: raise data.workers (now 0)",
        ),
        (
            "model=mlp model.depth=12 model.width=128 training.batch_size=4".split(),
            None,
            "of a step: optimization.fused_optimizer.enabled=true",
        ),
        pytest.param(
            *(["model.width=8"], Dawdling(), "of step time is spent between steps"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(["model.width=8", "model.depth=12", "device.threads=1"], None, "host-bound: "),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "optimizer", "between", "host"],
)
def test_a_run_is_told_what_keeps_it_from_being_faster(
    shape: list[str], hook: Hook | None, expected: str
) -> None:
    tool, summary, _ = profiled(*shape, hook=hook)
    assert any(expected in text for text in tool.verdicts), tool.verdicts
    (row,) = [row for row in summary.tools if row.name == "profile"]
    assert row.finding == "; ".join(tool.verdicts[:2])
    assert row.looks == 1
    assert row.seconds > 0


class Slow(DebugTool):
    """A debug tool that takes longer than the steps, between them."""

    name = "slow"

    def on_step(self, run: Run, step: Step) -> None:
        for _ in range(2):
            Dawdling().on_step(run, step)


def test_what_debug_tools_take_between_steps_is_not_held_against_the_run() -> None:
    tool, _, run = profiled("model.width=8", "device.threads=1", hook=Slow(DebugConfig()))
    assert run.stopwatch.phase_seconds["other"] > 0.25 * sum(
        run.stopwatch.phase_seconds.values()
    ), "it did take long"
    assert not any("between steps" in text for text in tool.verdicts), tool.verdicts
    assert tool.measurements.split["other"] < 0.25
    assert "without the time of debug tools" in tool.markdown(1.0)


LONG: dict[str, Any] = {
    "operators": 1800.0, "operator": "aten::mm", "operator_share": 0.6, "operator_ms": 1.25,
}  # fmt: skip
MANY: dict[str, Any] = {"step_ms": 30.0, "operators": 1800.0, "operators_ms": 8.0}
WAIT: dict[str, Any] = {
    "step_ms": 11.0, "operators": 40.0, "operators_ms": 10.0, "operator": "gloo:all_reduce",
    "operator_share": 0.9, "operator_ms": 9.0,
}  # fmt: skip
TAKES = "aten::mm takes 60% of the operators' time, 1.25 ms a step"
AMP = "16 bits may help: optimization.amp.enabled=true"
STALL = "50% of step time is spent in Python outside of torch's operators, most in module a 14 ms,"
HOST = "host-bound: 1,800 small operators a step: "
BOTTLENECKS: dict[str, tuple[dict[str, Any], str]] = {
    "a long operator": (
        {"step_ms": 100.0, **LONG}, f"{TAKES}; {AMP}"
    ),
    "a long operator in 16 bits": ({"step_ms": 100.0, "techniques": ["amp"], **LONG}, TAKES),
    "many short operators": ({"step_ms": 18.0, **LONG}, f"{HOST}optimization.whole_step"),
    "a technique that was refused": (
        {"step_ms": 18.0, "not_applied": ["whole_step"], **LONG},
        f"{HOST}a larger training.batch_size",
    ),
    "a busy device": ({"step_ms": 18.0, "busy": 0.9, **LONG}, f"{TAKES}; {AMP}"),
    "a wait for other processes": (
        WAIT, "waiting for the other processes takes 9 ms a step (gloo:all_reduce)"
    ),
    "short operators without a stall": (MANY, "host-bound"),
    "stalls before short operators": (MANY | {"stalls": {"a": 14.0, "b": 1.0}}, STALL),
    "a stall outside of modules": (
        {"step_ms": 30.0, "operators": 10.0, "operators_ms": 8.0, "split": {"forward": 1.0}},
        "73% of step time is spent in Python outside of torch's operators, most in forward: debug.",
    ),
    "a stall of 13 %": (MANY | {"stalls": {"a": 4.0}}, "host-bound"),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTTLENECKS)
def test_one_bottleneck_is_named(case: str) -> None:
    measured, expected = BOTTLENECKS[case]
    (text,) = find_bottlenecks(StepMeasurements(**measured))
    assert text.startswith(expected)
    assert ("amp.enabled" in text) == ("amp.enabled" in expected)


class Lopsided(nn.Module):
    """One layer does nearly all the work; a section is around another."""

    def __init__(self) -> None:
        super().__init__()
        self.light, self.heavy = nn.Linear(6, 256), nn.Linear(256, 2048)
        self.head = nn.Linear(2048, 2)

    def forward(self, x: Tensor) -> Tensor:
        with profile.section("light", category="model"):
            x = self.light(x).relu()
        return self.head(self.heavy(x).relu())


def test_operators_and_sections_are_in_tables_and_trace(tmp_path: Path) -> None:
    profiled(*OWN, folder=tmp_path, model=Lopsided())
    content = runs.debug_file(tmp_path, "profile")
    operators = {row["name"]: row for row in content["trace"]["operators"]}
    assert content["trace"]["steps"] == 5
    assert operators["aten::addmm"]["calls"] == 3 * 5, "no validation is in the window"
    assert operators["aten::mm"]["seconds"] > operators["aten::relu"]["seconds"] > 0
    (section,) = content["sections"]
    assert (section["name"], section["category"]) == ("light", "model")
    assert section["calls"] >= 40
    page = (tmp_path / "debug/profile.md").read_text()
    assert "| light model |" in page and "| aten::addmm | 3 |" in page
    assert content["trace_file"] == "debug/traces/step_00000022.json.gz" in page
    with gzip.open(tmp_path / content["trace_file"]) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "section light" for event in events) == 5
    assert sum(str(event.get("name")).startswith("ProfilerStep#") for event in events) == 5
    shown = b"".join(path.read_bytes() for path in tmp_path.glob("events.out.tfevents.*"))
    assert b"profile/report" in shown and b"| light model |" in shown


@pytest.mark.parametrize(
    ("overrides", "first", "steps"),
    [
        (["training.steps=5"], 3, 3),  # shorter than the window
        (["training.validate_every=20", "debug.profile.start=18"], 23, 5),  # behind a validation
    ],
)
def test_a_window_is_where_its_steps_are_usual_ones(
    overrides: list[str], first: int, steps: int
) -> None:
    tool, summary, _ = profiled(*overrides)
    assert summary.status == "done" and (tool.trace_start, tool.trace_steps) == (first, steps)


@pytest.mark.gpu
def test_on_a_gpu_time_is_that_of_the_kernels(tmp_path: Path) -> None:
    wide = "model=mlp model.width=1536 training.batch_size=256 optimizer=sgd device=cuda".split()
    tool, _, _ = profiled(*wide, FUSED, folder=tmp_path)
    assert 0 < (tool.busy or 0) <= 1 and tool.operators[0]["seconds"] > 0


def test_a_device_that_works_for_half_of_a_window_is_half_busy() -> None:
    row = SimpleNamespace(
        key="sgemm", device_type=DeviceType.CUDA, is_user_annotation=False, count=1,
        self_device_time_total=6000,
    )  # fmt: skip
    profiler: Any = SimpleNamespace(key_averages=lambda: [row], events=list)
    window: Any = SimpleNamespace(profiler=profiler, recorded=1, first=4, seconds=0.012)
    tool, run = object.__new__(ProfileTool), SimpleNamespace(folder=None)
    tool._read_window(run, window)  # type: ignore[arg-type]
    assert tool.busy == pytest.approx(0.5)


def test_a_window_that_cannot_be_closed_costs_its_operators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(window: ProfilerWindow) -> None:
        raise RuntimeError("no profiler is active")

    monkeypatch.setattr(ProfilerWindow, "stop", stop)
    _, summary, _ = profiled("training.steps=6", "debug.profile.steps=30", folder=tmp_path)
    assert summary.status == "done" and summary.faults == {"no_profile": 1}
    assert (tmp_path / "debug/profile.md").exists()
    assert (tmp_path / "debug/profile.json").exists()


def profiler_row(key: str, kind: Any = DeviceType.CPU, is_range: bool = False) -> Any:
    return SimpleNamespace(key=key, device_type=kind, is_user_annotation=is_range)


OPERATORS = [
    *("aten::mm", "custom::step", "cumulative", "## Call CompiledFxGraph f ##"),
    "autograd::engine::evaluate_function: AddmmBackward0",
]
OTHERS = [
    *("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"),
    *("cudaGraphLaunch", "hipLaunchKernel", "hipExtModuleLaunchKernel", "ProfilerStep#3"),
    *("cuda_stream_wait", "Activity Buffer Request", "Lazy Function Loading"),
    *("model.py(12): forward", "<built-in method sleep of module>", "nn.Module: Linear_0"),
]


def test_launches_python_functions_and_the_profilers_own_rows_are_no_operators() -> None:
    assert [key for key in OPERATORS + OTHERS if is_operator(profiler_row(key))] == OPERATORS
    assert not is_operator(profiler_row("ampere_sgemm_128x64", kind=DeviceType.CUDA))
    assert not is_operator(profiler_row("my section", is_range=True))
    assert operator_name("## Call CompiledFxGraph fhr6rbnwwefn7wij ##") == "compiled graph fhr6rbnw"
