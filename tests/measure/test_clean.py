"""`python -m runner.report --clean`: what is listed, what is removed, and what stays."""

from pathlib import Path

import pytest

from runner import report
from runner.core.checkpoint.lock import lock
from tests import runs

SMALL = ("training.steps=2", "device=cpu", "monitoring.progress=false")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run and a cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache/runner/compiled").mkdir(parents=True)
    (tmp_path / "cache/runner/compiled/graph").write_bytes(b"x" * 40_000)
    runs.trained("training.steps=2", folder=tmp_path / "outputs/runs/first")
    return tmp_path


def test_runs_and_caches_are_listed_with_their_sizes_and_removed(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (started / "outputs/runs/first/blob").write_bytes(b"x" * 300_000)
    assert report.main(["--clean"]) == 0
    shown = capsys.readouterr().out
    first, cache = (next(x for x in shown.splitlines() if n in x) for n in ("first", "compiled"))
    assert shown.index("first") < shown.index("compiled")  # the largest first
    assert "MiB" in first  # weights, optimizer and their two checkpoints
    assert "cache, made again" in cache
    assert (started / "outputs/runs/first").is_dir()
    assert report.main(["--clean", "outputs/runs/first/checkpoints"]) == 0
    assert (started / "outputs/runs/first/summary.json").is_file()
    assert not (started / "outputs/runs/first/checkpoints").exists()
    assert report.main(["--clean", "outputs/runs/first", "cache/runner/compiled"]) == 0
    assert "2 folders" in capsys.readouterr().out
    assert not (started / "outputs/runs/first").exists()
    assert not (started / "cache/runner/compiled").exists()


@pytest.mark.parametrize("key", ["checkpoint.resume", "model.weights"])
def test_a_run_that_another_one_names_stays_until_both_go(
    started: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    typed = (f"{key}=outputs/runs/first", "hydra.run.dir=outputs/runs/second", "training.steps=3")
    made = runs.command(started, *SMALL[1:], *typed)
    assert made.returncode == 0, made.stderr
    for path in ("outputs/runs/first", "outputs/runs/first/checkpoints", "outputs/runs"):
        code = report.main(["--clean", path])
        assert code == (0 if path == "outputs/runs" else 2), path
        if code:
            assert "is used by outputs/runs/second" in capsys.readouterr().err
            assert (started / "outputs/runs/first/checkpoints").is_dir()
    assert not (started / "outputs/runs").exists()


def _resuming_run(folder: Path, used: str, cwd: Path) -> None:
    """The record of a run, started in `cwd`, that resumed from `used`."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/config.yaml").write_text(f"checkpoint:\n  resume: {used}\n")
    (folder / ".hydra/hydra.yaml").write_text(f"hydra:\n  runtime:\n    cwd: {cwd}\n")


@pytest.mark.parametrize("used", ["outputs/runs/first", "/moved/from/outputs/runs/first"])
def test_a_run_that_another_one_names_stays_after_the_project_was_moved(
    started: Path, capsys: pytest.CaptureFixture[str], used: str
) -> None:
    _resuming_run(started / "outputs/runs/second", used, Path("/moved/from"))
    assert report.main(["--clean", "outputs/runs/first"]) == 2
    assert "is used by outputs/runs/second" in capsys.readouterr().err
    assert (started / "outputs/runs/first/checkpoints").is_dir()


def test_all_users_are_named_at_once_with_theirs(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, used in (("a", "first"), ("b", "first"), ("c", "b")):
        _resuming_run(started / "outputs/runs" / name, f"outputs/runs/{used}", started)
    assert report.main(["--clean"]) == 0
    assert "(used by outputs/runs/a and outputs/runs/b)" in capsys.readouterr().out
    assert report.main(["--clean", "outputs/runs/first"]) == 2
    users = [f"outputs/runs/{name}" for name in "abc"]
    assert f"used by {users[0]}, {users[1]} and {users[2]} (" in capsys.readouterr().err
    assert report.main(["--clean", "outputs/runs/first", *users]) == 0


def test_a_run_of_others_is_listed_as_used_though_it_names_itself_first(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, other in ("ab", "ba"):  # each is the first user of itself if it is read first
        _resuming_run(started / "outputs/runs" / name, f"outputs/runs/{name}", started)
        with (started / "outputs/runs" / name / ".hydra/config.yaml").open("a") as file:
            file.write(f"model:\n  weights: outputs/runs/{other}\n")
    assert report.main(["--clean"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, other in ("ab", "ba"):
        shown = f"outputs/runs/{name}  (used by outputs/runs/{other})"
        assert any(line.endswith(shown) for line in lines)


@pytest.mark.parametrize("text", ["checkpoint: {resume: [", "", "a: &x 1\nb: *x\n"])
def test_nothing_is_removed_while_the_config_of_another_run_cannot_be_read(
    started: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    _resuming_run(started / "outputs/runs/broken", "none", started)
    (started / "outputs/runs/broken/.hydra/config.yaml").write_text(text)
    assert report.main(["--clean", "outputs/runs/first"]) == 2
    assert "outputs/runs/broken/.hydra/config.yaml" in capsys.readouterr().err
    assert (started / "outputs/runs/first").is_dir()
    assert report.main(["--clean", "outputs/runs/first", "outputs/runs/broken"]) == 0
    assert not any((started / "outputs/runs").iterdir())


def test_a_long_path_is_listed_uncut_on_one_line_of_a_narrow_terminal(
    started: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "outputs/runs/" + "/".join(["a-long-name-with-[brackets]" * 3] * 4) + "/2026-01-31 run"
    _resuming_run(started / path, "none", started)
    assert report.main(["--clean"]) == 0
    shown = capsys.readouterr().out
    assert [line[-len(path) :] for line in shown.splitlines() if "long-name" in line] == [path]
    assert "runs below outputs/" in shown


def test_a_path_with_two_dots_is_refused_and_its_content_stays(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--clean", "outputs/runs/first/checkpoints/.."]) == 2
    assert "contains .." in capsys.readouterr().err
    assert (started / "outputs/runs/first/summary.json").is_file()


def test_what_is_elsewhere_running_or_a_link_is_refused_and_nothing_is_removed(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (started / "mine").mkdir()
    (started / "outputs/link").symlink_to(started / "mine")
    running = started / "outputs/runs/running"
    running.mkdir()
    expected = {
        "mine": "is outside",
        "outputs/../mine": "is outside",
        "outputs": "is all outputs",
        "outputs/link": "is a link",
        "outputs/none": "does not exist",
        "outputs/runs/running": "is in use by a running process",
        "outputs/runs/running/debug": "is in use by a running process",
    }
    (running / "debug").mkdir()
    held = lock(running)
    try:
        for path, problem in expected.items():
            assert report.main(["--clean", "outputs/runs/first", path]) == 2, path
            assert problem in capsys.readouterr().err
            assert (started / "outputs/runs/first").is_dir()
    finally:
        held.release()
    assert report.main(["--clean", "--tables", "csv"]) == 2
    assert (started / "mine").is_dir()
