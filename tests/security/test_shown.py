"""What the environment holds is in no name, no refusal and no config that is shown."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.cli.arguments import read_arguments
from runner.cli.launch import launch
from runner.cli.preflight import check
from runner.errors import ConfigError, SecurityError
from runner.training.summary import Summary

LEAVE = "security.environment=[MY_TOKEN]"


@pytest.fixture(autouse=True)
def variable(nothing_remembered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one."""
    monkeypatch.setenv("SHORT", "abc")


@pytest.mark.parametrize(
    ("key", "typed_in"),
    [
        ("hydra.output_subdir", ["hydra.output_subdir=x${oc.env:MY_TOKEN}"]),
        ("hydra.job.name", ["hydra.job.name=${oc.env:MY_TOKEN}", "hydra/job_logging=default"]),
        ("hydra.sweep.subdir", ["-m", "seed=0,1", "+optimizer.options.pw=${oc.env:MY_TOKEN}",
                                "hydra.sweep.subdir=${hydra.job.num}_${optimizer.options.pw}"]),
        ("hydra.sweep.dir", ["-m", "seed=0,1", "name=${oc.env:MY_TOKEN}"]),
    ],
)  # fmt: skip
def test_no_file_or_folder_that_hydra_makes_is_called_after_a_value(
    key: str, typed_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "canary_4b1d")
    with pytest.raises(SecurityError, match="would show in the name") as refused:
        check(read_arguments([*typed_in, LEAVE]))
    assert key in str(refused.value) and "canary" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed_in", "value", "told"),
    [
        ("name=x${oc.env:SHORT}/", "p@s", "hydra.run.dir"),
        ("model._target_=${oc.env:SHORT}", "p@s", "hydra.run.dir"),
        ("training.batch_size=${oc.env:SHORT}", "-17", "${oc.env:SHORT}"),
        ("hydra.launcher.jobs=${oc.env:SHORT}", "x1", "${oc.env:SHORT}"),
    ],
)
def test_a_refusal_tells_a_value_by_its_name(
    typed_in: str, value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHORT", value)
    with pytest.raises((SecurityError, ConfigError)) as refused:
        check(read_arguments([typed_in, "security.environment=[SHORT]"]))
    assert value not in str(refused.value) and told in str(refused.value)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("optimizer.name", "torch.optim has no '${oc.env:SHORT}'"),
        ("training.monitor", "there is no metric '${oc.env:SHORT}'"),
    ],
)
def test_what_ends_a_run_tells_a_short_value_by_its_name_too(
    key: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner"])
    monkeypatch.setenv("SHORT", "p@ss")
    typed_in = [
        *"data=cancer device=cpu optimization=none training.steps=1".split(),
        f"{key}=${{oc.env:SHORT}}",
        "security.environment=[SHORT]",
        "hydra.run.dir=outputs/mine",
    ]
    folder = Path("outputs/mine")
    folder.mkdir(parents=True)  # so that it stays
    assert launch(check(read_arguments(typed_in))) == 2
    log, reason = (folder / "run.log").read_text(), Summary.read(folder).reason
    for text in (log, reason, capsys.readouterr().err):
        assert told in text and "p@ss" not in text


@pytest.mark.parametrize(
    "mistake", [["optimizer.name=Lion"], ["data=tabular", "data.path=no.csv", "data.target=y"]]
)
def test_a_mistake_that_the_build_finds_leaves_no_folder(
    mistake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner"])
    assert launch(check(read_arguments([*mistake, "device=cpu", "optimization=none"]))) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_hydra_prints_is_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner"])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (tmp_path / "theirs" / "experiment").mkdir(parents=True)
    (tmp_path / "theirs" / "experiment" / "own.yaml").write_text(
        '# @package _global_\noptimizer: {options: {x: "a\\u202Eb\\u2066c\\u0085d\\ud800"}}\n'
    )
    asked = ["--cfg", "all", "--config-dir=theirs", "+experiment=own"]
    launch(check(read_arguments(asked)))
    shown = capsys.readouterr().out
    assert "\\u202e" in shown
    assert len(shown.splitlines()) > 5
    assert all(line.replace("\t", "").isprintable() for line in shown.split("\n"))


@pytest.mark.parametrize("part", [[], ["-p", "seed"]])
def test_a_config_that_is_shown_has_the_name_of_a_number_too(
    part: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner"])
    monkeypatch.setenv("SHORT", "12345")
    asked = ["--cfg", "job", "--resolve", *part, "seed=${oc.env:SHORT}", "training.steps=7"]
    assert launch(check(read_arguments([*asked, "security.environment=[SHORT]"]))) == 0
    shown = capsys.readouterr().out
    assert "${oc.env:SHORT}" in shown and "12345" not in shown
    assert part or ("steps: 7" in shown and "level: standard" in shown)
