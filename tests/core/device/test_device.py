from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner import compose, train
from runner.core.config.run_config import config_hash
from runner.core.device import resources
from runner.core.device.device import Device, capabilities, most_free_gpu, seed_everything, select
from runner.core.device.resources import SystemMonitor
from runner.core.errors import ConfigError, DeviceError
from runner.core.schemas.device import DeviceConfig, DeviceKind
from tests import runs

linux = pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
accelerated = torch.cuda.is_available() or torch.backends.mps.is_available()


def cpu(scope: ExitStack, **knobs: object) -> Device:
    return select(DeviceConfig(kind=DeviceKind.cpu, **knobs), scope)  # type: ignore[arg-type]


@pytest.fixture
def scope():
    with ExitStack() as stack:
        yield stack


@pytest.mark.skipif(accelerated, reason="there is an accelerator")
def test_auto_takes_the_cpu_where_there_is_nothing_else_and_says_why(scope):
    device = select(DeviceConfig(), scope)
    assert (device.kind, device.torch) == ("cpu", torch.device("cpu"))
    assert "no accelerator" in device.reason and device.name == capabilities.cpu_name()


@pytest.mark.parametrize("kind", [DeviceKind.cuda, DeviceKind.mps])
def test_a_missing_device_is_an_error_that_lists_the_available_ones(kind, scope):
    if getattr(torch, kind.value).is_available():
        pytest.skip(f"there is {kind.value}")
    says = rf"device.kind={kind.value}.*built without.*available: cpu \(.*device=auto"
    with pytest.raises(DeviceError, match=says) as error:
        select(DeviceConfig(kind=kind), scope)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("index", [1, -1])
def test_an_index_out_of_range_is_an_error_that_says_what_is_there(index, scope):
    with pytest.raises(DeviceError, match=rf"device.index: .*cpu device {index}.*available: cpu"):
        cpu(scope, index=index)


@pytest.mark.parametrize(
    ("knob", "value"), [("memory_fraction", 0.5), ("cudnn_benchmark", True), ("tf32", True)]
)
def test_a_knob_that_a_cpu_does_not_have_is_refused_with_the_fix(knob, value, scope):
    with pytest.raises(ConfigError, match="leave it out") as error:
        cpu(scope, **{knob: value})
    assert error.value.key == f"device.{knob}"


def test_fast_dtypes_follow_from_cpu_instructions_and_compute_capability():
    without = capabilities.of_cpu(frozenset({"avx2", "avx512f"}))
    assert without.bf16 and not without.bf16_fast and "no bf16" in without.notes[0]
    for flag in ("avx512_bf16", "amx_bf16", "bf16"):
        assert capabilities.of_cpu(frozenset({flag})).bf16_fast
    for version, fp16, bf16 in (((6, 1), 0, 0), ((7, 5), 1, 0), ((9, 0), 1, 1)):
        able = capabilities.of_gpu(*version)
        assert (able.fp16_fast, able.bf16_fast, able.tf32) == (fp16, bf16, bf16)
        assert not capabilities.of_gpu(*version, nvidia=False).tf32


def test_threads_are_set_and_put_back_and_more_than_cores_are_warned_of():
    before, cores = torch.get_num_threads(), capabilities.usable_cores()
    with ExitStack() as scope:
        device = cpu(scope, threads=cores + 1)
        assert torch.get_num_threads() == cores + 1 == device.threads == device.settings["threads"]
        assert any(f"device.threads={cores}" in text for text in device.warnings)
    assert torch.get_num_threads() == before


def test_determinism_is_set_and_put_back():
    assert not torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with ExitStack() as scope:
        device = cpu(scope, deterministic=True)
        assert device.settings["deterministic"]
        with pytest.raises(RuntimeError, match="does not have a deterministic"):
            torch.ones(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert json.loads(json.dumps(device.describe()))["settings"]["deterministic"] is True
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is fill


@linux
def test_affinity_holds_for_every_thread_and_is_put_back():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    done, seen = threading.Event(), []
    other = threading.Thread(target=lambda: (done.wait(10), seen.append(os.sched_getaffinity(0))))
    other.start()
    threads = torch.get_num_threads()
    try:
        with ExitStack() as scope:
            device = cpu(scope, affinity=sorted(one))
            assert os.sched_getaffinity(0) == one
            assert device.settings["affinity"] == sorted(one)
            assert device.cores == 1 and device.threads == 1  # not more threads than cores
            done.set()
            other.join(10)
        assert seen == [one]
    finally:
        done.set()
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == threads


@linux
@pytest.mark.parametrize("cores", [[4095], [-1], [], "one that is there and one that is not"])
def test_affinity_to_a_core_that_is_not_there_is_refused_and_changes_nothing(cores, scope):
    before = os.sched_getaffinity(0)
    cores = [min(before), 4095] if isinstance(cores, str) else cores
    with pytest.raises(ConfigError, match="choose from") as error:
        cpu(scope, affinity=cores)
    assert error.value.key == "device.affinity"
    assert os.sched_getaffinity(0) == before


def test_priority_is_set_and_a_refusal_names_the_key():
    code = """
import os
from tests.core.device.test_device import ConfigError, ExitStack, cpu
with ExitStack() as scope:
    print(cpu(scope, priority=7).settings["priority"])
if os.getuid() == 0:
    os.setuid(65534)  # nobody: who may not take niceness back
try:
    with ExitStack() as scope:
        cpu(scope, priority=-5)
except ConfigError as error:
    print(error)
"""
    first, second = runs.printed_by(code).splitlines()
    assert first == "7"
    assert second.startswith("device.priority: -5 ") and "CAP_SYS_NICE" in second


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reseeding_repeats_dropout_masks_and_normals(scope, kind):
    device = select(DeviceConfig(kind=DeviceKind(kind)), scope)
    ones = torch.ones(4096, device=device.torch)

    def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        device.reseed(seed)
        torch.randn(3)  # an odd count: half a pair of normals is left over for the next draw
        return torch.nn.functional.dropout(ones, 0.5), torch.randn(3)

    first, again, other = draw(2**63 + 7), draw(2**63 + 7), draw(8)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_seeding_covers_python_numpy_and_torch():
    def draw() -> tuple[int, float, float]:
        return random.getrandbits(64), float(np.random.random()), float(torch.rand(()))

    seed_everything(2**40 + 3)
    first = draw()
    seed_everything(2**40 + 3)
    assert draw() == first
    seed_everything(2**40 + 4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match=r"seed: .*use 0 to"):
            seed_everything(seed)


@pytest.mark.gpu
def test_auto_takes_cuda_and_puts_every_switch_back():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul

    def switches() -> list[object]:
        flags = [cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32]
        flags += [torch.get_float32_matmul_precision(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")]
        return [*flags, torch.cuda.get_per_process_memory_fraction()]

    before = switches()
    with ExitStack() as scope:
        device = select(DeviceConfig(memory_fraction=0.5, tf32=False, deterministic=True), scope)
        assert device.kind == "cuda" and not device.reads_are_free
        settings = device.settings
        assert settings["cudnn_deterministic"] and not settings["cudnn_benchmark"]
        assert not settings["tf32_matmul"] and not settings["tf32_cudnn"]
        assert settings["memory_fraction"] == pytest.approx(0.5)
        product = torch.ones(64, 64, device=device.torch) @ torch.ones(64, 64, device=device.torch)
        assert float(product[0, 0]) == 64
        json.dumps(device.describe())
    assert switches() == before


SET_TWICE = """
import torch
from runner import build, compose
typed = ["device=cpu", "data=cancer", "optimization=none", "training.steps=2"]
with build(compose([*typed, "device.interop_threads=3"])) as run:
    print(torch.get_num_interop_threads())
with build(compose([*typed, "device.interop_threads=2"])) as run:
    print(torch.get_num_interop_threads(), run.device.warnings)
"""


def test_threads_that_run_operators_side_by_side_are_set_once_a_process():
    first, second = runs.printed_by(SET_TWICE).splitlines()
    assert first == "3" and second.startswith("3 ")
    assert "device.interop_threads=2 needs a new process" in second


@pytest.mark.parametrize("waits", [True, False])
def test_every_step_waits_for_the_device_before_hooks_if_asked_to(waits, monkeypatch):
    events = []

    def finish(device):
        events.append("wait")
        time.sleep(0.01)  # what the device still has to do

    typed = f"data=cancer device.synchronize={waits} training.steps=6 training.validate_every=100"
    with runs.opened(*typed.split(), "optimization=none") as run:
        steps = runs.AtSteps(range(1, 7), lambda run: events.append(run.progress.step))
        run.hooks.append(steps)
        monkeypatch.setattr(Device, "synchronize", finish)
        summary = train(run)
    expected = [["wait", i] if waits else [i] for i in range(1, 7)]
    assert [event for event in events if event != "wait" or waits] == sum(expected, [])
    assert summary.throughput.step_ms.p50 >= 10 or not waits


def test_waiting_for_the_device_leaves_the_hash_alone():
    assert config_hash(compose(["device.synchronize=true"])) == config_hash(compose())


# device.index=auto, and the readings of a GPU's allocator, on simulated GPUs

GIB = 2**30
TOTAL, USED = 80 * GIB, [70 * GIB, 10 * GIB, 30 * GIB]


def simulate(monkeypatch: pytest.MonkeyPatch, nvml: bool) -> None:
    def used(index: int) -> int:
        if not nvml:
            raise ModuleNotFoundError("pynvml")
        return USED[index]

    total = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(USED))
    monkeypatch.setattr(torch.cuda, "device_memory_used", used)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (TOTAL - USED[index], TOTAL))


@pytest.mark.parametrize("nvml", [True, False])
def test_auto_takes_the_gpu_with_most_memory(nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, nvml)
    index, text = most_free_gpu()
    assert index == 1 and text == "GPU 1 of 3 has most free memory, 70.00 GiB"


def test_auto_on_a_cpu_is_the_cpu() -> None:
    with ExitStack() as scope:
        device = select(compose(["device=cpu", "device.index=auto"]).device, scope)
    assert device.torch == torch.device("cpu") and "device.index=auto" in device.reason


@pytest.mark.parametrize("typed", ["gpu1", "best", "1.5", "[0]", "true"])
def test_another_word_for_an_index_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"^device\.index: must be "):
        compose([f"device.index={typed}"])


def test_readings_of_a_gpu_count_retries_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_alloc_retries": 3, "num_ooms": 2, "num_device_alloc": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(resources, "gpu_readings", lambda device: {"gpu_percent": 50.0})
    device: Any = SimpleNamespace(kind="cuda", torch=torch.device("cuda", 0))
    monitor, without = SystemMonitor(), SystemMonitor(gpu=False)
    monitor.device = without.device = device
    row = monitor.sample().row()
    assert {k: x for k, x in row.items() if k.startswith("gpu_")} == {
        "gpu_percent": 50.0, "gpu_alloc_retries": 3.0, "gpu_ooms": 2.0,
    }  # fmt: skip
    assert without.sample().gpu == {"gpu_alloc_retries": 3.0, "gpu_ooms": 2.0}
