"""Above its shares of the memory a run cleans, and stops; leaks and full disks are said."""

import gc
import json
import mmap
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import Hook, build, compose, train
from runner.core.build.setup import Components
from runner.core.data.user_dataset import UserDataset
from runner.core.device import memory
from runner.core.errors import ConfigError, StorageError
from runner.core.hooks.resources import Resources
from runner.core.interfaces.hook import Report, Step
from runner.core.interfaces.run import Run
from runner.core.jobs.train import main as train_job
from runner.core.record.history import History
from runner.core.record.summary import Summary
from tests import runs

QUICK = ["data=cancer", "training.steps=60", "monitoring.every=10", "monitoring.progress=false"]
QUICK += ["device=cpu", "device.threads=1", "optimization=none"]
MIB = 2**20
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is kept by Linux")


# trouble with the readings


class NoFiles(Hook):
    """From step 5 to 50 no file can be opened: EMFILE."""

    def on_step(self, run: Run, step: Step) -> None:
        if step.number in (5, 50):
            most = 0 if step.number == 5 else FILES[0]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, FILES[1]))
        time.sleep(0.012)  # a row about the machine falls due


def test_a_run_continues_when_no_file_can_be_opened(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    more = ["monitoring.system_every_s=0.01", "checkpoint=off"]
    summary = runs.trained(*QUICK, *more, folder=tmp_path, hooks=[NoFiles()])
    assert (summary.status, summary.steps) == ("done", 60)
    assert len(runs.rows(tmp_path, "train")) == 6
    assert summary.faults["monitoring"] > 2
    said = [r.message for r in caplog.records if r.message.endswith("; the run continues")]
    assert sorted(text.split(": ")[1] for text in said) == ["Recording", "Resources"]  # each once
    assert all("Too many open files" in text for text in said)


def test_a_run_that_ends_for_want_of_files_says_so_and_not_what_failed_afterwards(
    tmp_path: Path,
) -> None:
    config = compose([*QUICK, "checkpoint.every=5", "training.validate_every=60"])
    starves = runs.AtSteps(5, lambda run: resource.setrlimit(resource.RLIMIT_NOFILE, (0, FILES[1])))
    try:
        with pytest.raises(StorageError, match=r"3 checkpoints in a row .* Too many open files"):
            train_job(config, tmp_path, Components(hooks=[starves]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, FILES)


# stopping and leaks, each in a process of its own: there the heap has no room left by others

REAL = """
import json, resource, sys
from hashlib import sha256
from pathlib import Path
import torch
from runner import Hook, build, compose, train
from runner.core.device import memory

class Leaking(Hook):
    def __init__(self, size):
        self.size, self.kept = size, []
    def on_step(self, run, step):
        kept = self.kept if self.size > 0 else run.model.__dict__.setdefault("kept", [])
        kept.append(torch.ones(abs(self.size) // 4))

folder, leak, left, *overrides = sys.argv[1:]
with build(compose(overrides), Path(folder)) as run:
    if int(left):
        held = memory.status_bytes("VmSize")
        limit = held + (int(left) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        watch = next(hook for hook in run.hooks if type(hook).__name__ == "Resources")
        watch.config.stop_above = 1 - (int(left) << 19) / limit  # when half of it is taken
    if int(leak):
        run.hooks.append(Leaking(int(leak)))
    began, summary = run.progress.step, train(run)
    weights = b"".join(t.numpy().tobytes() for t in run.model.state_dict().values())
print(json.dumps({"status": summary.status, "began": began, "steps": summary.steps,
                  "reason": summary.reason, "faults": summary.faults,
                  "weights": sha256(weights).hexdigest()}))
"""


def real(folder: Path, leak: int, left: int, *overrides: str) -> dict[str, Any]:
    """A run that keeps `leak` bytes a step, in its model if negative, and may take `left` MiB; how
    it ended.
    """
    done = runs.command(Path(), "-c", REAL, str(folder), str(leak), str(left), *QUICK, *overrides)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@linux
def test_a_run_that_fills_its_memory_saves_stops_and_can_be_resumed(tmp_path: Path) -> None:
    same = ["schedule=constant", "device.clean_above=null"]
    ended = real(tmp_path, 4 * MIB, 600, "training.steps=500", *same)
    assert ended["status"] == "stopped" and 20 <= ended["steps"] < 150
    for part in ("`ulimit -v` all", "stability.watch.stop_above", f"checkpoint.resume={tmp_path}"):
        assert part in ended["reason"]
    assert ended["faults"]["memory_stop"] == 1 and "out_of_memory" not in ended["faults"]
    step = ended["steps"]
    assert (tmp_path / f"checkpoints/step_{step:08d}/manifest.json").is_file()
    assert Summary.read(tmp_path).status == "stopped"

    on = [*same, f"training.steps={step + 20}"]
    resumed = real(tmp_path, 0, 0, *on, f"checkpoint.resume={tmp_path}")
    assert resumed["began"] == step
    assert resumed["status"] == "done" and resumed["steps"] == step + 20


@linux
def test_a_model_that_fills_the_memory_ends_stopped_with_its_checkpoint(tmp_path: Path) -> None:
    ended = real(tmp_path, -4 * MIB, 600, "training.steps=500", "optimization=basic")
    assert ended["status"] == "stopped" and ended["faults"]["memory_stop"] == 1
    assert (tmp_path / f"checkpoints/step_{ended['steps']:08d}/manifest.json").is_file()
    techniques = Summary.read(tmp_path).techniques
    looked = [row for row in techniques if row.requested and row.status != "not applicable"]
    assert looked and not any(row.known or row.status == "failed" for row in looked)
    assert {row.reason for row in looked} == {"not looked at: the run was stopped for memory"}


def test_the_machines_memory_stops_a_run_only_if_the_run_holds_its_share(tmp_path: Path) -> None:
    with runs.opened(*QUICK, "stability.watch.stop_above=1e-9", folder=tmp_path) as run:
        summary = train(run)
    held = summary.memory.peak_process_bytes / run.device.memory_bytes
    if held < 0.09:  # of a large machine this small process is no part that would help
        assert summary.status == "done" and summary.faults["memory_short"] == 1
        return
    assert summary.status == "stopped"


# leaks


def test_a_leak_of_50_kb_a_step_is_found_within_500_steps(tmp_path: Path) -> None:
    ended = real(tmp_path, 50_000, 0, "training.steps=500")
    assert ended["faults"]["leak"] == 1 and ended["status"] == "done"
    (leak,) = runs.faults(tmp_path, "leak")
    assert leak["steps"][0] <= 500 and "debug=memory" in leak["action"]
    assert 40 < float(leak["message"].partition("grows by ")[2].partition(" KB a step")[0]) < 65


class Hoarding:
    """Keeps 250 KB at each of the first `limit` fetches, or leaves them as cyclic garbage."""

    sizes = {"task": "classification", "in_features": 2, "classes": 2}  # noqa: RUF012

    def __init__(self, limit: int, garbage: bool = False) -> None:
        self.limit, self.garbage, self.kept = limit, garbage, list[mmap.mmap]()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        gc.disable()  # in the worker: its garbage stays until the run asks to free it
        if len(self.kept) < self.limit:
            block = mmap.mmap(-1, 250_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.write(b"x" * 250_000)
            cycle: list[Any] = [block]
            cycle.append(cycle)
            if not self.garbage:
                self.kept.append(block)
        return torch.full((2,), float(index)), index % 2


@linux
@pytest.mark.parametrize(
    ("limit", "garbage", "verdict"),
    [
        (10**9, False, "a leak: growing"),
        (280, False, "growth stopped at step 1"),
        (10**9, True, "samples"),
    ],
    ids=["leak", "cache", "garbage"],
)
def test_memory_of_data_workers_is_watched_for_leaks_without_full_caches_and_garbage(
    limit: int, garbage: bool, verdict: str, tmp_path: Path
) -> None:
    config = compose([*QUICK[1:], "model=mlp", "training.batch_size=4", "data.workers=2"])
    config.training.steps, config.monitoring.every = 260, 1
    data = UserDataset(Hoarding(limit, garbage), "Hoarding", config.data)
    with build(config, tmp_path, Components(data=data)) as run:
        summary = train(run)
        found = run.leaks["workers"].describe()
        assert not run.leaks["process"].leaking
    assert verdict in found
    leaks = [fault for fault in History.read(tmp_path) if fault.kind == "leak"]
    assert summary.faults.get("leak", 0) == len(leaks) == ("a leak" in verdict)
    assert all("the data workers grow by" in leak.message for leak in leaks)


@linux
def test_shared_memory_such_as_batches_of_workers_counts_as_memory_that_can_leak() -> None:
    before = memory.anonymous_bytes()
    with mmap.mmap(-1, 40 * MIB) as block:
        block.write(b"x" * 40 * MIB)
        assert memory.anonymous_bytes() - before > 30 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("steps", [500, 5000])
def test_a_healthy_run_raises_nothing(steps: int, tmp_path: Path) -> None:
    ended = real(tmp_path, 0, 0, f"training.steps={steps}")
    assert ended["steps"] == steps and ended["faults"] == {}


# the rest


def test_memory_is_cleaned_a_full_disk_is_logged_once_and_the_load_is_recorded(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    low = ["stability.watch.disk_min_mb=1e12", "device.clean_above=1e-6"]
    summary = runs.trained(*QUICK, "monitoring.system_every_s=0.0001", *low, folder=tmp_path)
    assert summary.status == "done"
    assert (summary.faults["disk_low"], summary.faults["memory_cleaned"]) == (1, 1)
    assert len([r for r in caplog.records if "device.clean_above" in r.message]) == 1
    load = runs.rows(tmp_path, "system")
    assert load and {"cpu_percent", "ram_percent", "disk_free_gib"} <= set(load[0])


def test_readings_of_a_gpu_that_is_not_there_are_an_error_only_where_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"stability\.watch\.gpu: NVML is missing"):
        runs.trained(*QUICK, "stability.watch.gpu=true")
    assert runs.trained(*QUICK).status == "done"


@pytest.mark.gpu
def test_nvml_tells_of_the_gpu_that_torch_computes_on(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    on = [x for x in QUICK if x != "device=cpu"]
    with build(compose([*on, "stability.watch.gpu=true"]), tmp_path) as run:
        train(run)
    load = next(row for row in runs.rows(tmp_path, "system") if "gpu_celsius" in row)
    assert 10 < load["gpu_celsius"] < 110 and load["gpu_mhz"] > 0 and load["gpu_gib"] > 0


class Card:
    """Stands in for `torch.cuda`: tensors and the allocator's cache, as shares of the memory."""

    def __init__(self, allocated: float, reserved: float) -> None:
        self.allocated, self.reserved, self.emptied = allocated, reserved, 0

    def memory_allocated(self, device: Any) -> int:
        return round(1000 * self.allocated)

    def memory_reserved(self, device: Any) -> int:
        return round(1000 * self.reserved)

    def empty_cache(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated


@pytest.mark.parametrize(
    ("allocated", "emptied"), [(0.5, 0), (0.89, 0), (0.95, 1)], ids=["half", "below", "above"]
)
def test_memory_that_the_allocator_keeps_for_the_next_step_is_not_freed(
    monkeypatch: pytest.MonkeyPatch, allocated: float, emptied: int
) -> None:
    card = Card(allocated, 0.97)
    for name in ("memory_allocated", "memory_reserved", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    with runs.opened(*QUICK, "checkpoint=off", "stability.watch.enabled=false") as run:
        run.device = replace(run.device, kind="cuda", memory_bytes=1000)
        watch = next(hook for hook in run.hooks if isinstance(hook, Resources))
        for number in range(1, 6):
            card.reserved = 0.97  # as the next steps need it again
            watch.on_report(run, Report(number, [1.0], [1.0], [False], 0.1, 0.5, 32))
    assert card.emptied == emptied
    assert run.history.counts.get("memory_cleaned", 0) == emptied
