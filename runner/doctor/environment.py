"""Checks of what surrounds a run, each with the fix; one function a check, given what it judges."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet

from runner.device import memory
from runner.device.device import Device
from runner.doctor import packages
from runner.techniques import compiler

MIB, GIB = 1 << 20, 1 << 30
SHARED_MEMORY = 256 * MIB  # a few batches of images from a few workers; containers get 64 MiB
DISK, DISK_LAST = GIB, 100 * MIB
FILES = 1024  # every worker holds pipes, and every batch on its way a file in /dev/shm


class Status(Enum):
    """How a check came out."""

    ok = "ok"
    warn = "warn"  # slower, or will fail in some runs
    fail = "fail"  # a run cannot work


@dataclass(frozen=True)
class Check:
    """One thing looked at, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    fix: str = ""


def checks(device: Device, outputs: Path) -> list[Check]:
    """Everything, for a run on this device that writes under `outputs`."""
    requirements, python_range = packages.declared()
    found = [
        python(sys.version_info[:3], python_range),
        requirements_met(requirements, packages.unmet(requirements)),
        hydra(packages.versions()["hydra-core"]),
        *compilers(device.kind, os.environ),
        inductor_cache(os.environ),
        shared_memory(memory.shared_memory_bytes()),
        available_memory(memory.available_bytes()),
        disk(outputs),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        load(os.getloadavg()[0], os.cpu_count() or 1, os.environ),
    ]
    if device.kind == "cuda":
        found.append(device_memory(*torch.cuda.mem_get_info(device.torch)))
    found += [Check("device", Status.warn, text) for text in device.warnings]
    return found


def python(version: tuple[int, int, int], wanted: str) -> Check:
    """The interpreter is one that the project supports."""
    here = ".".join(map(str, version))
    if SpecifierSet(wanted).contains(here):
        return Check("python", Status.ok, here)
    return Check("python", Status.fail, f"{here} is not in {wanted}", "use Python 3.11 to 3.13")


def requirements_met(requirements: list[str], unmet: list[packages.Unmet]) -> Check:
    """Every package needed is there in a version that fits."""
    if not requirements:
        problem = "the project's requirements are not to be found, so nothing was compared"
        return Check("packages", Status.warn, problem, "pip install the project")
    if not unmet:
        return Check("packages", Status.ok, f"all {len(requirements)} requirements hold")
    problems = [
        f"{one.needed_by} needs {one.requirement}, "
        + ("which is not installed" if one.found is None else f"found {one.found}")
        for one in unmet
    ]
    wanted = " ".join(sorted({f"'{one.requirement}'" for one in unmet}))
    return Check("packages", Status.fail, "; ".join(problems), f"pip install {wanted}")


def hydra(version: str | None) -> Check:
    """Hydra is one whose target checks hold."""
    if version is None or SpecifierSet(">=1.3.7").contains(version):
        return Check("hydra", Status.ok, version or "not installed")
    problem = f"{version} can be made to call a _target_ that it means to block"
    return Check("hydra", Status.fail, problem, "pip install 'hydra-core>=1.3.8,<1.4'")


def compilers(kind: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """What torch.compile needs: a C++ compiler, Python's headers, on a GPU triton."""
    wanted = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(wanted, path=environ.get("PATH", os.defpath))
    if path is None:
        fix = "install g++ (Debian: apt install g++), or name another in CXX; or compile nothing"
        yield Check("C++ compiler", Status.warn, f"no {wanted}, which torch.compile calls", fix)
    else:
        yield _compiler(path)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        yield Check("Python headers", Status.ok, str(header.parent))
    else:
        problem = f"no {header}, which torch.compile includes"
        fix = "install them (Debian: apt install python3-dev)"
        yield Check("Python headers", Status.warn, problem, fix)
    if kind == "cuda":
        if importlib.util.find_spec("triton") is not None:
            yield Check("triton", Status.ok, packages.versions()["triton"] or "installed")
        else:
            problem = "not installed, torch.compile on a GPU needs it"
            yield Check("triton", Status.warn, problem, "install torch's CUDA build, it brings it")


def _compiler(path: str) -> Check:
    try:
        answer = subprocess.run(  # noqa: S603  # the compiler that torch would run, asked its version
            [path, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        fix = "name a compiler that works in CXX"
        return Check("C++ compiler", Status.warn, f"{path} does not run: {error}", fix)
    version = answer.partition("\n")[0].strip()
    return Check("C++ compiler", Status.ok, f"{path}: {version}")


def inductor_cache(environ: Mapping[str, str]) -> Check:
    """Runs can keep compiled code; without that each run compiles again (25 s against 3)."""
    folder = compiler.cache_folder(environ)
    problem = _unwritable(folder)
    if problem is None and folder.exists():
        reason = compiler.cache_problem(folder, environ)
        problem = reason and f"{folder} {reason}"
    if problem is None:
        return Check("compile cache", Status.ok, str(folder))
    fix = "name a folder that can be written in TORCHINDUCTOR_CACHE_DIR"
    return Check("compile cache", Status.warn, problem, fix)


def shared_memory(free: int | None) -> Check:
    """Loader workers have room to hand over their batches."""
    if free is None:
        return Check("shared memory", Status.ok, "no /dev/shm; workers use files instead")
    if free >= SHARED_MEMORY:
        return Check("shared memory", Status.ok, f"{size(free)} free")
    fix = "data.workers=0; in a container --shm-size=1g or --ipc=host"
    return Check("shared memory", Status.warn, f"{size(free)} free in /dev/shm", fix)


def available_memory(free: int) -> Check:
    """There is memory left to work in."""
    status = Status.ok if free >= GIB else Status.warn
    fix = "" if status is Status.ok else "end other programs, or raise the container's limit"
    return Check("memory", status, f"{size(free)} available", fix)


def device_memory(free: int, total: int) -> Check:
    """Nobody else holds the GPU's memory."""
    status = Status.ok if free >= total / 2 else Status.warn
    fix = "" if status is Status.ok else "nvidia-smi shows who holds it; device.index picks another"
    return Check("GPU memory", status, f"{size(free)} of {size(total)} free", fix)


def disk(outputs: Path) -> Check:
    """Checkpoints and logs can be written, and there is room for them."""
    problem = _unwritable(outputs)
    if problem is not None:
        return Check("disk", Status.fail, problem, "set hydra.run.dir, or free the folder")
    free = shutil.disk_usage(_existing(outputs)).free
    text = f"{size(free)} free under {outputs}"
    if free >= DISK:
        return Check("disk", Status.ok, text)
    status = Status.warn if free >= DISK_LAST else Status.fail
    return Check("disk", status, text, "free some, or checkpoint less often")


def open_files(limit: int) -> Check:
    """The process may open enough files for loader workers."""
    if limit == resource.RLIM_INFINITY:
        return Check("open files", Status.ok, "unlimited")
    status = Status.ok if limit >= FILES else Status.warn
    fix = "" if status is Status.ok else "ulimit -n 4096 before the runner starts"
    return Check("open files", status, f"at most {limit}", fix)


def load(average: float, cores: int, environ: Mapping[str, str]) -> Check:
    """The machine is not busy; on a busy one, waiting threads spin: steps took 4 times as long."""
    policy = environ.get("OMP_WAIT_POLICY", "").lower()
    text = f"load {average:.1f} on {cores} cores"
    if average <= cores:
        return Check("load", Status.ok, text)
    if policy == "passive":
        return Check("load", Status.warn, f"{text}; timings will not mean much", "wait, or nice it")
    return Check(
        "load",
        Status.warn,
        f"{text}, and OMP_WAIT_POLICY is {policy or 'not set'}: waiting threads spin",
        "OMP_WAIT_POLICY=passive before the runner starts, or fewer device.threads",
    )


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written there, or None; found by writing, since permissions may lie."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return None
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
