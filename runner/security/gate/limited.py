"""What runs in the limited process: it gets bytes, looks at them, and answers in plain text."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from runner.security.config import SecurityLevel
from runner.security.gate import threads
from runner.security.gate.held import mapped, place_of
from runner.security.gate.policy import Bounds, Policy

HEADER = 8  # bytes of a message's length, before it
DESCRIPTORS = 64
MIB = 1 << 20


def main(descriptor: int) -> None:
    """Examine what comes through the socket until it is closed; a descriptor with each request."""
    line = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    import torch

    from runner.security.gate.examine import examine

    torch.set_num_threads(1)  # more would need threads that the limits below forbid
    threads.begin()
    _limit_for_good()
    send(line, {"ready": True})
    while True:
        header, descriptors, _, _ = socket.recv_fds(line, HEADER, 1)
        if not header:
            return
        asked = json.loads(exactly(line, int.from_bytes(header, "big")))
        bounds = Bounds(**asked["bounds"])
        size = asked["size"]
        _limit_for_now(bounds, size)
        data = mapped(descriptors[0], size) if size else b""
        policy = Policy(SecurityLevel(asked["level"]), tuple(asked["may_run"]), bounds=bounds)
        place = place_of(descriptors[0])
        found = examine(memoryview(data), asked["name"], policy, asked["deep"], place=place)
        found.content = None  # nothing that was made of the file leaves this process
        send(line, {"format": found.format, "reasons": [
            [r.code, int(r.severity), r.where, r.evidence, r.way_out] for r in found.reasons
        ]})  # fmt: skip
        del data, found
        os.close(descriptors[0])


def send(line: socket.socket, message: Any) -> None:
    """One message."""
    text = json.dumps(message).encode()
    line.sendall(len(text).to_bytes(HEADER, "big") + text)


def exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes. Raises EOFError where the other end has closed before."""
    found = bytearray()
    while len(found) < count:
        part = line.recv(min(count - len(found), MIB))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _limit_for_good() -> None:
    """No file written, no process or thread begun, few descriptors, no core dumped."""
    import resource  # there is none on Windows

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # the kernel excepts root


def _limit_for_now(bounds: Bounds, size: int) -> None:
    """CPU time and, on Linux, memory, in addition to what is used so far."""
    import resource

    if sys.platform == "linux":  # elsewhere it is not enforced
        more = 3 * size + int(bounds.memory_mb * MIB)  # the bytes themselves are mapped once
        _soft(resource.RLIMIT_AS, _in_use() + more)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + bounds.seconds) + 1)


def _soft(what: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, hard))


def _in_use() -> int:
    """Bytes of address space, of which the limit is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end_with_parent(descriptor: int) -> None:
    """Wait for the other end to close; costs no CPU."""
    watched = select.poll()
    watched.register(descriptor, 0)  # that it has hung up is always told
    watched.poll()
    os.killpg(0, signal.SIGKILL)
