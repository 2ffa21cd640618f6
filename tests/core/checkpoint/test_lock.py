import os
import subprocess
import sys

import pytest

from runner.core.checkpoint.lock import is_locked, lock
from runner.core.errors import StorageError, UsageError

pytest.importorskip("fcntl")

OWNER = """
import os, sys
from pathlib import Path
from runner.core.checkpoint.lock import lock
held = lock(Path(sys.argv[1]))
child = os.fork()  # as a loader worker: it lives on when its parent is killed
if not child:
    os.read(0, 1)
    os._exit(0)
print("locked", flush=True)
os.waitpid(child, 0)
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that holds the lock of `tmp_path`, and has a child."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path)
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.stdin.close()  # ends the child, and with it the owner
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path, owner):
    assert is_locked(tmp_path)
    with pytest.raises(UsageError, match=f"in use by process {owner.pid} on "):
        lock(tmp_path)


def test_a_killed_owner_leaves_no_lock_though_its_workers_live_on(tmp_path, owner):
    owner.kill()
    owner.wait()
    assert not is_locked(tmp_path)
    with lock(tmp_path):
        assert (tmp_path / ".lock").read_bytes().split()[0] == str(os.getpid()).encode()


def test_the_same_process_is_refused_too_until_it_releases(tmp_path):
    with lock(tmp_path) as held:
        with pytest.raises(UsageError, match="already in use by this process"):
            lock(tmp_path)
        held.release()
        held.release()
        with lock(tmp_path):
            assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def locked_for_another_process(folder) -> bool:
    """What a forked child sees, which does not own its parent's lock; its exit releases nothing."""
    child = os.fork()
    if not child:
        os._exit(is_locked(folder))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_asking_does_not_lose_the_lock_to_the_kernels_rule_about_closing(tmp_path):
    with lock(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(UsageError):
            lock(tmp_path)
        assert locked_for_another_process(tmp_path)
    assert not locked_for_another_process(tmp_path)


def test_a_forked_child_does_not_own_its_parents_lock(tmp_path):
    with lock(tmp_path) as held:
        child = os.fork()
        if not child:
            status = 1
            try:
                held.release()  # what a worker does at its exit must not free its parent's lock
                with pytest.raises(UsageError, match=f"in use by process {os.getppid()} on "):
                    lock(tmp_path)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert locked_for_another_process(tmp_path)


def test_no_folder_is_not_locked_and_cannot_be(tmp_path):
    assert not is_locked(tmp_path / "none")
    with pytest.raises(StorageError, match="cannot be written to: No such file"):
        lock(tmp_path / "none")
