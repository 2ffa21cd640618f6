"""The state of a repository is read, and none of the programs its files name is run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.record import provenance as part
from runner.record.provenance import read_git_state

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, env=ENVIRONMENT, check=True,
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def make_repository(folder: Path, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "trunk", *options)
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def rewrite(file: Path) -> None:
    """The same content with another time, so that git has to read it."""
    file.write_bytes(file.read_bytes())
    os.utime(file, (1e9, 1e9))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "code")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that leaves a file behind, `sprung`, beside it."""
    path = tmp_path / "trap.sh"
    sprung = shlex.quote(str(tmp_path / "sprung"))
    path.write_text(f"#!/bin/sh\necho x >> {sprung}\n")
    path.chmod(0o755)
    return path


def with_filter(repository: Path, *keys: str, trap: Path) -> None:
    (repository / ".gitattributes").write_text("*.py filter=x diff=x\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "-q", "-m", "attributes")
    for key in keys:
        git(repository, "config", key, str(trap))
    rewrite(repository / "model.py")


def without_a_tree(repository: Path, trap: Path) -> None:
    """A partial clone that would have to fetch the tree of HEAD."""
    tree = git(repository, "rev-parse", "HEAD^{tree}")
    (repository / ".git/objects" / tree[:2] / tree[2:]).unlink()
    for key, value in {
        "core.repositoryformatversion": "1", "extensions.partialClone": "origin",
        "remote.origin.url": f"file://{repository}", "remote.origin.promisor": "true",
        "remote.origin.partialclonefilter": "tree:0", "remote.origin.uploadpack": str(trap),
        "core.sshCommand": str(trap),
    }.items():  # fmt: skip
        git(repository, "config", key, value)


def with_hooks(repository: Path, trap: Path) -> None:
    for name in ("post-index-change", "fsmonitor-watchman", "query-watchman"):
        shutil.copy(trap, repository / ".git/hooks" / name)
    rewrite(repository / "model.py")


def with_other_programs(repository: Path, trap: Path) -> None:
    keys = ("core.pager", "pager.status", "diff.external", "diff.x.textconv", "diff.x.command",
            "core.editor", "core.askPass", "credential.helper", "gpg.program",
            "filter.x.smudge")  # fmt: skip
    with_filter(repository, *keys, trap=trap)
    git(repository, "config", "alias.status", f"!{trap}")


def with_include(repository: Path, trap: Path) -> None:
    with_filter(repository, trap=trap)
    (repository / "more").write_text(f'[filter "x"]\nclean = {trap}\n[core]\nfsmonitor = {trap}\n')
    git(repository, "config", "include.path", "../more")


def with_submodule(repository: Path, trap: Path) -> None:
    inner = make_repository(repository / "inner")
    git(repository, "add", "inner")
    git(repository, "commit", "-q", "-m", "submodule")
    with_filter(inner, "filter.x.clean", trap=trap)


def with_programs_in_path(repository: Path, trap: Path) -> None:
    shutil.copy(trap, repository / "git")


def with_a_key_in_a_value(repository: Path, trap: Path) -> None:
    """What is read of the config is one word; a second line of it would be another key."""
    shutil.copy(trap, repository / "2")  # the argument that git gives a monitor first
    git(repository, "config", "core.eol", "lf\ncore.fsmonitor sh")


def with_an_include_in_a_value(repository: Path, trap: Path) -> None:
    (repository / ".git/reftable").write_text(f"[core]\n\tfsmonitor = {trap}\n")
    git(repository, "config", "core.eol", "lf\ninclude.path reftable")


TRAPS: dict[str, Callable[[Path, Path], None]] = {
    "filter.clean": lambda folder, trap: with_filter(folder, "filter.x.clean", trap=trap),
    "filter.process": lambda folder, trap: with_filter(folder, "filter.x.process", trap=trap),
    "partial clone": without_a_tree,
    "fsmonitor": lambda folder, trap: with_filter(folder, "core.fsmonitor", trap=trap),
    "hooks": with_hooks,
    "pager, external diff, textconv": with_other_programs,
    "include.path": with_include,
    "submodule": with_submodule,
    "a git in the folder": with_programs_in_path,
    "a key in a value": with_a_key_in_a_value,
    "an include in a value": with_an_include_in_a_value,
}
NOT_RUN_BY_GIT_STATUS = ("hooks", "pager, external diff, textconv", "a key in a value",
                         "an include in a value")  # fmt: skip


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
    assert state is not None and state["commit"] == commit
    if name not in NOT_RUN_BY_GIT_STATUS:  # the trap is one
        subprocess.run(
            ["git", "status"], env={**ENVIRONMENT, "PATH": os.environ["PATH"]}, timeout=60,
            capture_output=True,
        )  # fmt: skip
        assert (trap.parent / "sprung").exists()


def test_dirty_is_left_out_where_only_a_filter_could_tell(repository: Path, trap: Path) -> None:
    with_filter(repository, trap=trap)
    state = read_git_state(repository)
    assert state is not None and state["dirty"] is False  # the file that was committed
    (repository / "model.py").write_text("width = 2\n")
    state = read_git_state(repository)
    assert state is not None and "dirty" not in state and state["branch"] == "trunk"


def change_nothing(_: Path) -> bool:
    return False


def change_a_file(folder: Path) -> bool:
    (folder / "model.py").write_text("width = 2\n")
    return True


def touch_a_file(folder: Path) -> bool:
    rewrite(folder / "model.py")
    return False


def end_lines_as_windows_does(folder: Path) -> bool:
    git(folder, "config", "core.autocrlf", "true")
    (folder / "model.py").unlink()
    git(folder, "checkout", "-q", "model.py")
    assert (folder / "model.py").read_bytes().endswith(b"\r\n")
    return touch_a_file(folder)


def pack(folder: Path) -> bool:
    git(folder, "gc", "-q")
    assert not (folder / ".git/refs/heads/trunk").exists()
    return change_a_file(folder)


def detach(folder: Path) -> bool:
    git(folder, "checkout", "-q", "--detach")
    return False


CHANGES = [change_nothing, change_a_file, touch_a_file, 
           end_lines_as_windows_does, pack, detach]  # fmt: skip


@pytest.mark.parametrize("change", [*CHANGES, None])
def test_commit_branch_and_changes_are_those_that_git_says(
    change: Callable[[Path], bool] | None, tmp_path: Path
) -> None:
    folder = make_repository(tmp_path / "main")
    if change is None:
        git(folder, "checkout", "-q", "-b", "elsewhere")
        git(folder, "worktree", "add", "-q", str(tmp_path / "linked"), "trunk")
        change, folder = change_a_file, tmp_path / "linked"
    dirty = change(folder)
    (folder / "notes.txt").write_text("new\n")
    (folder / "package").mkdir()
    state = read_git_state(folder / "package")  # from below, too
    assert state == {
        "commit": git(folder, "rev-parse", "HEAD"),
        "branch": None if change is detach else "trunk",
        "dirty": dirty,
        "untracked": 1,
    }
    plain = git(folder, "status", "--porcelain", "--untracked-files=no")
    assert bool(plain) is dirty


def test_before_the_first_commit_there_is_a_branch_alone(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    expected = {"commit": None, "branch": "trunk", "dirty": False, "untracked": 0}
    assert read_git_state(tmp_path) == expected


def test_a_repository_of_sha256_is_read(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "code", "--object-format=sha256")
    state = read_git_state(folder)
    assert state is not None and state["commit"] == git(folder, "rev-parse", "HEAD")
    assert state["dirty"] is False


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_another_users_repository_is_read_as_any(repository: Path) -> None:
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 12345, 12345)
    refused = subprocess.run(
        ["git", "status"], cwd=repository, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert "dubious ownership" in refused.stderr
    state = read_git_state(repository)
    assert state is not None and state["commit"] and state["dirty"] is False


def test_the_environment_leads_to_no_other_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Path
) -> None:
    with_filter(repository, trap=trap)
    monkeypatch.setenv("GIT_DIR", str(make_repository(tmp_path / "other") / ".git"))
    for key, value in {"COUNT": "1", "KEY_0": "filter.x.clean", "VALUE_0": str(trap)}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    state = read_git_state(repository)
    assert state is not None and state["commit"] == git(repository, "rev-parse", "HEAD")
    assert not (tmp_path / "sprung").exists()


def test_outside_a_repository_there_is_no_state(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()  # not one
    assert read_git_state(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe with a name")
@pytest.mark.parametrize("name", ["HEAD", "config", "index"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    name: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / ".git" / name).unlink()
    os.mkfifo(repository / ".git" / name)
    monkeypatch.setattr(part, "GIT_TIMEOUT_S", 1.0)
    before = time.monotonic()
    state = read_git_state(repository)
    assert time.monotonic() - before < 30
    assert state == ({"commit": commit} if name == "index" else None)


def test_a_run_in_such_a_repository_starts_nothing_of_it(
    repository: Path, trap: Path, tmp_path: Path
) -> None:
    with_submodule(repository, trap)
    with_filter(repository, "filter.x.clean", "filter.x.process", "core.fsmonitor", trap=trap)
    without_a_tree(repository, trap)
    (tmp_path / "sprung").unlink(missing_ok=True)
    (repository / "model.py").write_text("width = 2\n")
    ended = subprocess.run(
        [sys.executable, "-m", "runner", "training.steps=1", "debug=none", "checkpoint=off",
         "hydra.run.dir=outputs/run"], cwd=repository, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "sprung").exists()
    summary = json.loads((repository / "outputs/run/summary.json").read_text())
    assert summary["git"] == {"commit": git(repository, "rev-parse", "HEAD")}
