"""Where a run came from: versions of what it ran on, the state of the code, the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.storage import read_record, replace_text

PACKAGES = (
    "runner", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard", "triton",
)  # fmt: skip
GIT_PATIENCE_S = 3.0  # a repository on a slow disk must not hold up the run


@cache
def versions() -> dict[str, str]:
    """Python, the platform and the packages a result can depend on, those that are there."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def git_state(path: Path | None = None) -> dict[str, Any] | None:
    """Commit, branch and whether files differ from it, of the repository around `path`.

    `path` is the current folder by default. None outside a repository, without git, or when git
    does not answer in time. `branch` is None where none is checked out, `commit` where there is
    none yet. Asked once; what counts is the state at the start.
    """
    git = shutil.which("git")
    if git is None:
        return None
    # the repository's own config could name programs to run; a question must not start them
    command = [git, "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules"]
    try:
        answer = subprocess.run(  # noqa: S603  # fixed arguments, no shell
            command,
            cwd=path,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_PATIENCE_S,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.splitlines()
    head = dict(
        line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and " " in line[2:]
    )
    commit, branch = head.get("branch.oid"), head.get("branch.head")
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": None if branch == "(detached)" else branch,
        "dirty": any(line[0] not in "#?" for line in lines if line),
        "untracked": sum(line.startswith("?") for line in lines),
    }


def command() -> str:
    """The shell command that starts this run again; for a job of a sweep, that job alone."""
    arguments = _job_of_a_sweep()
    if arguments is None:
        arguments = sys.argv[1:]
        script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
        ours = (
            script is None
            or script.name == "runner"
            or script.parts[-2:] == ("runner", "__main__.py")
        )
        if script is not None and not ours:  # used as a library
            return shlex.join(["python", *sys.argv])
    return shlex.join(["python", "-m", "runner", *arguments])


def _job_of_a_sweep() -> list[str] | None:
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    config = HydraConfig.get()
    if config.mode is None or config.mode.name != "MULTIRUN":
        return None
    return as_typed(config.overrides.task)


def as_typed(overrides: Any) -> list[str]:
    """Hydra's list of overrides, in which each is a text that OmegaConf would work out: a secret
    would then stand in it."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(overrides, resolve=False)
    return [str(text) for text in found] if isinstance(found, list) else []


def record(folder: Path) -> dict[str, Any]:
    """Write `provenance.json`; a resumed run's earlier sessions stay in it, oldest first."""
    session = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "git": git_state(),
        "versions": versions(),
    }
    path = folder / "provenance.json"
    try:
        sessions = json.loads(read_record(path))["sessions"]
        sessions = sessions if isinstance(sessions, list) else []
    except (OSError, ValueError, KeyError, TypeError):
        sessions = []
    replace_text(path, json.dumps({"sessions": [*sessions, session]}, indent=2) + "\n")
    return session
