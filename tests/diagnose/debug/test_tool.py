"""A tool whose own code fails rests, and the run goes on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner import train
from runner.core.build.hooks import load_debug_tools
from runner.core.errors import GaveUp
from runner.core.interfaces.hook import Report, Step
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.core.schemas.debug import AnomalyConfig, DebugConfig, tool_field
from runner.diagnose.debug.tool import DebugTool
from tests import runs
from tests.core.optim.steps import assert_same

SMALL = "data=cancer optimization=none training.steps=8 training.batch_size=32".split()
PLACES = ["session", "before", "after", "report"]


class Fragile(DebugTool):
    """Raises at one place."""

    name = "fragile"

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__(DebugConfig(), every=2)
        self.place, self.error, self.called = place, error, 0

    def at(self, place: str) -> None:
        if place == self.place:
            self.called += 1
            raise self.error

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        self.at("session")
        yield
        self.at("end")

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        self.at("before")
        yield
        self.at("after")

    def on_gradients(self, run: Run, step: Step) -> None:
        self.at("gradients")

    def on_report(self, run: Run, report: Report) -> None:
        self.at("report")


def trained(place: str, error: Exception) -> tuple[Fragile, Summary]:
    tool = Fragile(place, error)
    with runs.opened(*SMALL) as run:
        run.hooks.append(tool)
        return tool, train(run)


@pytest.mark.parametrize("place", PLACES)
def test_a_failed_tool_stops_and_the_run_continues(place: str) -> None:
    tool, summary = trained(place, ZeroDivisionError("division by zero"))
    assert summary.status == "done" and summary.steps == 8
    assert summary.faults == {"tool_failed": 1} and tool.called == 1
    finding = next(row.finding for row in summary.tools if row.name == "fragile")
    assert finding == "failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("place", ["before", "gradients", "report"])
def test_what_a_tool_raises_on_purpose_ends_the_run(place: str) -> None:
    with pytest.raises(GaveUp, match="enough"):
        trained(place, GaveUp("enough"))


def test_what_a_step_raises_is_not_taken_for_the_tools() -> None:
    tool = Fragile("nowhere", ValueError())
    with runs.opened(*SMALL) as run:
        run.hooks.append(tool)

        def failing(*_: object) -> None:
            if run.progress.step == 3:  # at a step that the tool is around
                raise ValueError("of the model")

        run.model.register_forward_hook(failing)
        with pytest.raises(ValueError, match="of the model"):
            train(run)
    assert not tool.failure and "tool_failed" not in run.history.counts


class Dummy(DebugTool):
    """A tool that only counts its steps."""

    name = "dummy"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, every=2)

    def on_step(self, run: Run, step: Step) -> None:
        self.inspections += 1
        self.finding = f"step {step.number}"


@dataclass
class WithDummy(DebugConfig):
    """The group with a line more."""

    dummy: AnomalyConfig = tool_field(f"{__name__}:Dummy", AnomalyConfig)


def test_a_tool_is_one_class_and_one_line_of_the_config() -> None:
    assert load_debug_tools(WithDummy()) == []
    tools = load_debug_tools(WithDummy(dummy=AnomalyConfig(enabled=True)))
    with runs.opened(*SMALL) as run:
        run.hooks += tools
        summary = train(run)
    row = next(row for row in summary.tools if row.name == "dummy")
    assert (row.looks, row.finding) == (4, "step 8")


def test_full_debugging_has_every_tool_outermost_first() -> None:
    names = [tool.name for tool in load_debug_tools(runs.config(*SMALL, "debug=full").debug)]
    assert names == ["gradcheck", "memory", "profile", "gradients", "anomaly"]


@pytest.mark.parametrize(
    "model",
    ["mlp model.dropout=0.1", pytest.param("cnn model.width=4", marks=pytest.mark.slow)],
)
def test_weights_and_moments_are_bit_equal_with_every_tool_and_with_none(model: str) -> None:
    small = ["data=digits", *f"model={model}".split(), "optimizer.ema=0.99"]
    more = ["optimization=basic", "training.steps=6", "training.micro_batch=10", "debug.every=2"]
    more.append("debug.gradcheck.budget_s=0.2")
    ends = []
    for debug in ("debug=none", "debug=full"):
        with runs.opened(*small, *more, debug) as run:
            summary = train(run)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
            ends.append([run.model.state_dict(), run.update.state()])
    assert all(tool.looks for tool in summary.tools) and len(summary.tools) == 5
    assert summary.faults.keys() <= {"constant_output"}  # few steps may learn one class
    assert_same(*ends)


@pytest.mark.parametrize("value", [Path("a"), {1, 2}, object(), {(1, 2): 3}])
def test_a_state_that_json_does_not_have_is_said_once_and_ends_no_save(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Stateful(Fragile):
        def state(self) -> dict[str, Any]:
            return {"kept": value}

        def load(self, state: Mapping[str, Any]) -> None:
            raise AssertionError(state)

    tool = Stateful("", ValueError())
    tool.inspections = 7
    texts = [tool.resume_state() for _ in range(2)]
    assert caplog.text.count("Stateful.state: ") == 1
    assert "return values of JSON types" in caplog.text
    resumed = Stateful("", ValueError())
    resumed.load_resume_state(texts[1])
    assert resumed.inspections == 7
