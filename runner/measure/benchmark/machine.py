"""Identity and load of the machine that is measured on."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

from runner.core.device import capabilities
from runner.core.record import provenance

GIB = 1 << 30
COMPARED = "cpu cores memory_gib platform device device_name device_memory_gib threads".split()
"""Facts that must be equal for two machines to be comparable; the torch version is not one."""


def machine_facts(summaries: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return facts about this machine, with the device of the first summary that names one."""
    facts: dict[str, Any] = {
        "cpu": capabilities.cpu_name(),
        "cores": capabilities.usable_cores(),
        "memory_gib": round(capabilities.usable_memory() / GIB),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": provenance.versions().get("torch", ""),
    }
    device = next((s["device"] for s in summaries if s.get("device")), None)
    if device is not None:
        facts["device"] = device.get("kind")
        facts["device_name"] = device.get("name")
        facts["device_memory_gib"] = round((device.get("memory_bytes") or 0) / GIB)
        facts["threads"] = device.get("threads")
    return facts


def machine_differences(current: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ, as text; keys that only one of them has are skipped."""
    return [
        f"{key.replace('_', ' ')} is {current[key]}, was {baseline[key]}"
        for key in COMPARED
        if key in current and key in baseline and current[key] != baseline[key]
    ]
