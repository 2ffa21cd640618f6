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

_lock = threading.RLock()
_open: list[MemoryPeak] = []


@dataclass(eq=False)
class MemoryPeak:
    """The most that was held in a stretch, in bytes; it is whole once the stretch is over."""

    device: Device | None
    process: int = 0
    on_device: int = 0
    process_before: int = 0  # held when it began
    on_device_before: int = 0
    exact: bool = True  # by the kernel's mark; else by what is held at both ends

    def read(self) -> None:
        """Take along what the marks say."""
        held = memory.process_mark() if self.exact else memory.process_bytes()
        self.process = max(self.process, held)
        if self.device is not None:
            self.on_device = max(self.on_device, memory.device_mark(self.device))


@contextmanager
def peak(device: Device | None = None) -> Iterator[MemoryPeak]:
    """The most memory that the process, and `device`, hold meanwhile; 40 µs in all.

    What other threads of the process hold counts too: the kernel does not tell them apart. Where
    its mark cannot be restarted (not on Linux, or in some sandboxes) only both ends are read.
    """
    stretch = MemoryPeak(device)
    with _lock:
        stretch.exact = restart(device)
        stretch.process = stretch.process_before = memory.process_bytes()
        if device is not None:
            stretch.on_device = stretch.on_device_before = memory.device_mark(device)
        _open.append(stretch)
    try:
        yield stretch
    finally:
        with _lock:
            _open.remove(stretch)
            stretch.read()


def restart(device: Device | None = None) -> bool:
    """Let the marks begin anew, remembering what they said; False where the kernel refuses.

    `memory.peak_process_bytes` and `memory.peak_device_bytes` still say the most ever held.
    """
    with _lock:
        for stretch in _open:
            stretch.read()
        before = {"": memory.peak_process_bytes()}
        if device is not None:
            before[str(device.torch)] = memory.peak_device_bytes(device)
        exact = memory.reset_peak(device)
        memory.earlier.update(before)
        return exact
