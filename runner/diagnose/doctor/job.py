"""job=doctor: report this machine's capabilities, applicable techniques, and problems."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from runner.core.device import capabilities, cgroup, memory
from runner.core.device.device import select
from runner.core.errors import NotVerified, UsageError
from runner.core.findings import CheckStatus, DoctorCheck
from runner.core.format import count_noun, size
from runner.core.record.console import facts_table, print_stdout
from runner.core.record.storage import write_json
from runner.core.record.text import escape_control_chars
from runner.core.schemas.device import DeviceConfig, DeviceKind
from runner.diagnose.doctor import environment

if TYPE_CHECKING:
    from runner.core.config.run_config import RunConfig

STYLES = {CheckStatus.ok: "green", CheckStatus.warn: "yellow", CheckStatus.fail: "bold red"}


@dataclass(frozen=True)
class TechniqueAvailability:
    """Whether a technique is available on this device."""

    name: str
    requested: bool
    available: bool
    reason: str  # why it is not available


class ProcessLinks(Protocol):
    """Measurements of the links between a run's processes."""

    def rows(self) -> Iterable[tuple[str, str]]:
        """Return names and texts for the report's table."""

    def checks(self) -> Iterable[DoctorCheck]:
        """Return what was checked of them."""


@dataclass(frozen=True)
class DoctorReport:
    """The doctor's report, as in `doctor.json`."""

    device: dict[str, Any]  # as in a run's summary
    cpu: dict[str, Any]
    memory: dict[str, int | None]  # bytes
    versions: dict[str, str | None]  # None: not installed
    techniques: list[TechniqueAvailability]
    checks: list[DoctorCheck]
    links: ProcessLinks | None = None  # of a distributed run

    @property
    def status(self) -> CheckStatus:
        """The worst status of all checks."""
        return max((check.status for check in self.checks), key=list(CheckStatus).index)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        plain = asdict(self)
        for check in plain["checks"]:
            check["status"] = check["status"].value
        return {"status": self.status.value, **plain}


def main(config: RunConfig, folder: Path | None, links: ProcessLinks | None = None) -> DoctorReport:
    """Print the report; write `doctor.json` if there is a folder.

    Raises NotVerified, exit code 1, if a check has failed.
    """
    report = examine_machine(config, folder, links)
    print_stdout(render_doctor_report(report))
    if folder is not None:
        path = folder / "doctor.json"
        write_json(path, report.as_dict())
        print_stdout("", f"as JSON: {path}", soft_wrap=True)
    if failed := [check for check in report.checks if check.status is CheckStatus.fail]:
        texts = "; ".join(f"{check.name}: {check.finding}" for check in failed)
        raise NotVerified(f"job=doctor: {count_noun(len(failed), 'check')} failed: {texts}")
    return report


def examine_machine(
    config: RunConfig, folder: Path | None = None, links: ProcessLinks | None = None
) -> DoctorReport:
    """Run all checks for a run with this config.

    If its device does not exist, that is a failed check, and the rest is reported for the CPU.
    """
    checks = [] if links is None else list(links.checks())
    with ExitStack() as scope:
        try:
            device = select(config.device, scope)
        except UsageError as error:  # its message ends with the fix
            checks.append(DoctorCheck("device", CheckStatus.fail, str(error)))
            device = select(DeviceConfig(kind=DeviceKind.cpu), scope)
            device = replace(device, reason="the requested one is not available, see the checks")
        checks += environment.run_checks(device, folder or Path("outputs"))
        reasons = [(n, t, t.unavailable(device)) for n, t in config.optimization.techniques()]
        return DoctorReport(
            device=device.describe(),
            cpu={
                "name": capabilities.cpu_name(),
                "flags": sorted(capabilities.cpu_flags() & capabilities.REPORTED_FLAGS),
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
                **environment.versions(),
                "cuda": torch.version.cuda,
            },
            techniques=[
                TechniqueAvailability(name, technique.enabled, reason is None, reason or "")
                for name, technique, reason in reasons
            ],
            checks=checks,
            links=links,
        )


def render_doctor_report(report: DoctorReport) -> RenderableType:
    """Return the report for a terminal of 80 columns."""
    device = {k: v for k, v in report.device.items() if not isinstance(v, dict | list)}
    device_capabilities = report.device["capabilities"]
    device["can"] = ", ".join(name for name, value in device_capabilities.items() if value is True)
    device["notes"] = "; ".join(device_capabilities["notes"])
    device |= report.device["settings"] | {"memory": size(device.pop("memory_bytes"))}
    sizes = {f"memory, {name}": size(n) for name, n in report.memory.items() if n is not None}
    cpu = {"flags": ", ".join(report.cpu["flags"]), "load": f"{report.cpu['load']:.1f}"}
    machine = report.cpu | cpu | sizes
    versions = {name: text or "not installed" for name, text in report.versions.items()}
    counts = [sum(check.status is status for check in report.checks) for status in CheckStatus]
    return Group(
        *_section("device", device.items()),
        *_section("machine", machine.items()),
        *_section("versions", versions.items()),
        *([] if report.links is None else _section("processes", report.links.rows())),
        *_section(
            "techniques", [(row.name, _format_availability(row)) for row in report.techniques]
        ),
        *_section("checks", [(check.name, _format_check(check)) for check in report.checks]),
        Text("ok: {}, warnings: {}, failed: {}".format(*counts), style="bold"),
    )


def _section(heading: str, rows: Iterable[tuple[str, object]]) -> list[RenderableType]:
    table = facts_table((name, value, "") for name, value in rows if value not in (None, ""))
    return [Text(heading, style="bold cyan"), Padding(table, (0, 0, 1, 2))]


def _format_availability(row: TechniqueAvailability) -> Text:
    requested = ("" if row.requested else "not ") + "requested"
    if row.available:
        return Text.assemble(("can be applied", "green"), (f", {requested}", "dim"))
    return Text.assemble(("not available", "yellow"), f": {row.reason}", (f", {requested}", "dim"))


def _format_check(check: DoctorCheck) -> Group:
    status = (f"{check.status.value:4}", STYLES[check.status])
    finding = Text.assemble(status, f"  {escape_control_chars(check.finding)}")
    fix = Text(f"fix: {escape_control_chars(check.fix)}", "italic")
    return Group(finding, *([Padding(fix, (0, 0, 0, 6))] if check.fix else []))
