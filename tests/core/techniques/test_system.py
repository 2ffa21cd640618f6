"""The system technique: threads by rule, denormals, kept memory; read back, and undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner import train
from runner.core.device import process
from runner.core.record.summary import Summary
from runner.core.techniques import system
from runner.core.train.evidence import collect_evidence
from tests import runs

AUTO = "device.threads=null"
QUICK = ["training.steps=2", "optimization=custom", "optimization.system.enabled=true", AUTO]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")


def test_a_model_too_small_to_share_out_gets_one_thread_and_keeps_it_only_while_it_runs() -> None:
    before = torch.get_num_threads()
    assert runs.status(runs.trained(*QUICK, "model.width=8"), "system").evidence["threads"] == 1
    assert torch.get_num_threads() == before


def test_a_model_large_enough_keeps_torchs_threads_and_deterministic_ones_ask_nobody() -> None:
    before = torch.get_num_threads()
    asked = ["optimization.system.small_mflop=0", "device.deterministic=true"]
    with runs.opened(*QUICK, *asked) as run:
        (choice,) = [choice for choice in run.choices if choice.key == "device.threads"]
    assert choice.value == before
    assert "device.deterministic: other processes are not considered" in choice.reason


@linux
def test_threads_that_are_named_stay_and_denormals_are_zero_while_a_run_lasts() -> None:
    with runs.opened(*QUICK, "device.threads=2", "model.width=8") as run:
        assert torch.get_num_threads() == 2
        assert "device.threads" not in {choice.key for choice in run.choices}
        train(run)
        shown = run.evidence["system"]
    assert shown.engaged and shown.facts["denormals_are_zero"] is True
    assert not system.denormals_flushed()


def test_settings_that_the_users_code_takes_back_are_named() -> None:
    threads = torch.get_num_threads()
    with runs.opened(*QUICK, "model.width=8") as run:
        collect_evidence(run)
        assert run.evidence["system"].engaged
        torch.set_num_threads(2)
        collect_evidence(run)
        assert not run.evidence["system"].engaged
        # what a thread that has started since then does with denormals may come after it
        reason = run.evidence["system"].reason.partition("; ")[0]
        assert reason == "device.threads is 2, not the 1 chosen"
    torch.set_num_threads(threads)


@linux
def test_a_core_that_a_neighbour_keeps_busy_is_left_to_him() -> None:
    if os.nice(0) > 0:
        pytest.skip("a neighbour of positive niceness does not count, and this one inherits it")
    code = "print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()  # it runs
        os.sched_setaffinity(busy.pid, [min(os.sched_getaffinity(0))])
        # on a machine under load it may have to wait for its core
        assert any(process.busy_cores(0.5) > 0.4 for _ in range(40))
    finally:
        busy.kill()
        busy.communicate()
    cores = len(os.sched_getaffinity(0))
    assert process.free_threads(cores, 1.0) == max((cores + 1) // 2, cores - 1)
    assert process.free_threads(cores, 0.3) == cores
    assert process.free_threads(8, 50.0) == 4  # neighbours come and go
    assert process.free_threads(1, 50.0) == 1


@pytest.mark.gpu
def test_on_a_gpu_segments_grow_and_cudnn_tries_its_kernels_unless_deterministic() -> None:
    cnn = [*QUICK, "model=cnn", "device=cuda", "training.batch_size=64"]
    for more, tries in (([], True), (["device.deterministic=true"], False)):
        facts = runs.status(runs.trained(*cnn, *more), "system").evidence
        assert facts["cudnn_benchmark"] is tries
        assert ("cudnn_benchmark_left_alone" in facts) is not tries
        assert facts["expandable_segments"] > 0 or "expandable_segments_left_alone" in facts


@pytest.mark.parametrize(
    "own", [{}, pytest.param({"OMP_WAIT_POLICY": "active"}, marks=pytest.mark.slow)]
)
def test_the_command_line_has_threads_sleep_soon_unless_the_user_names_a_policy(
    own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in system.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    made = runs.command(tmp_path, *QUICK, "device=cpu", "hydra.run.dir=outputs/run", **own)
    assert made.returncode == 0, made.stderr
    row = runs.status(Summary.read(tmp_path / "outputs" / "run"), "system")
    assert row.evidence["waiting"] == (own or {"GOMP_SPINCOUNT": "10000"})
