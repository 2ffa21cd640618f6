"""Which GPU a process of several trains on. The GPUs are simulated."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner import compose
from runner.core.errors import ConfigError
from runner.scale.distributed import join
from runner.scale.distributed.join import config_for_rank, gpu_uuid, join_world
from runner.scale.distributed.launch import _process_name, count_processes
from runner.scale.distributed.rank import LinkReport
from runner.scale.distributed.rank_info import RankInfo, detect_rank

SLURM = {
    "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "4", "MASTER_ADDR": "n1",
}  # fmt: skip
POD = {"WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}  # without LOCAL_RANK
UseGpus = Callable[..., None]


@pytest.fixture
def use_gpus(monkeypatch: pytest.MonkeyPatch) -> UseGpus:
    """Make this process see GPUs with these identities."""

    def use(*gpus: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[index])
        )

    return use


def rank(number: int, size: int = 4) -> RankInfo:
    return RankInfo(number, size, number, size, "127.0.0.1", 1, hosted=False)


@pytest.mark.parametrize(
    ("visible", "typed", "indices"),
    [
        (1, None, [0, 0, 0, 0]),  # each process sees a GPU of its own alone
        (2, None, [0, 1, 0, 1]),  # srun --gpus-per-task=2
        (4, None, [0, 1, 2, 3]),
        (8, None, [0, 1, 2, 3]),
        (1, 0, [0, 0, 0, 0]),
        (4, 2, [2, 2, 2, 2]),
    ],
)
def test_a_process_takes_the_gpu_that_it_sees(
    visible: int, typed: int | None, indices: list[int], use_gpus: UseGpus
) -> None:
    use_gpus(*"abcdefgh"[:visible])
    config = compose(["distributed=ddp", *([f"device.index={typed}"] if typed is not None else [])])
    for variables in (SLURM, POD):
        ranks = [
            detect_rank({**variables, "SLURM_PROCID": n, "SLURM_LOCALID": n, "RANK": n})
            for n in "0123"
        ]
        assert [config_for_rank(config, place).device.index for place in ranks if place] == indices
    assert config_for_rank(compose(["device=cpu"]), rank(1)).device.index is None
    assert _process_name(config, rank(3)) == f"process 3 (cuda:{indices[3]})"
    assert _process_name(compose(["device=cpu"]), rank(3)) == "process 3"


class _World:
    """The world of process 0, which sees `own` and hears of the others' GPUs."""

    others: tuple[str, ...] = ()

    def __init__(self, place: RankInfo, config: Any, device: torch.device) -> None:
        self.backend = config.backend.value if config.backend else "nccl"
        assert device.type == "cuda"

    def all_gather(self, value: Any) -> list[Any]:
        return [value, *self.others] if isinstance(value, str) else [value]

    def close(self, error: BaseException | None) -> None:
        pass


@pytest.mark.parametrize(
    ("own", "others", "typed", "message"),
    [
        ("a", "bcd", [], ""),
        ("a", "bca", [], "^distributed.processes: processes 0 and 3 would share GPU a"),
        ("a", "bab", [], "^distributed.processes: processes 0 and 2 would share GPU a"),
        ("a", "aaa", ["device.index=0"], "^device.index: is 0: processes 0 and 1 would share"),
        ("a", "aaa", ["distributed.backend=gloo"], ""),
        ("", "bcd", ["device.index=5"], ""),  # the selection of the device reports it
    ],
)
def test_processes_that_would_share_a_gpu_are_refused_unless_by_gloo(
    own: str, others: str, typed: list[str], message: str,
    use_gpus: UseGpus, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use_gpus("a")
    monkeypatch.setattr(join, "World", _World)
    monkeypatch.setattr(_World, "others", tuple(others))
    config = compose(["distributed=ddp", "device=cuda", *typed])
    with ExitStack() as scope:
        if not message:
            join_world(config, rank(0), scope)
            return
        with pytest.raises(ConfigError, match=message) as raised:
            join_world(config, rank(0), scope)
        assert "distributed.backend=gloo" in str(raised.value)


def test_a_gpu_that_is_not_there_has_no_identity(use_gpus: UseGpus) -> None:
    use_gpus("a", "b")
    assert [gpu_uuid(index) for index in (None, 0, 1, 2)] == ["", "a", "b", ""]


def test_more_processes_than_gpus_are_refused_before_they_start(use_gpus: UseGpus) -> None:
    use_gpus("a", "b")
    for device in ("auto", "cuda"):
        typed = ["distributed=ddp", "distributed.processes=4", f"device={device}"]
        with pytest.raises(ConfigError, match="is 4, but there are 2 GPUs"):
            count_processes(compose(typed))
        assert count_processes(compose([*typed, "distributed.backend=gloo"])) == 4
    assert count_processes(compose([*typed, "device=cpu"])) == 4


@pytest.mark.parametrize(("gpus", "status"), [("abcd", "ok"), ("abca", "fail")])
def test_the_doctor_counts_gpus_by_their_identity(gpus: str, status: str) -> None:
    facts = [{"host": "n", "device": "cuda:0", "gpu": gpu} for gpu in gpus]
    checks = {check.name: check for check in LinkReport("ddp", "nccl", facts, 0).checks()}
    assert checks["devices"].status.value == status
