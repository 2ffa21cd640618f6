"""Nothing is written where it should not be, or so that others could change it."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints
from unittest.mock import Mock

import pytest
from hydra.core.hydra_config import HydraConfig

from runner import build, compose, train
from runner.cli.arguments import read_arguments
from runner.cli.launch import launch
from runner.cli.preflight import check
from runner.core.checkpoint.manifest import read_manifest
from runner.core.checkpoint.ownership import folder_is_checked
from runner.core.config.composing import SCHEMAS
from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError, RunnerError, SecurityError, UsageError
from runner.core.record.console import close_logging, set_up_logging
from runner.core.schemas.security import SecurityLevel
from runner.core.schemas.sweep import (
    JobSweeperConfig,
    LauncherConfig,
    SearchSweeperConfig,
    storage_path,
)
from runner.core.security.checksummed_json import read_checksummed_json, to_checksummed_json
from runner.core.security.cli_overrides import FILE_HYDRA_KEYS
from runner.core.security.config_files import NO_FILE_KEYS
from runner.core.security.outside_places import FOLDER_KEYS, WRITTEN_KEYS
from runner.core.security.paths import restrict_run_folder

QUICK = ["data=cancer", "training.steps=3", "monitoring=quiet", "device=cpu", "optimization=none"]


@pytest.fixture(autouse=True)
def umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one of a careless account; put back, as is what Hydra keeps of its last job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr(sys, "argv", ["runner"])
    before = os.umask(0)
    yield
    os.umask(before)
    close_logging()


def start(*typed: str) -> Path:
    assert launch(check(read_arguments([*QUICK, *typed]))) == 0
    return max(Path("outputs/runs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)


def modes(folder: Path) -> dict[str, int]:
    everything = [folder, *folder.rglob("*")]
    return {str(p): stat.S_IMODE(p.lstat().st_mode) for p in everything if not p.is_symlink()}


def test_nothing_that_a_run_writes_can_be_written_by_everybody() -> None:
    folder = start()
    found = modes(folder)
    assert any("checkpoints" in name for name in found)
    assert not {name: oct(mode) for name, mode in found.items() if mode & stat.S_IWOTH}
    assert stat.S_IMODE(folder.stat().st_mode) & stat.S_IRGRP  # the umask lets others read


def test_a_strict_run_is_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start("security=strict")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not {name: oct(mode) for name, mode in modes(folder).items() if mode & 0o077}
    assert os.umask(0) == 0  # as it was before


def test_an_output_root_that_everybody_may_change_is_a_warning_and_refused_under_strict() -> None:
    root = Path("outputs")
    root.mkdir()
    root.chmod(0o777)
    folder = start()
    assert re.search("is writable by every user.*chmod o-w", (folder / "run.log").read_text())
    with pytest.raises(SecurityError, match="is writable by every user"):
        restrict_run_folder(folder, SecurityLevel.strict)
    for mode in (0o1777, 0o755):  # the first is that of /tmp
        root.chmod(mode)
        assert restrict_run_folder(folder, SecurityLevel.standard) == []


@pytest.mark.parametrize(
    "name",
    ["../escape", "/escape", "a/b", "..", ".", "a\\b", "", "a\nb", "a\x1b[31m", "x" * 300, "~",
     "$(touch x)", "-rf", "a\0b", "con fig", "‮gnp"],
)  # fmt: skip
def test_a_run_s_name_is_a_name_and_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunnerError):
        check(read_arguments([*QUICK, f"name={name!r}" if name else "name=''"]))
    assert not list(tmp_path.iterdir())


def theirs(text: str) -> list[str]:
    Path("conf/experiment").mkdir(parents=True, exist_ok=True)
    Path("conf/experiment/own.yaml").write_text(f"# @package _global_\n{text}")
    return ["--config-dir=conf", "experiment=own"]


def test_a_job_in_this_process_is_held_to_the_folder_that_it_really_gets(tmp_path: Path) -> None:
    """Its number is not known when it is composed; a link lies where the second one would go."""
    outside = tmp_path / "outside"
    outside.mkdir()
    Path("outputs/s").mkdir(parents=True)
    Path("outputs/s/1").symlink_to(outside)
    for more, folder in (("", "1"), (", subdir: ../t", ".*/t")):
        typed = theirs(f"hydra: {{sweep: {{dir: outputs/s{more}}}}}\n")
        typed += ["-m", "seed=0,1", "hydra/launcher=basic"]
        with pytest.raises(SecurityError, match=rf"hydra\.sweep\.subdir: {folder} is refused"):
            launch(check(read_arguments([*QUICK, *typed])))
    assert Path("outputs/s/0/summary.json").exists() and not list(outside.iterdir())
    assert not Path("outputs/t").exists()


def test_a_run_has_its_log_and_warnings_with_any_config(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers = list(root.handlers)
    typed = theirs(
        "hydra: {job_logging: {version: 1, root: {handlers: []}, "
        "loggers: {runner: {level: CRITICAL, propagate: false, handlers: []}}}}\n"
    )
    try:
        folder = start(*typed, "security=off")
    finally:
        for handler in handlers:  # pytest's own
            root.addHandler(handler)
    for text in ((folder / "run.log").read_text(), capsys.readouterr().err):
        assert text.count("security=off: configs of other people") == 1


def test_a_link_in_place_of_a_record_is_not_followed_when_writing(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    names = (".summary.json.tmp", "summary.json", "report.md", "debug/history.json",
             "metrics.jsonl", "run.log", ".report.md.tmp", "provenance.json")  # fmt: skip
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(outside)
    set_up_logging("info", folder)
    with folder_is_checked(), build(compose(QUICK), folder) as run:  # else refused as a record
        train(run)
    assert outside.read_text() == "precious"
    folder.chmod(0o755)
    with pytest.raises(SecurityError, match="a link out of"):
        restrict_run_folder(folder, SecurityLevel.strict)


TEXT_KEYS = set(  # all others that hold text: names, choices, and places that are only read
    """
    name data.kind data._target_ data.arguments data.sampler data.parts data.path
    data.validation_path data.test_path data.encoding data.separator data.target data.task
    data.ignore data.split_by data.types data.decimal data.date_formats data.thousands data.text
    data.tokenizer data.dtype data.inputs data.validation_target model.kind model._target_
    model.arguments model.weights model.weights_except model.path objective.kind objective._target_
    objective.arguments objective.loss objective.class_weights objective.metrics optimizer.name
    optimizer.options optimizer._target_ optimizer.freeze optimizer.groups training.monitor
    optimization.level optimization.extra optimization.auto.without debug.gradcheck.skip debug.hooks
    security.trusted security.environment security.allow_pickle security.pinned checkpoint.resume
    monitoring.log_level replay.path scan.path benchmark.arms benchmark.reference benchmark.baseline
    sweep.resume search.metric distributed.kind device.index predict.prompt hydra.launcher._target_
    hydra.sweeper._target_ hydra.sweeper.params hydra.sweeper.direction hydra.sweeper.n_trials
    hydra.sweeper.max_batch_size hydra.job.chdir
    """.split()
)


def text_keys(schema: type, prefix: str) -> Iterator[str]:
    """The keys of a schema whose value may be or hold a text."""
    types = get_type_hints(schema)
    for field in fields(schema):
        key, kind = f"{prefix}{field.name}", types[field.name]
        if is_dataclass(kind):
            yield from text_keys(kind, f"{key}.")  # type: ignore[arg-type]
        elif kind is str or any(word in str(kind) for word in ("str", "Any")):
            yield key


def test_every_key_that_names_a_place_to_write_is_in_the_list() -> None:
    keys = set(text_keys(RunConfig, "")) | set(FILE_HYDRA_KEYS)
    for group, schemas in SCHEMAS.items():
        for schema in schemas.values():
            keys |= set(text_keys(schema, f"{group}."))
    keys |= set(text_keys(LauncherConfig, "hydra.launcher."))
    for schema in (JobSweeperConfig, SearchSweeperConfig):
        keys |= set(text_keys(schema, "hydra.sweeper."))
    assert keys == TEXT_KEYS | set(FOLDER_KEYS) | set(WRITTEN_KEYS)
    assert set(NO_FILE_KEYS) == set(WRITTEN_KEYS)


@pytest.mark.parametrize(
    ("storage", "refused"),
    [
        ("outputs/own/a.db", False),
        ("sqlite:///outputs/a.db", False),
        ("outputs/linked.db", True),
        ("outputs/own/../../a.db", True),
    ],
)
def test_a_storage_from_a_file_lies_below_outputs_and_a_typed_one_anywhere(
    storage: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # an import raises: the check comes first
    Path("outputs").mkdir()
    Path("outputs/linked.db").symlink_to(tmp_path / "a.db")
    typed = theirs(f"defaults: [search]\nsearch: {{storage: '{storage}'}}\n")
    typed.append("optimizer.lr=interval(1e-4,1e-1)")
    plan = Mock(side_effect=UsageError("planned"))
    monkeypatch.setattr("runner.cli.sweep.plan_search", plan)
    with pytest.raises(SecurityError if refused else UsageError, match="storage|planned"):
        check(read_arguments(typed))
    with pytest.raises(UsageError, match="planned"):
        check(read_arguments([*typed, f"search.storage={storage}"]))
    path = storage_path(plan.call_args[0][1].search.storage)
    assert str(path) == storage.removeprefix("sqlite:///")
    with pytest.raises(SecurityError, match=r"search\.storage: .* security=strict"):
        check(read_arguments([*typed[2:], "experiment=search", "security=strict",
                              "search.storage=/elsewhere/a.db"]))  # fmt: skip


def test_names_in_a_manifest_are_never_paths(tmp_path: Path) -> None:
    """Written by hand with a digest that fits."""
    with build(compose(QUICK), tmp_path / "run") as run:
        train(run)
    place = next((tmp_path / "run" / "checkpoints").glob("step_*")) / "manifest.json"
    body = read_checksummed_json(place, 1)
    entry = next(iter(body["files"].values()))
    for name in ("../../../secret.txt", "/etc/hostname", "state.pt\0x"):
        body["files"] = {"model.safetensors": entry, name: entry}
        place.write_bytes(to_checksummed_json(body))
        with pytest.raises((RunnerError, ConfigError), match="lists"):
            read_manifest(place.parent)
