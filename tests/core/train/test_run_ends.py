"""`ended_by` of summary.json: what ended a run, and who continues it."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import build, compose, train
from runner.core.build.setup import Components
from runner.core.device.signals import request_stop
from runner.core.errors import GaveUp
from runner.core.hooks import limits, resources
from runner.core.interfaces.hook import Verdict
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.measure.discover import compare_folders
from runner.measure.verdicts import conclusion
from runner.scale.sweep.plan import JobPlan, Planner
from runner.scale.sweep.schedule import write_failed_summary
from runner.scale.sweep.state import Job
from tests.measure.planted import job, run, sweep
from tests.runs import AtSteps, trained

QUICK = """
    data=cancer training.steps=12 training.validate_every=3 monitoring=quiet monitoring.every=1
    device=cpu optimization=none debug.capture.enabled=false
    """.split()
UNFINISHED = ("limit", "stop_file", "memory", "signal", "policy", "error")


def fail(run: Run) -> None:
    raise RuntimeError("of the hook")


ACTIONS: dict[str, Any] = {
    "hook": lambda run: Verdict.STOP,
    "stop_file": lambda run: request_stop(run.folder, "enough"),
    "pruned": lambda run: request_stop(run.folder, "pruned at validation 1: val/loss 1 (median)"),
    "signal": lambda run: os.kill(os.getpid(), signal.SIGTERM),
    "error": fail,
    "policy": lambda run: Verdict.ROLLBACK,
}
OVERRIDES = {
    "policy": ["stability.max_rollbacks=0"],
    "limit": ["security.limits.hours=1e-9"],
    "memory": ["stability.watch.stop_above=1e-9"],
    "patience": ["training.patience=1", "optimizer.lr=1e-30", "schedule=constant"],
}


@pytest.mark.parametrize("ended_by", sorted({"done", *ACTIONS, *OVERRIDES}))
def test_the_summary_names_what_ended_the_run(
    ended_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHECK_S", 0.0)
    monkeypatch.setattr(resources, "MIN_OWN_SHARE", 0.0)
    meanwhile: list[str | None] = []

    def act(run: Run) -> Any:
        meanwhile.append(Summary.read(tmp_path).ended_by)
        return ACTIONS[ended_by](run) if ended_by in ACTIONS else None

    with build(compose([*QUICK, *OVERRIDES.get(ended_by, [])]), tmp_path) as built:
        built.hooks.append(AtSteps(4, act))
        with suppress(Exception, KeyboardInterrupt):
            train(built)
    summary = Summary.read(tmp_path)
    assert summary.ended_by == ended_by
    assert summary.finished == (ended_by not in UNFINISHED)
    if ended_by == "signal":  # within a step, not in a wait
        assert summary.checkpoint.last == "checkpoints/step_00000004"
    # limits end the run before the hook's step
    assert meanwhile == [None] * (summary.steps >= 4)


def test_a_request_to_stop_at_the_last_step_leaves_nothing_to_continue(tmp_path: Path) -> None:
    summary = trained(
        *QUICK, "training.steps=4", folder=tmp_path, hooks=[AtSteps(4, ACTIONS["stop_file"])]
    )
    assert (summary.steps, summary.ended_by, summary.finished) == (4, "done", True)


def test_patience_finishes_a_run_that_a_limit_ends_at_the_same_step() -> None:
    for causes in (("patience", "limit"), ("limit", "patience")):
        run_like = Run.__new__(Run)
        run_like.stop_reason = run_like.stopped_by = ""
        for cause in causes:
            run_like.request_stop(cause, f"by {cause}")
        assert (run_like.stopped_by, run_like.stop_reason) == ("patience", "by patience")


def planned(folder: Path, ended_by: str | None, status: str = "stopped") -> JobPlan:
    """The plan of a repeated sweep for a job that ended so."""
    (folder / "0" / "checkpoints" / "step_00000004").mkdir(parents=True)
    (folder / "0" / "checkpoints" / "step_00000004" / "manifest.json").touch()
    Summary(status, ended_by=ended_by).write(folder / "0")
    requested = JobPlan(Job(0, ["seed=0"], "0", "hash"), trains=True)
    return Planner(folder, [Job(0, ["seed=0"], "0", "hash", status)], [["seed=0"]]).match(requested)


@pytest.mark.parametrize(
    "ended_by", ["limit", "stop_file", "memory", "patience", "pruned", "hook", None]
)
def test_a_repeated_sweep_continues_a_job_that_was_ended_early(
    ended_by: str | None, tmp_path: Path
) -> None:
    plan, early = planned(tmp_path, ended_by), ended_by in UNFINISHED
    assert (plan.done, plan.continues, plan.replaces) == (not early, early, False)
    assert (plan.job.status == "stopped") is not early and plan.job.status != "done"


def test_a_full_disk_leaves_status_and_end_in_the_summary(tmp_path: Path) -> None:
    Summary(steps=3).write(tmp_path)
    Summary("stopped", "too long for the place", "stop_file").write_status(tmp_path)
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.ended_by, summary.steps) == ("stopped", "stop_file", 3)
    assert not summary.finished
    Summary().write(tmp_path)
    Summary("interrupted", "", "signal").write_status(tmp_path)
    assert Summary.read(tmp_path).ended_by == "signal"


@pytest.mark.parametrize(
    ("status", "ended_by"), [("interrupted", "signal"), ("timeout", "limit"), ("failed", "error")]
)
def test_an_end_that_is_seen_from_outside_is_named_too(
    status: str, ended_by: str, tmp_path: Path
) -> None:
    Summary(steps=3).write(tmp_path)
    write_failed_summary(tmp_path, status, "seen", "python -m runner")
    assert Summary.read(tmp_path).ended_by == ended_by


def test_a_comparison_names_the_rows_that_ended_early(tmp_path: Path) -> None:
    ends = {"none": "limit", "basic": "stop_file", "ultra": "patience", "auto": None}
    root = sweep(tmp_path / "sweep", [job(n, level, "stopped") for n, level in enumerate(ends)])
    for n, (level, ended_by) in enumerate(ends.items()):
        run(root / str(n), [f"optimization={level}"], status="stopped", ended_by=ended_by)
    texts = [sentence.text for sentence in conclusion(compare_folders([root]))]
    early = [text for text in texts if text.startswith("Ended early")]
    assert len(early) == 1
    assert "none (limit)" in early[0] and "basic (stop_file)" in early[0]
    assert "ultra" not in early[0] and "auto" not in early[0]
    assert "the sweep's command again continues them" in early[0]


def make_a_weight_infinite(run: Run) -> None:
    next(run.model.parameters()).data.view(-1)[0] = float("inf")


def test_a_run_without_a_guard_that_ends_with_lost_weights_fails_and_begins_afresh(
    tmp_path: Path,
) -> None:
    typed = [*QUICK, "stability=off", "checkpoint.every=3", "checkpoint.resume=auto"]
    ruin = AtSteps(4, make_a_weight_infinite)
    for hooks in ([ruin], [ruin], []):
        with build(compose(typed), tmp_path) as run:
            assert run.progress.step == 0
            run.hooks += hooks
            with (
                pytest.raises(GaveUp, match="^the weights are not finite")
                if hooks
                else nullcontext()
            ):
                train(run)
        summary = Summary.read(tmp_path)
        assert (summary.status, summary.ended_by) == (
            ("failed", "policy") if hooks else ("done", "done")
        )
    assert GaveUp.exit_code == 4
    assert {path.name for path in (tmp_path / ".earlier").iterdir()} == {"run-1", "run-2"}
    assert (tmp_path / ".earlier" / "run-1" / "checkpoints").is_dir()


class Unstable(torch.nn.Linear):
    """Its loss is never finite in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (float("nan") if self.training else 1.0)


@pytest.mark.parametrize("scale_overflows", [False, True])
def test_a_run_whose_steps_were_all_skipped_has_trained_nothing_and_fails(
    tmp_path: Path, scale_overflows: bool
) -> None:
    with build(compose(QUICK), tmp_path, Components(model=Unstable(30, 2))) as run:
        if scale_overflows:  # of a search that a short run does not end
            run.history.add("overflow", "the scale is halved", step=1, category="numerics")
        with nullcontext() if scale_overflows else pytest.raises(GaveUp, match="^nothing is tr"):
            train(run)
    summary = Summary.read(tmp_path)
    assert summary.skipped_steps == 12
    assert (summary.status, summary.ended_by) == (
        ("done", "done") if scale_overflows else ("failed", "policy")
    )
