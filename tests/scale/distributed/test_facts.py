"""What the summary of a distributed run and its debug tools say of its processes."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import Summary, train
from runner.core.errors import ConfigError
from runner.core.schemas.device import Backend, DistributedConfig, DistributedKind
from runner.core.techniques.flops import PeakFlops
from runner.scale.distributed.rank_info import RankInfo
from runner.scale.distributed.world import World
from tests import runs
from tests.faults import processes as forked
from tests.my_package import Computed
from tests.scale.distributed.processes import alone
from tests.scale.distributed.runs import PATH

SLOW = """
import os, time
from torch import nn

class Net(nn.Linear):
    def __init__(self, in_features, classes):
        super().__init__(in_features, classes)

    def forward(self, x):
        if os.environ["RANK"] == "1":
            time.sleep(0.03)
        return super().forward(x.flatten(1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two processes, the second of which is slow."""
    home = tmp_path_factory.mktemp("two")
    (home / "slow_net.py").write_text(SLOW)
    typed = ["distributed=ddp", "distributed.processes=2", "data=digits", "training.steps=20"]
    typed += ["model._target_=slow_net.Net", "security.trusted=[slow_net]", *runs.QUICK]
    path = os.pathsep.join([str(home), PATH])
    forked.serve("runner.scale.distributed.launch", PYTHONPATH=PATH)
    done = forked.start(home, [*typed, "hydra.run.dir=outputs/runs/a"], "console", PYTHONPATH=path)
    output = (home / "console").read_text() if done.wait(300) == 0 else ""
    assert "2 (ddp, gloo)" in output and "of a step waiting" in output
    return home / "outputs" / "runs" / "a"


def test_the_summary_says_who_waited_for_whom(folder: Path) -> None:
    summary = Summary.read(folder)
    facts = summary.distributed
    assert (facts["kind"], facts["world_size"], facts["backend"]) == ("ddp", 2, "gloo")
    quick, slow = facts["ranks"]
    assert (quick["rank"], slow["rank"]) == (0, 1)
    assert slow["work_ms"] >= 30 and slow["work_ms"] > quick["work_ms"]
    assert 1.2 < facts["imbalance"] <= 2
    assert quick["communication"] > slow["communication"]
    step_ms = quick["work_ms"] / (quick["split"]["data"] + quick["split"]["forward"])
    assert quick["exposed_ms"] > 15 and quick["communication"] * step_ms > quick["exposed_ms"] / 2
    communication = [rank["communication"] for rank in facts["ranks"]]
    assert summary.throughput.split["waiting"] == pytest.approx(communication[0])
    assert facts["communication"] == pytest.approx(sum(communication) / 2)
    both = quick["samples_per_second"] + slow["samples_per_second"]
    assert both == pytest.approx(facts["samples_per_second"])
    assert both == pytest.approx(summary.throughput.samples_per_second, rel=0.2)
    assert facts["flops_per_second"] == pytest.approx(both * 6 * 64 * 10)  # a linear layer's
    assert [rank["mfu"] for rank in facts["ranks"]] == [None, None]  # no sheet has a CPU's peak
    report = (folder / "report.md").read_text()
    assert "| rank 1, cpu of " in report and "GFLOP/s" in report
    peaks = [rank["peak_process_bytes"] for rank in facts["ranks"]]
    assert facts["peak_process_bytes"] == sum(peaks) and min(peaks) > 50 * 2**20
    assert sum(summary.throughput.split.values()) == pytest.approx(1.0, abs=0.01)


def test_tensorboard_has_the_waiting_and_the_memory_of_each_process(folder: Path) -> None:
    waiting, peaks = (
        [runs.scalars(folder, f"watch_ranks/{rank}/{what}")[-1][1] for rank in range(2)]
        for what in ("waiting", "peak_process_mib")
    )
    assert 0 < waiting[1] < waiting[0] <= 1  # the second is slow
    assert min(peaks) > 50


def test_a_run_is_one_row_whatever_its_processes_leave(folder: Path, tmp_path: Path) -> None:
    from runner.measure.columns import select_columns
    from runner.measure.discover import compare_folders
    from tests.measure import planted

    assert (folder / "ranks" / "1" / "run.log").exists()
    (folder / "ranks" / "1" / "summary.json").write_text((folder / "summary.json").read_text())
    alone = planted.run(tmp_path / "alone", ["optimization=none"])
    two = compare_folders([folder.parent])
    assert len(two.rows) == 1 and "processes" not in [column.key for column in select_columns(two)]
    both = compare_folders([folder, alone])
    shown = next(column for column in select_columns(both) if column.key == "processes")
    assert [shown.text(row) for row in both.rows] == ["2", "1"]
    (folder / "summary.json").rename(tmp_path / "summary.json")  # killed before it wrote any
    try:
        assert [row.status for row in compare_folders([folder.parent]).rows] == ["killed"]
    finally:
        (tmp_path / "summary.json").rename(folder / "summary.json")


def test_mfu_is_the_share_of_the_peaks_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak, types = PeakFlops(1e9, "bf16", "a sheet"), []

    def peak_flops(device: object, dtype: torch.dtype, measure: object) -> PeakFlops:
        types.append(dtype)
        return peak

    monkeypatch.setattr("runner.scale.distributed.process_stats.peak_flops", peak_flops)
    amp = ("optimization=amp", "optimization.amp.dtype=bf16")
    config = runs.config("data=digits", "distributed=ddp", "training.steps=4", *amp)
    with alone(config, tmp_path, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))) as run:
        facts = train(run).distributed
    assert types == [torch.bfloat16]
    (rank,) = facts["ranks"]
    assert rank["mfu"] == facts["mfu"] == pytest.approx(facts["samples_per_second"] * 3840 / 1e9)


def test_a_run_that_fails_says_what_rank_0_alone_knows(tmp_path: Path) -> None:
    calls = itertools.count()

    def failing(model: Any, x: torch.Tensor) -> torch.Tensor:
        if model.training and next(calls) == 2:
            raise ValueError("the third")
        return model.layer(x.flatten(1))

    typed = ("data=digits", "distributed=ddp", "training.steps=9", "optimization=none")
    model = Computed(failing, layer=nn.Linear(64, 10))
    with alone(runs.config(*typed), tmp_path, model=model) as run:
        with pytest.raises(ValueError, match="the third"):
            train(run)
    found = runs.read(tmp_path)
    facts = found["distributed"]
    assert found["status"] == "failed"
    assert (facts["kind"], facts["world_size"], facts["backend"]) == ("ddp", 1, "gloo")
    assert len(facts["ranks"]) == 1 and "imbalance" not in facts
    assert facts["ranks"][0]["faults"] == {"exception": 1}


def test_nccl_without_gpus_is_refused_before_any_process_is_waited_for() -> None:
    asked = DistributedConfig(DistributedKind.ddp, backend=Backend.nccl)
    place = RankInfo(1, 2, 1, 2, "127.0.0.1", 1, hosted=False)
    with pytest.raises(ConfigError, match="distributed.backend"):
        World(place, asked, torch.device("cpu"))


NET = """
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return (x - 1e4).sqrt()

class Net(nn.Module):
    def __init__(self, in_features, classes):
        super().__init__()
        self.first, self.root, self.last = nn.Linear(in_features, 8), Root(), nn.Linear(8, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(self.root(x) if self.training else x)
"""


def test_each_process_names_the_module_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    (tmp_path / "root_net.py").write_text(NET)
    typed = ["distributed=ddp", "distributed.processes=2", "data=cancer", "training.steps=2"]
    typed += ["model._target_=root_net.Net", "security.trusted=[root_net]", "debug=anomaly"]
    path = os.pathsep.join([str(tmp_path), PATH])
    ended = runs.command(tmp_path, *typed, *runs.QUICK, "hydra.run.dir=run", PYTHONPATH=path)
    assert ended.returncode == 4, ended.stderr  # all steps were skipped
    for folder in (tmp_path / "run", tmp_path / "run/ranks/1"):
        (fault,) = runs.faults(folder, "anomaly")
        assert fault["steps"] == [1, 2] and fault["action"] == "skipped"
        assert "root (Root)" in fault["message"]
