from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from runner.errors import CheckpointError
from runner.security.gate import assessing as assessing_module
from runner.security.gate import child as child_module
from runner.security.gate.assessing import Assessor
from runner.security.gate.child import Child
from runner.security.gate.folder import thing_of, things
from runner.security.gate.held import Stopped, Watched, digest, hold
from runner.security.gate.policy import Bounds, Policy
from runner.security.trust import Severity, Trust
from tests.security.planted import Mark, checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no limited process")
ROOT = Path(__file__).parents[2]
CANARY = "canary-5b1d"


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One for all tests: a second to start."""
    os.environ["RUNNER_TEST_CANARY"] = CANARY
    try:
        with Child() as found:
            yield found
    finally:
        del os.environ["RUNNER_TEST_CANARY"]


def look(child: Child, path: Path, policy: Policy = Policy()):  # noqa: B008  # it is frozen
    with hold(path) as held:
        return child.examine(held, path.name, policy)


def pid_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def good(folder: Path) -> Path:
    torch.save({"w": torch.arange(3.0)}, folder / "good.pt")
    return folder / "good.pt"


def test_it_answers_with_a_format_and_reasons_and_runs_nothing(child, tmp_path):
    torch.save({"w": Mark(tmp_path / "mark")}, tmp_path / "evil.pt")
    assert look(child, good(tmp_path)) == ("torch_zip", [])
    _, reasons = look(child, tmp_path / "evil.pt")
    assert [reason.severity for reason in reasons] == [Severity.REFUSAL]
    assert not (tmp_path / "mark").exists()
    assert child.started == 1


def test_its_limits_and_its_environment_are_those_that_were_promised(child, tmp_path):
    look(child, good(tmp_path))
    process = psutil.Process(pid_of(child))
    for limit, most in (("FSIZE", 0), ("CORE", 0), ("NPROC", 0), ("NOFILE", 64)):
        soft, hard = process.rlimit(getattr(psutil, f"RLIMIT_{limit}"))
        assert soft == hard == most, limit
    space, _ = process.rlimit(psutil.RLIMIT_AS)
    assert process.memory_info().vms <= space <= process.memory_info().vms + (2 << 30)
    assert process.rlimit(psutil.RLIMIT_CPU)[0] <= Bounds().seconds + 60
    assert os.getsid(process.pid) == process.pid
    assert CANARY not in " ".join(process.environ().values())


def test_what_needs_more_memory_than_it_may_take_is_refused_and_the_next_file_is_not(
    child, tmp_path
):
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(60 << 20, np.uint8))
    tight = Policy(bounds=Bounds(ratio=1e9, memory_mb=8))
    _, reasons = look(child, tmp_path / "bomb.npz", tight)
    assert reasons[0].severity is Severity.REFUSAL, reasons
    assert look(child, good(tmp_path), tight) == ("torch_zip", [])


@pytest.fixture
def slow(tmp_path) -> Path:
    """Honest, and its hundreds of thousands of opcodes take a while to read."""
    torch.save({"n": [[n] for n in range(150_000)]}, tmp_path / "slow.pt")
    return tmp_path / "slow.pt"


def test_what_takes_too_long_or_kills_it_is_refused_and_that_is_not_done_for_ever(
    tmp_path, slow, monkeypatch
):
    monkeypatch.setattr(child_module, "MOST_ENDED", 2)
    with Child() as child:
        look(child, good(tmp_path))
        before = pid_of(child)
        _, reasons = look(child, slow, Policy(bounds=Bounds(seconds=0.05)))
        assert reasons[0].code == "child.timeout" and not psutil.pid_exists(before)
        assert look(child, good(tmp_path)) == ("torch_zip", [])  # by a new one
        os.kill(pid_of(child), signal.SIGKILL)
        _, reasons = look(child, good(tmp_path))
        assert reasons[0].code == "child.died" and "SIGKILL" in reasons[0].evidence
        _, reasons = look(child, good(tmp_path))
        assert reasons[0].code == "child.given_up" and child.started == 2


PARENT = """
import sys
from pathlib import Path
from runner.security.gate.child import Child
from runner.security.gate.held import hold
from runner.security.gate.policy import Policy
child = Child()
with hold(Path(sys.argv[1])) as held:
    child.examine(held, "good.pt", Policy())
print(child.process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, str(good(tmp_path))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        orphan = psutil.Process(int(one.stdout.readline()))
        one.kill()
    gone, left = psutil.wait_procs([orphan], timeout=20)
    assert gone and not left


@pytest.mark.parametrize(
    "answer",
    [
        None, [], {"format": "npy"}, {"format": 1, "reasons": []},
        {"format": "npy", "reasons": [["a", 9, "b", "c", "d"]]},
        {"format": "npy", "reasons": [["a", 1]]},
        {"format": "npy", "reasons": [["a", 0, "", "", ""]] * (child_module.REASONS + 1)},
    ],
)  # fmt: skip
def test_an_answer_in_another_form_is_not_believed(answer):
    with pytest.raises(child_module.Ended):
        child_module._read(answer)


def test_text_from_the_process_cannot_forge_a_line():
    reasons = child_module._read({"format": "npy", "reasons": [["a", 1, "x\n", "\x1b[2Jy", ""]]})[1]
    assert "\n" not in str(reasons) and "\x1b" not in str(reasons[0])


def test_what_was_hashed_can_not_be_changed_by_anybody(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc" * 1000)
    with hold(path) as held:
        path.write_bytes(b"other")
        assert bytes(held.view) == b"abc" * 1000
        with pytest.raises(TypeError):
            held.view[0] = 1
        copy = held.handed()
        if sys.platform == "linux":
            with pytest.raises(OSError):
                os.write(copy, b"x")
            with pytest.raises(OSError):
                os.ftruncate(copy, 0)
        os.close(copy)
    path.write_bytes(b"")
    with hold(path) as held:
        assert held.size == 0 and digest(path) == (held.sha256, 0)


def test_a_pipe_is_not_waited_for_and_reading_can_be_given_up(tmp_path):
    from threading import Event

    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="not a file"):
        hold(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="missing"):
        hold(tmp_path / "b.pt")
    stop = Event()
    stop.set()
    with pytest.raises(Stopped):
        hold(good(tmp_path), stop)


def test_own_checkpoints_need_no_process_foreign_ones_one_for_all_and_none_is_left(tmp_path):
    own, theirs = checkpoint(tmp_path / "outputs/a"), checkpoint(tmp_path / "theirs/a")
    checkpoint(tmp_path / "theirs/b")
    with (
        pytest.raises(KeyboardInterrupt),
        Assessor(Policy(own=(tmp_path / "outputs",))) as assessor,
    ):
        assert assessor.assess(thing_of(own)).trust is Trust.CHECKED
        assert assessor.child.started == 0
        found = [assessor.assess(thing) for thing in things(theirs.parent)]
        assert [one.trust for one in found] == [Trust.UNTRUSTED] * 2
        assert assessor.child.started == 1
        started = pid_of(assessor.child)
        raise KeyboardInterrupt
    assert not psutil.pid_exists(started)


def test_a_pinned_file_needs_no_process_either(tmp_path):
    path = good(tmp_path)
    with Assessor(Policy(pinned=(digest(path)[0],))) as assessor:
        assert assessor.assess(thing_of(path)).trust is Trust.PINNED
        assert assessor.child.started == 0


def test_more_files_than_are_read_ahead_are_all_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(assessing_module, "AHEAD", 1)
    folder = checkpoint(tmp_path / "outputs/a")
    with Assessor(Policy(own=(tmp_path,))) as assessor:
        seen: list[int] = []
        start = time.perf_counter()
        found = assessor.assess(thing_of(folder), seen.append)
        assert found.trust is Trust.CHECKED and 0 < found.seconds <= time.perf_counter() - start
    assert sum(seen) == sum(facts.size for facts in found.files.values())


def test_a_file_that_changes_while_it_is_looked_at_gets_no_verdict(tmp_path, monkeypatch):
    path = good(tmp_path)
    known = Policy(pinned=(digest(path)[0],))

    class Written(Watched):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            with path.open("r+b") as file:  # as a writer beside us would
                file.write(b"P")

    monkeypatch.setattr(assessing_module, "Watched", Written)
    with Assessor(known) as assessor:
        found = assessor.assess(thing_of(path))
    assert found.refusals[0].code == "file.changed"
