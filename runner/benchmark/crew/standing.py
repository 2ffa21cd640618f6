"""An arm's data workers: they stand still while it does, and hold memory of their own.

Else they would fetch ahead, on the cores of the arm whose turn it is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def workers_stopped() -> Iterator[None]:
    """They are stopped meanwhile, wherever they are, and go on from there; some 20 µs each.

    Whoever is stopped can still be killed, and is when this process dies.
    """
    workers = multiprocessing.active_children()
    try:
        for worker in workers:
            _signal(worker, signal.SIGSTOP)
        yield
    finally:
        for worker in workers:
            _signal(worker, signal.SIGCONT)


def worker_bytes() -> int:
    """What they hold now that no other process holds too; some 5 ms each."""
    held = 0
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):
            memory = psutil.Process(worker.pid).memory_full_info()
            held += getattr(memory, "uss", memory.rss)  # not every sandbox tells it
    return held


def _signal(worker: multiprocessing.process.BaseProcess, number: int) -> None:
    # only we collect our children, so until then nobody else has its id
    if worker.pid is not None and worker.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)
