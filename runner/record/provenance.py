"""Where a run came from: package versions, the state of the code, the command.

A repository's config names programs that git starts: filters, a file system monitor, transports
for missing objects, helpers of submodules. None is run: git is asked about a second git folder,
which links to the repository's objects, refs and index and has a config of our own.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.record.storage import read_record, replace_text

PACKAGES = (
    "runner",
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "tensorboard",
    "triton",
)
GIT_TIMEOUT_S = 3.0  # for all questions: a repository on a slow disk must not hold up the run
LINKED = ("objects", "refs", "reftable", "info", "packed-refs")
KEYS = (
    "core.autocrlf",
    "core.eol",
    "core.filemode",
    "core.ignorecase",
    "core.symlinks",
    "extensions.objectformat",
    "extensions.refstorage",
)
"""The settings that decide how data are read and compared; their values are words, not programs."""
STATUS = (
    "status",
    "--porcelain=v2",
    "--branch",
    "-z",
    "--untracked-files=normal",
    "--no-renames",
    "--ignore-submodules=all",
)


@cache
def versions() -> dict[str, str]:
    """Python, the platform and the packages a result can depend on, those that are there."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def command() -> str:
    """The shell command that starts this run again; for a job of a sweep, that job alone."""
    arguments = _job_of_a_sweep()
    if arguments is None:
        script, arguments = Path(sys.argv[0] if sys.argv else ""), sys.argv[1:]
        ours = script.name in ("", "runner") or script.parts[-2:] == ("runner", "__main__.py")
        if not ours:  # used as a library
            return shlex.join(["python", *sys.argv])
    return shlex.join(["python", "-m", "runner", *arguments])


def _job_of_a_sweep() -> list[str] | None:
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    config = HydraConfig.get() if HydraConfig.initialized() else None
    if config is None or config.mode is None or config.mode.name != "MULTIRUN":
        return None
    return literal_overrides(config.overrides.task)


def literal_overrides(overrides: Any) -> list[str]:
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
        sessions = [*json.loads(read_record(path))["sessions"]]
    except (OSError, ValueError, KeyError, TypeError):
        sessions = []
    replace_text(path, json.dumps({"sessions": [*sessions, session]}, indent=2) + "\n")
    return session


def describe_git(state: dict[str, Any]) -> str:
    """The commit, the branch and whether files differ, in words."""
    changes = "with changes not committed" if state.get("dirty") else "clean"
    if "dirty" not in state:
        changes = "not known whether files differ from it"
    branch = state.get("branch", "an unknown branch") or "a detached HEAD"
    return f"{state.get('commit')} on {branch}, {changes}"


@cache
def git_state() -> dict[str, Any] | None:
    """The state of the code in the current folder, as it is when first asked for."""
    return read_git_state(Path.cwd())


def read_git_state(path: Path) -> dict[str, Any] | None:
    """`commit`, `branch`, `dirty` and the number of `untracked` files of the repository at `path`.

    None outside a repository and without git. `branch` is None where none is checked out, `commit`
    before the first one. All but the commit is left out where git cannot compare files in time.
    Filters (Git LFS) are not run: `dirty` is left out where all that differ are files of theirs.
    """
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        for root in (path.absolute(), *path.absolute().parents):
            folder = root / ".git"
            if folder.is_file():  # a linked worktree or a submodule
                folder = root / _read_line(folder).removeprefix("gitdir:").strip()
            if (folder / "HEAD").is_file():
                with tempfile.TemporaryDirectory(prefix="runner-git-") as copy:
                    return _read_state(_Git(root, Path(copy)), folder)
    return None


def _read_line(path: Path) -> str:
    return read_record(path, 65536).decode().strip()


class _Git:
    """The user's git, run on the work tree `root` with the git folder `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        places = [
            place
            for place in os.get_exec_path()
            if os.path.isabs(place) and not Path(place).resolve().is_relative_to(root.resolve())
        ]
        self.program = shutil.which("git", path=os.pathsep.join(places))  # none of the folder's
        self.deadline = time.monotonic() + GIT_TIMEOUT_S
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.environment |= {
            "PATH": os.pathsep.join(places),
            "GIT_DIR": str(folder),
            "GIT_WORK_TREE": str(root),
            "GIT_OPTIONAL_LOCKS": "0",
            "LC_ALL": "C",
        }

    def ask(self, *arguments: str, paths: Sequence[str] = ()) -> str:
        """What git prints, "" if it fails. Raises SubprocessError when the time is up."""
        answer = subprocess.run(  # noqa: S603  # fixed arguments, no shell
            [self.program or "git", *arguments],
            cwd=self.root,
            env=self.environment,
            input=os.fsencode("".join(f"{path}\0" for path in paths)),
            capture_output=True,
            timeout=max(0.0, self.deadline - time.monotonic()),
        )
        return os.fsdecode(answer.stdout) if answer.returncode == 0 else ""


def _read_state(git: _Git, folder: Path) -> dict[str, Any] | None:
    if git.program is None:
        return None
    _link_repository(git, folder)
    commit = git.ask("rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    try:
        lines = git.ask(*STATUS).rstrip("\0").split("\0")
    except subprocess.SubprocessError:
        return {"commit": commit}
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    if not heads:
        return {"commit": commit}
    branch = heads.get("branch.head")
    changed = [line for line in lines if line[:1] in ("1", "2", "u")]
    return {
        "commit": commit,
        "branch": None if branch == "(detached)" else branch,
        **({} if changed and _are_filtered(git, changed) else {"dirty": bool(changed)}),
        "untracked": sum(line.startswith("?") for line in lines),
    }


def _are_filtered(git: _Git, changed: list[str]) -> bool:
    """Whether all differ in contents alone, and a filter, which is not run, would change these."""
    rows = [line.split(" ", 8) for line in changed]
    if any(row[:2] != ["1", ".M"] or row[4] != row[5] for row in rows):  # or other modes
        return False
    paths = [row[8] for row in rows]
    fields = git.ask("check-attr", "-z", "--stdin", "filter", paths=paths).split("\0")
    values = fields[2::3]
    return len(values) == len(paths) and not {"unspecified", "unset"} & set(values)


def _link_repository(git: _Git, folder: Path) -> None:
    """Put links to the repository's data into the new git folder, and a config."""
    common = folder
    if (folder / "commondir").is_file():  # a linked worktree shares all but HEAD and index
        common = folder / _read_line(folder / "commondir")
    (git.folder / "HEAD").write_text(_read_line(folder / "HEAD") + "\n")
    files = [common / name for name in LINKED] + [folder / "index", *folder.glob("sharedindex.*")]
    for path in filter(Path.exists, files):
        (git.folder / path.name).symlink_to(path.absolute())
    wanted = ("-z", "--get-regexp", f"^({'|'.join(KEYS)})$")
    theirs = ("--no-includes", "--file", str((common / "config").absolute()))
    # the user's keys first; those of the repository count after them
    entries = git.ask("config", *wanted) + git.ask("config", *theirs, *wanted)
    lines = ["[core]", "repositoryformatversion = 1", "bare = false"]
    for entry in entries.split("\0"):
        key, _, value = entry.partition("\n")
        # one word only: a value may have line breaks, and the next line would be another key
        if key in KEYS and re.fullmatch(r"\w+", value):
            section, name = key.split(".")
            lines += [f"[{section}]", f"{name} = {value}"]
    (git.folder / "config").write_text("\n".join(lines) + "\n")
    git.environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
