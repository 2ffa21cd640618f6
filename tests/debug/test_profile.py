"""The profiler's windows, the verdict in words: in real runs, shaped to be so."""

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

from runner import Hook, build, compose, profile, train
from runner.debug.config import DebugConfig
from runner.debug.profile import ProfileTool
from runner.debug.profile_report import Facts, operator_name, verdicts
from runner.debug.profile_trace import Module, Trace, operator_kind, read_events
from runner.debug.tool import Tool
from runner.training.hook import Step
from runner.training.run import Run
from runner.training.summary import Summary

QUIET = ["device.threads=2", "monitoring.progress=false", "debug=profile"]
SMALL = [
    *QUIET,
    *"data=cancer optimization=none training.steps=40 training.validate_every=1000".split(),
]
OWN = ["security.trusted=[my_package]", "data._target_=my_package.Noisy"]
pytestmark = pytest.mark.usefixtures("my_package")


def profiled(
    overrides: list[str], folder: Path | None = None, hook: Hook | None = None
) -> tuple[ProfileTool, Summary, Run]:
    with build(compose(overrides), folder) as run:
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


UNFUSED = ["model=mlp", "model.depth=12", "model.width=128", "training.batch_size=4"]
WIDE = (
    "model=mlp model.width=1536 training.batch_size=256 optimizer=sgd "
    "optimization.fused_optimizer.enabled=true"
).split()


@pytest.mark.parametrize(
    ("shape", "hook", "expected"),
    [
        (
            [*OWN, "data.workers=0", "+data.seconds=0.0005"],
            None,
            "step time waits for data: raise data.workers (now 0)",
        ),
        (UNFUSED, None, "of a step: optimization.fused_optimizer.enabled=true"),
        (["model.width=8"], Dawdling(), "of step time is spent between steps"),
        (["model.width=8", "model.depth=12", "device.threads=1"], None, "host-bound: "),
    ],
    ids=["data", "optimizer", "between", "host"],
)
def test_a_run_is_told_what_keeps_it_from_being_faster(
    shape: list[str], hook: Hook | None, expected: str
) -> None:
    tool, summary, _ = profiled([*SMALL, *shape], hook=hook)
    assert any(expected in said for said in tool.verdicts), tool.verdicts
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
    tool, _, run = profiled([*SMALL, "model.width=8"], hook=Slow(DebugConfig()))
    assert run.watch.spent["other"] > 0.25 * sum(run.watch.spent.values()), "it did take long"
    assert not any("between steps" in said for said in tool.verdicts), tool.verdicts
    assert tool.facts.split["other"] < 0.25
    assert "without the time of debug tools" in tool.markdown()


def test_a_run_whose_time_goes_to_few_long_operators_is_not_bound_by_its_many_short_ones() -> None:
    most = {"operators": 1800.0, "operator_share": 0.9, "calling": 0.3}
    (said,) = verdicts(Facts({}, kinds={"convolutions": 0.55, "matrix products": 0.03}, **most))
    assert said.startswith("compute-bound: convolutions take 55% of the operators' time; 16 bits")
    (said,) = verdicts(Facts({}, kinds={"matrix products": 0.6}, **most | {"calling": 0.7}))
    assert said.startswith("host-bound: 1,800 operators a step, so small that calling them is most")


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


def verdict_of(model: nn.Module) -> tuple[str, list[str]]:
    from runner.build import Components

    overrides = [*SMALL, "device.threads=1", "optimization.fused_optimizer.enabled=true"]
    with build(compose(overrides), None, Components(model=model)) as run:
        summary = train(run)
        (tool,) = (hook for hook in run.hooks if isinstance(hook, ProfileTool))
    (row,) = [row for row in summary.tools if row.name == "profile"]
    return row.finding, tool.verdicts


def test_a_loop_of_small_operators_is_host_bound_and_its_module_is_named() -> None:
    finding, verdicts = verdict_of(Encoded(OneByOne()))
    assert finding.startswith("host-bound: "), verdicts
    assert "% of the operators' time is in encoder.loop.layer, which makes " in finding
    assert "operators on whole tensors instead of a loop over samples or time" in finding


def test_a_pause_of_the_scheduler_makes_no_module_the_hot_spot() -> None:
    steps = {"small": [0.001] * 4 + [1.0], "large": [0.003] * 5}
    modules = [Module(name, forward=sum(seconds)) for name, seconds in steps.items()]
    module, share = Trace(5, modules=modules, module_steps=steps).hot_spot
    assert module is not None and module.name == "large"
    assert share == pytest.approx(0.75)


def test_the_only_large_product_is_named_as_the_hot_spot_and_is_not_host_bound() -> None:
    finding, verdicts = verdict_of(Encoded(Large()))
    assert not any(said.startswith("host-bound") for said in verdicts), verdicts
    assert "% of the operators' time is in encoder.loop" in finding, verdicts


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


def test_attention_is_named_and_its_technique_where_it_is_off() -> None:
    kinds = {"matrix products": 0.2, "attention": 0.54}
    (said,) = verdicts(Facts({}, operators=1.0, operator_share=0.9, kinds=kinds))
    assert "attention takes 54% of the operators' time, matrix products 20%" in said
    assert "optimization.attention.enabled=true" in said
    on = frozenset({"attention", "amp"})
    (said,) = verdicts(Facts({}, operator_share=0.9, kinds=kinds, techniques=on))
    assert "optimization." not in said


def test_time_in_compiled_graphs_is_stated() -> None:
    graph = {"operators": 210.0, "operator_share": 0.99, "operator_ms": 1.25}
    (said,) = verdicts(Facts({}, kinds={"compiled graphs": 0.992}, **graph))
    assert said == "compiled graphs take 99% of the operators' time, 1.24 ms a step"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::convolution_backward", "convolutions"),
        ("aten::mkldnn_convolution", "convolutions"),
        ("aten::addmm", "matrix products"),
        ("aten::resolve_conj", ""),
        ("aten::relu", ""),
        ("## Call CompiledFxGraph fhr6rbnwwefn7wij ##", "compiled graphs"),
    ],
)
def test_operators_are_told_apart_by_their_names(name: str, what: str) -> None:
    assert operator_kind(name) == what
    assert "#" not in operator_name(name)


def test_weights_are_bit_equal_with_and_without_the_tool() -> None:
    model = "data=digits model=cnn model.width=8"
    ends = []
    for debug in ("debug=none", "debug=profile"):
        overrides = [*QUIET, "training.steps=30", "optimization=basic", *model.split(), debug]
        with build(compose(overrides)) as run:
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


def lopsided(folder: Path, *overrides: str) -> tuple[ProfileTool, dict[str, Any]]:
    from runner.build import Components

    config = compose([*SMALL, *OWN, *overrides])
    with build(config, folder, Components(model=Lopsided())) as run:
        train(run)
        (tool,) = (hook for hook in run.hooks if isinstance(hook, ProfileTool))
    return tool, json.loads((folder / "debug/profile.json").read_text())


def test_modules_with_their_backward_and_sections_are_in_tables_and_trace(tmp_path: Path) -> None:
    _, rows = lopsided(tmp_path)
    (window,) = rows["windows"]
    modules = {row["name"]: row for row in window["modules"]}
    inside = [name for name in modules if not name.startswith("(")]
    assert max(inside, key=lambda n: modules[n]["forward"] + modules[n]["backward"]) == "heavy"
    assert modules["heavy"]["backward"] > 0
    assert modules["heavy"]["calls"] == window["steps"] == 5, "no validation is in the window"
    assert sum(m["forward"] + m["backward"] for m in modules.values()) == pytest.approx(
        window["operator_seconds"]
    )
    (section,) = rows["sections"]
    assert (section["name"], section["category"]) == ("light", "model")
    assert section["calls"] >= 40
    assert rows["categories"]["model"] == pytest.approx(section["seconds"])
    assert "| light | model |" in (tmp_path / "debug/profile.md").read_text()
    with gzip.open(tmp_path / "debug/traces/step_00000022.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "section light" for event in events) == 5
    assert sum(str(event.get("name")).startswith("ProfilerStep#") for event in events) == 5
    shown = b"".join(path.read_bytes() for path in tmp_path.glob("events.out.tfevents.*"))
    for tag in (
        b"profile/operators",
        b"profile/modules",
        b"profile/verdict",
        b"profile/sections",
        b"profile/step_ms",
    ):
        assert tag in shown


@pytest.mark.parametrize(("handler", "traces", "tables"), [("trace", 1, False), ("table", 0, True)])
def test_the_handler_says_what_is_made(
    handler: str, traces: int, tables: bool, tmp_path: Path
) -> None:
    tool, _, _ = profiled([*SMALL, f"debug.profile.handler={handler}"], tmp_path)
    assert len(list((tmp_path / "debug").glob("traces/*"))) == traces
    assert ("### Operators" in tool.markdown()) is tables


def test_windows_come_again(tmp_path: Path) -> None:
    often = [
        *SMALL,
        *(
            "debug.profile.start=5 debug.profile.repeat_every=8 debug.profile.at_most=4 "
            "debug.profile.steps=2"
        ).split(),
    ]
    tool, _, _ = profiled(often, tmp_path / "all")
    assert [row["first"] for row in tool.windows] == [7, 18, 29, 40]
    kept = sorted((tmp_path / "all/debug/traces").iterdir())
    assert [path.name[5:13] for path in kept] == ["00000007", "00000018", "00000029", "00000040"]


def test_a_run_shorter_than_its_window_is_profiled_as_far_as_it_goes() -> None:
    tool, summary, _ = profiled([*SMALL, "training.steps=5"])
    assert summary.status == "done"
    (row,) = tool.windows
    assert (row["first"], row["steps"]) == (3, 3)


def test_a_window_that_would_meet_a_validation_is_moved_behind_it() -> None:
    tool, _, _ = profiled([*SMALL, "training.validate_every=20", "debug.profile.start=18"])
    (row,) = tool.windows
    assert (row["first"], row["steps"]) == (23, 5)
    assert {m["calls"] for m in row["modules"] if m["calls"]} == {5}


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["whole_step", "compile"])
def test_a_compiled_run_is_profiled_as_it_is(technique: str) -> None:
    overrides = [
        *SMALL,
        f"optimization.{technique}.enabled=true",
        f"optimization.{technique}.min_steps=0",
    ]
    overrides = overrides[: -1 if technique == "whole_step" else None]
    tool, summary, run = profiled(overrides)
    engaged = {row.name: row.engaged for row in summary.techniques}
    assert engaged[technique]
    assert tool.trace is not None
    assert any("ompiled" in operator.name for operator in tool.trace.operators)
    assert "##" not in tool.markdown().partition("### Operators")[2].partition("### Modules")[0]
    assert len(tool.windows) == 1
    assert "optimization=none shows the modules" in tool.markdown()
    assert run.whole is not None or technique == "compile"


# -- reading -----------------------------------------------------------------------------------


def test_a_gpus_trace_tells_how_busy_it_was_and_what_was_copied() -> None:
    on_gpu = {"device_type": DeviceType.CUDA}
    reading = read_events(
        [
            event("ProfilerStep*", 0, 1000, is_user_annotation=True),
            event("aten::mm", 10, 20, self_device_time_total=300.0),
            event("aten::relu", 40, 10, self_device_time_total=100.0),
            event("sm90_xmma_gemm_bf16bf16_tn", 100, 300, **on_gpu),
            event("elementwise_kernel", 350, 100, **on_gpu),
            event("Memcpy HtoD (Pinned -> Device)", 600, 100, **on_gpu),
            event("Memcpy DtoH (Device -> Pinned)", 700, 100, **on_gpu),
        ],
        1,
    )
    assert reading.busy == pytest.approx((350 + 200) / 1000), "kernels side by side count once"
    assert [o.name for o in reading.operators] == ["aten::mm", "aten::relu"]
    assert reading.spent(reading.operators[0]) == pytest.approx(300e-6)
    assert reading.kinds == {"matrix products": pytest.approx(0.75)}
    assert reading.copies == pytest.approx(200e-6)


@pytest.mark.gpu
def test_on_a_gpu_time_is_that_of_the_kernels(tmp_path: Path) -> None:
    tool, _, _ = profiled([*SMALL, *WIDE, "device=cuda"], tmp_path)
    assert tool.trace is not None
    assert tool.trace.on_device
    assert 0 < (tool.trace.busy or 0) <= 1
    assert tool.trace.copies > 0
