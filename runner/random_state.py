"""One thread at a time uses the random state, which is the process's.

A step seeds the generators of torch, a build those of torch, NumPy and Python. Drawn from by two
threads, they give numbers that depend on the timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from runner.errors import UsageError

POLL_S = 0.05
_lock = RLock()
_training = False  # what the thread that holds the lock is doing


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
