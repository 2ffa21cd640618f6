"""A checker that goes on from a checkpoint is the one that never stopped, whatever comes first."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import train
from runner.checks.config import InputsConfig, Policy
from runner.checks.inputs.baseline import Baseline
from runner.checks.inputs.here import numbers
from runner.checks.inputs.look import InputChecks
from runner.checks.inputs.measure import Labels, Measure, key_in, key_of, leaves, plan_of
from runner.errors import Interrupted
from runner.run import Run
from tests.checks.inputs.spoiled import Spoiled, same, weights
from tests.checks.inputs.test_admission import Leave, far, mislabelled, poison

FIRST = 8  # batches of the baseline
CUTS = (3, FIRST, 12)
LAST = 20
N, FEATURES, CLASSES = 2048, 2, 256


def plain(own: torch.Generator, n: int = N, features: int = FEATURES) -> tuple[Any, Tensor]:
    x = torch.randn(n, features, generator=own)
    return x, torch.randint(0, CLASSES, (n,), generator=own)


FIRST_SEEN: dict[str, Callable[[torch.Generator], tuple[Any, Tensor]]] = {
    "as all": plain,
    "ragged": lambda own: plain(own, 500),
    "one sample": lambda own: plain(own, 1),
    "larger": lambda own: plain(own, 3000),
    "float64": lambda own: (torch.randn(N, FEATURES, generator=own).double(), plain(own)[1]),
    "more features": lambda own: plain(own, features=3),
    "a leaf more": lambda own: ({"a": plain(own)[0], "b": plain(own)[0]}, plain(own)[1]),
    "no labels": lambda own: (plain(own)[0], torch.zeros(0, dtype=torch.int64)),
    "empty": lambda own: (torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64)),
    "one class": lambda own: (plain(own)[0], torch.full((N,), 7)),
}


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint brings it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def content(checks: InputChecks) -> dict[str, Any]:
    state = checks.state()
    state["repeats"]["marks"] = state["repeats"]["marks"].tolist()
    return state


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("what", FIRST_SEEN)
@pytest.mark.parametrize("form", [Policy.warn, Policy.off])
def test_whatever_batch_it_sees_first_it_knows_and_finds_the_same(
    what: str, cut: int, form: Policy
) -> None:
    def checker() -> InputChecks:
        return InputChecks(InputsConfig(baseline=FIRST, form=form), classes=CLASSES)

    own = torch.Generator().manual_seed(cut)
    whole = checker()
    for _ in range(cut):
        assert whole.look(plain(own), 0) == []
    resumed = checker()
    resumed.load(stored(whole.state()))
    for step in range(cut, LAST):
        batch = FIRST_SEEN[what](own) if step == cut else plain(own)
        assert resumed.look(batch, 0) == whole.look(batch, 0)
        assert content(resumed) == content(whole)
        assert resumed.limits == whole.limits and resumed.usual == whole.usual
    assert whole.baseline.full or what == "larger"  # of which there are few


def test_labels_are_counted_in_batches_of_any_length() -> None:
    known = Labels(classes=CLASSES, ignored=-100)
    plans = []
    for n in (1, 500, 5000):
        own = torch.Generator().manual_seed(n)
        x, y = plain(own, n)
        y[0], y[n // 2] = -100, CLASSES - 1
        found = leaves((x, y))
        plan, measure = plan_of(key_of(found), known), Measure(known)
        counted = torch.bincount(y[y >= 0], minlength=CLASSES).tolist()
        plans.append(plan)
        for row in (numbers(measure, found, plan), measure.row(found, plan).tolist()):
            assert row[plan.width : plan.width + plan.shares] == counted
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_whole_type_are_counted(kind: torch.dtype) -> None:
    known = Labels(classes=CLASSES)
    found = leaves((torch.randn(64, 2), torch.arange(128).to(kind)[::2] % 5))
    plan, measure = plan_of(key_of(found), known), Measure(known)
    for row in (numbers(measure, found, plan), measure.row(found, plan).tolist()):
        assert row[plan.width :][:6] == [13, 13, 13, 12, 13, 0]


def test_counts_beyond_what_float32_holds_one_by_one_are_those_of_a_batch_of_that_size() -> None:
    plan = plan_of(key_of(leaves(plain(torch.Generator(), 2))), Labels(classes=2))
    baseline = Baseline(FIRST, 8.0)
    baseline.samples, row = 2**24 + 3, [1.0] * plan.length
    row[plan.width] = torch.tensor(baseline.samples).float().item()
    baseline.rows = [row]
    assert row[plan.width] > baseline.samples and baseline.fits(plan)


def test_one_class_alone_is_found_in_a_batch_of_thousands() -> None:
    own = torch.Generator().manual_seed(0)
    checks = InputChecks(InputsConfig(baseline=FIRST), classes=CLASSES)
    for _ in range(FIRST):
        assert checks.look(plain(own)) == []
    assert [r.where for r in checks.look(FIRST_SEEN["one class"](own))] == ["target"]


@pytest.mark.parametrize("name", ["inputs.it's", 'inputs."a", torch.int8, 1)', "inputs[0].\\ö"])
def test_a_key_is_known_again_by_its_text(name: str) -> None:
    for dtype in (torch.float32, torch.complex64, torch.bool):
        key = key_of({name: torch.zeros(2, 3, dtype=dtype), "target": torch.zeros(2)})
        assert key_in(plan_of(key, Labels()).form) == key
    for form in ("", "(('a', torch.load, 1),)", "(('a', torch.no_such, 1),)", "(" * 9999, "((), 1"):
        assert key_in(form) is None


# -- numbers that were on their way from an accelerator when the checkpoint was written ------------

OWN = ["checks.inputs.baseline=11", "training.steps=20"]


def went_on(data: Spoiled, folder: Path, at: int, *overrides: str) -> Run:
    """The run that was cut off in that step is the one that was not."""
    own = [*OWN, *overrides, f"checkpoint.every={at - 1}"]
    with far(data, None, *own) as whole:
        train(whole)
    with far(data, folder, *own) as run:
        run.hooks.append(Leave(at))
        with pytest.raises(Interrupted):
            train(run)
    with far(data, folder, *own, "checkpoint.resume=auto") as run:
        train(run)
    assert same(weights(run), weights(whole))
    assert run.history.counts == whole.history.counts
    assert run.inputs is not None and whole.inputs is not None
    assert content(run.inputs.checks) == content(whole.inputs.checks)
    return run


@pytest.mark.parametrize("at", [14, 15])
def test_what_was_on_its_way_is_told_and_learned_after_the_checkpoint(
    at: int, tmp_path: Path
) -> None:
    run = went_on(poison(math.nan, 193), tmp_path, at, "checks.inputs.not_finite=skip")
    assert run.history.counts["input_not_finite"] == 1


def test_a_batch_of_another_form_drops_nothing_that_is_on_its_way(tmp_path: Path) -> None:
    data = mislabelled(9, 193)  # step 13
    data.odd = (13 * 16, data.x[13 * 16 : 14 * 16].reshape(16, 3, 4))  # step 14
    run = went_on(data, tmp_path, 15, "checks.inputs.labels=skip")
    assert run.history.counts == {"input_labels": 1}


@pytest.mark.parametrize("cut", CUTS)
def test_nothing_is_left_of_what_was_usual_before_a_state_is_loaded(cut: int) -> None:
    def checker() -> InputChecks:
        return InputChecks(InputsConfig(baseline=FIRST), classes=CLASSES)

    own = torch.Generator().manual_seed(0)
    batches = [plain(own) for _ in range(LAST)]
    source, used, fresh = checker(), checker(), checker()
    for x, y in batches[:cut]:
        source.look((x, y), 0)
    for x, y in batches:
        used.look((3 * x, y), 0)
    used.load(stored(source.state()))
    fresh.load(stored(source.state()))
    for batch in batches[cut:]:
        assert used.look(batch, 0) == fresh.look(batch, 0)
        assert content(used) == content(fresh)
        assert used.limits == fresh.limits and used.usual == fresh.usual
