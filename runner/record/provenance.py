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
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, final

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
LINKED_FOLDERS = ("objects", "refs", "reftable", "info")
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


def read_git_state(path: Path) -> dict[str, Any] | None:
    """`commit`, `branch`, `dirty` and the number of `untracked` files of the repository at `path`.

    None outside a repository and without git. `branch` is None where none is checked out, `commit`
    before the first one. What cannot be known is left out: `dirty` where the files that differ
    belong to filters, and all but the commit where git cannot compare files in time.
    """
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        for root in (path.absolute(), *path.absolute().parents):
            folder = _git_folder(root)
            if (folder / "HEAD").is_file():
                with tempfile.TemporaryDirectory(prefix="runner-git-") as copy:
                    return _ask_about(_Git(root, Path(copy)), folder)
    return None


def describe_git(state: dict[str, Any]) -> str:
    """The commit, the branch and whether files differ, in words."""
    changes = "with changes not committed" if state.get("dirty") else "clean"
    if "dirty" not in state:
        changes = "not known whether files differ from it"
    branch = state.get("branch", "an unknown branch") or "a detached HEAD"
    return f"{state.get('commit')} on {branch}, {changes}"


def _git_folder(root: Path) -> Path:
    """`.git` is a folder, or a file that names one (linked worktrees and submodules)."""
    path = root / ".git"
    if not path.is_file():
        return path
    return root / _read_line(path).removeprefix("gitdir:").strip()


def _read_line(path: Path) -> str:
    return read_record(path, 65536).decode().strip()


@final
class _Git:
    """The user's git, run on the work tree `root` with the git folder `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        inside = root.resolve()
        places = [
            place
            for place in os.get_exec_path()
            if os.path.isabs(place) and not Path(place).resolve().is_relative_to(inside)
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

    def ask(self, *arguments: str, standard_input: str = "") -> str:
        """What git prints, "" if it fails. Raises SubprocessError when the time is up."""
        answer = subprocess.run(  # noqa: S603  # fixed arguments, no shell
            [self.program or "git", *arguments],
            cwd=self.root,
            env=self.environment,
            input=os.fsencode(standard_input),
            capture_output=True,
            timeout=max(0.0, self.deadline - time.monotonic()),
        )
        return os.fsdecode(answer.stdout) if answer.returncode == 0 else ""


def _ask_about(git: _Git, folder: Path) -> dict[str, Any] | None:
    if git.program is None:
        return None
    _fill(git, folder)
    commit = git.ask("rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    try:
        status = git.ask(
            "status",
            "--porcelain=v2",
            "--branch",
            "-z",
            "--untracked-files=normal",
            "--no-renames",
            "--ignore-submodules=all",
        )
        return {"commit": commit, **_parse(status, git)}
    except subprocess.SubprocessError:
        return {"commit": commit}


def _fill(git: _Git, folder: Path) -> None:
    """Put links to the repository's data into the new git folder, and a config."""
    common = folder
    if (folder / "commondir").is_file():  # a linked worktree shares all but HEAD and index
        common = folder / _read_line(folder / "commondir")
    (git.folder / "HEAD").write_text(_read_line(folder / "HEAD") + "\n")
    shared = [common / name for name in LINKED_FOLDERS if (common / name).is_dir()]
    files = [common / "packed-refs", folder / "index", *folder.glob("sharedindex.*")]
    for path in (*shared, *files):
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


def _parse(status: str, git: _Git) -> dict[str, Any]:
    """`branch`, `dirty` and `untracked` of `git status --porcelain=v2 -z`; {} of an empty text."""
    if not status:
        return {}
    lines = status.rstrip("\0").split("\0")
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    branch = heads.get("branch.head")
    changed = [line for line in lines if line[:1] in ("1", "2", "u")]
    state: dict[str, Any] = {"branch": None if branch == "(detached)" else branch}
    if not changed or not _filtered(changed, git):
        state["dirty"] = bool(changed)
    return {**state, "untracked": sum(line.startswith("?") for line in lines)}


def _filtered(changed: list[str], git: _Git) -> bool:
    """Whether all that differ are contents which a filter, that is not run, would change."""
    fields = [line.split(" ", 8) for line in changed]
    if any(line[0] != "1" or line[1] != ".M" or line[4] != line[5] for line in fields):
        return False
    paths = "".join(f"{line[8]}\0" for line in fields)
    answer = git.ask("check-attr", "-z", "--stdin", "filter", standard_input=paths).split("\0")
    return all(value not in ("unspecified", "unset") for value in answer[2::3])
