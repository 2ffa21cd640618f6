"""A level measures what it buys: blocks with a technique and without, and the faster is kept."""

from __future__ import annotations

import copy
import gc
import re
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Summary, build, train
from runner.core.build.setup import Components
from runner.core.interfaces.hook import Verdict
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import GAIN_TESTS, Switch
from runner.core.techniques import cost
from runner.core.train.gain_tests import GainTest, GainTests
from runner.core.train.step import make_step
from tests import runs

STEPS, MADE = 1400, 60  # 2 % of them are 28
DATA = ("data=synthetic", "data.form=tabular", "data.features=16", "data.classes=4")
DATA = (*DATA, "data.samples=64", "training.batch_size=8")
RUN = (*DATA, f"training.steps={STEPS}", "training.validate_every=700", "device.threads=1")
BF16 = ("optimization.amp.enabled=true", "optimization.amp.dtype=bf16")
LEVEL = ("optimization=basic", *BF16)
IMAGES = ("data=synthetic", "data.form=images", "data.image_size=16", "data.samples=64")
SMALL = ("model=cnn", "model.width=16", "device.threads=1", "training.batch_size=4")
CNN = (*IMAGES, *SMALL, f"training.steps={STEPS}")


class Slow(nn.Module):
    """A forward of 30 ms, and of 50 under autocast, or without it."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.autocast = nn.Linear(16, 4), autocast

    def forward(self, x: Tensor) -> Tensor:
        slow = torch.is_autocast_enabled("cpu") is self.autocast
        time.sleep(0.05 if slow else 0.03)
        return self.layer(x)  # type: ignore[no-any-return]


def trained(
    *overrides: str, slow_with: bool, folder: Path | None = None
) -> tuple[Summary, dict[str, Tensor], list[dict[str, Any]]]:
    given = Components(model=Slow(slow_with), hooks=[runs.AtSteps(MADE, lambda run: Verdict.STOP)])
    with runs.opened(*RUN, *overrides, folder=folder, given=given) as run:
        summary = train(run)
        return (
            summary,
            runs.weights(run),
            [] if run.gain_tests is None else run.gain_tests.history(),
        )


def test_a_technique_that_is_slower_here_is_dropped_with_both_figures_and_resume_is_exact(
    tmp_path: Path,
) -> None:
    every = ("checkpoint.every=10", "checkpoint.keep=9")
    summary, weights, history = trained(*LEVEL, *every, slow_with=True, folder=tmp_path / "once")
    row = runs.status(summary, "amp")
    assert (row.status, row.engaged) == ("skipped", False)
    assert row.evidence["measured_ms"] > max(50, row.evidence["without_ms"])
    said = re.match(r"slower here: (\S+) ms against (\S+) ms without it", row.reason)
    assert said is not None, row.reason
    figures = [row.evidence["measured_ms"], row.evidence["without_ms"]]
    assert [float(ms) for ms in said.groups()] == pytest.approx(figures, rel=0.01)
    (choice,) = [c for c in summary.choices if c.key == "optimization.amp.enabled"]
    assert choice.value is False
    (gain_test,) = history  # each seventh step is of a smaller batch, and not timed
    assert (gain_test["first"], gain_test["block"]) == (6, 2)
    assert 7 <= gain_test["pairs"] <= 12
    for step in (10, 50):  # while it is measured, and after it was decided
        place = tmp_path / f"from_{step}"
        shutil.copytree(tmp_path / "once", place, symlinks=True)
        for folder in (place / "checkpoints").glob("step_*"):
            if int(folder.name[5:]) > step:
                shutil.rmtree(folder)
        resumed, again, _ = trained(
            *LEVEL, *every, "checkpoint.resume=auto", slow_with=True, folder=place
        )
        assert runs.rows(place, "train") == runs.rows(tmp_path / "once", "train")
        assert runs.differences(again, weights) == []
        assert runs.status(resumed, "amp").status == "skipped"
        assert "slower here" in runs.status(resumed, "amp").reason


def test_a_technique_that_is_faster_here_is_kept_and_says_so() -> None:
    row = runs.status(trained(*LEVEL, slow_with=False)[0], "amp")
    assert (row.status, row.engaged) == ("engaged", True)
    assert row.evidence["times_as_fast"] > 1.3
    assert row.evidence["measured_ms"] < row.evidence["without_ms"]


@pytest.mark.parametrize(
    "overrides",
    [
        (*LEVEL, "optimization.measure=false"),
        (*LEVEL, "optimization.strict=true"),
        ("optimization=amp", "optimization.amp.dtype=bf16"),
    ],
)
def test_a_single_or_strict_technique_is_used_without_timing(
    overrides: tuple[str, ...],
) -> None:
    with runs.opened(*RUN, *overrides) as run:
        assert run.gain_tests is None
        assert len(run.contexts) == 1


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def skipped(run: Run, name: str) -> str:
    return next((row.reason for row in run.unapplied_techniques if row.name == name), "")


def test_a_run_too_short_to_measure_uses_only_what_was_measured_before_and_says_why() -> None:
    with runs.opened(*RUN, *LEVEL, "training.steps=1300") as run:
        assert "1,300 steps are too few to measure" in skipped(run, "amp")
        assert "no earlier run here measured it" in skipped(run, "amp")
        (choice,) = [c for c in run.choices if c.key == "optimization.measure"]
        assert choice.value is False
        assert "1,350" in choice.reason
    with runs.opened(*CNN, "optimization=advanced", "training.steps=20") as run:
        assert run.gain_tests is None
        assert "too few to measure" in skipped(run, "channels_last")
        assert dict(run.techniques).keys() <= {"system", "fused_optimizer", "tf32"}


@pytest.mark.parametrize("slow_with", [False, True])
def test_a_short_run_uses_a_technique_that_a_long_one_measured_as_faster(slow_with: bool) -> None:
    trained(*LEVEL, slow_with=slow_with)
    short, given = (*RUN, *LEVEL, "training.steps=100"), Components(model=Slow(slow_with))
    with runs.opened(*short, given=given) as run:
        (choice,) = [c for c in run.choices if c.key == "optimization.amp.enabled"]
        assert choice.value is not slow_with
        assert choice.reason.startswith("measured before on this machine: ")
        assert ("amp" in dict(run.techniques)) is not slow_with
        assert skipped(run, "amp") == (choice.reason if slow_with else "")
    for changed in ("training.batch_size=4", "device.threads=2"):
        with runs.opened(*short, changed, given=given) as run:
            assert "no earlier run here measured it" in skipped(run, "amp")


def test_a_resumed_short_run_keeps_what_it_used_though_the_cache_changed(tmp_path: Path) -> None:
    once = (*LEVEL, "training.steps=80", "checkpoint.every=40")
    summary, _, _ = trained(*once, slow_with=False, folder=tmp_path / "run")
    assert runs.status(summary, "amp").status == "skipped"
    trained(*LEVEL, slow_with=False)  # measured meanwhile as faster
    resumed, _, _ = trained(
        *once, "checkpoint.resume=auto", slow_with=False, folder=tmp_path / "run"
    )
    assert runs.status(resumed, "amp").reason == "kept from the resumed run"


def test_a_new_memory_layout_of_weights_between_steps_changes_only_rounding() -> None:
    def losses(*overrides: str) -> tuple[list[float], int]:
        config = runs.config(*CNN, "training.steps=24", "optimization=advanced", *overrides)
        config.optimization.compile.enabled = False
        config.stability.clip_norm = None
        turns, seen = 0, []
        recorded = {GAIN_TESTS: [{"name": "channels_last", "first": 2, "block": 2, "pairs": 4,
                              "settling": 0}]} if not overrides else {}  # fmt: skip
        with build(config, given=Components(choices=recorded)) as run:
            run.model.train()
            for _, batch in zip(range(20), run.train.batches(0), strict=False):
                before = [switch.on for switch in run.switches]
                seen.append(float(make_step(run, batch)[0].loss))
                run.progress.step += 1
                turns += before != [switch.on for switch in run.switches]
        return seen, turns

    plain, none = losses("optimization.measure=false")
    turned, turns = losses()
    assert (none, turns) == (0, 4)  # from step 2 to 17, in the order ABBA
    assert turned == pytest.approx(plain, rel=2e-3)


def test_compiled_levels_are_tried_one_after_another_and_short_runs_wait_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from runner.core.techniques import compiler

    began: list[str] = []
    monkeypatch.setattr(compiler.Compilation, "start", lambda _: began.append("compile"))
    ultra = (*RUN, "optimization=ultra", "training.steps=5400")
    with runs.opened(*ultra) as run:  # a second of work
        assert run.gain_tests is None
        rows = {row.name: row.reason for row in run.unapplied_techniques}
        assert "run too short (5,400 steps" in rows["compile"]
        assert "run too short (5,400 steps" in rows["whole_step"]
    monkeypatch.setattr(cost, "COLD_COMPILE_S", 1e-4)  # as if it took no time
    with runs.opened(*ultra) as run:
        assert run.gain_tests is not None
        assert run.step_graph is None
        assert not began  # steps are eager until their gain_test
        run.gain_tests.plan(run)
        one, two = run.gain_tests.tests
        assert (one.name, two.name, two.first) == ("compile", "whole_step", one.last + 1)
        run.gain_tests.enter(run, two.first)
        assert run.step_graph is not None
        two.used = False
        run.gain_tests.enter(run, two.last + 1)
        assert run.step_graph is None
    with runs.opened(*ultra, "optimization.measure=false") as run:
        assert run.step_graph is not None


@pytest.mark.parametrize("slower", [True, False], ids=["rejected", "accepted"])
def test_a_rejected_technique_is_discarded_once_and_an_accepted_one_never(slower: bool) -> None:
    discarded: list[int] = []
    with runs.opened(*RUN, "optimization=none") as run:
        switch = Switch("own", lambda *_: None, discard=lambda r: discarded.append(r.progress.step))
        gain_tests = GainTests([switch], [])
        gain_tests.is_timing, gain_tests.finished = True, False
        gain_tests.tests = [GainTest("own", first=1, block=2, pairs=6, settling=0)]
        while not gain_tests.finished:
            on = gain_tests.tests[0].uses_technique(run.progress.step + 1, True)
            gain_tests.end(run, time.perf_counter() - (2.0 if on is slower else 1.0), regular=True)
            run.progress.step += 1
        assert gain_tests.tests[0].used is not slower
        last = gain_tests.tests[0].last
    assert discarded == ([last - 1] if slower else [])


@pytest.mark.parametrize("on", [True, False])
def test_a_whole_step_that_was_given_up_is_dropped_in_any_block_of_its_gain_test(
    on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.core.techniques import compiler

    monkeypatch.setattr(compiler.Compilation, "start", lambda _: None)
    monkeypatch.setattr(cost, "COLD_COMPILE_S", 1e-4)  # as if it took no time
    with runs.opened(*RUN, "optimization=ultra", "training.steps=5400") as run:
        assert run.gain_tests is not None
        switch = run.gain_tests.switches["whole_step"]
        switch.set_enabled(run, True)
        graph = weakref.ref(run.step_graph)
        switch.set_enabled(run, on)
        assert compiler.drop_graphs(run, "no memory")
        gc.collect()
        assert run.step_graph is None and graph() is None  # its memory is free
        switch.set_enabled(run, True)
        assert run.step_graph is None
        assert run.fallback_reasons["whole_step"] == "no memory"
        assert not compiler.drop_graphs(run, "again")
        assert run.fallback_reasons["whole_step"] == "no memory"


def test_a_hopeless_gain_test_ends_early() -> None:
    gain_test = GainTest("amp", first=11, block=3, pairs=6, settling=0)
    for step in range(11, 17):
        gain_test.record_time(step, 1.0 if gain_test.uses_technique(step, True) else 0.1)
        gain_test.stop_early(step)
    assert (gain_test.used, gain_test.last) == (False, 16)


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        ([1.3, 1.2, 1.4, 1.2, 1.3, 1.3], True),
        ([0.9, 0.8, 0.9, 0.85, 0.9, 0.95], False),
        ([1.2, 0.9, 1.01, 1.0, 0.95, 1.05], False),  # nothing gained: left out
        ([1.2, 0.9, 1.2, 1.1, 1.1, 1.3], True),  # within the noise: the likelier
    ],
)
def test_the_faster_is_kept_by_the_interval_of_the_pairs(gains: list[float], kept: bool) -> None:
    gain_test = GainTest("compile", first=1, block=2, pairs=6, settling=3)
    for number, gain in enumerate(gains):
        for block in (2 * number, 2 * number + 1):
            step = 4 + 2 * block + 1
            gain_test.record_time(step - 1, 9.0)  # the first of a block is not timed
            gain_test.record_time(step, 1.0 if gain_test.uses_technique(step, False) else gain)
    estimate = gain_test.estimate()
    assert estimate is not None
    assert estimate.faster is kept
    assert estimate.low == min(gains)
    assert estimate.high == max(gains)
    assert copy.deepcopy(gain_test).estimate() == estimate
