"""Waits for processes of ours, the state of a process, and its termination with its parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

STOPPED = "T"
MEMORY_HINT = "; by the kernel, if the memory was used up"  # of a process killed by SIGKILL
ENDED = "Z"  # it has ended, and its parent has not asked for its exit code
PR_SET_PDEATHSIG = 1  # of prctl(2)


class PolledClock:
    """Counts the seconds between the polls of a waiter, at most `most_s` for each poll.

    While the waiter is itself stopped, it does not poll: a group of processes that is stopped as a
    whole exceeds no limit.
    """

    def __init__(self, most_s: float = 1.0) -> None:
        self.seconds, self._most_s, self._last_poll = 0.0, most_s, time.monotonic()
        self.longest_gap_s = 0.0  # between two polls

    def poll(self) -> float:
        """Count the time since the last poll; return all seconds."""
        now = time.monotonic()
        self.seconds += min(now - self._last_poll, self._most_s)
        self.longest_gap_s = max(self.longest_gap_s, now - self._last_poll)
        self._last_poll = now
        return self.seconds


def process_state(pid: int) -> str:
    """Return the letter of a process's state, as ps has it; "" where that is unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def describe_state(pid: int) -> str:
    """Return a remark for the message on a process that does not answer."""
    state = process_state(pid)
    meaning = " = stopped" if state == STOPPED else ""
    return f" (pid {pid}, state {state}{meaning})" if state else f" (pid {pid})"


def describe_exit(code: int | None) -> str:
    """Return how a process ended, by its exit code, which is negative for a signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def die_with_parent(parent: int | None = None) -> None:
    """On Linux, be killed with the thread that started this process; `parent` is its pid."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def kill_group() -> None:
    """Kill this process and its group."""
    os.killpg(0, signal.SIGKILL)


def watch_parent(descriptor: int, end: Callable[[], None] = kill_group) -> None:
    """Call `end` in a thread when the parent's end of a pipe closes, as when the parent dies."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always reported

    def wait() -> None:
        poll.poll()
        end()

    threading.Thread(target=wait, daemon=True).start()
