"""Time by module: own time, backward by its owner, stalls in Python, in a run and in own loops."""

import gzip
import json
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner import profile_model
from runner.core.errors import UsageError
from runner.core.schemas.debug import DebugConfig
from runner.diagnose.debug.module_times import COMPILED, MAX_ROWS, REST, ModuleTime, module_table
from runner.diagnose.debug.profile import ProfileTool
from runner.diagnose.debugging import Debugger
from tests import runs
from tests.diagnose.debug.test_profile import profiled
from tests.my_package import Computed, differentiable

FORWARD_MS, BACKWARD_MS = 20.0, 45.0  # more than other programs take from the rest of a step
SHORT = "training.steps=10"


def timed() -> nn.Module:
    """Takes known times in an operator, in forward and in backward."""

    def wait(ms: float, x: Tensor) -> Tensor:
        time.sleep(ms / 1e3)
        return x.view_as(x)

    operator = differentiable(
        lambda ctx, x: wait(FORWARD_MS, x), lambda ctx, gradient: wait(BACKWARD_MS, gradient)
    )
    return Computed(lambda _, x: operator(x))


def nested() -> nn.Module:
    """Has a module that is called twice, by two names."""
    part, layer = timed(), nn.Linear(30, 30)
    return Computed(lambda m, x: m.alias(m.timed(m.layer(x))), layer=layer, timed=part, alias=part)


def dawdling() -> nn.Module:
    """Only Python, for 100 ms."""
    return Computed(lambda _, x: time.sleep(0.1) or x)


class Recomputed(nn.Module):
    """Its timed module runs again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.timed, self.reentrant = nn.Linear(30, 30), timed(), reentrant
        self.head = nn.Linear(30, 2)

    def _block(self, x: Tensor) -> Tensor:
        return self.timed(x * self.layer.weight[0]).sin()  # sin saves its input

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if not torch.is_grad_enabled():
            return self.head(self._block(x))
        return self.head(checkpoint(self._block, x, use_reentrant=self.reentrant))


class Net(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(30, 30), nn.Sequential(*parts)
        self.head = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)))


def rows_of(tool: ProfileTool) -> dict[str, ModuleTime]:
    return {row.module: row for row in tool.modules}


def test_own_time_of_a_module_that_is_nested_shared_and_called_twice(tmp_path: Path) -> None:
    before = nn.Module.__call__
    tool, _, _ = profiled(SHORT, model=Net(nested()), folder=tmp_path)
    assert nn.Module.__call__ is before
    rows = rows_of(tool)
    timed = rows["body.0.timed"]
    assert "body.0.alias" not in rows and timed.calls == 2
    assert timed.forward_ms >= 2 * FORWARD_MS and timed.backward_ms >= 2 * BACKWARD_MS
    assert rows["body.0"].calls == rows["body.0.layer"].calls == 1
    others = [rows[name] for name in ("(model)", "body", "body.0")]
    assert all(row.total_ms < timed.total_ms / 3 for row in others)
    assert rows["body.0.layer"].backward_ms > 0
    record = runs.debug_file(tmp_path, "profile")
    operators_ms = sum(row["seconds"] for row in record["trace"]["operators"]) / 5 * 1e3
    total_ms = sum(row["forward_ms"] + row["backward_ms"] for row in record["modules"])
    assert total_ms == pytest.approx(operators_ms, rel=0.05)
    assert sum(row["share"] for row in record["modules"]) == pytest.approx(1)
    assert timed.share == pytest.approx(timed.total_ms / total_ms)
    (text,) = [text for text in tool.verdicts if text.startswith("module ")]
    assert text.startswith(f"module body.0.timed takes {timed.share:.0%} of the operators' time")
    page = (tmp_path / "debug/profile.md").read_text()
    assert "| module | calls | forward ms | backward ms | share |" in page
    assert "| body.0.timed | 2 |" in page and f"| {REST} |" in page
    with gzip.open(tmp_path / record["trace_file"]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("module body.0.timed") == 2 * 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_time_of_its_module_in_backward(reentrant: bool) -> None:
    tool, _, _ = profiled(SHORT, model=Recomputed(reentrant))
    timed = rows_of(tool)["timed"]
    assert timed.calls == 2
    assert FORWARD_MS <= timed.forward_ms < FORWARD_MS + BACKWARD_MS
    assert timed.backward_ms >= FORWARD_MS + BACKWARD_MS
    assert rows_of(tool)["(model)"].total_ms < timed.total_ms / 3


def test_a_gradient_that_is_added_belongs_to_the_module_of_its_weight() -> None:
    wide = nn.Linear(30, 30)
    wide.weight.register_hook(lambda grad: time.sleep(BACKWARD_MS / 1e3))
    tool, _, _ = profiled(SHORT, "training.micro_batch=16", model=Net(wide))
    row = rows_of(tool)["body.0"]
    assert row.calls == 2 and row.backward_ms >= 2 * BACKWARD_MS  # of 32 samples


@pytest.mark.parametrize("stacks", ["false", "true"])
def test_a_stall_in_python_is_named_by_its_module(stacks: str) -> None:
    tool, _, _ = profiled(SHORT, f"debug.profile.stacks={stacks}", model=Net(dawdling(), nn.ReLU()))
    row = rows_of(tool)["body.0"]
    assert (row.calls, row.total_ms) == (1, 0) and row.stall_ms >= 99
    assert tool.measurements.step_ms > 2 * tool.measurements.operators_ms
    assert "most in module body.0 1" in tool.verdicts[0]
    assert not any("amp" in text for text in tool.verdicts)  # no operator is blamed
    assert not any(".py(" in row["name"] or "<" in row["name"] for row in tool.operators)


def test_without_modules_there_are_no_times_and_no_ranges(tmp_path: Path) -> None:
    profiled(SHORT, "debug.profile.modules=false", model=Net(timed()), folder=tmp_path)
    record = runs.debug_file(tmp_path, "profile")
    assert record["modules"] == []
    assert "| module |" not in (tmp_path / "debug/profile.md").read_text()
    with gzip.open(tmp_path / record["trace_file"]) as file:
        assert "module body" not in file.read().decode()


def test_the_times_are_kept_by_a_checkpoint_and_an_earlier_one_has_none() -> None:
    tool, again, earlier = (ProfileTool(DebugConfig()) for _ in range(3))
    tool.modules = [ModuleTime("body.0", 1.0, 2.0, 3.0, 0.5)]
    state = json.loads(tool.resume_state())
    again.load(state)
    assert again.modules == tool.modules
    del state["modules"]
    earlier.load(state)
    assert earlier.modules == []


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["whole_step", "compile"])
def test_compiled_parts_are_one_row_and_are_not_compiled_again(technique: str) -> None:
    from torch._dynamo.utils import counters

    lengths = ["optimization.compile.min_steps=0"] if technique == "compile" else []
    tool, summary, run = profiled(f"optimization.{technique}.enabled=true", *lengths)
    assert {row.name: row.engaged for row in summary.techniques}[technique]
    assert any("ompiled" in operator["name"] for operator in tool.operators)
    assert "##" not in tool.markdown(1.0).partition("| operator |")[2].partition("\n\n")[0]
    assert run.step_graph is not None or technique == "compile"
    rows = rows_of(tool)
    assert set(rows) <= {COMPILED, REST, "(model)"}
    assert rows[COMPILED].calls == 1 and rows[COMPILED].share > 0.2
    if technique == "compile":
        assert rows[COMPILED].forward_ms > 0 and rows[COMPILED].backward_ms > 0
    assert not counters["graph_break"]


def test_the_other_modules_of_a_long_table_are_one_row() -> None:
    rows = [ModuleTime(str(i), 1, 1.0, 2.0, 0.02) for i in range(MAX_ROWS + 5)]
    table = module_table([*rows, ModuleTime(REST, 0, 0.5, 0.0, 0.01)])
    assert "| (5 more) | 5 | 5 | 10 | 10.0% |" in table and f"| {REST} |  | 0.5 |" in table
    assert len(table.splitlines()) == 2 + MAX_ROWS + 2


def test_the_backward_of_a_scripted_module_is_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 9))
        )
    profile = profile_model(nn.Sequential(scripted), torch.randn(64, 256), runs=2, backward=True)
    rows = {row.module: row for row in profile.modules}
    assert rows["0"].backward_ms > 2 * rows[REST].backward_ms


@pytest.mark.parametrize("backward", [False, True])
def test_profile_model_has_the_time_by_module(backward: bool) -> None:
    profile = profile_model(Net(nested()), torch.randn(4, 30), runs=2, backward=backward)
    timed = {row.module: row for row in profile.modules}["body.0.timed"]
    assert timed.calls == 2 and timed.forward_ms >= 2 * FORWARD_MS
    assert timed.backward_ms >= 2 * BACKWARD_MS if backward else timed.backward_ms == 0
    assert timed.share > 0.5 and profile.modules[0] is timed
    known_ms = sum(profile.operators_ms.values())  # of the ten slowest
    assert known_ms <= sum(row.total_ms for row in profile.modules) * 1.001
    assert "body.0.timed" in str(profile)


def test_a_trace_of_an_own_loop_has_modules_operators_and_contexts(tmp_path: Path) -> None:
    model, loss_fn, own = Net(nested()), nn.MSELoss(), Debugger()
    with own.trace(tmp_path / "trace"):
        for _ in range(3):
            with own.context("step"):
                loss_fn(model(torch.randn(4, 30)), torch.zeros(4, 2)).backward()
    page = (tmp_path / "trace/profile.md").read_text()
    assert "| body.0.timed | 6 |" in page and "| MSELoss | 3 |" in page and "| Net | 3 |" in page
    assert "| aten::addmm | 9 |" in page
    assert "- module body.0.timed takes" in page
    events = json.loads((tmp_path / "trace/trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("section step") == 3 and names.count("module body.0.timed") == 6
    assert own.summary().operations[0].calls == 3


def test_a_trace_of_an_own_loop_is_written_after_an_error_and_names_a_stall(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Debugger().trace(tmp_path):
        Net(dawdling(), dawdling())(torch.randn(4, 30))
        raise KeyError
    page = (tmp_path / "profile.md").read_text()
    assert "outside of torch's operators, most in module body." in page
    assert (tmp_path / "trace.json").exists()


def test_a_trace_needs_a_folder_and_no_other_profiler(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for folder, problem in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "link", "is a link"),
        ("", "must be the name of a folder"),
        (3, "must be a path"),
    ):
        with pytest.raises(UsageError, match=problem), Debugger().trace(folder):  # type: ignore[arg-type]
            pass
    with (
        torch.profiler.profile(),
        pytest.raises(UsageError, match="another profiler"),
        Debugger().trace(tmp_path),
    ):
        pass
