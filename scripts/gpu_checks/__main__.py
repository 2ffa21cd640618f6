"""One check in this process, or the facts of the machine: `python -m gpu_checks NAME`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_checks.base import CheckFailed, CheckSkipped
from gpu_checks.table import CHECKS

FAILED, SKIPPED = 1, 3


def machine_facts() -> dict[str, Any]:
    """Return GPU, driver, torch and Python; `gpu` is None where torch sees no CUDA device."""
    import torch

    facts: dict[str, Any] = {
        "gpu": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": gpu.name,
            "gpus": torch.cuda.device_count(),
            "capability": f"sm_{gpu.major}{gpu.minor}",
            "memory_bytes": gpu.total_memory,
            "driver": _driver_version(),
            "bf16": torch.cuda.is_bf16_supported(),
            "flash_attention": torch.backends.cuda.flash_sdp_enabled(),
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def main() -> int:
    """Make the named check; exit code 0: it holds, 1: it does not, 3: it is skipped."""
    parser = argparse.ArgumentParser(prog="gpu_checks", description=__doc__)
    parser.add_argument("name", choices=["machine", *(check.name for check in CHECKS)])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.name == "machine":
        print(json.dumps(machine_facts()))
        return 0
    check = next(check for check in CHECKS if check.name == arguments.name)
    folder = (arguments.folder or Path("outputs/gpu") / check.name).absolute()
    try:
        check.make(arguments.device, folder)
    except CheckFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except CheckSkipped as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    print(f"ok: {check.claim}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
