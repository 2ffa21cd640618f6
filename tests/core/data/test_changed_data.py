"""A run is resumed and evaluated on the files that it was trained on, or says that they changed."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from runner import build
from runner.core.config.recorded import merge_recorded_overrides
from runner.core.errors import ConfigError
from runner.core.jobs import evaluate
from runner.core.record.digests import DataFiles
from runner.core.schemas.data import Text
from runner.core.train.loop import train
from runner.measure.verify.rerun import _check_data
from tests import runs

QUICK = ("data=tabular", "data.target=y", "model=mlp", "model.width=8", "training.batch_size=16")


def write_table(path: Path, sign: int = 1) -> Path:
    """60 distinct rows; the label is that of the sign of x."""
    rows = [(sign * (i - 30) + 0.25, i * i % 7, "yes" if i > 30 else "no") for i in range(60)]
    path.write_text("x,z,y\n" + "".join(f"{x},{z},{y}\n" for x, z, y in rows))
    return path


def digest_by_hand(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha256(f"{path.name}\0{len(content)}\n".encode() + content).hexdigest()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with t.csv and a run of 4 steps on it."""
    path = write_table(tmp_path / "t.csv")
    runs.trained(*QUICK, f"data.path={path}", "training.steps=4", folder=tmp_path / "run")
    return tmp_path


def resumed(folder: Path, *typed: str, path: str = "t.csv") -> None:
    overrides = [*QUICK, f"data.path={folder / path}", "training.steps=6"]
    more = ("checkpoint.resume=auto", *typed)
    with runs.opened(*overrides, *more, folder=folder / "run") as run:
        train(run)


def test_a_run_is_not_resumed_on_a_replaced_file_and_digests_are_named(trained: Path) -> None:
    then = digest_by_hand(trained / "t.csv")
    now = digest_by_hand(write_table(trained / "t.csv", sign=-1))
    digests = f"sha256 {then[:12]}… then, {now[:12]}… now"
    with pytest.raises(ConfigError, match=f"t.csv has changed.*{digests}.*data.changed=accept"):
        resumed(trained)
    resumed(trained, "data.changed=accept")
    resumed(trained, "training.steps=8")  # on the file that was accepted


def test_a_file_that_only_has_another_time_is_unchanged(trained: Path) -> None:
    os.utime(trained / "t.csv", (1, 1))
    resumed(trained)


def test_another_path_is_accepted_and_named(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(trained / "u.csv", sign=-1)
    resumed(trained, path="u.csv")
    assert f"now on {trained / 'u.csv'}" in caplog.text and str(trained / "t.csv") in caplog.text


def test_a_checkpoint_without_a_digest_is_not_checked_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(tmp_path / "t.csv")
    with monkeypatch.context() as patch:
        patch.setattr(DataFiles, "describe", lambda self: {})
        runs.trained(*QUICK, f"data.path={path}", "training.steps=4", folder=tmp_path / "run")
    write_table(path, sign=-1)
    resumed(tmp_path)
    assert "is not checked for changes: the checkpoint has no digest" in caplog.text


def test_hidden_files_and_outputs_are_no_part_of_a_folders_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    before = DataFiles(Text(path=".")).digest
    for name in (".DS_Store", "outputs/runs/x/run.log", ".cache/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("y")
    assert DataFiles(Text(path=".")).digest == before
    (tmp_path / "a.txt").write_text("z")
    assert DataFiles(Text(path=".")).digest != before


@pytest.mark.parametrize("how", ["evaluate", "verify"])
def test_other_jobs_stop_at_a_replaced_file_unless_it_is_accepted(trained: Path, how: str) -> None:
    write_table(trained / "t.csv", sign=-1)
    overrides = [*QUICK, f"data.path={trained / 't.csv'}", f"checkpoint.resume={trained / 'run'}"]
    refused = pytest.raises(ConfigError, match="has changed since")
    for more, outcome in ((), refused), (("data.changed=accept",), nullcontext()):
        config = runs.config(*overrides, f"job={how}", *more)
        config.verify.what = type(config.verify.what).run
        with outcome:
            if how == "verify":
                _check_data(trained / "run", config)
            else:
                build(config, trained / f"e{len(more)}").__exit__(None, None, None)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("data.ignore=[x]", r"fitted with \[\], got \['x'\]; use data.ignore=\[\]"),
        ("+data.types={x: text}", "data.types.x: .* fitted with {}, got text; leave it out"),
        ("data.task=regression", "data.task: .* use data.task=auto"),
        ("data.target=x", "data.target: .* fitted with y, got x; use data.target=y"),
    ],
)
def test_a_key_by_which_a_table_was_fitted_stays(trained: Path, typed: str, message: str) -> None:
    before = (trained / "run" / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match=message):
        if typed.startswith("data.target"):
            overrides = [*QUICK, f"data.path={trained / 't.csv'}", "job=predict", typed]
            overrides.append(f"checkpoint.resume={trained / 'run'}")
            build(runs.config(*overrides), trained / "p").__exit__(None, None, None)
        resumed(trained, typed)
    assert (trained / "run" / "summary.json").read_bytes() == before
    resumed(trained, "training.steps=8")


def test_verification_accepts_another_path(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also from Python, where no override is typed."""
    copied = write_table(trained / "copy.csv", sign=-1)
    config = runs.config(*QUICK, f"data.path={copied}")
    _check_data(trained / "run", config)
    assert f"t.csv'}}, and is repeated on {{'data.path': '{copied}'}}" in caplog.text


def write_hydra_files(run: Path, start: Path, *overrides: str) -> None:
    """The record of a run that was started in `start`."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / ".hydra").mkdir()
    lines = "".join(f"- '{text}'\n" for text in overrides)
    (run / ".hydra" / "overrides.yaml").write_text(lines)
    (run / ".hydra" / "hydra.yaml").write_text(f"hydra:\n  runtime:\n    cwd: {start}\n")
    (run / ".hydra" / "config.yaml").write_text("data:\n  kind: tabular\n  path: t.csv\n")


def test_a_relative_path_is_that_of_the_folder_in_which_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        write_table(folder / "t.csv")
    write_hydra_files(one / "run", one, "data=tabular", "data.path=t.csv", "data.target=y")
    typed = ["checkpoint.resume=../one/run"]
    for folder, expected in ((two, f"data.path='{one / 't.csv'}'"), (one, "data.path=t.csv")):
        monkeypatch.chdir(folder)
        merged = merge_recorded_overrides(typed, sweeps=False).overrides
        assert [text for text in merged if text.startswith("data.path=")][-1] == expected
    monkeypatch.chdir(two)
    merged = merge_recorded_overrides([*typed, "data.path=t.csv"], sweeps=False).overrides
    assert [text for text in merged if text.startswith("data.path=")] == ["data.path=t.csv"]


@pytest.mark.parametrize(
    ("recorded", "typed", "accepts"),
    [
        ("", ["job=evaluate", "data.path=t.csv"], True),
        ("", ["job=evaluate"], False),
        ("", ["data.path=t.csv"], False),
        ("", ["job=evaluate", "data.path=t.csv", "data.changed=error"], False),
        ("", ["job=predict", "data._target_=my.Data", "+data.path=t.csv"], False),  # no such key
        ("data.changed=accept", [], False),  # it was for once
        ("data.changed=accept", ["data.changed=accept"], True),
    ],
)
def test_a_path_typed_for_an_evaluation_is_accepted_as_it_is_and_a_change_once(
    recorded: str, typed: list[str], accepts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("data=tabular", "data.path=t.csv", *filter(None, [recorded]))
    write_hydra_files(tmp_path / "run", tmp_path, *overrides)
    merged = merge_recorded_overrides(["checkpoint.resume=run", *typed], sweeps=False).overrides
    assert [text for text in merged if text.endswith("data.path=t.csv")]
    assert ("data.changed=accept" in merged) is accepts


def evaluated(folder: Path, path: Path) -> dict[str, str]:
    """The choices of an evaluation of the run on `path`."""
    overrides = [*QUICK, f"data.path={path}", f"checkpoint.resume={folder / 'run'}"]
    config = runs.config(*overrides, "job=evaluate", "data.changed=accept")
    shutil.rmtree(folder / "evaluation", ignore_errors=True)
    summary = evaluate.main(config, folder / "evaluation")
    return {choice.key: f"{choice.value}: {choice.reason}" for choice in summary.choices}


def test_rows_that_were_trained_on_are_counted_when_they_are_evaluated(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """80 % of the 60 distinct rows were trained on: 48."""
    copied = shutil.copy(trained / "t.csv", trained / "copy.csv")
    message = evaluated(trained, Path(copied))["data.trained_rows"]
    assert message.startswith("48: of 60 rows are equal to rows that the model was trained on")
    assert "data.trained_rows: 48 of 60" in caplog.text
    (trained / "t.csv").rename(trained / "moved.csv")  # the data that were trained on are gone
    assert evaluated(trained, trained / "moved.csv")["data.trained_rows"].startswith("48: of 60")
    shutil.copy(trained / "moved.csv", trained / "t.csv")
    lines = (trained / "t.csv").read_text().splitlines()
    others = [f"{100 + i}.5,{i},no" for i in range(40)]
    (trained / "more.csv").write_text("\n".join([*lines, *others]) + "\n")
    assert evaluated(trained, trained / "more.csv")["data.trained_rows"].startswith("48: of 100")
    (trained / "new.csv").write_text("\n".join([lines[0], *others, "3.5,1,yes"]) + "\n")
    assert "data.trained_rows" not in evaluated(trained, trained / "new.csv")
