"""job=evaluate: its own words, its own place, and the way back to the run that was evaluated."""

from pathlib import Path

import pytest

from runner.core.config.composing import compose_raw
from runner.core.errors import CheckpointError
from runner.core.jobs import run_report as report
from runner.core.record.summary import Summary
from tests import runs

QUICK = ["device=cpu", "monitoring.progress=false", "optimization=none"]
RUN = "outputs/runs/digits-mlp/one"


def test_an_evaluation_speaks_of_itself_lies_apart_and_leads_back_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.trained("optimization=none", "training.steps=40", folder=Path(RUN))
    # on other samples than those of the training, so that the two values differ
    other = ["data.validation=0.4", "data.split_seed=5", "debug=full"]
    done = runs.command(tmp_path, *QUICK, "job=evaluate", f"checkpoint.resume={RUN}", *other)
    assert done.returncode == 0, done.stderr
    assert "evaluated" in done.stdout and "weights of step 40" in done.stdout
    assert "trained" not in done.stdout and "best" not in done.stdout
    assert "debug tools" not in done.stdout and "debug.every" not in done.stdout
    assert [path.name for path in Path("outputs/runs/digits-mlp").iterdir()] == ["one"]
    (folder,) = Path("outputs/evaluations/digits-mlp").iterdir()
    summary = runs.read(folder)
    assert summary["best"] == summary["metrics"]["val/accuracy"] != Summary.read(Path(RUN)).best
    with pytest.raises(CheckpointError) as refused:
        runs.checked(f"checkpoint.resume={folder}")
    named = f"is an evaluation of another run; use checkpoint.resume={RUN}"
    assert str(refused.value).endswith(named)


@pytest.mark.parametrize("job", ["evaluate", "verify", "doctor", "scan", "replay", "benchmark"])
def test_only_trainings_lie_in_outputs_runs(job: str) -> None:
    typed = [f"job={job}", "name=mine", "checkpoint.resume=x"]
    assert not compose_raw(typed, hydra_too=True).hydra.run.dir.startswith("outputs/runs/")
    assert compose_raw(["name=mine"], hydra_too=True).hydra.run.dir.startswith("outputs/runs/mine/")


def test_the_best_says_which_validations_it_leaves_out() -> None:
    left_out = Summary(
        metrics={"val/accuracy": 0.961}, monitor="val/accuracy", best=0.9582, best_step=20,
        faults={"validation_not_finite": 1},
    )  # fmt: skip
    document = report.render_report(left_out)
    assert "best 0.9582 at step 20 (of validations with a finite loss)" in document
