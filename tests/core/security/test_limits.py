"""A run that has taken what security.limits allows is saved, stopped, and can go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner import train
from runner.core.checkpoint.folder import step_name
from runner.core.device import memory
from runner.core.errors import ConfigError
from runner.core.hooks import limits as hook
from runner.core.hooks.limits import folder_bytes
from runner.core.record.summary import Summary
from tests import runs

QUICK = "data=cancer monitoring=quiet optimization=none debug.capture.enabled=false".split()
LONG = [*QUICK, "training.steps=1000000", "training.validate_every=1000000"]


def stopped(folder: Path, *limits: str) -> Summary:
    with runs.opened(*LONG, *limits, folder=folder) as run:
        summary = train(run)
        assert run.saved_step == summary.steps < 1_000_000
    assert summary.status == Summary.read(folder).status == "stopped"
    assert (folder / "checkpoints" / step_name(summary.steps) / "manifest.json").is_file()
    assert f"checkpoint.resume={folder}" in summary.reason
    return summary


def test_time_that_is_up_ends_the_run_with_a_checkpoint_and_advice(tmp_path: Path) -> None:
    summary = stopped(tmp_path, "security.limits.hours=1e-5")
    assert "security.limits.hours" in summary.reason
    assert summary.faults == {"limit_hours": 1}
    more = [*QUICK, f"training.steps={summary.steps + 5}", f"checkpoint.resume={tmp_path}"]
    assert runs.trained(*more, folder=tmp_path).status == "done"


def test_memory_beyond_a_limit_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "CHECK_S", 0.0)
    limit, held = memory.process_bytes() / 1e6 + 150, list[bytes]()
    with runs.opened(*LONG, f"security.limits.memory_mb={limit:.0f}", folder=tmp_path) as run:
        run.hooks.append(runs.AtSteps(2, lambda run: held.append(b"x" * 300_000_000)))
        summary = train(run)
    assert summary.status == "stopped"
    assert "security.limits.memory_mb" in summary.reason and "MB of" in summary.reason


def test_memory_that_is_held_before_the_first_step_is_too_low_a_limit(tmp_path: Path) -> None:
    limit = memory.process_bytes() / 2e6
    with runs.opened(*LONG, f"security.limits.memory_mb={limit:.0f}", folder=tmp_path) as run:
        with pytest.raises(ConfigError, match="memory_mb: .* before the first step"):
            train(run)
        assert run.progress.step == 0


def test_a_folder_never_outgrows_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECK_S", "SCAN_S"):  # so that only a checkpoint is a reason to look
        monkeypatch.setattr(hook, name, 1e6)
    more = ["checkpoint.every=5", "checkpoint.keep=1000", "monitoring.tensorboard=false"]
    summary = stopped(tmp_path, *more, "security.limits.disk_mb=6")
    assert "security.limits.disk_mb" in summary.reason
    assert 2e6 < folder_bytes(tmp_path) <= 6e6


def test_a_resumed_folder_counts_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECK_S", "SCAN_S"):
        monkeypatch.setattr(hook, name, 0.0)
    (tmp_path / "earlier.bin").write_bytes(bytes(5_000_000))
    short = [*QUICK, "training.steps=20", "security.limits.disk_mb=5"]
    assert runs.trained(*short, folder=tmp_path).status == "done"


def test_limits_that_are_not_reached_change_no_number(tmp_path: Path) -> None:
    wide = [f"security.limits.{name}=1e6" for name in ("memory_mb", "disk_mb", "hours")]
    wide.append("security.limits.device_memory_mb=1e6")
    one, other = (runs.trained(*QUICK, "training.steps=40", *more) for more in ([], wide))
    assert one.metrics == other.metrics
    assert (other.status, other.faults) == ("done", {})


def test_a_hard_link_is_counted_once_and_a_link_out_of_the_folder_never(tmp_path: Path) -> None:
    inside = tmp_path / "run" / "a"
    inside.mkdir(parents=True)
    (inside / "one.bin").write_bytes(bytes(1000))
    os.link(inside / "one.bin", inside / "two.bin")
    (tmp_path / "outside.bin").write_bytes(bytes(100_000))
    (inside / "link").symlink_to(tmp_path / "outside.bin")
    (inside / "back").symlink_to(tmp_path)
    assert 1000 <= folder_bytes(tmp_path / "run") < 2000


@pytest.mark.gpu
def test_the_accelerator_s_allocator_is_told_its_limit(tmp_path: Path) -> None:
    import torch

    limit = torch.cuda.memory_reserved() / 1e6 + 500
    more = [*QUICK, "device=cuda", f"security.limits.device_memory_mb={limit}"]
    before = torch.cuda.get_per_process_memory_fraction()
    with runs.opened(*more, folder=tmp_path) as run:
        watch = next(h for h in run.hooks if isinstance(h, hook.Limits))
        with watch.session(run), pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == before
