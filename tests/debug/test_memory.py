"""The account of a step, what grows, and what would help when memory runs out; in real runs."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from runner import build, compose, train
from runner.build import Components
from runner.debug.memory import MemoryTool
from runner.debug.memory_breakdown import BATCH, LOSS, PARTS, SavedTensors
from runner.debug.object_counts import count_objects, find_growth
from runner.errors import OutOfMemory
from runner.objectives.base import Objective
from runner.training.hook import Hook, Step
from runner.training.run import Run

QUICK = ["monitoring.progress=false", "device=cpu", "device.threads=1", "optimization=none"]
CNN = [*QUICK, "data=digits", "model=cnn", "model.width=4", "training.steps=12"]
MLP = [*QUICK, "data=cancer", "training.steps=30"]
GPT = [
    *QUICK,
    *(
        "data=synthetic data.form=tokens data.sequence=32 data.samples=64 model=gpt "
        "model.width=32 model.depth=2 training.batch_size=16"
    ).split(),
]
LOOK = ["debug=memory", "debug.every=5"]


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "debug/memory.json").read_text())
    return found


def weights(overrides: list[str], folder: Path | None = None) -> dict[str, Tensor]:
    with build(compose(overrides), folder) as run:
        train(run)
        state = run.update.optimizer.state_dict()["state"]
        moments = {
            f"{i}.{k}": v for i, s in state.items() for k, v in s.items() if isinstance(v, Tensor)
        }
        return {k: v.clone() for k, v in {**run.model.state_dict(), **moments}.items()}


@pytest.mark.parametrize(
    "overrides",
    [CNN, [*GPT, "training.steps=6", "model.dropout=0.1", "optimizer.ema=0.9"]],
    ids=["cnn", "gpt"],
)
def test_weights_and_moments_are_bit_equal_with_and_without(
    overrides: list[str], tmp_path: Path
) -> None:
    plain, watched = weights(overrides), weights([*overrides, *LOOK], tmp_path)
    assert len(plain) > 10
    assert [name for name in plain if not torch.equal(plain[name], watched[name])] == []
    assert found_in(tmp_path)["account"]["step"] in (5, 10)


def test_the_account_adds_up_to_the_sizes_that_are_known(tmp_path: Path) -> None:
    with build(compose([*CNN, *LOOK, "optimizer.ema=0.99"]), tmp_path) as run:
        train(run)
        own = sum(p.nbytes for p in run.model.parameters())
        buffers = sum(b.nbytes for b in run.model.buffers())
    rows = found_in(tmp_path)["account"]["rows"]
    total = {part: sum(row[part] for row in rows) for part in PARTS}
    assert total["parameters"] == total["gradients"] == total["average"] == own
    assert 2 * own <= total["optimizer"] < 2.01 * own  # two moments, and the numbers of steps
    assert total["buffers"] == 2 * buffers  # and what a skipped step puts back
    assert total["activations"] > 0
    names = {row["name"] for row in rows if row["activations"]}
    assert {"stem.1", "head", "(batch)", "(loss)"} <= names


class Running(nn.Module):
    """Keeps a running mean in a plain attribute, and may refuse tensors without data."""

    def __init__(self, readable: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.readable = nn.Linear(30, 2), readable
        self.again, self.mean, self.calls = self.layer, torch.zeros(30), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        self.mean += 0.1 * x.mean(0)
        self.calls.append(1.0 if self.readable else float(x.mean()))
        return self.again(x - self.mean) * (1 + len(self.calls) % 3)  # type: ignore[no-any-return]


@pytest.mark.parametrize("readable", [True, False], ids=["fake", "refused"])
def test_a_model_with_a_state_of_its_own_learns_the_same(readable: bool, tmp_path: Path) -> None:
    plain, watched = Running(readable), Running(readable)
    for model, more in ((plain, []), (watched, LOOK)):
        with build(
            compose([*MLP, *more]), tmp_path / str(len(more)), Components(model=model)
        ) as run:
            assert train(run).faults.get("tool_failed") is None
    assert torch.equal(plain.layer.weight, watched.layer.weight)
    assert torch.equal(plain.mean, watched.mean) and plain.calls == watched.calls
    predicted = found_in(tmp_path / str(len(LOOK)))["predicted"]
    assert (predicted is not None) is readable


def test_what_is_kept_for_the_backward_is_what_was_predicted(tmp_path: Path) -> None:
    with build(compose([*GPT, "training.steps=6", *LOOK]), tmp_path) as run:
        train(run)
    found = found_in(tmp_path)
    rows, said = found["account"]["rows"], found["predicted"]
    saved = sum(row["activations"] for row in rows if row["name"] != BATCH)
    assert said["saved"] == pytest.approx(saved, rel=0.05)


def test_activations_are_those_of_the_module_that_made_them_and_counted_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu())

    model, x = Two(), torch.randn(32, 8)
    saved = SavedTensors(model, model.parameters())
    with saved.counting():
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
        with build(compose([*GPT, "training.steps=2", *LOOK, *more]), tmp_path / folder) as run:
            train(run)
        rows = found_in(tmp_path / folder)["account"]["rows"]
        kept.append(sum(row["activations"] for row in rows if row["name"].startswith("blocks")))
    assert kept[1] < kept[0] / 4


def test_a_short_run_is_looked_at_and_tells_what_it_found(tmp_path: Path) -> None:
    with build(compose([*MLP, "debug=memory"]), tmp_path) as run:  # every 50, and 30 steps
        summary = train(run)
    cost = next(tool for tool in summary.tools if tool.name == "memory")
    assert cost.looks == 3 and cost.seconds > 0
    assert "activations" in cost.finding
    said = found_in(tmp_path)["leak"]
    assert said == "too few samples for a leak verdict (0 of 40)" and cost.finding.endswith(said)
    for name in ("memory", "memory_modules"):
        with Image.open(tmp_path / f"debug/plots/{name}.png") as picture:
            assert picture.size[0] == 640
    found = found_in(tmp_path)
    assert {"training", "validation"} == set(found["phases"])
    assert [point["step"] for point in found["timeline"]] == [10, 20, 30]


class Hoard(Hook):
    """Keeps a tensor of 400 kB at each step."""

    def __init__(self, mapped: Callable[[int], mmap.mmap]) -> None:
        self.mapped = mapped
        self.hoarded: list[Tensor] = []

    def on_step(self, run: Run, step: Step) -> None:
        self.hoarded.append(torch.frombuffer(self.mapped(400_000), dtype=torch.float32))


def test_a_leak_is_named_by_its_tensors_and_by_the_list_that_keeps_them(
    tmp_path: Path, mapped: Callable[[int], mmap.mmap]
) -> None:
    with build(compose([*MLP, *LOOK, "training.steps=600"]), tmp_path) as run:
        run.hooks.append(Hoard(mapped))
        summary = train(run)
    rows = json.loads((tmp_path / "debug/history.json").read_text())["faults"]
    leak = next(row for row in rows if row["kind"] == "leak")
    assert "more tensors [100000] float32 on cpu" in leak["action"]
    assert "items in the list Hoard.hoarded" in leak["action"]
    assert found_in(tmp_path)["grown"][0]["bytes"] > 50e6
    finding = next(t for t in summary.tools if t.name == "memory").finding
    assert finding.startswith("leak: the process grows by ") and " KB a step; " in finding
    assert "more tensors [100000] float32" in finding, "the largest growth"
    assert summary.faults["leak"] == 1, "one leak, however often longer windows find it"


def test_a_short_run_that_grows_is_told_by_how_much_and_that_it_is_no_verdict(
    tmp_path: Path, mapped: Callable[[int], mmap.mmap]
) -> None:
    class Hoarding(Hoard):
        def on_step(self, run: Run, step: Step) -> None:
            self.hoarded.append(torch.frombuffer(self.mapped(2_800_000), dtype=torch.uint8))

    with build(compose([*MLP, *LOOK, "training.steps=60"]), tmp_path) as run:
        run.hooks.append(Hoarding(mapped))
        train(run)
    said = found_in(tmp_path)["leak"]
    assert said.startswith("too few samples for a leak verdict (1 of 40): growing ")
    assert 2.5 < float(said.split("growing ")[1].split(" MB a step so far")[0]) < 3.5


# of 60 samples 48 are trained on: batches of 32 and 16, by turns
RAGGED = [*QUICK, "data=synthetic", "data.samples=60", "model=mlp", "debug=memory"]


@pytest.mark.parametrize(
    ("more", "step", "rows"),
    [
        (["training.steps=40", "debug.every=4"], 5, 32),  # each look would be at a small batch
        (["training.steps=10", "debug.memory.every=50"], 9, 32),  # the run ends with a small one
    ],
    ids=["paced", "unreached"],
)
def test_the_account_is_of_a_full_batch(
    more: list[str], step: int, rows: int, tmp_path: Path
) -> None:
    with build(compose([*RAGGED, *more]), tmp_path) as run:
        assert [run.train.samples(i) for i in range(4)] == [32, 16, 32, 16]
        run.hooks.append(first := First())
        summary = train(run)
    assert first.accounts[0] == (step, rows)
    assert all(samples == 32 for _, samples in first.accounts)
    assert "partial" not in next(t for t in summary.tools if t.name == "memory").finding


class First(Hook):
    """Collects the accounts as they are made."""

    def __init__(self) -> None:
        self.accounts: list[tuple[int, int]] = []

    def on_step(self, run: Run, step: Step) -> None:
        (tool,) = (hook for hook in run.hooks if isinstance(hook, MemoryTool))
        if tool.breakdown is not None:
            self.accounts.append((tool.breakdown.step, tool.breakdown.samples))


def test_a_run_of_partial_batches_only_says_so(tmp_path: Path) -> None:
    with build(compose([*RAGGED, "training.steps=1"]), tmp_path) as run:
        train(run)
    resumed = [*RAGGED, "training.steps=2", "checkpoint.resume=auto"]
    with build(compose(resumed), tmp_path) as run:
        summary = train(run)
    assert found_in(tmp_path)["account"]["samples"] == 16
    finding = next(t for t in summary.tools if t.name == "memory").finding
    assert "of a partial batch, 16 of 32 samples: no full one was looked at" in finding


KEPT: list[Any] = []


def test_a_count_names_the_list_of_a_module_and_forgets_what_is_gone() -> None:
    before = count_objects()
    KEPT.extend([object()] for _ in range(5000))
    gone = [[] for _ in range(5000)]
    del gone
    said = [str(growth) for growth in find_growth(before, count_objects())]
    KEPT.clear()
    assert any("5,000 more items in the list" in x and x.endswith("test_memory.KEPT") for x in said)


def test_lazy_parameters_and_a_compilers_fake_tensors_are_not_counted() -> None:
    kept = [nn.LazyLinear(3), torch.ones(7, 73)]
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 73))
    assert isinstance(fake.numel(), torch.SymInt)  # which has no hash
    shapes = [shape for shape, *_ in count_objects().tensors]
    assert shapes.count("7×73") == 1 and not [shape for shape in shapes if shape.startswith("s")]
    assert len(kept) == 2


# out of memory


class Limited(Objective):
    """Allocates more than any machine has when a part is above `most` samples."""

    def __init__(self, own: Objective, most: int) -> None:
        self.own, self.most = own, most
        self.takes_deferred = own.takes_deferred

    def __call__(self, output: Any, target: Any) -> Any:
        if len(target) > self.most and not isinstance(output, torch._subclasses.FakeTensor):
            torch.empty(2**50)
        return self.own(output, target)

    def weight(self, target: Any) -> Any:
        return self.own.weight(target)

    def tally(self, output: Any, target: Any) -> Any:
        return self.own.tally(output, target)

    def metrics(self, totals: Any) -> Any:
        return self.own.metrics(totals)


def test_a_run_that_memory_ends_leaves_a_page_that_ranks_what_holds_it(tmp_path: Path) -> None:
    overrides = [*GPT, "training.steps=12", "optimizer.ema=0.9", "training.micro_batch=1"]
    with build(compose(overrides), tmp_path) as run:
        run.objective = Limited(run.objective, 0)
        with pytest.raises(OutOfMemory):
            train(run)
    page = (tmp_path / "debug/out_of_memory.md").read_text()
    assert "out of memory" in page and "The largest modules" in page
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    held = [float(row[2].replace(",", "")) for row in rows[2:7]]
    assert held == sorted(held, reverse=True) and held[0] > 0, page
    assert "| state of the optimizer, average | " in page


def test_a_step_that_did_not_fit_leaves_the_page_and_the_run_goes_on(tmp_path: Path) -> None:
    with build(compose([*GPT, "training.steps=3", *LOOK]), tmp_path) as run:
        run.objective = Limited(run.objective, 8)
        assert train(run).status == "done"
    assert "run goes on" in (tmp_path / "debug/out_of_memory.md").read_text()


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "debug").write_text("a file where the folder would be")
    with build(compose([*GPT, "training.steps=3", *LOOK]), tmp_path) as run:
        run.objective = Limited(run.objective, 8)
        assert train(run).status == "done"
    for name in ("debug/out_of_memory.md", "debug/memory.json"):
        assert name in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_the_allocators_snapshot_and_the_measured_peak_are_there(tmp_path: Path) -> None:
    on = [x for x in CNN if x not in ("device=cpu", "device.threads=1")]
    with build(compose([*on, *LOOK]), tmp_path) as run:
        train(run)
    assert (tmp_path / "debug/memory_snapshot.pickle").stat().st_size > 1000
    found = found_in(tmp_path)
    assert found["account"]["peak"] > 0 and found["timeline"][-1]["device_peak"] > 0
