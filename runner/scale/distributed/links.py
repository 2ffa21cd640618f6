"""Measure communication between the processes of a distributed run, by all-reduce."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from runner.core.device.capabilities import usable_cores
from runner.core.findings import CheckStatus, DoctorCheck
from runner.core.format import size
from runner.scale.distributed.join import gpu_uuid

if TYPE_CHECKING:
    from runner.scale.distributed.world import World

SIZES = (4, 64 << 10, 1 << 20, 25 << 20)  # bytes: a flag, a small layer, a large one, a bucket
WARM_UP, REPEATS = 3, 10


@dataclass(frozen=True)
class AllReduce:
    """The all-reduce of a tensor; medians."""

    bytes: int
    ms: float  # of the slowest process
    gb_per_s: float  # bus bandwidth: 2·(n-1)/n of the bytes, as in nccl-tests


@dataclass(frozen=True)
class LinkReport:
    """The processes of a run, and their all-reduce measurements."""

    kind: str
    backend: str
    ranks: list[dict[str, Any]]  # host, device, versions
    all_reduce: list[AllReduce]
    wrong: int  # number of wrong sums

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the report's table."""
        yield "kind", f"{self.kind}, {len(self.ranks)} processes, {self.backend}"
        for rank, facts in enumerate(self.ranks):
            yield f"process {rank}", ", ".join(f"{k} {v}" for k, v in facts.items())
        for row in self.all_reduce:
            speed = f", {row.gb_per_s:.2f} GB/s" if row.bytes >= SIZES[1] else ""
            name = size(row.bytes) if row.bytes >= SIZES[2] else f"{row.bytes:,} bytes"
            yield f"all-reduce, {name}", f"{row.ms:.3f} ms{speed}"

    def checks(self) -> Iterator[DoctorCheck]:
        """Yield checks of sums, cores and devices."""
        all_right = self.wrong == 0
        text = "sums are right" if all_right else f"{self.wrong} sums are wrong"
        fix = "run nccl-tests, or try distributed.backend=gloo"
        yield DoctorCheck.of("all-reduce", all_right, text, fix, CheckStatus.fail)
        local_ranks = [facts for facts in self.ranks if facts["host"] == self.ranks[0]["host"]]
        cores, cpu = usable_cores(), local_ranks[0]["device"] == "cpu"
        text = f"{len(local_ranks)} processes on {cores} cores"
        fix = f"distributed.processes={cores}: each needs a core"
        yield DoctorCheck.of("cores", len(local_ranks) <= cores or not cpu, text, fix)
        local_gpus = {facts["gpu"] for facts in local_ranks if not cpu}
        have_own_gpu = cpu or len(local_gpus) == len(local_ranks)
        text = f"{len(local_ranks)} processes on {'the CPU' if cpu else f'{len(local_gpus)} GPUs'}"
        fix = "distributed.processes= at most the number of GPUs"
        yield DoctorCheck.of("devices", have_own_gpu, text, fix, CheckStatus.fail)


def measure_links(world: World, device: torch.device) -> LinkReport:
    """Measure; called by all processes, each gets the same result."""
    rank_facts = {
        "host": world.host,
        "device": str(device),
        **({"gpu": uuid} if (uuid := gpu_uuid(device.index)) else {}),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        "local rank": world.place.local_rank,
    }
    ranks = world.all_gather(rank_facts)
    rows = [_time_all_reduce(world, device, count) for count in SIZES]
    wrong = sum(world.all_gather(sum(bad for _, bad in rows)))
    return LinkReport(world.kind, world.backend, ranks, [row for row, _ in rows], wrong)


def _time_all_reduce(world: World, device: torch.device, count: int) -> tuple[AllReduce, int]:
    """Return the median time of an all-reduce, and the number of wrong sums in this process."""
    values = torch.empty(count // 4, dtype=torch.float32, device=device)
    expected, bad, seconds = world.size * (world.size + 1) / 2, 0, []
    for _ in range(WARM_UP + REPEATS):
        values.fill_(world.rank + 1)
        world.barrier()
        start = time.perf_counter()
        total = world.all_reduce_sum(values)
        bad += float(total[-1]) != expected  # waits for the device
        seconds.append(time.perf_counter() - start)
    seconds_per_call = max(world.all_gather(median(seconds[WARM_UP:])))
    bytes_sent = 2 * (world.size - 1) / world.size * count
    return AllReduce(count, seconds_per_call * 1e3, bytes_sent / seconds_per_call / 1e9), bad
