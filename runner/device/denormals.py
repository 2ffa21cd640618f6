"""Denormals: numbers below 1e-38 (in fp32), with which a CPU computes far slower than with others.

They come by themselves. A moment of Adam whose gradient stays zero shrinks until it is one and
then stays one, and an update full of them took 21 times as long as one full of zeros. Whether
they count as zero is a switch in each thread: a new thread takes it from the one that makes it,
one that is there keeps its own. `torch.set_flush_denormal` turns that of its caller and no other
(torch 2.13), so a quarter of a product came out flushed and the rest not. Here OpenMP's threads,
in which operators run, are told as well; a backward pass on a CPU needs no others.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from runner.device.allocator import libraries

OPENMP = ("libgomp", "libiomp", "libomp")
ENVIRONMENT_BYTES = 64  # room for a fenv_t, which takes 32 on x86-64 and 8 on arm
SHARED_OUT = 1 << 20  # elements: enough that an operator is cut into a piece for each thread


def flush(scope: ExitStack) -> str | None:
    """Count denormals as zero in this thread and OpenMP's, or say why that cannot be had."""
    names = [path for path in libraries() if Path(path).name.startswith(OPENMP)]
    loaded = [ctypes.CDLL(path) for path in names]
    teams = [library.GOMP_parallel for library in loaded if _exports(library, "GOMP_parallel")]
    if not teams:
        return "the threads that operators run in cannot be reached here"
    for kind in (np.float32, np.float64):
        str(np.finfo(kind))  # kept by numpy from now on; under the switch it would warn
    libc = ctypes.CDLL(None)
    earlier = _environment(libc)
    if not torch.set_flush_denormal(True):
        return "this CPU has no such switch"

    def put(environment: ctypes.Array[ctypes.c_char]) -> None:
        function = ctypes.cast(libc.fesetenv, ctypes.c_void_p)
        for in_each_thread in teams:
            in_each_thread(function, environment, torch.get_num_threads(), 0)
        libc.fesetenv(environment)

    scope.callback(put, earlier)
    put(_environment(libc))
    return None


def flushed() -> bool:
    """Whether a denormal comes out as zero in every thread that an operator is cut into."""
    smallest = torch.full((SHARED_OUT,), torch.finfo(torch.float32).tiny)
    return not bool((smallest * 0.5).count_nonzero())


def _environment(libc: ctypes.CDLL) -> ctypes.Array[ctypes.c_char]:
    """This thread's floating-point switches, as C keeps them (fenv.h)."""
    environment = ctypes.create_string_buffer(ENVIRONMENT_BYTES)
    libc.fegetenv(environment)
    return environment


def _exports(library: ctypes.CDLL, function: str) -> bool:
    try:
        library[function]
    except AttributeError:
        return False
    return True
