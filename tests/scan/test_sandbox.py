"""The sandboxed process: its limits, its answers, and that nothing of it is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from runner.core.findings import Severity, Trust
from runner.core.security.files.file_bytes import FileBytes, hash_file
from runner.core.security.files.policy import FileLimits, FilePolicy
from runner.scan import sandbox as module
from runner.scan.sandbox import Sandbox
from runner.scan.scan import Scanner, list_folder, list_items
from tests.core.security.planted import Mark, checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no sandbox")
ROOT = Path(__file__).parents[2]
CANARY = "canary-5b1d"
LIMITS = FileLimits()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["RUNNER_TEST_CANARY"] = CANARY
    try:
        with Sandbox() as opened:
            yield opened
    finally:
        del os.environ["RUNNER_TEST_CANARY"]


def examine(sandbox: Sandbox, path: Path, limits: FileLimits = LIMITS):
    with FileBytes.open_copy(path) as data:
        return sandbox.examine(data, path.name, limits)


def pid_of(sandbox: Sandbox) -> int:
    assert sandbox.process is not None
    return sandbox.process.pid


def good(folder: Path) -> Path:
    torch.save({"w": torch.arange(3.0)}, folder / "good.pt")
    return folder / "good.pt"


def test_it_runs_nothing_serves_all_files_and_has_the_promised_limits(sandbox, tmp_path):
    torch.save({"w": Mark(tmp_path / "mark")}, tmp_path / "evil.pt")
    assert examine(sandbox, good(tmp_path)) == ("torch_zip", [])
    process = psutil.Process(pid_of(sandbox))
    _, reasons = examine(sandbox, tmp_path / "evil.pt")
    assert [reason.severity for reason in reasons] == [Severity.REFUSAL]
    assert not (tmp_path / "mark").exists() and pid_of(sandbox) == process.pid
    limits = {"FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": module.MAX_DESCRIPTORS}
    for limit, most in limits.items():
        soft, hard = process.rlimit(getattr(psutil, f"RLIMIT_{limit}"))
        assert soft == hard == most, limit
    space, _ = process.rlimit(psutil.RLIMIT_AS)
    used = process.memory_info().vms
    assert used <= space <= used + LIMITS.memory + (1 << 30)
    assert 0 < process.rlimit(psutil.RLIMIT_CPU)[0] <= LIMITS.cpu_s + 60
    assert os.getsid(process.pid) == process.pid
    assert CANARY not in " ".join(process.environ().values())


def test_a_file_that_takes_too_long_or_kills_it_is_refused_and_so_many_times_at_most(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "MAX_CRASHES", 2)
    slow = tmp_path / "slow.pt"
    torch.save({"n": [[n] for n in range(2_000_000)]}, slow)
    with Sandbox() as sandbox:
        examine(sandbox, good(tmp_path))
        before = pid_of(sandbox)
        # 0.01 s in all: without the seconds that a file is given for its size
        allowed = 0.01 - module.cpu_seconds(FileLimits(cpu_s=0.0), slow.stat().st_size)
        _, reasons = examine(sandbox, slow, FileLimits(cpu_s=allowed))
        assert reasons[0].code == "sandbox.timeout" and not psutil.pid_exists(before)
        assert examine(sandbox, good(tmp_path)) == ("torch_zip", [])  # by a new one
        started = time.monotonic()
        os.kill(pid_of(sandbox), signal.SIGSTOP)  # one that stands still is not waited for
        _, reasons = examine(sandbox, good(tmp_path), FileLimits(cpu_s=0.05))
        assert reasons[0].code == "sandbox.timeout" and "0.5 s" in reasons[0].evidence
        assert time.monotonic() - started < 50
        _, reasons = examine(sandbox, good(tmp_path))
        assert reasons[0].code == "sandbox.given_up" and sandbox.process is None


PARENT = """
import sys
from pathlib import Path
from runner.scan import sandbox
endless = "from runner.core.security.files import parsing; "
endless += "parsing.examine = lambda *_, **__: any(False for _ in iter(int, 1)); sandbox.serve()"
sandbox.SERVER_CODE = sandbox.SERVER_CODE.replace("sandbox.serve()", endless)
opened = sandbox.Sandbox()
opened._start()
print(opened.process.pid, flush=True)
with sandbox.FileBytes.open_copy(Path(sys.argv[1])) as data:
    opened.examine(data, "good.pt", sandbox.FileLimits())
"""


def test_a_busy_one_ends_at_once_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, str(good(tmp_path))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        orphan = psutil.Process(int(one.stdout.readline()))
        started = orphan.cpu_times().user
        while orphan.cpu_times().user < started + 0.5:  # it has begun
            assert one.poll() is None
        one.kill()
    gone, left = psutil.wait_procs([orphan], timeout=15)
    assert gone and not left  # LIMITS.cpu_s would end it later


def test_own_and_pinned_files_need_no_process_foreign_ones_one_for_all_and_none_is_left(tmp_path):
    own, theirs = checkpoint(tmp_path / "outputs/a"), checkpoint(tmp_path / "theirs/a")
    checkpoint(own / "checkpoint")
    (own / "replay.md").write_text("what was found")
    checkpoint(tmp_path / "theirs/b")
    path = good(tmp_path)
    policy = FilePolicy(run_tree=(tmp_path / "outputs",), pinned=(hash_file(path)[0],))
    with pytest.raises(KeyboardInterrupt), Scanner(policy) as scanner:
        found = scanner.scan(list_folder(own))
        assert (found.trust, found.reasons) == (Trust.CHECKED, [])
        assert scanner.scan(list_folder(path)).trust is Trust.PINNED
        assert scanner.sandbox.process is None
        verdicts = [scanner.scan(item).trust for item in list_items(theirs.parent, policy)]
        assert verdicts == [Trust.UNTRUSTED] * 2
        started = pid_of(scanner.sandbox)
        raise KeyboardInterrupt
    assert not psutil.pid_exists(started)


def test_a_file_that_changes_while_it_is_examined_gets_no_verdict(tmp_path, monkeypatch):
    path = good(tmp_path)
    examine_it = Sandbox.examine

    def examine_and_write(self, data, *given):
        with path.open("r+b") as file:
            file.write(b"P")
        return examine_it(self, data, *given)

    monkeypatch.setattr(Sandbox, "examine", examine_and_write)
    with Scanner(FilePolicy()) as scanner:
        assert scanner.scan(list_folder(path)).refusals[0].code == "file.changed"
