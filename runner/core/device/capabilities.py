"""Dtypes that a device supports and is fast at; name, cores and memory of this machine."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runner.core.device import cgroup

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "FEAT_BF16"})  # x86, arm, Apple
REPORTED_FLAGS = BF16_FLAGS | {"avx2", "avx512f", "avx512_fp16", "amx_int8", "sve", "sve2", "i8mm"}
"""Flags that determine the speed of torch's kernels."""


@dataclass(frozen=True)
class Capabilities:
    """Supported dtypes; `…_fast` means worth using, not only possible."""

    bf16: bool
    bf16_fast: bool
    fp16: bool
    fp16_fast: bool
    tf32: bool
    float64: bool
    notes: tuple[str, ...] = ()  # limits worth knowing


def of_cpu(flags: frozenset[str]) -> Capabilities:
    """Return the capabilities of a CPU; fp16 was 20 to 30 times slower, on one with AVX512-FP16."""
    fast = not BF16_FLAGS.isdisjoint(flags)
    notes = () if fast else ("no bf16 instructions: 16-bit autocast is slower than fp32",)
    return Capabilities(True, fast, True, False, False, True, notes)


def of_gpu(major: int, minor: int, nvidia: bool = True) -> Capabilities:
    """Return the capabilities of a GPU; `nvidia` is false under ROCm, which has no TF32.

    Tensor cores, which make fp16 fast, exist since 7.0 (Volta), bf16 and TF32 since 8.0 (Ampere):
    CUDA C++ Programming Guide, table of features per compute capability.
    """
    ampere, volta = major >= 8, major >= 7
    notes = ["fp16 gradients need a loss scale; bf16 does not"]
    if not ampere:
        notes.append(f"compute capability {major}.{minor}: bf16 is emulated, no TF32")
    return Capabilities(ampere, ampere, True, volta, ampere and nvidia, True, tuple(notes))


def of_mps(bf16: bool) -> Capabilities:
    """Return the capabilities of an Apple GPU; bf16 needs macOS 14.0 and is native since the M2."""
    notes = (
        "no float64: numpy's default type has to be cast before it reaches the device",
        "an operator that Metal lacks raises; PYTORCH_ENABLE_MPS_FALLBACK=1 runs it on the CPU",
    )
    return Capabilities(bf16, False, True, True, False, False, notes)


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's instruction-set flags as the system spells them; empty if unknown."""
    if sys.platform == "darwin":
        return frozenset({"FEAT_BF16"} if _sysctl("hw.optional.arm.FEAT_BF16") == "1" else ())
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features")).split())


@cache
def cpu_name() -> str:
    """Return the CPU's model name."""
    name = _sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else ""
    return name or _cpuinfo("model name") or platform.processor() or platform.machine() or "CPU"


def usable_cores() -> int:
    """Return the number of usable cores, by affinity and the container's quota (rounded up)."""
    affinity = allowed_cores()
    cores = os.cpu_count() or 1 if affinity is None else len(affinity)
    quota = cgroup.cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def allowed_cores() -> list[int] | None:
    """Return the cores in this process's affinity; None on systems without affinity."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else None


def usable_memory() -> int:
    """Return the bytes of memory of the machine, or of its container if less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


@cache
def _cpuinfo(field: str) -> str:
    """Return the first processor's value of a field in /proc/cpuinfo, or ""."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")


def _sysctl(name: str) -> str:
    try:
        command = ["/usr/sbin/sysctl", "-n", name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
