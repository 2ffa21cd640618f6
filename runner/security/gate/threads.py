"""Work that lets go of the interpreter, shared out to threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

THREADS = 3
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


def have_begun() -> bool:
    """Whether this process keeps threads for it."""
    return bool(_begun)


def at_once(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """What `work` makes of each, in order; the first of its errors is raised."""
    if _begun:
        return list(_begun[0].map(work, items))
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))
