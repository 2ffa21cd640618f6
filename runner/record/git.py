"""The commit of the code and whether files differ from it, without running the folder's programs.

A repository's config names programs that git starts: filters, a file system monitor, transports
for missing objects, helpers of submodules. Git is asked about a second git folder instead, which
links to the repository's objects, refs and index and has a config of our own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from runner.storage import read_record

TIMEOUT_S = 3.0  # for all questions: a repository on a slow disk must not hold up the run
LINKED_FOLDERS = ("objects", "refs", "reftable", "info")
KEYS = (
    "core.autocrlf", "core.eol", "core.filemode", "core.ignorecase", "core.symlinks",
    "extensions.objectformat", "extensions.refstorage",
)  # fmt: skip
"""The settings that decide how data are read and compared; their values are words, not programs."""


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


def describe(state: dict[str, Any]) -> str:
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
        self.deadline = time.monotonic() + TIMEOUT_S
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.environment |= {
            "PATH": os.pathsep.join(places), "GIT_DIR": str(folder), "GIT_WORK_TREE": str(root),
            "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C",
        }  # fmt: skip

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
            "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal",
            "--no-renames", "--ignore-submodules=all",
        )  # fmt: skip
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
