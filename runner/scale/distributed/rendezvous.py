"""Rendezvous of a run's processes: store, ranks, and exchange between machines.

Each machine has an agent that starts its processes. The agent with rank 0 has the store and judges
what ended the run; the others query it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from runner.core.config.run_config import RunConfig
from runner.core.errors import UsageError
from runner.scale.distributed.outcome import MachineReport, RunVerdict, dump_json, parse_json
from runner.scale.distributed.rank_info import LOOPBACK, RankInfo
from runner.scale.distributed.world import host_local_store

log = logging.getLogger("runner")

JOIN_S = 900  # that machines wait for each other at the start
HEARTBEAT_S = 30.0  # without a heartbeat, after which an agent counts as lost
VERDICT_READ_S = 10.0  # for the others to read the verdict
POLL_S = 0.2
STORE_S = 30  # timeout of one call

JudgeFunction = Callable[[Sequence[MachineReport], str], RunVerdict]


class Rendezvous:
    """The ranks of this machine's processes, and the connection to the other agents."""

    def __init__(
        self, places: list[RankInfo], node: int = 0, nodes: int = 1, store: TCPStore | None = None
    ) -> None:
        """`store` is shared by all agents, if there are several machines."""
        self.places, self.node, self.nodes, self._store = places, node, nodes, store
        self._failed = self._failure_published = False
        self.exchange(False)

    def exchange(self, failed: bool) -> bool:
        """Report failures of this machine; return whether a process failed on any machine.

        Call it repeatedly, since it is also this agent's heartbeat.
        """
        self._failed = self._failed or failed
        if self._store is None:
            return self._failed
        try:
            self._store.add(f"alive/{self.node}", 1)
            if self._failed and not self._failure_published:
                self._store.set("failed", "")
                self._failure_published = True
            self._failed = self._failed or self._store.check(["failed"])
        except RuntimeError:  # the store ended with its agent
            self._failed = True
        return self._failed

    def agree_on_verdict(self, own: MachineReport, judge: JudgeFunction) -> RunVerdict:
        """Return the first machine's verdict on all reports, after all processes have ended.

        `judge` also receives the names of unreachable machines, or "".
        """
        store = self._store
        if store is None:
            return judge([own], "")
        with suppress(RuntimeError):
            if self.node == 0:
                return self._judge_reports(store, own, judge)
            return self._request_verdict(store, own)
        return self._unreachable_verdict()

    def _judge_reports(
        self, store: TCPStore, own: MachineReport, judge: JudgeFunction
    ) -> RunVerdict:
        reports, lost = [own], []
        for node in range(1, self.nodes):
            if self._await_key(store, f"report/{node}", node):
                reports.append(parse_json(MachineReport, store.get(f"report/{node}")))
            else:
                lost.append(f"machine {node} of {self.nodes} has ended, or does not answer")
        verdict = judge(reports, ", ".join(lost))
        store.set("verdict", dump_json(verdict))
        deadline = time.monotonic() + VERDICT_READ_S
        while store.add("read", 0) < len(reports) - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)  # the store ends with this process
        return verdict

    def _request_verdict(self, store: TCPStore, own: MachineReport) -> RunVerdict:
        store.set(f"report/{self.node}", dump_json(own))
        if not self._await_key(store, "verdict", 0):
            return self._unreachable_verdict()
        verdict = parse_json(RunVerdict, store.get("verdict"))
        store.add("read", 1)
        return verdict

    def _await_key(self, store: TCPStore, key: str, node: int) -> bool:
        """Wait for a key of a machine; False if its agent's heartbeat stops."""
        last_beat, beat_count = time.monotonic(), -1
        while not store.check([key]):
            self.exchange(False)
            count = store.add(f"alive/{node}", 0)
            if count != beat_count:
                last_beat, beat_count = time.monotonic(), count
            elif time.monotonic() > last_beat + HEARTBEAT_S:
                return False
            time.sleep(POLL_S)
        return True

    def _unreachable_verdict(self) -> RunVerdict:
        place = self.places[0]
        problem = f"the machine of process 0, {place.address}, has ended, or does not answer"
        return RunVerdict("unreachable", problem)


@contextmanager
def join_rendezvous(config: RunConfig, processes: int, attempt: int) -> Iterator[Rendezvous]:
    """Yield the rendezvous of all machines; its store lives within this context."""
    settings = config.distributed
    if settings.nodes == 1:
        store = host_local_store()
        yield Rendezvous(_make_places(0, processes, processes, LOOPBACK, store.port, attempt))
        return
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=settings.rendezvous or "",
        run_id=f"{config.name}-{attempt}",
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        timeout=JOIN_S,
    )
    log.info("%d machines meet at %s", settings.nodes, settings.rendezvous)
    handler, info = _join_with_retries(parameters, HEARTBEAT_S if attempt else 0.0)
    try:
        info.store.set(f"processes/{info.rank}", str(processes))  # how many each machine starts
        counts = [int(info.store.get(f"processes/{node}")) for node in range(info.world_size)]
        store_info = info.bootstrap_store_info
        if store_info is None:
            raise UsageError("distributed.rendezvous: it names no store")
        first_rank, size = sum(counts[: info.rank]), sum(counts)
        address, port = store_info.master_addr, store_info.master_port
        wait = timedelta(seconds=STORE_S)
        places = _make_places(first_rank, processes, size, address, port, attempt)
        store = TCPStore(address, port, None, False, wait, wait_for_workers=False)
        yield Rendezvous(places, info.rank, info.world_size, store)
    finally:
        handler.shutdown()


def _join_with_retries(
    parameters: RendezvousParameters, retry_s: float
) -> tuple[RendezvousHandler, RendezvousInfo]:
    """Return the rendezvous handler and its result.

    The store may still be that of the previous attempt, which is ending, so broken connections are
    retried for `retry_s`.
    """
    deadline = time.monotonic() + retry_s
    while True:
        handler = None
        try:
            handler = get_rendezvous_handler(parameters)
            return handler, handler.next_rendezvous()
        except RendezvousConnectionError:
            if handler is not None:
                handler.shutdown()
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _make_places(
    first_rank: int, local_size: int, size: int, address: str, port: int, attempt: int
) -> list[RankInfo]:
    return [
        RankInfo(first_rank + i, size, i, local_size, address, port, True, attempt, "runner")
        for i in range(local_size)
    ]
