"""Every check says what it finds, the strictest policy acts, and a run goes on bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import train
from runner.checks.config import InputsConfig, Policy
from runner.checks.inputs.look import InputChecks
from runner.errors import DataError, Interrupted
from tests.checks.inputs.spoiled import FEATURES, Spoiled, same, spoiled, weights
from tests.checks.inputs.test_admission import (
    Leave,
    Past,
    far,
    mislabelled,
    odd,
    poison,
    trained,
)


def grown(factor: float) -> Spoiled:
    data = Spoiled()
    data.x[192:208] *= factor
    return data


def both(value: float, label: int) -> Spoiled:
    data = poison(value, 193)
    data.y[193] = label
    return data


STRICTEST = {
    "range warns, drift stops": (grown(50.0), ["drift=stop"], "drift"),
    "range drops all, drift stops": (grown(1e4), ["range=drop", "drift=stop"], "drift"),
    "constant warns, drift stops": (odd(torch.ones(16, FEATURES)), ["drift=stop"], "drift"),
    "not finite warns, range stops": (
        poison(math.inf, 193), ["not_finite=warn", "range=stop"], "range"),
    "NaN is in no range": (poison(math.nan, 193), ["not_finite=warn", "range=stop"], "range"),
    "the sample left out has no class": (
        both(math.nan, 99), ["not_finite=drop", "labels=stop"], "labels"),
    "another form with no class": (
        odd(torch.zeros(16, 5)), ["form=skip", "labels=stop", "schema.classes=1"], "labels"),
}  # fmt: skip


@pytest.mark.parametrize("what", STRICTEST)
def test_a_finding_hides_no_other_of_a_stricter_policy(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, policies, check = STRICTEST[what]
    with spoiled(data, None, *(f"checks.inputs.{one}" for one in policies)) as run:
        with pytest.raises(DataError, match=rf"\(checks\.inputs\.{check}=stop\)"):
            train(run)
    assert run.history.counts[f"input_{check}"] == 1
    assert "the run ends" not in caplog.text  # the error says it


@pytest.mark.parametrize("policies", [["drift=stop"], ["constant=off", "drift=stop"]])
def test_drift_stops_the_same_run_where_batches_lie_on_an_accelerator(policies: list[str]) -> None:
    own = [f"checks.inputs.{one}" for one in policies]
    with far(grown(50.0), None, *own) as run, pytest.raises(DataError, match="step 13: .*drift"):
        train(run)


def test_what_goes_with_the_samples_that_are_left_out_stops_nothing() -> None:
    for data, first in ((poison(math.nan, 193), "not_finite"), (poison(1e6, 193), "range")):
        own = [f"checks.inputs.{first}=drop", "checks.inputs.drift=stop"]
        if first == "not_finite":
            own.append("checks.inputs.range=stop")
        run, past = trained(data, None, *own)
        assert not any(past.skipped.values())
        assert run.history.counts == {f"input_{first}": 2}


def test_drift_is_told_of_finite_numbers_only() -> None:
    own = ["checks.inputs.drift=stop"]
    near, _ = trained(poison(math.nan, 193), None, *own)
    with far(poison(math.nan, 193), None, *own) as run:
        train(run)
    assert run.progress.skipped == near.progress.skipped == 2
    assert run.history.counts["input_not_finite"] == 2 and same(weights(run), weights(near))


def test_on_an_accelerator_only_a_step_that_was_not_made_is_called_skipped() -> None:
    data = Spoiled()
    data.y[192:208] = 0  # drift by the shares of labels, which the host finds
    own = ["checks.inputs.drift=skip", "checks.inputs.threshold=4", "training.steps=20"]
    with far(data, None, *own) as run:
        train(run)
        assert run.progress.skipped == 0
        found = run.history.faults.values()
        assert [fault.kind for fault in found] == ["input_drift"]
        assert "skipped" not in next(iter(found)).action


def test_causes_are_said_once_where_nothing_more_is_done_about_the_rest() -> None:
    own = torch.Generator().manual_seed(0)
    y = torch.zeros(32)
    for drift, codes in (
        (Policy.warn, ["input.range"]),
        (Policy.stop, ["input.range", "input.drift"]),
    ):
        checks = InputChecks(InputsConfig(baseline=8, drift=drift))
        for _ in range(9):
            assert checks.look((torch.randn(32, 4, generator=own), y)) == []
        found = checks.look((50 * torch.randn(32, 4, generator=own), y))
        assert [reason.code for reason in found] == codes


# -- together with what else a run does ------------------------------------------------------------

SPOILT = {"skip": "checks.inputs.not_finite=skip", "drop": "checks.inputs.not_finite=drop"}
WITH = {
    "alone": [],
    "ema": ["optimizer.ema=0.9"],
    "accumulation": ["training.micro_batch=4"],
}


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        ("drop", "alone"),
        *(pytest.param(policy, extra, marks=pytest.mark.slow)
          for policy, extra in (("skip", "alone"), ("skip", "ema"), ("skip", "accumulation"),
                                ("drop", "ema"), ("drop", "accumulation"))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [pytest.param(14, marks=pytest.mark.slow), 17])
def test_a_run_with_findings_goes_on_bit_for_bit(
    policy: str, extra: str, at: int, tmp_path: Path
) -> None:
    data = poison(math.nan, 193)
    own = [
        SPOILT[policy],
        "training.steps=20",
        "checkpoint.every=4",
        "schedule=cosine",
        *WITH[extra],
    ]
    whole, past = trained(data, None, *own)
    with spoiled(data, tmp_path, *own) as run:
        run.hooks.append(Leave(at))
        with pytest.raises(Interrupted):
            train(run)
    later = Past()
    with spoiled(data, tmp_path, *own, "checkpoint.resume=auto") as run:
        run.hooks.append(later)
        train(run)
    assert min(later.after) == at - at % 4 + 1 and same(later.after[20], past.after[20])
    assert same(averaged(run), averaged(whole))
    assert run.history.counts == whole.history.counts
    assert whole.progress.skipped == (1 if policy == "skip" else 0)


def averaged(run: Any) -> dict[str, Any]:
    with run.update.averaged():
        return weights(run)


@pytest.mark.parametrize("extra", ["ema", "accumulation"])
def test_a_skipped_batch_leaves_averages_and_accumulated_gradients_alone(extra: str) -> None:
    class Averages(Past):
        def on_step(self, run: Any, step: Any) -> None:
            super().on_step(run, step)
            self.after[step.number] |= {f"mean.{k}": v for k, v in averaged(run).items()}

    past = Averages()
    with spoiled(poison(math.nan, 193), None, *WITH[extra]) as run:
        run.hooks.append(past)
        train(run)
    assert [step for step, flag in past.skipped.items() if flag] == [13, 33]
    assert same(past.after[13], past.after[12]) and not same(past.after[14], past.after[13])
    if extra == "ema":
        assert not torch.equal(
            past.after[14]["mean.layers.0.weight"], past.after[14]["layers.0.weight"]
        )


@pytest.mark.slow
def test_a_skipped_batch_leaves_a_run_with_every_optimisation_as_it_was() -> None:
    own = ["optimization=ultra", "checks.inputs.labels=skip"]
    run, past = trained(mislabelled(99, 195), None, *own)
    bad = [step for step, flag in past.skipped.items() if flag]
    assert bad == [13, 33] and run.progress.skipped == 2
    for step in bad:
        assert same(past.after[step], past.after[step - 1])
    assert not same(past.after[14], past.after[13])
