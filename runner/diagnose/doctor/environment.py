"""Checks of a run's environment, one function each, with the fix."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from runner.core.device import memory
from runner.core.device.device import Device
from runner.core.errors import DISTRIBUTION
from runner.core.findings import CheckStatus, DoctorCheck
from runner.core.format import count_noun, size
from runner.core.techniques import compiler

MIB, GIB = 1 << 20, 1 << 30
MIN_SHARED_MEMORY = 256 * MIB  # a few image batches of a few workers; containers get 64 MiB
MIN_DISK = 100 * MIB
MIN_OPEN_FILES = 1024  # each worker holds pipes, each batch in flight a file in /dev/shm
PACKAGES = (
    "torch hydra-core omegaconf tensorboard numpy safetensors rich psutil matplotlib Pillow "
    "pyarrow triton"
).split()


PROBE_SOURCE = '#include <cmath>\nextern "C" double probe(double x) { return std::sqrt(x); }\n'


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
    """Return the versions of relevant packages; None if not installed."""
    return {name: _version(name) for name in PACKAGES}


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
    yield DoctorCheck.of(
        "C++ compiler", *_probe_compiler(path) if path else (False, f"no {name}"), fix
    )
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
    yield DoctorCheck.of(
        "load", average <= cores, f"load {average:.1f} on {count_noun(cores, 'core')}", fix
    )


def check_disk(outputs: Path) -> DoctorCheck:
    """Check that outputs can be written, and the free disk space."""
    problem = _write_problem(outputs)
    if problem is not None:
        return DoctorCheck(
            "disk", CheckStatus.fail, problem, "set hydra.run.dir, or make the folder writable"
        )
    free = shutil.disk_usage(_nearest_existing(outputs)).free
    failure = CheckStatus.warn if free >= MIN_DISK else CheckStatus.fail
    fix = "free some, or checkpoint less often"
    return DoctorCheck.of("disk", free >= GIB, f"{size(free)} free under {outputs}", fix, failure)


def _nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
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
