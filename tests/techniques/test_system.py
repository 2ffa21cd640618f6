"""The system technique: threads by rule, denormals, kept memory; read back, and undone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import build, compose, train
from runner.device import denormals, process
from runner.techniques.base import Evidence
from runner.techniques.system import WAITING
from runner.training.run import Run
from runner.training.summary import Summary

QUICK = [
    "training.steps=2",
    "monitoring.progress=false",
    "device=cpu",
    "optimization=custom",
    "optimization.system.enabled=true",
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")


@contextmanager
def prepared(*overrides: str) -> Iterator[Run]:
    with build(compose([*QUICK, *overrides])) as run:
        yield run


def evidence(*overrides: str) -> Evidence:
    with prepared(*overrides) as run:
        train(run)
        return run.evidence["system"]


def chosen(run: Run) -> dict[str, Any]:
    return {choice.key: (choice.value, choice.reason) for choice in run.choices}


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A process that computes without pause on that core."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, [core])
        yield
    finally:
        busy.kill()
        busy.wait()


def test_a_model_too_small_to_share_out_gets_one_thread_and_keeps_it_only_while_it_runs() -> None:
    before = torch.get_num_threads()
    assert evidence("model.width=8").facts["threads"] == 1
    assert torch.get_num_threads() == before


def test_a_model_large_enough_keeps_torchs_threads_and_deterministic_ones_ask_nobody() -> None:
    before = torch.get_num_threads()
    with prepared("optimization.system.small_mflop=0", "device.deterministic=true") as run:
        value, reason = chosen(run)["device.threads"]
    assert value == before
    assert "device.deterministic: other processes are not considered" in reason


def test_threads_that_are_named_stay() -> None:
    with prepared("device.threads=2", "model.width=8") as run:
        assert torch.get_num_threads() == 2
        assert "device.threads" not in chosen(run)


@linux
def test_a_core_that_a_neighbour_keeps_busy_is_left_to_him() -> None:
    with neighbour(min(os.sched_getaffinity(0))):
        assert process.busy_cores(0.5) > 0.4
    cores = len(os.sched_getaffinity(0))
    assert process.free_threads(cores, 1.0) == max((cores + 1) // 2, cores - 1)
    assert process.free_threads(cores, 0.3) == cores
    assert process.free_threads(8, 50.0) == 4  # neighbours come and go
    assert process.free_threads(1, 50.0) == 1


@linux
def test_denormals_are_zero_while_a_run_lasts() -> None:
    seen = evidence("device.threads=2")
    assert seen.engaged
    assert seen.facts["denormals_are_zero"] is True
    assert not denormals.flushed()
    off = evidence("device.threads=2", "optimization.system.flush_denormals=false")
    assert "denormals_are_zero" not in off.facts


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_step_with_large_activations_faults_no_pages_in_once_memory_is_kept() -> None:
    code = (
        "import resource, sys\n"
        "from runner.techniques.probe import dry_run_step\n"
        "from tests.techniques.test_system import prepared\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "with prepared(*sys.argv[1:]) as run:\n"
        "    dry_run_step(run), dry_run_step(run)\n"
        "    before = faults()\n"
        "    dry_run_step(run)\n"
        "    print(faults() - before)\n"
    )
    cnn = [
        "model=cnn",
        "data=synthetic",
        "data.samples=256",
        "training.batch_size=64",
        "model.width=16",
        "device.threads=1",
        "training.validate_every=100",
    ]
    seen = {}
    for keep in ("false", "true"):
        command = [sys.executable, "-c", code, *cnn, f"optimization.system.keep_memory={keep}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seen[keep] = int(done.stdout.split()[-1])
    if seen["false"] < 2000:
        pytest.skip("here glibc keeps the memory by itself")
    assert seen["true"] < seen["false"] / 4


@pytest.mark.gpu
def test_on_a_gpu_segments_grow_and_cudnn_tries_its_kernels_unless_deterministic() -> None:
    cnn = ["model=cnn", "device=cuda", "training.batch_size=64"]
    with build(compose([*QUICK, *cnn])) as run:
        train(run)
        facts = run.evidence["system"].facts
    assert facts["cudnn_benchmark"] is True
    assert facts["expandable_segments"] > 0 or "expandable_segments_left_alone" in facts
    with build(compose([*QUICK, *cnn, "device.deterministic=true"])) as run:
        train(run)
        facts = run.evidence["system"].facts
    assert facts["cudnn_benchmark"] is False
    assert "deterministic" in facts["cudnn_benchmark_left_alone"]


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}])
def test_the_command_line_has_threads_sleep_soon_unless_told_otherwise(
    own: dict[str, str], tmp_path: Path
) -> None:
    clean = {key: value for key, value in os.environ.items() if key not in WAITING}
    command = [sys.executable, "-m", "runner", *QUICK, f"hydra.run.dir={tmp_path}/outputs/run"]
    subprocess.run(command, env=clean | own, capture_output=True, check=True)
    summary = Summary.read(tmp_path / "outputs" / "run")
    found = next(row for row in summary.techniques if row.name == "system")
    assert found.evidence["waiting"] == (own or {"GOMP_SPINCOUNT": "10000"})
