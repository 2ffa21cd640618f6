"""One thread at a time uses the random state, which is the process's.

A step seeds the generators of torch, a build those of torch, NumPy and Python. Drawn from by two
threads, they give numbers that depend on the timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from weakref import WeakKeyDictionary

from runner.errors import UsageError

POLL_S = 0.05
_lock = RLock()
_training = False  # what the thread that holds the lock is doing
_loops: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # open ones, and who steps them


@contextmanager
def exclusive_random_state(action: str, trains: bool = False) -> Iterator[None]:
    """While entered, no other thread builds, trains or evaluates a run.

    Waits for a build and an evaluation. Raises UsageError while another thread trains, which may
    take hours. The same thread may enter again, such as a hook that evaluates.
    """
    global _training
    while not _lock.acquire(timeout=POLL_S):
        if _training:
            raise UsageError(
                f"{action}: another thread of this process is training, and both would draw from "
                "one random state; do one after the other, or train in a process of its own: "
                "python -m runner, with -m for several runs"
            )
    before, _training = _training, _training or trains
    try:
        yield
    finally:
        _training = before
        _lock.release()


def claim_random_state(loop: object, action: str) -> None:
    """Let this thread step a loop of the user's own, which draws from the process's generators.

    Raises UsageError while another thread steps one that is open.
    """
    thread = get_ident()
    if any(other != thread for other in _loops.values()):
        raise UsageError(
            f"{action}: another thread steps a loop that is open, and both would draw from one "
            "random state; close that one first, or train in a process of its own"
        )
    _loops[loop] = thread


def release_random_state(loop: object) -> None:
    """The loop is closed."""
    _loops.pop(loop, None)
