"""`monitoring=quiet` shows warnings alone, and other jobs of a quiet run show their result."""

from __future__ import annotations

from pathlib import Path

from tests import runs

SHORT = ("data=cancer", "training.steps=4", "device=cpu")


def test_a_quiet_sweep_prints_nothing_and_the_evaluation_of_its_run_prints_the_result(
    tmp_path: Path,
) -> None:
    typed = ("seed=0,1", "monitoring=quiet", "hydra.sweep.dir=outputs/sweeps/one")
    swept = runs.command(tmp_path, "-m", *typed, *SHORT)
    assert (swept.returncode, swept.stdout, swept.stderr) == (0, "", "")
    assert (tmp_path / "outputs/sweeps/one/comparison.html").is_file()
    resumed = "checkpoint.resume=outputs/sweeps/one/1"
    evaluated = runs.command(tmp_path, "job=evaluate", resumed)
    assert "weights of step 4" in evaluated.stdout and "checkpoints/step_" in evaluated.stderr
    quiet = runs.command(tmp_path, "job=evaluate", resumed, "monitoring=quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_a_failed_job_of_a_quiet_sweep_is_reported(tmp_path: Path) -> None:
    swept = runs.command(tmp_path, "-m", "model=mlp,cnn", "monitoring=quiet", *SHORT)
    assert swept.returncode == 7 and "#1 model=cnn" in swept.stderr
    assert "#0 model=mlp" not in swept.stderr and not swept.stdout
