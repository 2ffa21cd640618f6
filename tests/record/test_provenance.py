from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.record import provenance

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "model.py").write_text("width = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    provenance.git_state.cache_clear()
    return tmp_path


@needs_git
def test_a_clean_repository_gives_its_commit_and_branch(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    expected = {"commit": commit, "branch": "trunk", "dirty": False, "untracked": 0}
    assert provenance.git_state(repository) == expected


@needs_git
def test_changed_and_new_files_are_told_apart(repository: Path) -> None:
    (repository / "notes.txt").write_text("new\n")
    state = provenance.git_state(repository)
    assert state is not None and (state["dirty"], state["untracked"]) == (False, 1)
    (repository / "model.py").write_text("width = 2\n")
    provenance.git_state.cache_clear()
    state = provenance.git_state(repository)
    assert state is not None and (state["dirty"], state["untracked"]) == (True, 1)


@needs_git
def test_a_detached_head_has_no_branch(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    state = provenance.git_state(repository)
    assert state is not None and state["branch"] is None and state["commit"]


@needs_git
def test_a_repositorys_own_settings_start_no_program(repository: Path) -> None:
    trap = repository / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(repository / 'sprung'))}\n")
    trap.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(trap))
    assert provenance.git_state(repository) is not None
    assert not (repository / "sprung").exists()


def test_outside_a_repository_there_is_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    provenance.git_state.cache_clear()
    assert provenance.git_state(tmp_path) is None


def test_without_git_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    provenance.git_state.cache_clear()
    assert provenance.git_state(tmp_path) is None


@pytest.mark.skipif(os.name != "posix", reason="needs a shell script")
def test_a_git_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(provenance, "GIT_PATIENCE_S", 0.1)
    provenance.git_state.cache_clear()
    assert provenance.git_state(tmp_path) is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["/somewhere/runner/__main__.py", "data=digits"],
            ["python", "-m", "runner", "data=digits"],
        ),
        (["/usr/bin/runner", "name=a b"], ["python", "-m", "runner", "name=a b"]),
        (["study.py", "--quick"], ["python", "study.py", "--quick"]),
    ],
)
def test_the_command_runs_again_in_a_shell(
    argv: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert shlex.split(provenance.command()) == expected


def test_the_versions_name_what_a_result_depends_on() -> None:
    found = provenance.versions()
    assert {"python", "platform", "torch", "numpy", "hydra-core", "omegaconf"} <= found.keys()


def test_each_session_of_a_resumed_run_is_kept(tmp_path: Path) -> None:
    provenance.record(tmp_path)
    provenance.record(tmp_path)
    sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert sessions[0].keys() == {"started", "command", "git", "versions"}


def test_a_damaged_record_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text("[1, 2")
    provenance.record(tmp_path)
    assert len(json.loads((tmp_path / "provenance.json").read_text())["sessions"]) == 1
