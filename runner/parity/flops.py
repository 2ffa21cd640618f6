"""Count a call's FLOPs with torch's counter; look up or measure a device's peak FLOP/s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from timeit import repeat
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from runner.device.device import Device

T = 1e12
MAX_SIZE, REPEATS, SLOW_S = 2048, 5, 0.05


def call_flops(function: Callable[[], Any], grad: bool = True) -> int:
    """Count FLOPs of matmul, convolution and attention in a call; a multiply-add counts as two.

    Runs eagerly with attention as plain products, since torch's counter misses compiled graphs and
    CPU flash attention.
    """
    with (
        torch.set_grad_enabled(grad),
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel([SDPBackend.MATH]),
        FlopCounterMode(display=False) as counter,
    ):
        function()
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class PeakFlops:
    """A device's peak floating-point operations per second, in matrix products of one dtype."""

    flops_per_second: float
    dtype: str
    source: str


# Dense products (half of the numbers "with sparsity"), accumulated in fp32. The first entry whose
# name is part of the device's name applies, so longer names come first.
DATA_SHEETS: tuple[tuple[str, dict[str, float], str], ...] = (
    ("B200", {"16 bits": 2250 * T, "tf32": 1125 * T, "fp32": 75 * T}, "NVIDIA HGX B200"),
    ("H200 NVL", {"16 bits": 835 * T, "tf32": 417 * T, "fp32": 60 * T}, "NVIDIA H200"),
    ("H200", {"16 bits": 989 * T, "tf32": 494 * T, "fp32": 67 * T}, "NVIDIA H200"),
    ("H100 NVL", {"16 bits": 835 * T, "tf32": 417 * T, "fp32": 60 * T}, "NVIDIA H100"),
    ("H100 PCIe", {"16 bits": 756 * T, "tf32": 378 * T, "fp32": 51 * T}, "NVIDIA H100 PCIe"),
    ("H100", {"16 bits": 989 * T, "tf32": 494 * T, "fp32": 67 * T}, "NVIDIA H100"),
    ("A100", {"16 bits": 312 * T, "tf32": 156 * T, "fp32": 19.5 * T}, "NVIDIA A100"),
    ("A40", {"16 bits": 149.7 * T, "tf32": 74.8 * T, "fp32": 37.4 * T}, "NVIDIA A40"),
    ("A10G", {}, ""),  # a different chip from the A10, without published dense numbers
    ("A10", {"16 bits": 125 * T, "tf32": 62.5 * T, "fp32": 31.2 * T}, "NVIDIA A10"),
    ("L40S", {"16 bits": 362 * T, "tf32": 183 * T, "fp32": 91.6 * T}, "NVIDIA L40S"),
    ("L40", {"16 bits": 181 * T, "tf32": 90.5 * T, "fp32": 90.5 * T}, "NVIDIA L40"),
    ("L4", {"16 bits": 121 * T, "tf32": 60 * T, "fp32": 30.3 * T}, "NVIDIA L4"),
    ("V100-PCIE", {"fp16": 112 * T, "fp32": 14 * T}, "NVIDIA V100"),
    ("V100", {"fp16": 125 * T, "fp32": 15.7 * T}, "NVIDIA V100"),
    ("T4", {"fp16": 65 * T, "fp32": 8.1 * T}, "NVIDIA T4"),
    ("MI300X", {"16 bits": 1307 * T, "fp32": 163.4 * T}, "AMD Instinct MI300X"),
)
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def peak_flops(device: Device, dtype: torch.dtype, measure: bool = True) -> PeakFlops | None:
    """Return the device's peak in products of `dtype`; None if unknown.

    On a CPU it is measured once per dtype and number of threads, in about a second; the result is
    unreliable on a busy machine.
    """
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        return None
    if device.kind == "cpu":
        return _measure_peak(dtype, torch.get_num_threads()) if measure else None
    if name == "fp32" and device.kind == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        name = "tf32"
    for part, rates, sheet in DATA_SHEETS if device.kind == "cuda" else ():
        if part in device.name:
            rate = rates.get(name) or (rates.get("16 bits") if name in ("bf16", "fp16") else None)
            return PeakFlops(rate, name, f"data sheet of {sheet}, dense") if rate else None
    return None


@cache
def _measure_peak(dtype: torch.dtype, threads: int) -> PeakFlops:
    """Measure the fastest of several matrix products, as an upper bound for this CPU.

    Sizes grow until one is slow, since a CPU without 16-bit units would take minutes.
    """
    size, seconds, rate = 128, 0.0, 0.0
    while size < MAX_SIZE and seconds < SLOW_S:
        size *= 2
        a = torch.ones(size, size, dtype=dtype)
        seconds = min(repeat(partial(torch.mm, a, a), number=1, repeat=REPEATS + 1))
        rate = max(rate, 2 * size**3 / seconds)
    source = f"measured here: products of up to {size}×{size}, {threads} threads"
    return PeakFlops(rate, DTYPE_NAMES[dtype], source)
