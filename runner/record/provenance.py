"""Where a run came from: versions of what it ran on, the state of the code, the command."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.record.git import read_git_state
from runner.storage import read_record, replace_text

PACKAGES = (
    "runner", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tensorboard", "triton",
)  # fmt: skip


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
    """The state of the code in `path` or the current folder, as it is when first asked for."""
    return read_git_state(path or Path.cwd())


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
