"""What ends a run is the same on all machines, and the cause of it rather than what followed."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from runner.core.errors import DataError, Interrupted, ProcessLost
from runner.scale.distributed import rendezvous
from runner.scale.distributed.outcome import (
    MachineReport,
    RankEnd,
    RankOutcome,
    RunVerdict,
    SharedOutcomes,
    dump_json,
    judge_reports,
    parse_json,
)
from runner.scale.distributed.rank_info import RankInfo
from runner.scale.distributed.rendezvous import Rendezvous

LOST = RankOutcome(0, "lost", "another process has ended", 1)
RUNNING = RankOutcome(0, "running")


def end(rank: int, code: int, outcome: RankOutcome | None = LOST, killed: bool = False) -> RankEnd:
    return RankEnd(rank, f"process {rank}", code, killed, outcome)


def report(*ends: RankEnd, **of_agent: Any) -> MachineReport:
    return MachineReport([*ends], **of_agent)


MISTAKE = RankOutcome.from_error(1, DataError("row 7"))
STOPPED = RankOutcome.from_error(1, Interrupted(15, " at step 3"))


@pytest.mark.parametrize(
    ("reports", "unreachable", "kind", "message", "code"),
    [
        ([report(end(0, 0)), report(end(1, 0))], "", "done", "", 0),
        ([report(end(0, 1)), report(end(1, 2, MISTAKE))], "", "error", "process 1: row 7", 2),
        ([report(end(0, 1))], "machine 1", "unreachable", "machine 1", 1),
        ([report(end(0, 143, STOPPED))], "machine 1", "interrupted", "", 143),
        ([report(end(0, 1), received=15)], "", "interrupted", "", 143),
        ([report(end(0, 0), received=15)], "", "done", "", 0),
        ([report(end(0, 1), end(1, -9, RUNNING))], "", "lost", "process 1 was killed by SIGK", 1),
        ([report(end(0, -9, LOST, True), end(1, 3, None))], "", "lost", "exit code 3", 1),
        (
            [report(end(0, 1), end(1, -9, RUNNING, True))],
            "",
            "lost",
            "process 1 was killed: no ans",
            1,
        ),
        ([report(end(0, 255), end(1, 255), problem="the server")], "", "lost", "the server", 1),
    ],
)
def test_the_cause_is_told_from_what_followed(
    reports: list[MachineReport], unreachable: str, kind: str, message: str, code: int
) -> None:
    copies = [parse_json(MachineReport, dump_json(report)) for report in reports]
    assert copies == reports
    verdict = judge_reports(copies, unreachable)
    assert (verdict.kind, verdict.exit_code) == (kind, code)
    assert message in verdict.message
    assert parse_json(RunVerdict, dump_json(verdict)) == verdict


def places(node: int, port: int) -> list[RankInfo]:
    return [RankInfo(node, 2, 0, 1, "127.0.0.1", port, True, by="runner")]


def two_machines() -> tuple[TCPStore, list[Rendezvous]]:
    host = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    wait = timedelta(seconds=5)
    stores = [TCPStore("127.0.0.1", host.port, None, False, wait) for _ in range(2)]
    return host, [Rendezvous(places(n, host.port), n, 2, stores[n]) for n in range(2)]


def test_one_machine_judges_and_all_hear_of_a_failure_at_once() -> None:
    host, (first, second) = two_machines()
    assert not first.exchange(False) and not second.exchange(False)
    assert second.exchange(True) and first.exchange(False)
    verdicts = []
    own = report(end(1, 2, MISTAKE))
    asks = threading.Thread(
        target=lambda: verdicts.append(second.agree_on_verdict(own, judge_reports))
    )
    asks.start()
    verdicts.append(first.agree_on_verdict(report(end(0, 1)), judge_reports))
    asks.join()
    assert verdicts[0] == verdicts[1] == RunVerdict("error", "process 1: row 7", 2)
    del host


def test_an_agent_that_shows_no_sign_of_life_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.5)
    monkeypatch.setattr(rendezvous, "VERDICT_READ_S", 0.5)
    host, (first, second) = two_machines()
    verdict = first.agree_on_verdict(report(end(0, 1)), judge_reports)
    assert (verdict.kind, verdict.message) == (
        "unreachable", "machine 1 of 2 has ended, or does not answer",
    )  # fmt: skip
    host, (first, second) = two_machines()
    verdict = second.agree_on_verdict(report(end(1, 1)), judge_reports)
    assert verdict.kind == "unreachable" and "machine of process 0" in verdict.message
    del host


def test_the_process_that_was_lost_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.scale.distributed.outcome.REPORT_S", 0.3)
    host = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    first, second, third = (SharedOutcomes(PrefixStore("run", host), rank, 3) for rank in range(3))
    lost = ProcessLost("another process has ended")
    assert first.name_cause(lost) is lost  # two of them are silent
    third.publish(RankOutcome.from_error(2, lost))
    named = first.name_cause(lost)
    assert str(named) == "process 1 was killed or ended during the run"
    second.publish(MISTAKE)
    for other in (first, third):
        named = other.name_cause(lost)
        assert (str(named), named.exit_code) == ("process 1: row 7", 2)
