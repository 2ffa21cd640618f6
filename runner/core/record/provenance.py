"""The origin of a run: package versions, commit and branch of the code, the command.

Git is not executed, since a repository's config can name programs that it runs: the commit is read
from `.git`, and uncommitted changes are not detected.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.core.module_path import __version__, python_command
from runner.core.record.digests import PROVENANCE, DataFiles, digest_modules
from runner.core.record.storage import read_record, replace_text

PACKAGES = "torch numpy hydra-core omegaconf safetensors tensorboard triton".split()
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # sha1 or sha256
REFERENCE = re.compile(r"ref: (refs(/[^./\s][^/\s]*)+)")  # no "..", so it stays within .git
LARGEST_PACK = 2**26  # bytes of packed-refs


@cache
def versions() -> dict[str, str]:
    """Return versions of Python, platform, runner, and installed packages that affect results."""
    installed = {"python": platform.python_version(), "platform": platform.platform()}
    installed["runner"] = __version__
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def command() -> str:
    """Return the shell command that repeats this run; in a sweep, that of this job alone."""
    if (job := _sweep_job()) is not None:
        return shlex.join([*python_command(), *job])
    script = Path(sys.argv[0] if sys.argv else "")
    is_runner = script.name in ("", "runner") or script.parts[-2:] == ("runner", "__main__.py")
    return shlex.join([*python_command(), *sys.argv[1:]] if is_runner else ["python", *sys.argv])


def _sweep_job() -> list[str] | None:
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    config = HydraConfig.get() if HydraConfig.initialized() else None
    if config is None or config.mode is None or config.mode.name != "MULTIRUN":
        return None
    return literal_overrides(config.overrides.task)


def literal_overrides(overrides: Any) -> list[str]:
    """Return Hydra's overrides as text, without resolving: a value may be a secret."""
    from omegaconf import OmegaConf

    texts = OmegaConf.to_container(overrides, resolve=False)
    return [str(text) for text in texts] if isinstance(texts, list) else []


def record(
    folder: Path, data: DataFiles | None = None, packages: Collection[str] = (), **start: Any
) -> dict[str, Any]:
    """Append this session to `provenance.json` and return it; earlier sessions come first.

    It has the digests of the loaded modules of `packages`, the user's, and what it `start`s from.
    """
    session: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "git": git_state(),
        "versions": versions(),
        **start,
    }
    if data is not None and data.paths:
        session["data"] = data.digest
    if modules := digest_modules(packages):
        session["modules"] = modules
    _write_sessions(folder, [*_read_sessions(folder), session])
    return session


def add_loaded_modules(folder: Path, session: dict[str, Any], packages: Collection[str]) -> None:
    """Add the modules that were loaded since `session` was recorded, as the last one."""
    modules = digest_modules(packages, session.get("modules", {}))
    sessions = _read_sessions(folder)
    if modules != session.get("modules", {}) and sessions:
        _write_sessions(folder, [*sessions[:-1], {**session, "modules": modules}])


def _read_sessions(folder: Path) -> list[Any]:
    try:
        return [*json.loads(read_record(folder / PROVENANCE))["sessions"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write_sessions(folder: Path, sessions: list[Any]) -> None:
    replace_text(folder / PROVENANCE, json.dumps({"sessions": sessions}, indent=2) + "\n")


def describe_git(state: dict[str, Any]) -> str:
    """Format commit and branch."""
    return f"{state.get('commit')} on {state.get('branch') or 'a detached HEAD'}"


@cache
def git_state() -> dict[str, Any] | None:
    """Return the git state of the current folder; cached at the first call."""
    return read_git_state(Path.cwd())


def read_git_state(path: Path) -> dict[str, Any] | None:
    """Return `commit` and `branch` of the repository that contains `path`, without running git.

    None outside a repository, or if references are not files (reftable). `branch` is None if HEAD
    is detached, `commit` before the first commit.
    """
    with suppress(OSError, ValueError):
        for root in (path.absolute(), *path.absolute().parents):
            folder = root / ".git"
            if folder.is_file():  # a linked worktree or a submodule
                folder = root / _read_line(folder).removeprefix("gitdir:").strip()
            if (folder / "HEAD").is_file():
                return _read_head(folder)
    return None


def _read_head(folder: Path) -> dict[str, Any] | None:
    head = _read_line(folder / "HEAD")
    if COMMIT.fullmatch(head):
        return {"commit": head, "branch": None}
    reference = REFERENCE.fullmatch(head)
    if reference is None:
        return None
    common_folder = folder
    if (folder / "commondir").is_file():  # a linked worktree shares the references
        common_folder = folder / _read_line(folder / "commondir")
    commit = _read_reference(common_folder, reference[1])
    return {"commit": commit, "branch": reference[1].removeprefix("refs/heads/")}


def _read_reference(common_folder: Path, name: str) -> str | None:
    """Return the commit of a reference, from its own file or packed-refs; None if missing."""
    lines = []
    if (common_folder / name).is_file():
        lines = [_read_line(common_folder / name)]
    elif (common_folder / "packed-refs").is_file():
        packed = read_record(common_folder / "packed-refs", LARGEST_PACK).decode().splitlines()
        lines = [line.removesuffix(f" {name}") for line in packed if line.endswith(f" {name}")]
    return lines[0] if lines and COMMIT.fullmatch(lines[0]) else None


def _read_line(path: Path) -> str:
    return read_record(path, 65536).decode().strip()
