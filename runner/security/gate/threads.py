"""Work that lets go of the interpreter, shared out to threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

THREADS = 3
LARGE = 1 << 20  # bytes that are worth a thread
A = TypeVar("A")
B = TypeVar("B")

_begun: list[ThreadPoolExecutor] = []


def begin() -> None:
    """Begin the threads now; for a process that may begin none later, and is never forked."""
    pool = ThreadPoolExecutor(THREADS)
    together = Barrier(THREADS)  # no thread takes two of these, so each of them is begun
    for waiting in [pool.submit(together.wait) for _ in range(THREADS)]:
        waiting.result()
    _begun.append(pool)


def at_once(work: Callable[[A], B], items: Iterable[A], size: Callable[[A], int]) -> list[B]:
    """What `work` makes of each, in order; the first of its errors is raised.

    Items below `LARGE` bytes are done here meanwhile: handing them over would take longer.
    """
    given = list(items)
    large = [i for i, item in enumerate(given) if size(item) >= LARGE]
    if not large:
        return [work(item) for item in given]
    pool = _begun[0] if _begun else ThreadPoolExecutor(THREADS)
    shared = {i: pool.submit(work, given[i]) for i in large}
    try:
        return [shared[i].result() if i in shared else work(item) for i, item in enumerate(given)]
    finally:
        for waiting in shared.values():
            waiting.cancel()  # where there was an error
        if not _begun:
            pool.shutdown()
