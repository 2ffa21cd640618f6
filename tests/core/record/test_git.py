"""The commit of a repository is read, and none of the programs its files name is run."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.core.record.provenance import read_git_state

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
ENVIRONMENT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
KEYS = "filter.x.clean filter.x.process core.fsmonitor core.pager diff.external diff.x.textconv"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout.strip()


def make_repository(folder: Path, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "trunk", *options)
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def set_traps(repository: Path, program: Path) -> None:
    """Have git start a program for all that a repository's files can have it start one for."""
    inner = make_repository(repository / "inner")  # a submodule
    git(repository, "add", "inner")
    for folder in (inner, repository):
        (folder / ".gitattributes").write_text("*.py filter=x diff=x\n")
        git(folder, "add", ".gitattributes")
        git(folder, "commit", "-q", "-m", "attributes")
    for key in KEYS.split():
        git(repository, "config", key, str(program))
    (inner / "more").write_text(f'[filter "x"]\nclean = {program}\n')
    git(inner, "config", "include.path", str(inner / "more"))
    for name in ("post-index-change", "fsmonitor-watchman", "query-watchman"):
        shutil.copy(program, repository / ".git/hooks" / name)
    shutil.copy(program, repository / "git")  # on a path that begins with the current folder
    for folder in (inner, repository):
        os.utime(folder / "model.py", (1e9, 1e9))  # so that git has to read it
    without_a_tree(repository, program)


def without_a_tree(repository: Path, program: Path) -> None:
    """A partial clone that would have to fetch the tree of HEAD."""
    tree = git(repository, "rev-parse", "HEAD^{tree}")
    (repository / ".git/objects" / tree[:2] / tree[2:]).unlink()
    for key, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": f"file://{repository}",
        "remote.origin.promisor": "true",
        "remote.origin.partialclonefilter": "tree:0",
        "remote.origin.uploadpack": str(program),
        "core.sshCommand": str(program),
    }.items():
        git(repository, "config", key, value)


def test_no_program_that_a_repository_names_is_run(tmp_path: Path) -> None:
    """Neither by reading its state nor by a run; `git status` would start it."""
    repository, sprung = make_repository(tmp_path / "code"), tmp_path / "sprung"
    program = tmp_path / "trap.sh"
    program.write_text(f"#!/bin/sh\necho x >> {shlex.quote(str(sprung))}\n")
    program.chmod(0o755)
    set_traps(repository, program)
    sprung.unlink(missing_ok=True)
    expected = {"commit": git(repository, "rev-parse", "HEAD"), "branch": "trunk"}
    assert not sprung.exists()
    short = ["training.steps=1", "debug=none", "checkpoint=off", "hydra.run.dir=outputs/run"]
    command = [sys.executable, "-m", "runner", *short]
    path = {**os.environ, "PATH": f".:{repository}:{os.environ['PATH']}"}
    ended = subprocess.run(command, cwd=repository, env=path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((repository / "outputs/run/summary.json").read_text())
    assert summary["git"] == read_git_state(repository) == expected
    assert not sprung.exists()
    subprocess.run(["git", "status"], cwd=repository, env=ENVIRONMENT, capture_output=True)
    assert sprung.exists()


@pytest.mark.parametrize("hashes", ["sha1", "sha256"])
def test_commit_and_branch_are_those_that_git_says(hashes: str, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    assert read_git_state(tmp_path) == {"commit": None, "branch": "trunk"}  # before the first one
    folder = make_repository(tmp_path / "main", f"--object-format={hashes}")
    (folder / "package").mkdir()
    expected = {"commit": git(folder, "rev-parse", "HEAD"), "branch": "trunk"}
    assert read_git_state(folder / "package") == expected  # from below, too
    git(folder, "gc", "-q")
    assert not (folder / ".git/refs/heads/trunk").exists()  # it is in packed-refs
    assert read_git_state(folder) == expected
    git(folder, "checkout", "-q", "--detach")
    assert read_git_state(folder) == {**expected, "branch": None}
    git(folder, "worktree", "add", "-q", str(tmp_path / "linked"), "trunk")
    assert read_git_state(tmp_path / "linked") == expected


HEADS = ["ref: ../../secret", "ref: refs/heads/../../../secret", "ref: refs/heads/.invalid", "x"]


def test_damage_and_a_pipe_are_no_state_and_nothing_outside_the_repository_is_read(
    tmp_path: Path,
) -> None:
    repository = make_repository(tmp_path / "code")
    (tmp_path / "secret").write_text("0" * 40)
    head, trunk = repository / ".git/HEAD", repository / ".git/refs/heads/trunk"
    for text in HEADS:
        head.write_text(text)
        assert read_git_state(repository) is None
    head.write_text("ref: refs/heads/trunk")
    trunk.write_text("not a commit")
    assert read_git_state(repository) == {"commit": None, "branch": "trunk"}
    for path, state in ((trunk, {"commit": None, "branch": "trunk"}), (head, None)):
        path.unlink()
        os.mkfifo(path)
        assert read_git_state(repository) == state
    (tmp_path / ".git").mkdir()  # not one
    assert read_git_state(tmp_path) is None
