"""What stdout and stderr cannot take, a missing home and foreign modules change no exit code."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.core import module_path
from runner.core.config.composing import compose
from runner.core.data.paths import existing_path
from runner.core.errors import ConfigError
from runner.core.module_path import python_command
from runner.core.record.console import print_stdout
from runner.core.record.storage import user_cache
from tests import runs
from tests.runs import command

SHORT = ("data=digits", "training.steps=2", "device=cpu", "optimization=none")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:surrogateescape"])
def test_help_is_printed_in_any_encoding_with_missing_characters_escaped(encoding: str) -> None:
    done = runs.python("-m", "runner", "--help", PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert r"[group=option \u2026]" in done.stdout


def test_a_finished_run_prints_its_table_on_an_ascii_stdout(tmp_path: Path) -> None:
    for name in ("café", "tea"):
        (tmp_path / "drinks" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "drinks" / name / f"{number}.txt").write_text(f"{name} {number}")
    overrides = ("data=text", "data.path=drinks", "model=classifier", "model.width=8")
    more = ("model.heads=1", "model.depth=1", "training.steps=2", "device=cpu")
    done = command(tmp_path, *overrides, *more, flags=("-u",), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "text-classifier  done" in done.stdout and done.stdout.isascii()
    table = runs.command(tmp_path, "--cfg", "job", "name='café'", PYTHONIOENCODING="ascii")
    assert table.returncode == 0 and r"caf\xe9" in table.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("typed", "streams", "code"),
    [
        (("--help",), {"stdout": "/dev/full"}, 0),
        (("--version",), {"stdout": "/dev/full"}, 0),
        (("no.such=1",), {"stderr": "/dev/full"}, 2),
        (("no.such=1",), {"stdout": "/dev/full", "stderr": "/dev/full"}, 2),
    ],
)
def test_a_full_disk_behind_a_stream_keeps_the_exit_code(
    typed: tuple[str, ...], streams: dict[str, str], code: int
) -> None:
    opened = {name: open(path, "w") for name, path in streams.items()}
    program = [sys.executable, "-u", "-m", "runner", *typed]
    done = subprocess.run(program, cwd=runs.TESTS.parent, **opened)  # type: ignore[call-overload]
    for file in opened.values():
        try:
            file.close()
        except OSError:
            pass
    assert done.returncode == code


def test_a_closed_stderr_keeps_the_exit_code() -> None:
    program = f"exec {sys.executable} -m runner no.such=1 2>&-"
    done = subprocess.run(["sh", "-c", program], cwd=runs.TESTS.parent)
    assert done.returncode == 2


def test_a_programs_own_ascii_stdout_takes_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    print_stdout("café …")
    stream.seek(0)
    assert stream.read() == "caf\\xe9 \\u2026\n"


def test_names_that_are_not_utf8_are_refused_on_the_command_line(tmp_path: Path) -> None:
    done = runs.python("-m", "runner", b"data.path=caf\xe9")
    assert done.returncode == 2
    assert r"data.path=caf\xe9: has bytes that are not UTF-8; rename" in done.stderr


def test_without_a_home_folder_there_is_no_cache_and_a_tilde_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert user_cache({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/runner")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache({}) == Path("/home/me/.cache/runner")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and passwd
    assert user_cache({}) is None
    with pytest.raises(ConfigError, match=r"data.path: the home folder in ~/x.csv is not known"):
        existing_path("~/x.csv")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="unshare is Linux's")
def test_a_user_without_a_home_and_a_passwd_entry_gets_a_report_of_the_doctor(
    tmp_path: Path,
) -> None:
    unshare = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces")
    tmp_path.chmod(0o777)
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(runs.TESTS.parent)}
    program = [*unshare, sys.executable, "-m", "runner", "job=doctor", "device=cpu"]
    folder = f"hydra.run.dir={tmp_path}/doctor"
    done = subprocess.run(
        [*program, folder], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr and done.returncode in (0, 2), done.stderr
    assert "HOME is not set" in " ".join(done.stdout.split())


def test_printed_commands_leave_the_current_folder_off_the_module_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_path, "_SAFE", True)
    assert python_command("runner.report") == ["python", "-P", "-m", "runner.report"]
    (tmp_path / "runner.py").write_text("raise SystemExit('a foreign runner.py')")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise SystemExit('foreign')")
    done = runs.python(*python_command()[1:], *SHORT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "python -P -m runner.report --tensorboard" in done.stdout
    monkeypatch.setattr(module_path, "_SAFE", False)  # found only in the current folder
    assert python_command() == ["python", "-m", "runner"]


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "my" / "experiment"
    folder.mkdir(parents=True)
    content = "# @package _global_\r\ntraining:\r\n  steps: 3\r\n"
    (folder / "win.yaml").write_bytes(content.encode("utf-8-sig"))
    done = command(tmp_path, "-cd", "my", "experiment=win", "--cfg", "job", "-p", "training")
    assert done.returncode == 0, done.stderr
    assert "steps: 3" in done.stdout
    (folder / "win.yaml").write_bytes(content.encode("utf-16"))
    done = command(tmp_path, "-cd", "my", "experiment=win", "--cfg", "job")
    assert done.returncode == 2 and "save it as UTF-8" in done.stderr
    assert compose(["training.steps=3"]).training.steps == 3
