"""job=doctor: what this machine has, what each technique would do here, and what is amiss."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runner.device import capabilities, cgroup, memory
from runner.device.config import DeviceConfig, DeviceKind
from runner.device.device import Device, select
from runner.doctor import environment, packages
from runner.doctor.environment import Check, Status, size
from runner.errors import StorageError, UsageError
from runner.record.console import plain_text, print_stdout
from runner.record.storage import replace_text
from runner.record.text import escape_control_chars

if TYPE_CHECKING:
    from runner.config import RunConfig
    from runner.techniques.base import Technique

OUTPUTS = Path("outputs")
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Outlook:
    """What one technique would do on this device."""

    name: str
    requested: bool
    available: bool
    reason: str  # why not


@dataclass(frozen=True)
class Report:
    """What the doctor found; `doctor.json` holds the same."""

    device: dict[str, Any]  # as in the summary
    cpu: dict[str, Any]
    memory: dict[str, int | None]  # bytes
    versions: dict[str, str | None]  # None: not installed
    techniques: list[Outlook]
    checks: list[Check]

    @property
    def status(self) -> Status:
        """The worst of the checks."""
        found = {check.status for check in self.checks}
        return next((s for s in (Status.fail, Status.warn) if s in found), Status.ok)

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        plain = asdict(self)
        for check in plain["checks"]:
            check["status"] = check["status"].value
        return {"status": self.status.value, **plain}


def main(config: RunConfig, folder: Path | None) -> Report:
    """Print the report, and write `doctor.json` where there is a folder."""
    report = examine(config, folder)
    print_stdout(show(report))
    if folder is not None:
        path = folder / "doctor.json"
        try:
            replace_text(path, json.dumps(report.as_dict(), indent=2) + "\n")
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        print_stdout("", f"as JSON: {path}", soft_wrap=True)
    return report


def examine(config: RunConfig, folder: Path | None = None) -> Report:
    """Look at everything, as a run with this config would find it.

    A device that cannot be had is a failed check, and the rest is told for the CPU.
    """
    found: list[Check] = []
    with ExitStack() as scope:
        try:
            device = select(config.device, scope)
        except UsageError as error:  # its message ends with the fix
            found.append(Check("device", Status.fail, str(error)))
            device = select(DeviceConfig(kind=DeviceKind.cpu), scope)
            device = replace(device, reason="what was asked for cannot be had, see the checks")
        found += environment.checks(device, folder or OUTPUTS)
        return Report(
            device=device.describe(),
            cpu={
                "name": capabilities.cpu_name(),
                "flags": sorted(capabilities.cpu_flags() & capabilities.NOTED_FLAGS),
                "kernels": torch.backends.cpu.get_cpu_capability(),
                "quota": cgroup.cpu_quota(),
                "load": os.getloadavg()[0],
            },
            memory={
                "total": capabilities.usable_memory(),
                "available": memory.available_bytes(),
                "shared": memory.shared_memory_bytes(),
                "process": memory.process_bytes(),
            },
            versions={
                "python": platform.python_version(),
                **packages.versions(),
                "cuda": torch.version.cuda,
            },
            techniques=[
                outlook(name, technique, device)
                for name, technique in config.optimization.techniques()
            ],
            checks=found,
        )


def outlook(name: str, technique: Technique, device: Device) -> Outlook:
    """Whether the technique could be applied on this device."""
    reason = technique.unavailable(device)
    return Outlook(name, technique.enabled, reason is None, reason or "")


def show(report: Report) -> RenderableType:
    """The report for a terminal; made for 80 columns, fits fewer."""
    device = report.device
    able = device["capabilities"]
    yes = [name for name, value in able.items() if value is True]
    no = [name for name, value in able.items() if value is False]
    parts: list[RenderableType] = []

    def section(heading: str, rows: Sequence[tuple[str, RenderableType]]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=15, max_width=32, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        for name, value in rows:
            table.add_row(plain_text(name), plain_text(value) if isinstance(value, str) else value)
        parts.extend([Text(heading, style="bold cyan"), Padding(table, (0, 0, 1, 2))])

    section(
        "device",
        [
            ("picked", f"{device['kind']}: {device['name']}"),
            ("why", device["reason"]),
            ("can", ", ".join(yes)),
            ("cannot", ", ".join(no)),
            *(("note", note) for note in able["notes"]),
            ("memory", size(device["memory_bytes"])),
            *((name, str(value)) for name, value in device["settings"].items()),
        ],
    )
    section(
        "machine",
        [
            ("cpu", report.cpu["name"]),
            ("flags", ", ".join(report.cpu["flags"]) or "none that matter"),
            ("torch's kernels", report.cpu["kernels"]),
            ("cores", f"{device['cores']} usable, load {report.cpu['load']:.1f}"),
            *((name, size(count)) for name, count in report.memory.items() if count is not None),
        ],
    )
    section("versions", [(name, found or "not here") for name, found in report.versions.items()])
    section("techniques", [(row.name, _outlook_line(row)) for row in report.techniques])
    section("checks", [(check.name, _check_line(check)) for check in report.checks])
    counts = [sum(c.status is status for c in report.checks) for status in Status]
    parts.append(Text("{} ok, {} to look at, {} failed".format(*counts), style="bold"))
    return Group(*parts)


def _outlook_line(row: Outlook) -> Text:
    asked = "asked for" if row.requested else "not asked for"
    if row.available:
        return Text.assemble(("can be applied", "green"), (f", {asked}", "dim"))
    return Text.assemble(("not here", "yellow"), f": {row.reason}", (f", {asked}", "dim"))


def _check_line(check: Check) -> RenderableType:
    status = check.status.value
    line = Text.assemble((f"{status:4}", STYLES[status]), f"  {escape_control_chars(check.found)}")
    if not check.fix:
        return line
    return Group(
        line, Padding(Text(f"fix: {escape_control_chars(check.fix)}", "italic"), (0, 0, 0, 6))
    )
