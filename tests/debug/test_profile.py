"""The profiler's window, the verdict in words: in real runs, shaped to be so."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from runner import Hook, Summary, profile, train
from runner.build import Components
from runner.debug.config import DebugConfig
from runner.debug.profile import ProfileTool
from runner.debug.profile_report import Facts, operator_name, verdicts
from runner.debug.profile_trace import Module, Trace, read_events
from runner.debug.tool import Tool
from runner.training.hook import Step
from runner.training.run import Run
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
        (["model.width=8"], Dawdling(), "of step time is spent between steps"),
        (["model.width=8", "model.depth=12", "device.threads=1"], None, "host-bound: "),
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


class Slow(Tool):
    """A debug tool that takes longer than the steps, between them."""

    name = "slow"

    def on_step(self, run: Run, step: Step) -> None:
        with self.timed():
            for _ in range(2):
                Dawdling().on_step(run, step)


def test_what_debug_tools_take_between_steps_is_not_held_against_the_run() -> None:
    tool, _, run = profiled("model.width=8", "device.threads=1", hook=Slow(DebugConfig()))
    assert run.watch.spent["other"] > 0.25 * sum(run.watch.spent.values()), "it did take long"
    assert not any("between steps" in text for text in tool.verdicts), tool.verdicts
    assert tool.facts.split["other"] < 0.25
    assert "without the time of debug tools" in tool.markdown()


def test_one_long_operator_is_named_and_many_short_ones_are_host_bound() -> None:
    most = {"operators": 1800.0, "operator": "aten::mm", "operator_share": 0.6, "operator_ms": 1.25}
    (text,) = verdicts(Facts({}, calling=0.3, **most))
    assert text == (
        "aten::mm takes 60% of the operators' time, 1.25 ms a step; "
        "16 bits may help: optimization.amp.enabled=true"
    )
    (text,) = verdicts(Facts({}, calling=0.3, techniques=frozenset({"amp"}), **most))
    assert "optimization." not in text
    (text,) = verdicts(Facts({}, calling=0.7, **most))
    assert text.startswith("host-bound: 1,800 operators a step, so small that calling them is most")
    assert operator_name("## Call CompiledFxGraph fhr6rbnwwefn7wij ##") == "compiled graph fhr6rbnw"


class OneByOne(nn.Module):
    """A layer called for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


class Large(nn.Module):
    """The only large products of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(30, 8192))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight.T


class Encoded(nn.Module):
    """An encoder, and a head."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"loop": part})
        self.head = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder["loop"](x).relu())


def test_a_loop_of_small_operators_is_host_bound_and_its_module_is_named() -> None:
    tool, _, _ = profiled("device.threads=1", FUSED, model=Encoded(OneByOne()))
    assert tool.finding.startswith("host-bound: "), tool.verdicts
    assert "; encoder.loop.layer calls " in tool.finding and "% of them: " in tool.finding
    assert "operators on whole tensors instead of a loop over samples or time" in tool.finding


def test_the_only_large_product_is_named_as_the_hot_spot_and_is_not_host_bound() -> None:
    large = ["device.threads=1", "training.batch_size=256", FUSED]
    tool, _, _ = profiled(*large, model=Encoded(Large()))
    assert not any(text.startswith("host-bound") for text in tool.verdicts), tool.verdicts
    assert "% of the operators' time is in encoder.loop" in tool.finding, tool.verdicts


def test_a_pause_of_the_scheduler_makes_no_module_the_hot_spot() -> None:
    steps = {"small": [0.001] * 4 + [1.0], "large": [0.003] * 5}
    modules = [Module(name, forward=sum(seconds)) for name, seconds in steps.items()]
    module, share = Trace(5, modules=modules, module_steps=steps).hot_spot
    assert module is not None and module.name == "large"
    assert share == pytest.approx(0.75)


def test_weights_are_bit_equal_with_and_without_the_tool() -> None:
    model = ["data=digits", "model=cnn", "model.width=8", "training.steps=30", "optimization=basic"]
    ends = []
    for debug in ("debug=none", "debug=profile"):
        with runs.opened(*model, debug) as run:
            train(run)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
            ends.append({k: v.clone() for k, v in run.model.state_dict().items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


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


def test_modules_with_their_backward_and_sections_are_in_tables_and_trace(tmp_path: Path) -> None:
    profiled(*OWN, folder=tmp_path, model=Lopsided())
    content = json.loads((tmp_path / "debug/profile.json").read_text())
    trace, modules = content["trace"], {row["name"]: row for row in content["trace"]["modules"]}
    inside = [name for name in modules if not name.startswith("(")]
    assert max(inside, key=lambda n: modules[n]["forward"] + modules[n]["backward"]) == "heavy"
    assert modules["heavy"]["backward"] > 0
    assert modules["heavy"]["calls"] == trace["steps"] == 5, "no validation is in the window"
    assert sum(m["forward"] + m["backward"] for m in modules.values()) == pytest.approx(
        trace["operator_seconds"]
    )
    (section,) = content["sections"]
    assert (section["name"], section["category"]) == ("light", "model")
    assert section["calls"] >= 40
    page = (tmp_path / "debug/profile.md").read_text()
    assert "| light model |" in page and "| heavy |" in page
    assert content["trace_file"] == "debug/traces/step_00000022.json.gz" in page
    with gzip.open(tmp_path / content["trace_file"]) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "section light" for event in events) == 5
    assert sum(str(event.get("name")).startswith("ProfilerStep#") for event in events) == 5
    shown = b"".join(path.read_bytes() for path in tmp_path.glob("events.out.tfevents.*"))
    for tag in (b"profile/trace", b"profile/verdict", b"profile/step_ms"):
        assert tag in shown


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
    assert summary.status == "done" and tool.trace is not None
    assert (tool.first, tool.trace.steps) == (first, steps)
    assert {module.calls for module in tool.trace.modules if module.calls} == {steps}


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["whole_step", "compile"])
def test_a_compiled_run_is_profiled_as_it_is(technique: str) -> None:
    lengths = ["optimization.compile.min_steps=0"] if technique == "compile" else []
    tool, summary, run = profiled(f"optimization.{technique}.enabled=true", *lengths)
    assert {row.name: row.engaged for row in summary.techniques}[technique]
    assert tool.trace is not None
    assert any("ompiled" in operator.name for operator in tool.trace.operators)
    assert "##" not in tool.markdown().partition("| operator |")[2].partition("\n\n")[0]
    assert "optimization=none shows the modules" in tool.markdown()
    assert run.whole is not None or technique == "compile"


# -- reading -----------------------------------------------------------------------------------


def event(name: str, start: float, took: float, **more: Any) -> Any:
    """An event as torch.profiler has it; times in µs."""
    usual: dict[str, Any] = {
        "cpu_parent": None,
        "sequence_nr": -1,
        "is_user_annotation": False,
        "device_type": DeviceType.CPU,
        "self_cpu_time_total": took,
        "self_device_time_total": 0.0,
    }
    return SimpleNamespace(name=name, time_range=Interval(start, start + took), **usual | more)


def test_a_busy_machine_changes_no_share_of_calling() -> None:
    """What operators take is measured against others of the same moment, in CPU time."""
    reading = read_events([event("aten::mm", 10.0 * i, 5.0) for i in range(6)], 0)
    assert (reading.calls, reading.calibration_calls, reading.calling) == (6, 0, 0.0)
    reading.calibration_calls, reading.calibration_share = 3, 0.5
    assert reading.calling == pytest.approx(1.0)


def test_a_gpus_trace_tells_how_busy_it_was() -> None:
    on_gpu = {"device_type": DeviceType.CUDA}
    reading = read_events(
        [
            event("ProfilerStep*", 0, 1000, is_user_annotation=True),
            event("aten::mm", 10, 20, self_device_time_total=300.0),
            event("aten::relu", 40, 10, self_device_time_total=100.0),
            event("sm90_xmma_gemm_bf16bf16_tn", 100, 300, **on_gpu),
            event("elementwise_kernel", 350, 100, **on_gpu),
            event("Memcpy HtoD (Pinned -> Device)", 600, 200, **on_gpu),
        ],
        1,
    )
    assert reading.busy == pytest.approx((350 + 200) / 1000), "kernels side by side count once"
    assert [o.name for o in reading.operators] == ["aten::mm", "aten::relu"]
    assert reading.operators[0].seconds == pytest.approx(300e-6)


@pytest.mark.gpu
def test_on_a_gpu_time_is_that_of_the_kernels(tmp_path: Path) -> None:
    wide = "model=mlp model.width=1536 training.batch_size=256 optimizer=sgd device=cuda".split()
    tool, _, _ = profiled(*wide, FUSED, folder=tmp_path)
    assert tool.trace is not None and tool.trace.on_device
    assert 0 < (tool.trace.busy or 0) <= 1
