"""The machine that times were taken on: only those of one kind of machine can be compared."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

from runner.device import capabilities
from runner.record import provenance

GIB = 1 << 30
CLASS = (
    "cpu", "cores", "memory_gib", "platform", "device", "device_name", "device_memory_gib",
    "threads",
)  # fmt: skip
"""What has to be alike; the version of torch may differ, as its effect may be the question."""


def machine(summaries: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What is known of this one; of the device, what the first of the runs' summaries says."""
    found: dict[str, Any] = {
        "cpu": capabilities.cpu_name(),
        "cores": capabilities.usable_cores(),
        "memory_gib": round(capabilities.usable_memory() / GIB),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": provenance.versions().get("torch", ""),
    }
    device = next((s["device"] for s in summaries if s.get("device")), None)
    if device is not None:
        found["device"] = device.get("kind")
        found["device_name"] = device.get("name")
        found["device_memory_gib"] = round((device.get("memory_bytes") or 0) / GIB)
        found["threads"] = device.get("threads")
    return found


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Where two machines are not of one kind, in words; what one of them does not say is left."""
    return [
        f"{key.replace('_', ' ')} is {now[key]} and was {then[key]}"
        for key in CLASS
        if key in now and key in then and now[key] != then[key]
    ]
