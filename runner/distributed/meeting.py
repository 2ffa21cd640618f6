"""Rendezvous of the machines of a run: ranks, the shared store, and messages between agents.

Each machine has an agent, which starts its processes. The first machine's agent judges what ended
the run; the others ask it through the store.
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

from runner.config import RunConfig
from runner.distributed.outcome import MachineReport, RunVerdict, dump_json, parse_json
from runner.distributed.place import Place
from runner.errors import UsageError

log = logging.getLogger("runner")

MEET_S = 900  # time-out of the rendezvous
SILENCE_S = 30.0  # after which an agent without a heartbeat counts as lost
READ_S = 10.0  # for the others to read the verdict
POLL_S = 0.2
STORE_S = 30  # for one call

Judge = Callable[[Sequence[MachineReport], str], RunVerdict]


class Meeting:
    """Places of this machine's processes, and communication with the other machines' agents."""

    def __init__(
        self, places: list[Place], node: int = 0, nodes: int = 1, store: TCPStore | None = None
    ) -> None:
        """`store` is shared by all agents; None for one machine."""
        self.places, self.node, self.nodes, self._store = places, node, nodes, store
        self._failed = self._told = False
        self.exchange(False)

    def exchange(self, failed: bool) -> bool:
        """Publish whether a process of this machine has failed; return whether any machine's has.

        Must be called repeatedly, since it is also this agent's heartbeat.
        """
        self._failed = self._failed or failed
        if self._store is None:
            return self._failed
        try:
            self._store.add(f"alive/{self.node}", 1)
            if self._failed and not self._told:
                self._store.set("failed", "")
                self._told = True
            self._failed = self._failed or self._store.check(["failed"])
        except RuntimeError:  # the store has ended with its agent
            self._failed = True
        return self._failed

    def agree(self, own: MachineReport, judge: Judge) -> RunVerdict:
        """Return the first machine's verdict on all reports, once all processes have ended.

        `judge` also gets a text that names machines whose agent does not answer, or "".
        """
        store = self._store
        if store is None:
            return judge([own], "")
        with suppress(RuntimeError):
            return self._decide(store, own, judge) if self.node == 0 else self._ask(store, own)
        return self._unreachable()

    def _decide(self, store: TCPStore, own: MachineReport, judge: Judge) -> RunVerdict:
        reports, lost = [own], []
        for node in range(1, self.nodes):
            if self._await(store, f"report/{node}", node):
                reports.append(parse_json(MachineReport, store.get(f"report/{node}")))
            else:
                lost.append(f"machine {node} of {self.nodes} has ended, or does not answer")
        verdict = judge(reports, ", ".join(lost))
        store.set("verdict", dump_json(verdict))
        until = time.monotonic() + READ_S
        while store.add("read", 0) < len(reports) - 1 and time.monotonic() < until:
            time.sleep(POLL_S)  # the store ends with this process
        return verdict

    def _ask(self, store: TCPStore, own: MachineReport) -> RunVerdict:
        store.set(f"report/{self.node}", dump_json(own))
        if not self._await(store, "verdict", 0):
            return self._unreachable()
        verdict = parse_json(RunVerdict, store.get("verdict"))
        store.add("read", 1)
        return verdict

    def _await(self, store: TCPStore, key: str, node: int) -> bool:
        """Wait for a key of machine `node`; return False if its agent's heartbeat stops."""
        heard, beats = time.monotonic(), -1
        while not store.check([key]):
            self.exchange(False)
            count = store.add(f"alive/{node}", 0)
            if count != beats:
                heard, beats = time.monotonic(), count
            elif time.monotonic() > heard + SILENCE_S:
                return False
            time.sleep(POLL_S)
        return True

    def _unreachable(self) -> RunVerdict:
        place = self.places[0]
        problem = f"the machine of process 0, {place.address}, has ended, or does not answer"
        return RunVerdict("unreachable", problem)


@contextmanager
def meet(config: RunConfig, processes: int, attempt: int) -> Iterator[Meeting]:
    """Meet the other machines of a run; the store is open within the context."""
    asked = config.distributed
    if asked.nodes == 1:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        yield Meeting(_places(0, processes, processes, "127.0.0.1", store.port, attempt))
        return
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=asked.rendezvous or "",
        run_id=f"{config.name}-{attempt}",
        min_nodes=asked.nodes,
        max_nodes=asked.nodes,
        timeout=MEET_S,
    )
    log.info("%d machines meet at %s", asked.nodes, asked.rendezvous)
    handler, met = _rendezvous(parameters, SILENCE_S if attempt else 0.0)
    try:
        met.store.set(f"processes/{met.rank}", str(processes))  # how many each machine starts
        counts = [int(met.store.get(f"processes/{node}")) for node in range(met.world_size)]
        host = met.bootstrap_store_info
        if host is None:
            raise UsageError("distributed.rendezvous: it names no store")
        first, size = sum(counts[: met.rank]), sum(counts)
        address, port, wait = host.master_addr, host.master_port, timedelta(seconds=STORE_S)
        places = _places(first, processes, size, address, port, attempt)
        store = TCPStore(address, port, None, False, wait, wait_for_workers=False)
        yield Meeting(places, met.rank, met.world_size, store)
    finally:
        handler.shutdown()


def _rendezvous(
    parameters: RendezvousParameters, patience_s: float
) -> tuple[RendezvousHandler, RendezvousInfo]:
    """Return the rendezvous handler and its result.

    The previous attempt's store may answer and then end: reconnect for up to `patience_s`.
    """
    until = time.monotonic() + patience_s
    while True:
        handler = None
        try:
            handler = get_rendezvous_handler(parameters)
            return handler, handler.next_rendezvous()
        except RendezvousConnectionError:
            if handler is not None:
                handler.shutdown()
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)


def _places(first: int, own: int, size: int, address: str, port: int, attempt: int) -> list[Place]:
    return [
        Place(first + local, size, local, own, address, port, True, attempt, "runner")
        for local in range(own)
    ]
