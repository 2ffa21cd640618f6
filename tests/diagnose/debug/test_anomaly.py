"""Anomaly mode: the operation, line and module of a NaN are named, and the run survives or ends."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runner import Hook, train
from runner.core.build.setup import Components
from runner.core.errors import GaveUp
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Cost
from runner.core.interfaces.run import Run
from runner.core.jobs.run_report import _format_tool
from runner.core.objectives.custom import CustomObjective
from runner.core.record.summary import Summary
from runner.diagnose.debug.anomaly import AnomalyTool
from tests import runs
from tests.my_package import Computed, differentiable

DIGITS = "data=digits training.batch_size=32 training.steps=8 training.validate_every=100".split()
ANOMALY = [*DIGITS, "debug=anomaly"]


class Root(nn.Module):
    """The square root of what it gets; that of 0 has no finite slope."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()  # here


HERE = f"test_anomaly.py:{next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith('# here'))}"  # noqa: E501


class Net(nn.Module):
    """At the steps in `bad`, one of its parts makes a NaN."""

    def __init__(self, part: nn.Module, bad: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
        self.part, self.bad, self.step = part, bad, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).square() + 0.1
        x = self.part(x * 0 if self.training and self.step in self.bad else x)
        return self.last(x)  # type: ignore[no-any-return]


class Counting(Hook):
    """Tells the model the number of the step that comes."""

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        run.model.step = run.progress.step + 1
        yield


def trained(overrides: list[str], folder: Path | None, model: nn.Module | None = None) -> Summary:
    given, hooks = Components(model=model), [Counting()]
    return runs.trained(*overrides, folder=folder, given=given, hooks=hooks)


def test_a_nan_in_backward_is_named_and_skipped_and_the_run_continues(tmp_path: Path) -> None:
    model = Net(Root(), bad=(3, 5))
    summary = trained(ANOMALY, tmp_path, model)
    assert (summary.status, summary.skipped_steps, summary.faults["anomaly"]) == ("done", 2, 2)
    (fault,) = runs.faults(tmp_path, "anomaly")
    assert fault["steps"] == [3, 5]
    culprit = "the gradient through part (Root) becomes Inf in the backward, of finite numbers, "
    assert fault["message"].startswith(f"{culprit}div.Tensor in SqrtBackward0, ")
    assert fault["message"].endswith(f"{HERE} `return x.sqrt()  # here`")
    assert fault["action"] == "skipped"
    assert "returned nan values" in fault["traceback"]
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.is_anomaly_enabled()
    found = runs.finding(summary, "anomaly")
    assert "2 × " in found and found.endswith("every step")


def test_raising_ends_the_run_with_a_line_that_names_it(tmp_path: Path) -> None:
    overrides = [*ANOMALY, "debug.on_anomaly=raise"]
    with pytest.raises(GaveUp) as caught:
        trained(overrides, tmp_path, Net(Root(), bad=(3,)))
    message = str(caught.value)
    assert message.startswith("step 3: ") and "\n" not in message
    assert HERE in message and "part (Root)" in message
    record = json.loads((tmp_path / "summary.json").read_text())
    assert (record["status"], record["steps"], record["faults"]["anomaly"]) == ("failed", 2, 1)
    assert (tmp_path / "checkpoints" / "last").exists()
    assert not torch.is_anomaly_enabled()


OVERFLOWS = differentiable(
    lambda ctx, x: torch.full_like(x, torch.inf), lambda ctx, gradient: torch.zeros_like(gradient)
)


class Huge(nn.Module):
    """Inf, whose gradient is Inf too and no NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.any() else OVERFLOWS(x)


class Replaced(Net):
    """Inf - Inf is NaN further on, so that is cut off: only the Inf itself is there to be seen."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num(nan=torch.inf)


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        (Net(Computed(lambda _, x: x if x.any() else x / x), bad=(4,)),
         "part (Computed) makes NaN of finite numbers, div.Tensor, "),
        (Replaced(Huge(), bad=(4,)), "part (Huge) makes Inf of a constant Inf"),
    ],
    ids=["NaN", "Inf"],
)  # fmt: skip
def test_what_a_forward_makes_is_told_from_what_it_does_to_backward(
    model: Net, culprit: str, tmp_path: Path
) -> None:
    summary = trained(ANOMALY, tmp_path, model)
    assert (summary.status, summary.faults["anomaly"]) == ("done", 1)
    (fault,) = runs.faults(tmp_path, "anomaly")
    assert fault["message"].startswith(culprit)  # and not what backward made of it
    assert "1 × part in forward" in runs.finding(summary, "anomaly")


class Chatty(Root):
    """Warns at each call."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("once is enough", stacklevel=1)
        return super().forward(x)


def test_micro_batches_are_named_right_and_the_users_own_warnings_are_heard(
    tmp_path: Path,
) -> None:
    overrides = [*ANOMALY, "training.micro_batch=10"]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        summary = trained(overrides, tmp_path, Net(Chatty(), bad=(3,)))
    assert summary.status == "done"
    (fault,) = runs.faults(tmp_path, "anomaly")
    assert HERE in fault["message"] and "part (Chatty)" in fault["message"]
    said = [str(warning.message) for warning in heard]
    assert 1 <= said.count("once is enough") < 4, "of 33 calls"
    assert not any("Error detected in" in text for text in said)


def test_every_nth_step_is_watched_and_said_so(tmp_path: Path) -> None:
    summary = trained([*ANOMALY, "debug.anomaly.every=2"], tmp_path, Net(Root(), bad=(3, 4)))
    assert summary.skipped_steps == 2
    assert [fault["steps"] for fault in runs.faults(tmp_path, "anomaly")] == [[4]]
    assert runs.finding(summary, "anomaly").endswith("every 2 steps")


def test_another_error_stays_what_it_is() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise ValueError("my own mistake")

    with pytest.raises(ValueError, match="my own mistake"):
        trained(ANOMALY, None, Net(Computed(broken), bad=()))
    assert not torch.is_anomaly_enabled()


@pytest.mark.usefixtures("my_package")
def test_a_bad_batch_is_told_as_such_and_once_and_no_module_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = trained([*ANOMALY[1:], *runs.NOISY, "+data.poison=[7]", "data.workers=0"], tmp_path)
    assert summary.status == "done"
    (fault,) = runs.faults(tmp_path, "anomaly")
    assert fault["message"] == "the input is not finite: 1 of 32 samples"
    assert "× bad input" in runs.finding(summary, "anomaly")
    bad = [r.getMessage() for r in caplog.records if "finite" in r.getMessage()]
    assert len(bad) == 1 and bad[0].startswith(f"step {fault['steps'][0]}: inputs: ")
    assert bad[0].endswith("in 1 of 32 samples (of the data set: 7); skipped")
    assert summary.faults["non_finite"] == summary.faults["anomaly"]  # counted, if not said


def test_a_target_that_is_no_number_is_told_as_such(tmp_path: Path) -> None:
    loss = Computed(lambda _, output, target: (output.mean(1) - target).square().mean())
    given = Components(objective=CustomObjective(loss, "o"))
    with runs.opened(*ANOMALY, "training.steps=2", folder=tmp_path, given=given) as run:
        batches, at = run.train.batches, run.train.at

        def poisoned(batch: Batch) -> Batch:
            target = batch[1].float()
            target[:3] = torch.nan
            return batch[0], target

        run.train.batches = lambda start: map(poisoned, batches(start))  # type: ignore[method-assign]
        run.train.at = lambda step: poisoned(at(step))  # type: ignore[method-assign]
        with pytest.raises(GaveUp, match="nothing is trained"):
            train(run)
    (fault,) = runs.faults(tmp_path, "anomaly")
    assert fault["message"] == "the target is not finite: 3 of 32 samples"


@pytest.mark.slow
def test_watched_steps_leave_a_whole_step_graph(tmp_path: Path) -> None:
    compiled = "optimization=ultra debug.anomaly.every=5 optimization.measure=false"
    overrides = [*ANOMALY, *compiled.split(), "training.steps=20"]

    bad = Computed(  # the gradient of the weight is NaN at each step
        lambda model, x: model.last(x.flatten(1) * model.scale.sqrt()),
        last=nn.Linear(64, 10),
        scale=nn.Parameter(torch.zeros(64)),
    )
    overrides += ["stability.max_consecutive_skips=1000"]
    with runs.opened(*overrides, folder=tmp_path, given=Components(model=bad)) as run:
        with pytest.raises(GaveUp, match="nothing is trained: all 20 steps"):
            train(run)
    assert run.step_graph is not None
    (fault,) = runs.faults(tmp_path, "anomaly")
    assert fault["steps"] == [5, 10, 15, 20]
    assert "div.Tensor in SqrtBackward0, " in fault["message"]
    assert "uncompiled" in runs.finding(Summary.read(tmp_path), "anomaly")


def test_the_cost_of_checking_every_step_is_unknown() -> None:
    typed = ("data=cancer", "optimization=none", "training.steps=2", "debug=anomaly")
    summary = runs.trained(*typed)
    (cost,) = (row for row in summary.tools if row.name == "anomaly")
    assert cost.seconds is None
    assert "2 looks, cost –)" in _format_tool(cost, summary)
    summary.wall_seconds = 100.0
    assert "less than 0.1% of the run" in _format_tool(Cost("x", 1, 0.04), summary)


def test_the_cost_is_the_time_of_checked_steps_beyond_the_median_of_the_others() -> None:
    typed = ("data=cancer", "optimization=none", "training.steps=40", "debug=anomaly")
    with runs.opened(*typed, "debug.anomaly.every=10") as run:
        summary = train(run)
        (tool,) = (hook for hook in run.hooks if isinstance(hook, AnomalyTool))
        assert tool.looked_steps == [9, 19, 29, 39]  # counted from 0
        tool.seconds, watch = 0.25, run.stopwatch
        watch.durations[: watch.count] = 0.5
        watch.durations[20:30] = 0.75  # slower for another reason: the median is 0.5
        watch.durations[[9, 19, 29, 39]] = -1.5  # negative: inspected
        cost = tool.cost(run)
    assert cost is not None and cost.seconds == pytest.approx(4 * (1.5 - 0.5) + 0.25)
    summary.wall_seconds = 42.5
    assert "(4 looks, 4.2 s, 10.0% of the run)" in _format_tool(cost, summary)
