"""The profiler's window, the verdict in words: in real runs, shaped to be so."""

from __future__ import annotations

import gzip
import json
import time
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


def test_one_long_operator_is_named_and_many_short_ones_are_host_bound() -> None:
    most: dict[str, Any] = {"operators": 1800.0, "operator": "aten::mm"}
    most |= {"operator_share": 0.6, "operator_ms": 1.25}
    (text,) = find_bottlenecks(StepMeasurements(step_ms=100, **most))
    assert text == (
        "aten::mm takes 60% of the operators' time, 1.25 ms a step; "
        "16 bits may help: optimization.amp.enabled=true"
    )
    (text,) = find_bottlenecks(StepMeasurements(step_ms=100, techniques=["amp"], **most))
    assert "optimization." not in text
    (text,) = find_bottlenecks(StepMeasurements(step_ms=18, **most))
    assert text.startswith("host-bound: 1,800 small operators a step: optimization.whole_step")
    refused = StepMeasurements(step_ms=18, not_applied=["whole_step"], **most)  # in a short run
    (text,) = find_bottlenecks(refused)
    assert text == "host-bound: 1,800 small operators a step: a larger training.batch_size"
    assert find_bottlenecks(StepMeasurements(step_ms=18, busy=0.9, **most))[0].startswith(
        "aten::mm"
    )
    assert operator_name("## Call CompiledFxGraph fhr6rbnwwefn7wij ##") == "compiled graph fhr6rbnw"


class Stalling(nn.Module):
    """Its forward waits in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return self.layer(x)


@pytest.mark.parametrize("stacks", ["false", "true"])
def test_a_stall_in_python_is_not_blamed_on_an_operator(stacks: str) -> None:
    tool, _, _ = profiled(f"debug.profile.stacks={stacks}", model=Stalling())
    assert "in Python outside of torch's operators, most in module (model) " in tool.verdicts[0]
    assert not any("amp" in text for text in tool.verdicts)
    assert not any(".py(" in row["name"] or "<" in row["name"] for row in tool.operators)


def test_python_functions_are_not_counted_as_operators() -> None:
    rows = ["model.py(12): forward", "<built-in method sleep of module>", "nn.Module: Linear_0"]
    assert not any(is_operator(profiler_row(key, 1)) for key in rows)
    assert is_operator(profiler_row("autograd::engine::evaluate_function: AddmmBackward0", 1))


def test_waiting_for_other_processes_is_not_blamed_on_the_precision() -> None:
    most: dict[str, Any] = {"operators": 40.0, "operator_share": 0.9, "operator_ms": 9.0}
    measured = StepMeasurements(step_ms=11, operators_ms=10.0, operator="gloo:all_reduce", **most)
    (text,) = find_bottlenecks(measured)
    assert text.startswith("waiting for the other processes takes 9 ms a step (gloo:all_reduce)")
    assert "amp" not in text


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


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["whole_step", "compile"])
def test_a_compiled_run_is_profiled_as_it_is(technique: str) -> None:
    lengths = ["optimization.compile.min_steps=0"] if technique == "compile" else []
    tool, summary, run = profiled(f"optimization.{technique}.enabled=true", *lengths)
    assert {row.name: row.engaged for row in summary.techniques}[technique]
    assert any("ompiled" in operator["name"] for operator in tool.operators)
    assert "##" not in tool.markdown(1.0).partition("| operator |")[2].partition("\n\n")[0]
    assert run.step_graph is not None or technique == "compile"


@pytest.mark.gpu
def test_on_a_gpu_time_is_that_of_the_kernels(tmp_path: Path) -> None:
    wide = "model=mlp model.width=1536 training.batch_size=256 optimizer=sgd device=cuda".split()
    tool, _, _ = profiled(*wide, FUSED, folder=tmp_path)
    assert 0 < (tool.busy or 0) <= 1 and tool.operators[0]["seconds"] > 0


def profiler_row(key: str, ms: float, on_device: bool = False, user: bool = False) -> Any:
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    return SimpleNamespace(
        key=key, count=3, device_type=kind, is_user_annotation=user,
        self_device_time_total=ms * 1e3, self_cpu_time_total=ms * 1e3,
    )  # fmt: skip


def test_kernel_launches_and_the_profilers_own_rows_are_not_operators() -> None:
    operators = ["aten::mm", "custom::step", "cumulative", "## Call CompiledFxGraph f ##"]
    others = ["cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"]
    others += ["cudaGraphLaunch", "hipLaunchKernel", "hipExtModuleLaunchKernel", "ProfilerStep#3"]
    others += ["Activity Buffer Request", "Lazy Function Loading", "cuda_stream_wait"]
    assert all(is_operator(profiler_row(key, 1)) for key in operators)
    assert not any(is_operator(profiler_row(key, 1)) for key in others)
    assert not is_operator(profiler_row("ampere_sgemm_128x64", 1, on_device=True))
    assert not is_operator(profiler_row("my section", 1, user=True))
