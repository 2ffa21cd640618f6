"""The account of a step, what grows, and the page about a run that ran out; in real runs."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from runner import train
from runner.core.errors import OutOfMemory
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.run import Run
from runner.diagnose.debug import memory as memory_tool
from runner.diagnose.debug.memory import (
    BATCH,
    LOSS,
    PARTS,
    SavedTensors,
    count_objects,
    find_growth,
)
from tests import runs
from tests.my_package import Computed

QUICK = ["device.threads=1", "optimization=none"]
CNN = [*QUICK, "data=digits", "model=cnn", "model.width=4", "optimizer.ema=0.99"]
MLP = [*QUICK, "data=cancer"]
GPT = [
    *QUICK,
    *(
        "data=synthetic data.form=tokens data.sequence=32 data.samples=64 model=gpt "
        "model.width=32 model.depth=2 training.batch_size=16"
    ).split(),
]
LOOK = ["debug=memory", "debug.every=5"]


def test_the_time_line_has_a_point_for_each_report_also_after_a_resume(tmp_path: Path) -> None:
    typed = [*MLP, "debug=memory", "monitoring.every=5", "checkpoint.resume=auto"]
    for steps in (20, 40):
        runs.trained(*typed, f"training.steps={steps}", folder=tmp_path)
    points = runs.debug_file(tmp_path, "memory")["timeline"]
    assert [point["step"] for point in points] == list(range(5, 41, 5))
    process = psutil.Process().memory_info()
    for point in points:
        assert point["process"] == pytest.approx(process.rss, rel=0.5)
        assert point["virtual"] == pytest.approx(process.vms, rel=0.5) and point["swap"] >= 0


def test_a_long_time_line_is_thinned_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_tool, "MAX_POINTS", 10)
    runs.trained(*MLP, "debug=memory", "monitoring.every=1", "training.steps=45", folder=tmp_path)
    steps = [point["step"] for point in runs.debug_file(tmp_path, "memory")["timeline"]]
    assert steps == list(range(8, 45, 8))


def test_the_account_adds_up_to_the_sizes_that_are_known(tmp_path: Path) -> None:
    with runs.opened(*CNN, "training.steps=30", "debug=memory", folder=tmp_path) as run:
        summary = train(run)
        own, buffers = (
            sum(t.nbytes for t in of()) for of in (run.model.parameters, run.model.buffers)
        )
    rows = runs.debug_file(tmp_path, "memory")["account"]["rows"]
    total = {part: sum(row[part] for row in rows) for part in PARTS}
    assert total["parameters"] == total["gradients"] == total["average"] == own
    assert 2 * own <= total["optimizer"] < 2.01 * own  # two moments, and the numbers of steps
    assert total["buffers"] == 2 * buffers  # and what a skipped step puts back
    names = {row["name"] for row in rows if row["activations"]}
    assert {"stem.1", "head", "(batch)", "(loss)"} <= names
    (cost,) = (tool for tool in summary.tools if tool.name == "memory")  # debug.every is 50
    assert cost.looks == 3 and cost.seconds > 0 and "activations" in cost.finding
    assert cost.finding.endswith("too few samples for a leak verdict (0 of 40)")


def test_the_account_is_of_a_full_batch(tmp_path: Path) -> None:
    # of 60 samples 48 are trained on: batches of 32 and 16, by turns
    ragged = [*QUICK, "data=synthetic", "data.samples=60", "model=mlp", "debug=memory"]
    runs.trained(*ragged, "training.steps=10", "debug.every=4", folder=tmp_path)
    assert runs.debug_file(tmp_path, "memory")["account"]["samples"] == 32


def test_activations_are_those_of_the_module_that_made_them_and_counted_once() -> None:
    first, second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
    model = Computed(lambda m, x: m.second(m.first(x).relu()), first=first, second=second)
    x = torch.randn(32, 8)
    saved = SavedTensors(model, model.parameters())
    with saved.count_saved():
        model(x).square().sum().backward()
        model(x).sum().backward()  # of a second micro-batch nothing is added
    hidden = 32 * 16 * 4  # relu keeps its output, which is what the second layer keeps too
    assert saved.bytes == {BATCH: 32 * 8 * 4, "": hidden, LOSS: 32 * 4 * 4}
    assert saved.samples == 32
    assert not torch.nn.modules.module._global_forward_hooks


def test_recomputed_blocks_keep_less_and_the_account_shows_it(tmp_path: Path) -> None:
    full = ["optimization.recompute.enabled=true", "optimization.recompute.what=full"]
    kept = []
    for folder, more in (("plain", []), ("recomputed", full)):
        runs.trained(*GPT, "training.steps=2", *LOOK, *more, folder=tmp_path / folder)
        rows = runs.debug_file(tmp_path / folder, "memory")["account"]["rows"]
        kept.append(sum(row["activations"] for row in rows if row["name"].startswith("blocks")))
    assert kept[1] < kept[0] / 4


class Hoard(Hook):
    """Keeps a tensor at each step."""

    def __init__(self, mapped: Callable[[int], mmap.mmap], size: int) -> None:
        self.mapped, self.size = mapped, size
        self.hoarded: list[Tensor] = []

    def on_step(self, run: Run, step: Step) -> None:
        self.hoarded.append(torch.frombuffer(self.mapped(self.size), dtype=torch.float32))


def test_a_leak_is_named_by_the_tensors_that_became_more(
    tmp_path: Path, mapped: Callable[[int], mmap.mmap]
) -> None:
    with runs.opened(*MLP, *LOOK, "training.steps=600", folder=tmp_path) as run:
        run.hooks.append(Hoard(mapped, 400_000))
        summary = train(run)
    assert "more tensors [100000] float32 on cpu" in runs.faults(tmp_path, "leak")[0]["action"]
    assert runs.debug_file(tmp_path, "memory")["grown"][0]["bytes"] > 50e6
    assert runs.finding(summary, "memory").startswith("leak: the process grows by ")
    assert " KB a step; " in runs.finding(summary, "memory")
    assert "more tensors [100000] float32" in runs.finding(summary, "memory"), "the largest growth"
    assert summary.faults["leak"] == 1, "one leak, however often longer windows find it"


def test_objects_are_counted_by_kind_without_lazy_and_fake_tensors() -> None:
    class Kept:
        """No other object of the process is of this type, whatever is collected meanwhile."""

    before = count_objects()
    kept = [nn.LazyLinear(3), torch.ones(7, 73), *(Kept() for _ in range(5000))]
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 73))
    assert isinstance(fake.numel(), torch.SymInt)  # which has no hash
    now = count_objects()
    assert now[0]["tensors [7, 73] float32 on cpu"] == 1
    assert not any("s" in kind.partition("]")[0].removeprefix("tensors") for kind in now[1])
    growth = next(g for g in find_growth(before, now) if g.kind.endswith(".<locals>.Kept"))
    assert growth.more == 5000 and len(kept) == 5002


# out of memory


def limit(run: Run, most: int) -> None:
    """Let the loss allocate more than any machine has where a part is above `most` samples."""
    own = type(run.objective)

    def loss(self: Any, output: Any, target: Any) -> Any:
        if len(target) > most and not isinstance(output, torch._subclasses.FakeTensor):
            torch.empty(2**50)
        return own.__call__(self, output, target)

    run.objective.__class__ = type("Limited", (own,), {"__call__": loss})


def test_a_run_that_memory_ends_leaves_a_page_that_ranks_what_holds_it(tmp_path: Path) -> None:
    overrides = [*GPT, "training.steps=12", "optimizer.ema=0.9", "training.micro_batch=1"]
    with runs.opened(*overrides, folder=tmp_path) as run:
        limit(run, 0)
        with pytest.raises(OutOfMemory):
            train(run)
    page = (tmp_path / "debug/out_of_memory.md").read_text()
    assert "out of memory" in page and "| average |" in page
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    sizes = [float(row[-1]) for row in rows[2:-1]]
    assert len(sizes) > 3 and sizes == sorted(sizes, reverse=True) and sizes[0] > 0, page


@pytest.mark.parametrize("writable", [True, False])
def test_a_step_that_did_not_fit_leaves_the_page_if_it_can_be_written_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writable: bool
) -> None:
    if not writable:
        (tmp_path / "debug").write_text("a file where the folder would be")
    with runs.opened(*GPT, "training.steps=3", *LOOK, folder=tmp_path) as run:
        limit(run, 8)
        assert train(run).status == "done"
    if writable:
        assert "run continues" in (tmp_path / "debug/out_of_memory.md").read_text()
    else:
        assert "debug/out_of_memory.md" in caplog.text and "debug/memory.json" in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_the_allocators_snapshot_and_the_measured_peak_are_there(tmp_path: Path) -> None:
    runs.trained(*CNN, "device=cuda", "training.steps=12", *LOOK, folder=tmp_path)
    assert (tmp_path / "debug/memory_snapshot.pickle").stat().st_size > 1000
    assert runs.debug_file(tmp_path, "memory")["account"]["peak"] > 0
