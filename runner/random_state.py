"""Exclusive use of the process-wide random state by one thread at a time.

A step seeds the generators of torch, a build those of torch, NumPy and Python. If two threads draw
from them, results depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from weakref import WeakKeyDictionary

from runner.errors import UsageError

POLL_S = 0.05
_lock = RLock()
_training = False  # whether the thread that holds the lock trains
_loops: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # open loop -> thread that steps it


@contextmanager
def exclusive_random_state(action: str, trains: bool = False) -> Iterator[None]:
    """Keep other threads from building, training or evaluating a run while entered.

    Waits while another thread builds or evaluates; raises UsageError while one trains, which may
    take hours. The same thread may enter again, such as in a hook that evaluates.
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
    """Register a user's loop, which uses the process's generators, for this thread.

    Raises UsageError while another thread has an open loop.
    """
    thread = get_ident()
    if any(other != thread for other in _loops.values()):
        raise UsageError(
            f"{action}: another thread steps a loop that is open, and both would draw from one "
            "random state; close that one first, or train in a process of its own"
        )
    _loops[loop] = thread


def release_random_state(loop: object) -> None:
    """Unregister a closed loop."""
    _loops.pop(loop, None)
