"""The commit of a repository is read, and none of the programs its files name is run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.record.provenance import read_git_state

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
ENVIRONMENT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "code")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that leaves a file behind, `sprung`, beside it."""
    path = tmp_path / "trap.sh"
    path.write_text(f"#!/bin/sh\necho x >> {shlex.quote(str(tmp_path / 'sprung'))}\n")
    path.chmod(0o755)
    return path


def with_filter(repository: Path, *keys: str, trap: Path) -> None:
    (repository / ".gitattributes").write_text("*.py filter=x diff=x\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-q", "-m", "attributes")
    for key in keys:
        git(repository, "config", key, str(trap))
    os.utime(repository / "model.py", (1e9, 1e9))  # so that git has to read it


def without_a_tree(repository: Path, trap: Path) -> None:
    """A partial clone that would have to fetch the tree of HEAD."""
    tree = git(repository, "rev-parse", "HEAD^{tree}")
    (repository / ".git/objects" / tree[:2] / tree[2:]).unlink()
    for key, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": f"file://{repository}",
        "remote.origin.promisor": "true",
        "remote.origin.partialclonefilter": "tree:0",
        "remote.origin.uploadpack": str(trap),
        "core.sshCommand": str(trap),
    }.items():
        git(repository, "config", key, value)


def with_include(repository: Path, trap: Path) -> None:
    with_filter(repository, trap=trap)
    (repository / "more").write_text(f'[filter "x"]\nclean = {trap}\n[core]\nfsmonitor = {trap}\n')
    git(repository, "config", "include.path", "../more")


def with_submodule(repository: Path, trap: Path) -> None:
    inner = make_repository(repository / "inner")
    git(repository, "add", "inner")
    git(repository, "commit", "-q", "-m", "submodule")
    with_filter(inner, "filter.x.clean", trap=trap)


def with_hooks(repository: Path, trap: Path) -> None:
    keys = ("core.pager", "diff.external", "diff.x.textconv", "credential.helper", "gpg.program")
    with_filter(repository, *keys, trap=trap)
    for name in ("post-index-change", "fsmonitor-watchman", "query-watchman"):
        shutil.copy(trap, repository / ".git/hooks" / name)


def with_filters(*keys: str) -> Callable[[Path, Path], None]:
    return lambda folder, trap: with_filter(folder, *keys, trap=trap)


TRAPS: dict[str, Callable[[Path, Path], None]] = {
    "filter.clean": with_filters("filter.x.clean"),
    "filter.process": with_filters("filter.x.process"),
    "fsmonitor": with_filters("core.fsmonitor"),
    "partial clone": without_a_tree,
    "include.path": with_include,
    "submodule": with_submodule,
    "a git in the folder": lambda folder, trap: shutil.copy(trap, folder / "git"),
    "hooks, pager, external diff, textconv": with_hooks,
}


@pytest.mark.parametrize("name", TRAPS)
def test_no_program_that_a_repository_names_is_run(
    name: str, repository: Path, trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TRAPS[name](repository, trap)
    commit = (repository / ".git/refs/heads/trunk").read_text().strip()
    monkeypatch.setenv("PATH", f".:{repository}:{os.environ['PATH']}")
    monkeypatch.chdir(repository)
    state = read_git_state(repository)
    assert not (trap.parent / "sprung").exists()
    assert state == {"commit": commit, "branch": "trunk"}
    if not name.startswith("hooks"):  # the trap is one: `git status` springs it
        path = {**ENVIRONMENT, "PATH": os.environ["PATH"]}
        subprocess.run(["git", "status"], env=path, timeout=60, capture_output=True)
        assert (trap.parent / "sprung").exists()


def detach(folder: Path) -> Path:
    git(folder, "checkout", "-q", "--detach")
    return folder


def pack(folder: Path) -> Path:
    git(folder, "gc", "-q")
    assert not (folder / ".git/refs/heads/trunk").exists()
    return folder


def link_a_worktree(folder: Path) -> Path:
    git(folder, "checkout", "-q", "-b", "elsewhere")
    git(folder, "worktree", "add", "-q", str(folder.parent / "linked"), "trunk")
    return folder.parent / "linked"


@pytest.mark.parametrize("change", [lambda folder: folder, detach, pack, link_a_worktree])
@pytest.mark.parametrize("hashes", ["sha1", "sha256"])
def test_commit_and_branch_are_those_that_git_says(
    change: Callable[[Path], Path], hashes: str, tmp_path: Path
) -> None:
    folder = change(make_repository(tmp_path / "main", f"--object-format={hashes}"))
    (folder / "package").mkdir()
    branch = None if change is detach else "trunk"
    expected = {"commit": git(folder, "rev-parse", "HEAD"), "branch": branch}
    assert read_git_state(folder / "package") == expected  # from below, too


def test_before_the_first_commit_there_is_a_branch_alone(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    assert read_git_state(tmp_path) == {"commit": None, "branch": "trunk"}


HEADS = ["ref: ../../secret", "ref: refs/heads/../../../secret", "ref: refs/heads/.invalid", "x"]


@pytest.mark.parametrize("head", HEADS)
def test_a_head_leads_to_no_file_outside_the_repository(repository: Path, head: str) -> None:
    (repository.parent / "secret").write_text("0" * 40)
    (repository / ".git/HEAD").write_text(head)
    assert read_git_state(repository) is None
    (repository / ".git/HEAD").write_text("ref: refs/heads/trunk")
    (repository / ".git/refs/heads/trunk").write_text("not a commit")
    assert read_git_state(repository) == {"commit": None, "branch": "trunk"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe with a name")
@pytest.mark.parametrize("name", ["HEAD", "refs/heads/trunk", ""])
def test_outside_a_repository_and_with_a_pipe_in_it_there_is_no_state(
    name: str, repository: Path, tmp_path: Path
) -> None:
    if name:
        (repository / ".git" / name).unlink()
        os.mkfifo(repository / ".git" / name)
        state = read_git_state(repository)
        assert state == (None if name == "HEAD" else {"commit": None, "branch": "trunk"})
    else:
        (tmp_path / ".git").mkdir()  # not one
        assert read_git_state(tmp_path) is None


def test_a_run_in_such_a_repository_starts_nothing_of_it(
    repository: Path, trap: Path, tmp_path: Path
) -> None:
    with_submodule(repository, trap)
    with_filter(repository, "filter.x.clean", "filter.x.process", "core.fsmonitor", trap=trap)
    without_a_tree(repository, trap)
    (tmp_path / "sprung").unlink(missing_ok=True)
    short = ["training.steps=1", "debug=none", "checkpoint=off", "hydra.run.dir=outputs/run"]
    command = [sys.executable, "-m", "runner", *short]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "sprung").exists()
    summary = json.loads((repository / "outputs/run/summary.json").read_text())
    assert summary["git"] == {"commit": git(repository, "rev-parse", "HEAD"), "branch": "trunk"}
