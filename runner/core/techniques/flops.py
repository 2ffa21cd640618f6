"""Look up or measure a device's peak FLOP/s."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, partial
from timeit import repeat

import torch

from runner.core.device import numerics
from runner.core.device.device import Device
from runner.core.format import count_noun

T = 1e12
MAX_SIZE, REPEATS, SLOW_S = 2048, 5, 0.05


@dataclass(frozen=True)
class PeakFlops:
    """A device's peak floating-point operations per second, in matrix products of one dtype."""

    flops_per_second: float
    dtype: str
    source: str


@dataclass(frozen=True)
class DataSheet:
    """Peak FLOP/s by dtype, in dense products (half of "with sparsity") accumulated in fp32."""

    names: str  # a regular expression for the whole name of the device, without its brand
    rates: dict[str, float]
    source: str


def _rates(half: float, tf32: float, fp32: float) -> dict[str, float]:
    rates = {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32}
    return {name: rate * T for name, rate in rates.items()}


DATA_SHEETS = (
    DataSheet("GB200", _rates(2500, 1250, 80), "NVIDIA GB200 NVL72"),
    DataSheet("B200", _rates(2250, 1125, 75), "NVIDIA HGX B200"),
    DataSheet("GH200 (480GB|144G HBM3e)", _rates(989, 494, 67), "NVIDIA GH200"),
    DataSheet("H200 NVL", _rates(835, 417, 60), "NVIDIA H200"),
    DataSheet("H200", _rates(989, 494, 67), "NVIDIA H200"),
    DataSheet("H100 NVL", _rates(835, 417, 60), "NVIDIA H100"),
    DataSheet("H100 PCIe", _rates(756, 378, 51), "NVIDIA H100 PCIe"),
    DataSheet("H100 80GB HBM3", _rates(989, 494, 67), "NVIDIA H100"),
    DataSheet(
        "A100-(SXM4-[48]0GB|PCIE-40GB)|A100 80GB PCIe", _rates(312, 156, 19.5), "NVIDIA A100"
    ),
    DataSheet("A40", _rates(149.7, 74.8, 37.4), "NVIDIA A40"),
    DataSheet("A10", _rates(125, 62.5, 31.2), "NVIDIA A10"),
    DataSheet("L40S", _rates(362, 183, 91.6), "NVIDIA L40S"),
    DataSheet("L40", _rates(181, 90.5, 90.5), "NVIDIA L40"),
    DataSheet("L4", _rates(121, 60, 30.3), "NVIDIA L4"),
    DataSheet("V100-PCIE-(16|32)GB", {"fp16": 112 * T, "fp32": 14 * T}, "NVIDIA V100"),
    DataSheet("V100-SXM[23]-(16|32)GB", {"fp16": 125 * T, "fp32": 15.7 * T}, "NVIDIA V100"),
    DataSheet("T4", {"fp16": 65 * T, "fp32": 8.1 * T}, "NVIDIA T4"),
    DataSheet(
        "MI300X", {"bf16": 1307 * T, "fp16": 1307 * T, "fp32": 163.4 * T}, "AMD Instinct MI300X"
    ),
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
    if device.kind != "cuda" or (sheet := data_sheet(device.name)) is None:
        return None
    precision = numerics.read_fp32_precision()
    uses_tf32 = any(precision[switch] == "tf32" for switch in numerics.GPU_SWITCHES)
    if name == "fp32" and uses_tf32 and "tf32" in sheet.rates:
        name = "tf32"
    rate = sheet.rates.get(name)
    return PeakFlops(rate, name, f"data sheet of {sheet.source}, dense") if rate else None


def data_sheet(name: str) -> DataSheet | None:
    """Return the data sheet of a device; None for a part (MIG, vGPU) or a mobile variant."""
    name = re.sub(r"^(NVIDIA|Tesla|AMD Instinct) ", "", name)
    return next((sheet for sheet in DATA_SHEETS if re.fullmatch(sheet.names, name)), None)


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
    source = f"measured here: products of up to {size}×{size}, {count_noun(threads, 'thread')}"
    return PeakFlops(rate, DTYPE_NAMES[dtype], source)
