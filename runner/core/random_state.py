"""Exclusive use of the process-wide random generators by one thread at a time.

A step seeds torch's generators, a build those of torch, NumPy and Python. If two threads drew from
them, results would depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from runner.core.errors import UsageError

POLL_S = 0.05
_lock = RLock()
_training = False  # whether the thread with the lock trains


@contextmanager
def exclusive_random_state(action: str, trains: bool = False) -> Iterator[None]:
    """Prevent other threads from building, training or evaluating a run while entered.

    Waits for a build or an evaluation; raises UsageError while another thread trains, which may
    take hours. Re-entrant in one thread, as for a hook that evaluates.
    """
    global _training
    while not _lock.acquire(timeout=POLL_S):
        if _training:
            raise UsageError(
                f"{action}: another thread of this process is training, and both would use "
                "the same random state; train one after the other, or in separate processes: "
                "python -m runner, with -m for several runs"
            )
    before, _training = _training, _training or trains
    try:
        yield
    finally:
        _training = before
        _lock.release()
