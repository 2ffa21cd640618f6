"""What ends a run is the cause of its processes' ends rather than what followed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from runner.core.errors import DataError, Interrupted, ProcessLost
from runner.scale.distributed.agent import Agent
from runner.scale.distributed.outcome import RankEnd, RankOutcome, SharedOutcomes, judge

LOST = RankOutcome(0, "lost", "another process has ended", 1)
RUNNING = RankOutcome(0, "running")
MISTAKE = RankOutcome.from_error(1, DataError("row 7"))
STOPPED = RankOutcome.from_error(1, Interrupted(15, " at step 3"))


def end(rank: int, code: int, outcome: RankOutcome | None = LOST, killed: bool = False) -> RankEnd:
    return RankEnd(rank, f"process {rank}", code, killed, outcome)


@pytest.mark.parametrize(
    ("ends", "received", "problem", "kind", "message", "code"),
    [
        ([end(0, 0), end(1, 0)], 0, "", "done", "", 0),
        ([end(0, 1), end(1, 2, MISTAKE)], 0, "", "error", "process 1: row 7", 2),
        (
            [end(0, 0, RankOutcome(0, "done")), end(1, 0, RUNNING)],
            0,
            "",
            "lost",
            "process 1 ended with exit code 0 during the run",
            1,
        ),
        ([end(0, 143, STOPPED)], 0, "", "interrupted", "", 143),
        ([end(0, 1)], 15, "", "interrupted", "", 143),
        ([end(0, 0)], 15, "", "done", "", 0),
        ([end(0, 1), end(1, -9, RUNNING)], 0, "", "lost", "process 1 was killed by SIGKILL", 1),
        ([end(0, -9, LOST, True), end(1, 3, None)], 0, "", "lost", "exit code 3", 1),
        ([end(0, 1), end(1, -9, RUNNING, True)], 0, "", "lost", "process 1 was killed: no ans", 1),
        ([end(0, 255), end(1, 255)], 0, "the server", "lost", "the server", 1),
    ],
)
def test_the_cause_is_told_from_what_followed(
    ends: list[RankEnd], received: int, problem: str, kind: str, message: str, code: int
) -> None:
    for outcome in (each.outcome for each in ends if each.outcome):
        assert RankOutcome.from_json(outcome.as_json()) == outcome
    verdict = judge(ends, received, problem)
    assert (verdict.kind, verdict.exit_code) == (kind, code)
    assert message in verdict.message


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


@pytest.mark.parametrize(
    ("uses_nccl", "outcomes", "codes", "seconds"),
    [
        (False, {0: "running", 1: "running"}, {0: None, 1: -9}, 100),
        (True, {0: "running", 1: "running"}, {0: None, 1: -9}, 5),
        (True, {0: "running"}, {0: None, 1: 1}, 5),
        (True, {0: "running", 1: "lost"}, {0: None, 1: 1}, 5),
        (True, {0: "running", 1: "error"}, {0: None, 1: 1}, 30),  # it may write a capture
        (False, {0: "lost", 1: "running"}, {0: None, 1: -9}, 100),  # it saves a checkpoint
        (True, {0: "lost", 1: "running"}, {0: None, 1: -9}, 5),
        (True, {0: "interrupted", 1: "interrupted"}, {0: None, 1: 143}, 100),
    ],
)
def test_a_process_that_remains_under_nccl_is_not_waited_for(
    uses_nccl: bool, outcomes: dict[int, str], codes: dict[int, int | None], seconds: float,
    tmp_path: Path,
) -> None:  # fmt: skip
    agent = Agent(tmp_path, timeout_s=100, grace_s=1000, uses_nccl=uses_nccl)
    process: Any = SimpleNamespace
    agent.processes = {rank: process(pid=rank, exit_code=code) for rank, code in codes.items()}
    agent._failure_time = agent._clock.seconds = 1000.0
    reported = {rank: RankOutcome(rank, kind) for rank, kind in outcomes.items()}
    assert agent._hang_deadline(0, reported) == 1000.0 + seconds
