"""What this machine has, for a program."""

from __future__ import annotations

from typing import Any

from runner.composing import compose
from runner.jobs.doctor import examine


def system_info() -> dict[str, Any]:
    """Device, capabilities, CPU, memory, versions, techniques and checks, as `job=doctor` has them.

    All in plain values, so `json.dumps` takes it. It compiles a line of C++ and looks at what is
    installed: about a second.
    """
    return examine(compose()).as_dict()
