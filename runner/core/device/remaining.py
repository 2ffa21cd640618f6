"""What a process waits for at its exit: threads and processes that user code has started."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from traceback import walk_stack

import psutil

from runner.core.record.text import escape_control_chars, innermost_user_line
from runner.core.standard_streams import write_stream

WAIT_S = 2.0  # before they are named


def report_remaining(code: int) -> None:
    """Name what keeps this process from its exit with `code`, in a thread, if it takes long."""
    own = threading.main_thread(), threading.current_thread()
    threads = [t for t in threading.enumerate() if not t.daemon and t not in own]
    children = [child for child in multiprocessing.active_children() if not child.daemon]
    if threads or children:
        arguments = "done" if code == 0 else "ended", threads, {c.name: c.pid for c in children}
        threading.Thread(target=_report, args=arguments, daemon=True).start()


def _report(end: str, threads: list[threading.Thread], children: dict[str, int | None]) -> None:
    time.sleep(WAIT_S)
    frames, names = sys._current_frames(), list[str]()
    for thread in threads:
        if (frame := frames.get(thread.ident or 0)) is not None and thread.is_alive():
            file, line = innermost_user_line([*walk_stack(frame)][::-1])
            names.append(f"thread {thread.name} ({file}:{line})")
    running = {name: pid for name, pid in children.items() if pid and psutil.pid_exists(pid)}
    names += [f"process {pid} ({name})" for name, pid in running.items()]
    if names:
        text = f"{end}; this process waits for what user code has started: {', '.join(names)}"
        write_stream(sys.stderr, escape_control_chars(text) + "\n")
