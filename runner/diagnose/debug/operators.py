"""Which rows of a profile are operators, their names; a profiler that logs nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._autograd import DeviceType

SMALL_OPERATOR_US = 20.0  # step time per operator; a call takes 5 to 15
LOG_LEVEL_VARIABLE = "KINETO_LOG_LEVEL"
COMPILED_GRAPH = "compiled graph"
# rows of a trace that are calls of the GPU's runtime or driver, or the profiler's own work
RUNTIME_ROW = re.compile(
    r"(cuda|cu|hip|hsa)[A-Z_]\w*$|ProfilerStep|Activity Buffer Request$|Buffer Flush$"
    r"|Command Buffer Full$|Lazy Function Loading$|Runtime Triggered Module Loading$"
    r"|Instrumentation$|Resource$"
)
# rows of `debug.profile.stacks`: Python functions, and calls of modules
PYTHON_ROW = re.compile(r".*\.py\(\d+\): |<.*>|nn\.Module: |\w[\w.]*\(\d+\): ")


def is_operator(event: Any) -> bool:
    """Whether a profiler's row is an operator: no kernel, and no call that launches one or waits.

    The time of a kernel is that of the operator that launched it.
    """
    is_on_host = event.device_type == DeviceType.CPU and not event.is_user_annotation
    is_python = PYTHON_ROW.match(event.key) is not None
    return is_on_host and not is_python and RUNTIME_ROW.match(event.key) is None


def is_kernel(event: Any) -> bool:
    """Whether a profiler's row is work of an accelerator."""
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def operator_name(key: str) -> str:
    """Return an operator's name; that of a compiled graph is shortened."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", key)
    return f"{COMPILED_GRAPH} {call[1][:8]}" if call else key


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep torch.profiler from logging its start and stop to stderr, unless the user set that."""
    was_unset = LOG_LEVEL_VARIABLE not in os.environ
    os.environ.setdefault(LOG_LEVEL_VARIABLE, "6")
    try:
        yield
    finally:
        if was_unset:
            os.environ.pop(LOG_LEVEL_VARIABLE, None)
