"""What job=doctor says of the processes of a distributed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runner.core.device.capabilities import usable_cores
from runner.core.findings import CheckStatus, DoctorCheck
from runner.scale.distributed.join import gpu_uuid

if TYPE_CHECKING:
    from runner.scale.distributed.world import World


@dataclass(frozen=True)
class LinkReport:
    """The processes of a run, and whether their all-reduce is right."""

    kind: str
    backend: str
    ranks: list[dict[str, Any]]  # host, device, versions
    wrong: int  # number of wrong sums

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the report's table."""
        yield "kind", f"{self.kind}, {len(self.ranks)} processes, {self.backend}"
        for rank, facts in enumerate(self.ranks):
            yield f"process {rank}", ", ".join(f"{k} {v}" for k, v in facts.items())

    def checks(self) -> Iterator[DoctorCheck]:
        """Yield checks of sums, cores and devices."""
        text = f"{self.wrong} sums are wrong" if self.wrong else "sums are right"
        fix = "run nccl-tests, or try distributed.backend=gloo"
        yield DoctorCheck.of("all-reduce", not self.wrong, text, fix, CheckStatus.fail)
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


def examine_links(world: World, device: torch.device) -> LinkReport:
    """Describe the processes and check a sum; called by all, each gets the same result."""
    rank_facts = {
        "host": world.host,
        "device": str(device),
        **({"gpu": uuid} if (uuid := gpu_uuid(device.index)) else {}),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        "local rank": world.place.local_rank,
    }
    ones = torch.ones(1 << 18, dtype=torch.float32, device=device)
    total = world.all_reduce_sum(ones * (world.rank + 1))
    wrong = world.all_gather(int((total != world.size * (world.size + 1) / 2).any()))
    return LinkReport(world.kind, world.backend, world.all_gather(rank_facts), sum(wrong))
