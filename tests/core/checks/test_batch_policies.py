"""What is done about a bad batch: its effect on weights, on the record and on how a run ends."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import Summary, build, compose, train
from runner.core.build.setup import Components
from runner.core.data.dataset import TensorsDataset
from runner.core.errors import DataError, Interrupted
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.run import Run
from tests.core.checks.spoiled import FEATURES, QUIET, Spoiled, spoiled
from tests.runs import AtSteps, differences, faults, hook, interrupt, weights


class Past(Hook):
    """Weights, buffers and optimizer after each step."""

    def __init__(self) -> None:
        self.after: dict[int, list[Any]] = {}
        self.skipped: list[int] = []

    def on_step(self, run: Run, step: Step) -> None:
        state = deepcopy(run.update.state()["optimizer"]["state"])
        self.after[step.number] = [weights(run), state, int(run.update.updates)]
        if step.skipped:
            self.skipped.append(step.number)


def trained(data: Spoiled, folder: Path | None, *overrides: str) -> tuple[Run, Past]:
    past = Past()
    with spoiled(data, folder, *overrides) as run:
        run.hooks.append(past)
        train(run)
    return run, past


def poison(value: float, *samples: int) -> Spoiled:
    data = Spoiled()
    for sample in samples:
        data.x[sample, 3] = value
    return data


def mislabelled(label: int, *samples: int) -> Spoiled:
    data = Spoiled()
    data.y[list(samples)] = label
    return data


def odd(batch: Tensor) -> Spoiled:
    data = Spoiled()
    data.odd = (16 * 12, batch)  # step 13
    return data


def test_with_healthy_data_the_weights_are_those_of_a_run_without_checks() -> None:
    extra = ["data.workers=2", "training.micro_batch=5"]
    on, _ = trained(Spoiled(), None, *extra)
    off, _ = trained(Spoiled(), None, "checks=off", *extra)
    assert on.batch_validator is not None and off.batch_validator is None
    assert not differences(weights(on), weights(off))
    assert dict(on.history.counts) == {}


HIGH = "checks.inputs.schema.high=100"
SKIPS = {
    "not_finite": (poison(math.nan, 193, 200), []),
    "labels": (mislabelled(99, 195), ["checks.inputs.labels=skip"]),
    "range": (poison(1e5, 199), ["checks.inputs.range=skip", HIGH]),
    "form": (odd(torch.zeros(16, 5)), ["checks.inputs.form=skip"]),
    "constant": (odd(torch.ones(16, FEATURES)), ["checks.inputs.constant=skip"]),
}


@pytest.mark.parametrize(
    ("what", "guard"),
    [(what, "default") for what in SKIPS] + [("not_finite", "off")],
)
def test_after_a_skipped_batch_all_is_bit_equal_to_before_it(what: str, guard: str) -> None:
    data, overrides = SKIPS[what]
    run, past = trained(data, None, *overrides, f"stability={guard}", "schedule=cosine")
    assert past.skipped == [13, 33]  # an epoch has 20 steps
    for step in past.skipped:
        assert not differences(past.after[step], past.after[step - 1])
    assert differences(past.after[14], past.after[13])
    assert run.progress.skipped == 2
    assert any(kind.startswith("input_") for kind in run.history.counts)
    assert all(torch.isfinite(value).all() for value in weights(run).values())


def test_the_finding_names_the_samples_and_is_counted(tmp_path: Path) -> None:
    trained(poison(math.nan, 193, 200), tmp_path)
    found = {fault["kind"]: fault for fault in faults(tmp_path)}
    skipped = found["input_not_finite"]
    assert (skipped["category"], skipped["steps"]) == ("data", [13, 33])
    assert skipped["action"] == "skipped"
    assert "in 2 of 16 samples (of the data set: 193,200)" in skipped["message"]
    loss = found["non_finite"]["message"]
    assert loss.startswith("the loss was nan; cause in the batch: inputs: ")
    summary = Summary.read(tmp_path)
    assert summary.faults["input_not_finite"] == summary.skipped_steps == 2


STOPS = {
    "not_finite": (poison(math.nan, 193), "not_finite=stop", "193"),
    "labels": (mislabelled(99, 195), "labels=stop", "195"),
    "form": (odd(torch.zeros(16, 5)), "form=stop", r"\[5\]"),
}


@pytest.mark.parametrize("what", STOPS)
def test_stop_ends_the_run_with_a_checkpoint_of_before_and_says_how_to_go_on(
    what: str, tmp_path: Path
) -> None:
    data, policy, named = STOPS[what]
    with (
        spoiled(data, tmp_path, f"checks.inputs.{policy}") as run,
        pytest.raises(DataError, match=named) as caught,
    ):
        train(run)
    assert (DataError.exit_code, run.progress.step) == (2, 12)
    message = str(caught.value)
    assert message.startswith("step 13: ") and f"checks.inputs.{policy}" in message
    assert "\n" not in message and "checkpoint.resume=" in message
    assert (tmp_path / "checkpoints/last").resolve().name == "step_00000012"
    assert Summary.read(tmp_path).faults == {f"input_{what}": 1}


def test_a_stopped_run_goes_on_under_another_policy_as_if_it_had_had_it(tmp_path: Path) -> None:
    data = poison(math.nan, 193)
    with spoiled(data, tmp_path / "a", "checks.inputs.not_finite=stop") as run:
        with pytest.raises(DataError):
            train(run)
    with spoiled(data, tmp_path / "a", "checkpoint.resume=auto") as run:
        train(run)
    whole, _ = trained(data, None)
    assert not differences(weights(run), weights(whole))
    assert run.history.counts["input_not_finite"] == 3  # the stop, and two steps


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    data = poison(math.nan, 193)
    data.x[100, 2] = math.nan
    own = ["checkpoint.every=4", "training.steps=20", "training.micro_batch=4"]
    own.append("optimizer.ema=0.9")
    whole, past = trained(data, None, *own)
    with spoiled(data, tmp_path / "cut", *own) as run:
        run.hooks.append(AtSteps(14, interrupt))
        with pytest.raises(Interrupted):
            train(run)
    later = Past()
    with spoiled(data, tmp_path / "cut", *own, "checkpoint.resume=auto") as run:
        run.hooks.append(later)
        train(run)
    assert not differences(later.after[20], past.after[20])
    assert not differences(averaged(run), averaged(whole))
    assert run.history.counts == whole.history.counts
    assert run.history.counts["input_not_finite"] == 2


def averaged(run: Run) -> dict[str, Any]:
    with run.update.averaged():
        return weights(run)


def test_a_run_of_which_every_batch_is_skipped_comes_to_an_end() -> None:
    own = ["checks.inputs.range=skip", "checks.inputs.schema.high=-50", "training.steps=300"]
    with spoiled(Spoiled(), None, *own) as run:
        with pytest.raises(DataError, match="100 batches in a row"):
            train(run)


def test_the_strictest_policy_of_several_findings_acts(caplog: pytest.LogCaptureFixture) -> None:
    policies = ["checks.inputs.not_finite=warn", "checks.inputs.range=stop", HIGH]
    with spoiled(poison(math.inf, 193), None, *policies) as run:
        with pytest.raises(DataError, match=r"\(checks\.inputs\.range=stop\)"):
            train(run)
    assert run.history.counts["input_range"] == 1
    assert "the run ends" not in caplog.text  # the error says it


# -- data in memory, scanned once ------------------------------------------------------------------


def held(data: Spoiled, *overrides: str) -> Run:
    """A run on the same data as tensors in memory."""
    whole = TensorsDataset(data.x, data.y, data.sizes, (data.train, data.validation))
    own = [*QUIET, "checks.table.enabled=false", *overrides]
    return build(compose(own), None, Components(data=whole))


def test_faults_of_data_in_memory_are_detected_in_every_batch_with_one() -> None:
    data = poison(math.nan, 193)
    data.x[208:224] = 1.0
    with held(data) as run:
        train(run)
        counts = run.history.counts  # steps 13 and 33, 14 and 34
        assert (counts["input_not_finite"], counts["input_constant"]) == (2, 2)


def test_a_value_written_into_scanned_data_is_found_at_once() -> None:
    data, found = Spoiled(), []
    with held(data) as run:
        assert run.batch_validator is not None and run.batch_validator.table is not None
        for step, batch in zip(range(15), run.train.batches(0), strict=False):
            run.batch_validator.admit(step + 1, batch)
            found.append(run.history.counts.get("input_not_finite", 0))
            if step == 10:
                assert run.batch_validator.clean_versions
                run.batch_validator.table[0][193, 0] = math.inf
        assert found == [0] * 12 + [1, 1, 1]


# -- where the batch lies on an accelerator: nothing is read before two steps later ----------------


class Elsewhere:
    """The same loader, whose batches come past no inspector."""

    def __init__(self, run: Run) -> None:
        self.own = run.train
        run.train.inspector = None  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def far(data: Spoiled, folder: Path | None, *overrides: str) -> Run:
    """A run that treats the CPU's batches as it does those of an accelerator."""
    run = spoiled(data, folder, *overrides)
    run.train = Elsewhere(run)
    assert run.batch_validator is not None
    run.batch_validator.host_type = "none"
    return run


@pytest.mark.parametrize("what", ["labels", "constant"])
def test_on_an_accelerator_the_update_is_vetoed_and_the_words_come_two_steps_later(
    what: str,
) -> None:
    data, overrides = SKIPS[what]
    near, _ = trained(data, None, *overrides)
    kind, counts, past = f"input_{what}", list[int](), Past()
    told = hook(on_step=lambda run, step: counts.append(run.history.counts.get(kind, 0)))
    with far(data, None, *overrides) as run:
        run.hooks += [told, past]
        train(run)
    assert not differences(past.after[13], past.after[12])
    assert not differences(weights(run), weights(near))
    assert run.history.counts[kind] == near.history.counts[kind] == 2
    assert counts[12:15] == [0, 0, 1]  # first after step 15
    assert run.progress.skipped == 2


def test_on_an_accelerator_a_stop_comes_at_most_two_steps_late_and_without_the_update(
    tmp_path: Path,
) -> None:
    past = Past()
    with far(poison(math.nan, 193), tmp_path, "checks.inputs.not_finite=stop") as run:
        run.hooks.append(past)
        with pytest.raises(DataError, match="step 13: inputs: has values that are NaN"):
            train(run)
    assert max(past.after) == 14 and not differences(past.after[13], past.after[12])
    assert (tmp_path / "checkpoints/last").resolve().name == "step_00000014"


def test_a_stop_found_at_the_last_step_still_ends_the_run() -> None:
    own = ["checks.inputs.not_finite=stop", "training.steps=13"]
    with far(poison(math.nan, 193), None, *own) as run:
        with pytest.raises(DataError, match="step 13"):
            train(run)


@pytest.mark.gpu
def test_nothing_is_read_from_the_gpu_while_batches_there_are_looked_at() -> None:
    own = ["device=cuda", "data=cancer", "model=mlp", "training.batch_size=16"]
    with build(compose(own), None, Components(data=Spoiled())) as run:
        assert run.batch_validator is not None
        batches = [next(iter([run.train.at(i)])) for i in range(20)]
        run.batch_validator.admit(1, batches[0])  # caches
        run.device.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number, batch in enumerate(batches[1:], 2):
                run.batch_validator.admit(number, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_a_skipped_batch_leaves_a_compiled_whole_step_as_it_was(tmp_path: Path) -> None:
    data = poison(1e5, 199)
    own = ["optimization=none", "optimization.whole_step.enabled=true", "checks.inputs.range=skip"]
    own.append(HIGH)
    run, past = trained(data, tmp_path, *own)
    assert run.step_graph is not None, run.fallback_reasons
    assert past.skipped == [13, 33]
    assert not differences(past.after[13], past.after[12])
    assert run.progress.skipped == 2
