"""Measure communication between the processes of a distributed run, by all-reduce."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from runner.device.capabilities import usable_cores
from runner.doctor.environment import DoctorCheck, Status
from runner.format import size

if TYPE_CHECKING:
    from runner.distributed.world import World

SIZES = (4, 64 << 10, 1 << 20, 25 << 20)  # bytes: a flag, a small layer, a large one, a bucket
WARM_UP, TIMES = 3, 10


@dataclass(frozen=True)
class AllReduce:
    """The all-reduce of a tensor; medians."""

    bytes: int
    ms: float  # of the slowest process
    gb_per_s: float  # bus bandwidth: 2·(n-1)/n of the bytes, as in nccl-tests


@dataclass(frozen=True)
class Links:
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
        right = self.wrong == 0
        text = "sums are right" if right else f"{self.wrong} sums are wrong"
        fix = "run nccl-tests, or try distributed.backend=gloo"
        yield DoctorCheck.of("all-reduce", right, text, fix, Status.fail)
        here = [facts for facts in self.ranks if facts["host"] == self.ranks[0]["host"]]
        cores, cpu = usable_cores(), here[0]["device"] == "cpu"
        text = f"{len(here)} processes on {cores} cores"
        fix = f"distributed.processes={cores}: each needs a core"
        yield DoctorCheck.of("cores", len(here) <= cores or not cpu, text, fix)
        together = sorted({facts["device"] for facts in here if not cpu})
        apart = cpu or len(together) == len(here)
        text = f"{len(here)} processes on {', '.join(together) or 'the CPU'}"
        fix = "distributed.processes= at most the number of GPUs"
        yield DoctorCheck.of("devices", apart, text, fix, Status.fail)


def measure(world: World, device: torch.device) -> Links:
    """Measure; called by all processes, each gets the same result."""
    own = {
        "host": world.host,
        "device": str(device),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        "local rank": world.place.local_rank,
    }
    ranks = world.gather(own)
    rows = [_time(world, device, count) for count in SIZES]
    wrong = sum(world.gather(sum(bad for _, bad in rows)))
    return Links(world.kind, world.backend, ranks, [row for row, _ in rows], wrong)


def _time(world: World, device: torch.device, count: int) -> tuple[AllReduce, int]:
    """Return the median time of an all-reduce, and the number of wrong sums in this process."""
    values = torch.empty(count // 4, device=device)
    expected, bad, seconds = world.size * (world.size + 1) / 2, 0, []
    for _ in range(WARM_UP + TIMES):
        values.fill_(world.rank + 1)
        world.barrier()
        start = time.perf_counter()
        total = world.total(values)
        bad += float(total[-1]) != expected  # waits for the device
        seconds.append(time.perf_counter() - start)
    took = max(world.gather(median(seconds[WARM_UP:])))
    sent = 2 * (world.size - 1) / world.size * count
    return AllReduce(count, took * 1e3, sent / took / 1e9), bad
