"""Launchers of clusters: what has to be there before a sweep starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core.errors import UsageError
from runner.scale.sweep.cluster_launchers import adapt_launcher

LAUNCHER = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
DISABLED = "#!/bin/sh\necho Slurm accounting storage is disabled >&2\nexit 1\n"


@pytest.mark.parametrize(
    ("script", "problem"),
    [("", "No such file"), (DISABLED, "accounting storage is disabled"), ("#!/bin/sh\n", "")],
)
def test_a_submitit_sweep_needs_a_working_sacct(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = pytest.importorskip("submitit.core.core")
    monkeypatch.setattr(core.Job, "results", core.Job.results)  # which is replaced
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "sacct").write_text(script)
        (tmp_path / "sacct").chmod(0o755)
    if not problem:
        adapt_launcher(f"{LAUNCHER}.SlurmLauncher")
        return
    with pytest.raises(UsageError, match="hydra/launcher=submitit_slurm: ") as refused:
        adapt_launcher(f"{LAUNCHER}.SlurmLauncher")
    assert problem in str(refused.value) and "sbatch --array=0-2" in str(refused.value)
    adapt_launcher(f"{LAUNCHER}.LocalLauncher")  # which asks no scheduler
