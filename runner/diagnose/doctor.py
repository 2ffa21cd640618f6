"""job=doctor: report this machine's capabilities, applicable techniques, and problems."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from runner.core.device import capabilities, cgroup, memory
from runner.core.device.device import Device, select
from runner.core.errors import DISTRIBUTION, NotVerified, UsageError
from runner.core.findings import CheckStatus, DoctorCheck
from runner.core.format import count_noun, size
from runner.core.record.console import facts_table, print_stdout
from runner.core.record.storage import write_json
from runner.core.record.text import escape_control_chars
from runner.core.schemas.device import DeviceConfig, DeviceKind
from runner.core.techniques import compiler

if TYPE_CHECKING:
    from runner.core.config.run_config import RunConfig

STYLES = {CheckStatus.ok: "green", CheckStatus.warn: "yellow", CheckStatus.fail: "bold red"}
MIB, GIB = 1 << 20, 1 << 30
MIN_SHARED_MEMORY = 256 * MIB  # a few image batches of a few workers; containers get 64 MiB
MIN_DISK = 100 * MIB
MIN_OPEN_FILES = 1024  # each worker holds pipes, each batch in flight a file in /dev/shm
PACKAGES = (
    "torch hydra-core omegaconf tensorboard numpy safetensors rich psutil matplotlib Pillow "
    "pyarrow triton"
).split()
PROBE_SOURCE = '#include <cmath>\nextern "C" double probe(double x) { return std::sqrt(x); }\n'


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
        checks += run_checks(device, folder or Path("outputs"))
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
            versions=versions(),
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
        *_section("techniques", [(t.name, _format_availability(t)) for t in report.techniques]),
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


# -- checks of the environment, one function each, with the fix ----------------------------------


def run_checks(device: Device, outputs: Path) -> list[DoctorCheck]:
    """Run all checks, for a run on this device that writes below `outputs`."""
    requirements, python_range = read_requirements()
    results = [
        check_python(sys.version_info[:3], python_range),
        check_packages(requirements),
        *check_compilers(device.kind, os.environ),
        check_compile_cache(os.environ),
        *check_limits(device),
        check_disk(outputs),
    ]
    return results + [DoctorCheck("device", CheckStatus.warn, text) for text in device.warnings]


def versions() -> dict[str, str | None]:
    """Return the versions of Python, relevant packages (None: not installed) and CUDA."""
    packages = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **packages, "cuda": torch.version.cuda}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_requirements() -> tuple[list[str], str]:
    """Return the installed project's requirements and Python range; empty for a copied folder."""
    try:
        python_range = metadata.metadata(DISTRIBUTION)["Requires-Python"]
        requirements = metadata.requires(DISTRIBUTION) or []
        return [r for r in requirements if "extra ==" not in r], str(python_range or "")
    except metadata.PackageNotFoundError:
        return [], ""


def check_python(version: tuple[int, int, int], supported: str) -> DoctorCheck:
    """Check that the project supports this Python version."""
    text, fix = ".".join(map(str, version)), f"use a Python {supported}"
    fits = SpecifierSet(supported).contains(text)
    return DoctorCheck.of("python", fits, text, fix, CheckStatus.fail)


def check_packages(requirements: Sequence[str]) -> DoctorCheck:
    """Check that all required packages are installed in matching versions."""
    if not requirements:
        problem = "the project's requirements are unknown, so nothing was compared"
        return DoctorCheck("packages", CheckStatus.warn, problem, "pip install the project")
    unmet = []
    for requirement in map(Requirement, requirements):
        version = _version(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not (version and requirement.specifier.contains(version, prereleases=True)):
            unmet.append((f"{requirement.name}{requirement.specifier}", version or "not installed"))
    text = "; ".join(f"{requirement} is needed, found {version}" for requirement, version in unmet)
    fix = f"pip install {' '.join(repr(requirement) for requirement, _ in unmet)}"
    success = f"all {len(requirements)} requirements hold"
    return DoctorCheck.of("packages", not unmet, text or success, fix, CheckStatus.fail)


def check_compilers(kind: str, environ: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Check torch.compile's needs: a C++ compiler, Python's headers, triton on a GPU."""
    name = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    fix = "install g++ (Debian: apt install g++), or set CXX to a working compiler"
    works, text = _probe_compiler(path) if path else (False, f"no {name}")
    yield DoctorCheck.of("C++ compiler", works, text, fix)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    fix = "install them (Debian: apt install python3-dev); torch.compile includes them"
    yield DoctorCheck.of("Python headers", header.is_file(), str(header.parent), fix)
    if kind == "cuda":
        installed = importlib.util.find_spec("triton") is not None
        fix = "install torch's CUDA build, which includes it; torch.compile on a GPU needs it"
        yield DoctorCheck.of("triton", installed, _version("triton") or "not installed", fix)


def _probe_compiler(path: str) -> tuple[bool, str]:
    """Return whether the compiler makes a library as torch does, and its version."""
    try:
        output = _run_compiler(path, "--version")
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
            source.write_text(PROBE_SOURCE)
            _run_compiler(path, "-shared", "-fPIC", str(source), "-o", str(library))
            if not library.is_file():
                return False, f"{path} compiles nothing: it wrote no library"
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or "").strip().splitlines()
        return False, f"{path} does not compile: {lines[0] if lines else error}"
    return True, f"{path}: {output.splitlines()[0] if output else ''}"


def _run_compiler(path: str, *arguments: str) -> str:
    return subprocess.run(  # noqa: S603  # the compiler that torch would run
        [path, *arguments], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def check_compile_cache(environ: Mapping[str, str]) -> DoctorCheck:
    """Check that compiled code can be cached; else each run compiles again (25 s instead of 3)."""
    folder = compiler.cache_folder(environ)
    problem = compiler.NO_HOME if folder is None else _write_problem(folder)
    if problem is None and folder is not None and folder.is_dir():
        reason = compiler.cache_problem(folder, environ)
        problem = reason and f"{folder} {reason}"
    fix = "set TORCHINDUCTOR_CACHE_DIR to a writable folder"
    return DoctorCheck.of("compile cache", problem is None, problem or str(folder), fix)


def check_limits(device: Device) -> Iterator[DoctorCheck]:
    """Check memory, open files and load."""
    shared, free = memory.shared_memory_bytes(), memory.available_bytes()
    text = "no /dev/shm: workers use files" if shared is None else f"{size(shared)} in /dev/shm"
    fix = "data.workers=0; in a container --shm-size=1g or --ipc=host"
    yield DoctorCheck.of("shared memory", shared is None or shared >= MIN_SHARED_MEMORY, text, fix)
    fix = "end other programs, or raise the container's limit"
    yield DoctorCheck.of("memory", free >= GIB, f"{size(free)} available", fix)
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch)
        text, fix = f"{size(free)} of {size(total)} free", "nvidia-smi shows which processes use it"
        yield DoctorCheck.of("GPU memory", free >= total / 2, text, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= MIN_OPEN_FILES
    text = "unlimited" if files == resource.RLIM_INFINITY else f"at most {files}"
    fix = "ulimit -n 4096 before the runner starts"
    yield DoctorCheck.of("open files", enough, text, fix)
    average, cores = os.getloadavg()[0], os.cpu_count() or 1
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    wait_policy = "" if passive else "OMP_WAIT_POLICY=passive before the runner starts, or "
    fix = f"wait; or {wait_policy}fewer device.threads"
    text = f"load {average:.1f} on {count_noun(cores, 'core')}"
    yield DoctorCheck.of("load", average <= cores, text, fix)


def check_disk(outputs: Path) -> DoctorCheck:
    """Check that outputs can be written, and the free disk space."""
    problem = _write_problem(outputs)
    if problem is not None:
        fix = "set hydra.run.dir, or make the folder writable"
        return DoctorCheck("disk", CheckStatus.fail, problem, fix)
    free = shutil.disk_usage(_nearest_existing(outputs)).free
    failure = CheckStatus.warn if free >= MIN_DISK else CheckStatus.fail
    fix = "free some, or checkpoint less often"
    return DoctorCheck.of("disk", free >= GIB, f"{size(free)} free under {outputs}", fix, failure)


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _write_problem(folder: Path) -> str | None:
    """Return why the folder cannot be written, or None; tests by writing a file."""
    try:
        nearest = _nearest_existing(folder)
        with suppress(FileNotFoundError):
            folder.stat()  # raises for a name that is too long, and for links in a circle
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except (OSError, ValueError) as error:
        return f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}"
