"""Where the processes of a run meet: a store, and the rank of each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from runner.config import RunConfig
from runner.distributed.place import Place
from runner.errors import UsageError

MEET_S = 900  # that machines wait for each other at the start


@contextmanager
def meet(config: RunConfig, processes: int, attempt: int) -> Iterator[list[Place]]:
    """The places of this machine's processes; the store lives as long as this is entered."""
    if config.distributed.nodes > 1:
        yield from _machines(config, processes, attempt)
        return
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield _places(0, processes, processes, "127.0.0.1", store.port, attempt)


def _machines(config: RunConfig, processes: int, attempt: int) -> Iterator[list[Place]]:
    """Those of several machines: each tells the others how many it starts."""
    asked = config.distributed
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=asked.rendezvous or "",
            run_id=f"{config.name}-{attempt}",
            min_nodes=asked.nodes,
            max_nodes=asked.nodes,
            timeout=MEET_S,
        )
    )
    try:
        met = handler.next_rendezvous()
        met.store.set(f"processes/{met.rank}", str(processes))
        counts = [int(met.store.get(f"processes/{node}")) for node in range(met.world_size)]
        host = met.bootstrap_store_info
        if host is None:
            raise UsageError("distributed.rendezvous: it names no store")
        first, size = sum(counts[: met.rank]), sum(counts)
        yield _places(first, processes, size, host.master_addr, host.master_port, attempt)
    finally:
        handler.shutdown()


def _places(first: int, own: int, size: int, address: str, port: int, attempt: int) -> list[Place]:
    return [
        Place(first + local, size, local, own, address, port, True, attempt, "runner")
        for local in range(own)
    ]
