"""The most memory held within a stretch of work: stretches may nest, and overlap in threads.

The kernel keeps one high-water mark for the whole process (as CUDA does for a device). It is
read and restarted whenever a stretch begins, and what it said goes to all that are open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runner.device import memory
from runner.device.device import Device

EVERY_S = 0.005  # between two readings, where the mark cannot be restarted

_lock = threading.RLock()
_open: list[Peak] = []


@dataclass(eq=False)
class Peak:
    """The most that was held in a stretch, in bytes; it is whole once the stretch is over."""

    device: Device | None
    process: int = 0
    on_device: int = 0
    process_before: int = 0  # held when it began
    on_device_before: int = 0
    exact: bool = True  # from the kernel's mark, not from samples

    def note(self, process: int) -> None:
        """Take along what a mark, or a sample, says."""
        self.process = max(self.process, process)
        if self.device is not None:
            self.on_device = max(self.on_device, memory.device_mark(self.device))


@contextmanager
def peak(device: Device | None = None) -> Iterator[Peak]:
    """The most memory that the process, and `device`, hold meanwhile; 40 µs in all.

    What other threads of the process hold counts too: the kernel does not tell them apart. Where
    its mark cannot be restarted (not on Linux, or in some sandboxes), a thread reads every 5 ms.
    """
    found = Peak(device)
    with _lock:
        found.exact = restart(device)
        found.process = found.process_before = memory.process_bytes()
        if device is not None:
            found.on_device = found.on_device_before = memory.device_mark(device)
        _open.append(found)
    sampler = None if found.exact else _Sampler(found)
    try:
        yield found
    finally:
        if sampler is not None:
            sampler.stop()
        with _lock:
            _open.remove(found)
            found.note(_mark(found))


def restart(device: Device | None = None) -> bool:
    """Let the marks begin anew, remembering what they said; False where the kernel refuses.

    `memory.peak_process_bytes` and `memory.peak_device_bytes` go on to say the most ever held.
    """
    with _lock:
        for found in _open:
            found.note(_mark(found))
        before = {"": memory.peak_process_bytes()}
        if device is not None:
            before[str(device.torch)] = memory.peak_device_bytes(device)
        exact = memory.reset_peak(device)
        memory.earlier.update(before)
        return exact


def _mark(found: Peak) -> int:
    return memory.process_mark() if found.exact else memory.process_bytes()


class _Sampler:
    """Reads the process's memory again and again until it is stopped."""

    def __init__(self, found: Peak) -> None:
        self.found = found
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._read, name="memory peak", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """No more readings."""
        self.over.set()
        self.thread.join()

    def _read(self) -> None:
        while not self.over.wait(EVERY_S):
            self.found.note(memory.process_bytes())
