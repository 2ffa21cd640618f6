"""Denormals: numbers below 1e-38 (in fp32), with which a CPU computes far slower than with others.

They come by themselves: a moment of Adam whose gradient stays zero shrinks to one, and an update
full of them took 21 times as long. Whether they count as zero is a switch of each thread, and
`torch.set_flush_denormal` turns that of its caller only (torch 2.13), so OpenMP's threads, in
which operators run, are told as well.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from runner.device.allocator import libraries

OPENMP = ("libgomp", "libiomp", "libomp")
FENV_BYTES = 64  # room for a fenv_t, which takes 32 on x86-64 and 8 on arm
SHARED_OUT = 1 << 20  # elements: enough that an operator is cut into a piece for each thread


def flush(scope: ExitStack) -> str | None:
    """Count denormals as zero in this thread and OpenMP's, or say why that cannot be had."""
    names = [path for path in libraries() if Path(path).name.startswith(OPENMP)]
    loaded = [ctypes.CDLL(path) for path in names]
    teams = [library.GOMP_parallel for library in loaded if hasattr(library, "GOMP_parallel")]
    if not teams:
        return "the threads that operators run in cannot be reached here"
    for kind in (np.float32, np.float64):
        str(np.finfo(kind))  # numpy caches it; under the switch it would warn
    libc = ctypes.CDLL(None)

    def environment() -> ctypes.Array[ctypes.c_char]:
        switches = ctypes.create_string_buffer(FENV_BYTES)
        libc.fegetenv(switches)
        return switches

    def set_threads(switches: ctypes.Array[ctypes.c_char]) -> None:
        function = ctypes.cast(libc.fesetenv, ctypes.c_void_p)
        for run_in_each_thread in teams:
            run_in_each_thread(function, switches, torch.get_num_threads(), 0)
        libc.fesetenv(switches)

    earlier = environment()
    if not torch.set_flush_denormal(True):
        return "this CPU has no such switch"
    scope.callback(set_threads, earlier)
    set_threads(environment())
    return None


def flushed() -> bool:
    """Whether a denormal comes out as zero in every thread that an operator is cut into."""
    smallest = torch.full((SHARED_OUT,), torch.finfo(torch.float32).tiny)
    return not bool((smallest * 0.5).count_nonzero())
