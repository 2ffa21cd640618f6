"""Errors that mean a lack of memory or a lost device: recognised, translated, suppressed."""

from __future__ import annotations

import ctypes
import errno
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from runner.core.device import memory
from runner.core.errors import OutOfMemory, RunnerError

OOM_MESSAGE = re.compile(
    r"DefaultCPUAllocator|not enough memory|out of memory|std::bad_alloc|"
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|[Cc]annot allocate memory"
)
ONEDNN_MESSAGE = re.compile(r"could not (create|execute) a primitive")
CALL_FAILED = re.compile(r"aoti_torch_(\w+)\(.*API call failed at")
"""The error of compiled C++ code names the call, not the cause."""
ALLOCATIONS = ("empty_strided", "empty_strided_pinned")
"""Calls that fail for lack of memory alone."""
CAPTURE_MESSAGE = re.compile(r"error: operation .*captur")
DEVICE_MESSAGE = re.compile(
    r"(CUDA|HIP)( driver| runtime)? error|Triton Error|CU(BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_|"
    r"cu(DNN|BLAS|SPARSE) error|nvrtc",
    re.IGNORECASE,
)
REQUESTED_SIZE = re.compile(
    r"tried to allocate ([\d.,]+ ?\w+)|you tried to allocate (\d+) bytes", re.IGNORECASE
)
LESS_MEMORY_FIX = (
    "make the model smaller, or keep less for each weight (optimizer=sgd, optimizer.ema=null); if "
    "the weights fit, lower training.micro_batch"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, on the device or the host."""
    if isinstance(error, RunnerError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if CAPTURE_MESSAGE.search(text) and error.__context__ is not None:  # ended by that error
        return is_out_of_memory(error.__context__)
    if ONEDNN_MESSAGE.search(text):  # its message is the same for lack of memory
        return memory.rlimit_bytes_left() is not None
    if call := CALL_FAILED.search(text):
        return call[1] in ALLOCATIONS or OOM_MESSAGE.search(_last_cause()) is not None
    return OOM_MESSAGE.search(text) is not None


def _last_cause() -> str:
    """Return the cause of the last failed call of compiled C++ code, "" before torch 2.13."""
    libraries = Path(torch.__file__).parent / "lib"
    try:
        cause = ctypes.CDLL(str(next(libraries.glob("libtorch_cpu.*")))).torch_exception_get_what
    except (OSError, AttributeError, StopIteration):
        return ""
    cause.restype = ctypes.c_char_p
    return (cause() or b"").decode(errors="replace")


def is_device_error(error: BaseException) -> bool:
    """Whether a device call failed for another reason than memory: later ones may all fail."""
    if not isinstance(error, RuntimeError) or isinstance(error, RunnerError):
        return False
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or bool(DEVICE_MESSAGE.search(str(error)))


@contextmanager
def suppress_device_errors() -> Iterator[None]:
    """Suppress errors of the device, while another error ends the run."""
    try:
        yield
    except RuntimeError as error:
        if not is_device_error(error):
            raise


@contextmanager
def translate_oom(activity: str) -> Iterator[None]:
    """Raise OutOfMemory for a lack of memory inside; `activity` says what the run was doing."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        missing = missing_memory(error)
        release_references(error)
    else:
        return
    raise OutOfMemory(f"out of memory{missing} {activity}; {LESS_MEMORY_FIX}")


def release_references(error: BaseException | None) -> None:
    """Clear the local variables of all frames in the tracebacks of an error and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def missing_memory(error: Exception) -> str:
    """Return the size of the failed allocation as " (… more)", or "" if unknown."""
    match = REQUESTED_SIZE.search(str(error))
    if match is None:
        return ""
    size = match[1]
    if match[2] is not None:
        size = f"{int(match[2]) / 2**20:,.0f} MiB"
    return f" ({size} more)"
