"""`checkpoint.resume`: the folder, the recorded overrides, and what wins."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from runner.cli.preflight import Request
from runner.core.checkpoint.lock import lock
from runner.core.checkpoint.manifest import MODEL, STATE, Manifest
from runner.core.config.composing import compose
from runner.core.config.recorded import merge_recorded_overrides
from runner.core.config.run_config import config_hash
from runner.core.errors import CheckpointError, ConfigError, SecurityError, UsageError
from runner.core.record.hydra_files import RESUMED
from runner.core.record.storage import FileDigest, write_file
from runner.core.record.summary import Summary
from tests.runs import QUICK, trained
from tests.runs import checked as ask

pytestmark = pytest.mark.usefixtures("folder")
TIME = 1_700_000_000


def make_run(
    where: str,
    overrides: list[str],
    status: str = "interrupted",
    step: int = 0,
    ended_by: str | None = None,
) -> Path:
    run, sha256 = Path(where), config_hash(compose(overrides))
    (run / "checkpoints" / "step_00000012").mkdir(parents=True)
    if step:
        (run / "checkpoints" / f"step_{step:08d}").mkdir(exist_ok=True)
        files = {name: FileDigest(0, "") for name in (MODEL, STATE)}
        facts = Manifest(step, True, files, sha256, "", "", 1, "")
        write_file(run / f"checkpoints/step_{step:08d}/manifest.json", facts.write)
    (run / "checkpoints" / "last").symlink_to("step_00000012")
    (run / ".hydra").mkdir()
    lines = "".join(f"- {json.dumps(line)}\n" for line in overrides) or "[]\n"
    (run / ".hydra" / "overrides.yaml").write_text(lines)
    summary = {"status": status, "config_hash": sha256, "ended_by": ended_by}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


RUN = "outputs/runs/a/old"
TRUST = "security.trusted=[my_package]"


@pytest.mark.parametrize("path", [RUN, f"{RUN}/checkpoints", f"{RUN}/checkpoints/last"])
def test_a_path_continues_in_place_with_the_overrides_of_that_run(path: str) -> None:
    make_run(RUN, ["data=cancer", "seed=4"])
    request = ask(f"checkpoint.resume={path}")
    assert request.arguments == [
        "data=cancer", "seed=4", f"checkpoint.resume={path}", f"hydra.run.dir='{RUN}'",
    ]  # fmt: skip
    assert request.notes == [f"continuing {RUN}"]
    assert request.resumed_run == Path(RUN)  # which vouches for nothing


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ([], {"momentum": 0.5, "nesterov": True, "dampening": 0}),
        (["optimizer.options.momentum=0.7"], {"momentum": 0.7, "nesterov": True, "dampening": 0}),
        (["optimizer.options={}"], {}),
        (["optimizer.options={momentum: 0.1}"], {"momentum": 0.1}),
        (["+optimizer.options.dampening=1"], {"momentum": 0.5, "nesterov": True, "dampening": 1}),
        (["optimizer=adam"], {}),
    ],
)
def test_a_resume_takes_a_mapping_from_the_recorded_config_unless_it_is_typed_again(
    typed: list[str], options: dict[str, object]
) -> None:
    """An older version merged a typed mapping with the option's: its config says what was used."""
    recorded = ["optimizer=sgd", "+optimizer.options.dampening=0"]
    run = make_run(RUN, recorded)
    lines = [recorded[0], "optimizer.options={momentum: 0.5}", recorded[1]]
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps(lines))
    used = "{momentum: 0.5, nesterov: true, dampening: 0}"
    (run / ".hydra" / "config.yaml").write_text(f"optimizer:\n  options: {used}\n")
    if typed == ["optimizer.options={}"]:  # the recorded entry is not typed again
        (run / ".hydra" / "overrides.yaml").write_text(json.dumps(lines[:2]))
    config = ask(f"checkpoint.resume={RUN}", *typed).config
    assert config is not None and config.optimizer.options == options


@pytest.mark.parametrize("inside", ["", "checkpoints/step_00000012"])
def test_a_run_that_lies_elsewhere_goes_on_there_too_for_it_was_typed(
    inside: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("elsewhere/old", ["data=cancer"])
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    path = f"{folder}/elsewhere/old/{inside}"
    assert "hydra.run.dir=" in ask(f"checkpoint.resume={path}").arguments[-1]
    with pytest.raises(SecurityError, match="security=strict may only write below"):
        ask(f"checkpoint.resume={path}", "security=strict")


def test_a_path_is_understood_from_inside_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(RUN, ["seed=4"]).absolute()
    for folder, typed in ((run / "checkpoints", "step_00000012"), (run, ".")):
        monkeypatch.chdir(folder)
        assert "seed=4" in ask(f"checkpoint.resume={typed}").arguments


def test_what_the_user_types_wins_over_what_was_recorded() -> None:
    recorded = ["data=cancer", "optimizer=sgd", "optimizer.lr=0.1", "seed=4", "training.steps=9",
                "checkpoint.resume=auto", "+model.arguments.x=1"]  # fmt: skip
    run = make_run(RUN, recorded)
    again = ask(f"checkpoint.resume={run}", "optimizer=sgd").arguments  # which keeps its keys
    assert "optimizer.lr=0.1" in again and again.count("optimizer=sgd") == 1
    typed = [f"checkpoint.resume={run}", "seed=5", "optimizer=adam", "training.epochs=2"]
    assert ask(*typed).arguments == [
        "data=cancer", "+model.arguments.x=1", *typed, f"hydra.run.dir='{RUN}'",
    ]  # fmt: skip


def test_an_option_typed_in_another_case_on_resume_keeps_the_recorded_keys_of_its_group() -> None:
    run = make_run(RUN, ["optimization=basic", "optimization.system.small_mflop=7"])
    again = ask(f"checkpoint.resume={run}", "optimization_mode=BASIC").arguments
    assert "optimization.system.small_mflop=7" in again and "optimization=basic" in again


@pytest.mark.slow
def test_naming_an_option_takes_the_place_of_a_class_and_of_the_default() -> None:
    own = ["data._target_=my_package.Noisy", "+data.arguments.noise=0.1", "seed=4"]
    make_run(RUN, [*own, "model.width=8", TRUST])
    again = ask(f"checkpoint.resume={RUN}", *own[:1], "+data.noise=0.2", TRUST).arguments
    assert [text for text in again if "noise" in text] == ["+data.arguments.noise=0.2"]
    handed = ask(f"checkpoint.resume={RUN}", "data=cancer", "model=mlp").arguments
    assert not [text for text in handed if "_target_" in text or "noise" in text]
    assert "model.width=8" in handed and "seed=4" in handed
    assert "model.width=8" not in ask(
        f"checkpoint.resume={RUN}", "data=digits", "model=cnn"
    ).arguments  # fmt: skip
    with pytest.raises(SecurityError, match="my_package"):
        ask(f"checkpoint.resume={RUN}", "model=cnn")


@pytest.mark.parametrize("typed", [["job=evaluate"], ["-m", "seed=0,1"], ["hydra.run.dir=new"]])
def test_evaluating_sweeping_and_another_folder_leave_the_run_alone(typed: list[str]) -> None:
    make_run(RUN, ["data=cancer"])
    resume, flags = f"checkpoint.resume={RUN}", ["--multirun"] * ("-m" in typed)
    others = [text for text in typed if text != "-m"]
    assert ask(*typed, resume).arguments == [*flags, "data=cancer", *others, resume]


def test_several_runs_must_have_one_config() -> None:
    make_run("a", ["data=cancer"])
    make_run("b", ["data=cancer"])
    make_run("c", ["data=digits"])
    handed = ask("-m", "job=evaluate", "checkpoint.resume=a,b").arguments
    assert handed[1] == "data=cancer"
    with pytest.raises(ConfigError, match="name one run at a time"):
        ask("-m", "job=evaluate", "checkpoint.resume=a,c")


def test_a_checkpoint_without_its_run_starts_a_fresh_folder() -> None:
    Path("step_00000012").mkdir()
    assert ask("checkpoint.resume=step_00000012").arguments == ["checkpoint.resume=step_00000012"]


def test_a_path_that_is_not_there_and_a_torn_record_are_said() -> None:
    with pytest.raises(CheckpointError, match="no folder nowhere") as missing:
        ask("checkpoint.resume=nowhere")
    assert missing.value.exit_code == 5
    (make_run(RUN, []) / ".hydra" / "overrides.yaml").write_text("{a: [")
    with pytest.raises(CheckpointError, match=r"overrides\.yaml: cannot be read"):
        ask(f"checkpoint.resume={RUN}")


def test_what_leads_to_no_run_is_answered_with_the_one_that_was_meant() -> None:
    older = make_run("outputs/runs/own/older", [])
    make_run("outputs/runs/own/newer", [])
    os.utime(older, (TIME, TIME))
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: is empty"):
        ask("checkpoint.resume=")
    with pytest.raises(CheckpointError, match="the newest in it is outputs/runs/own/newer$"):
        ask("checkpoint.resume=outputs/runs/own")
    with pytest.raises(CheckpointError, match=r"did you mean outputs/runs/own\?"):
        ask("checkpoint.resume=outputs/runs/owm")
    with pytest.raises(ConfigError, match="the same command again continues"):
        ask("-m", "checkpoint.resume=auto", "seed=0,1")


def auto(*typed: str) -> Request:
    return ask("checkpoint.resume=auto", *typed)


HOME = "outputs/runs/digits-mlp"


def test_auto_continues_the_unfinished_run_of_the_same_config_that_came_furthest() -> None:
    make_run(f"{HOME}/further", [], step=30)
    make_run(f"{HOME}/less", [], status="running", step=20)  # it was killed
    make_run(f"{HOME}/other-config", ["seed=1"], step=40)
    make_run(f"{HOME}/done", [], status="done", step=40)
    make_run(f"{HOME}/stopped-early", [], status="stopped", step=40)
    make_run("outputs/runs/other-name/run", [], step=40)
    (make_run(f"{HOME}/no-checkpoints", []) / "checkpoints").rename("gone")
    os.utime(f"{HOME}/further/summary.json", (TIME, TIME))  # clocks decide nothing
    request = auto()
    assert request.arguments[-1] == f"hydra.run.dir='{HOME}/further'"
    assert request.notes == [f"checkpoint.resume=auto: continuing {HOME}/further"]
    with lock(Path(HOME, "further")):
        assert auto().arguments[-1] == f"hydra.run.dir='{HOME}/less'"


@pytest.mark.parametrize("ended_by", ["limit", "stop_file", "memory"])
def test_auto_continues_a_run_that_was_stopped_before_its_end(ended_by: str) -> None:
    for finished in ("patience", "pruned", "hook", "done"):
        make_run(f"{HOME}/{finished}", [], status="stopped", step=40, ended_by=finished)
    assert "afresh" in auto().notes[0]
    make_run(f"{HOME}/early", [], status="stopped", step=30, ended_by=ended_by)
    assert auto().notes == [f"checkpoint.resume=auto: continuing {HOME}/early"]


@pytest.mark.slow
def test_auto_goes_on_from_the_checkpoints_of_a_run_whose_summary_is_damaged() -> None:
    typed = ["data=cancer", "training.steps=3"]
    run = Path("outputs/runs/cancer-mlp/run")
    first = trained(*typed, folder=run)
    (run / "summary.json").unlink()
    for left in (None, "", "{", "[]", '{"status": "failed"}'):
        if left is not None:
            (run / "summary.json").write_text(left)
        assert auto(*QUICK, *typed).notes == [f"checkpoint.resume=auto: continuing {run}"]
    assert "afresh" in auto(*QUICK, *typed, "seed=1").notes[0]  # of another config
    again = trained(*typed, "checkpoint.resume=auto", folder=run)
    assert (again.status, again.steps, again.metrics) == ("done", 3, first.metrics)
    assert Summary.read(run).status == "done"


def test_a_record_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (sync(file), synced.append(os.fstat(file).st_ino))
    )
    Summary().write(Path())
    assert synced == [Path("summary.json").stat().st_ino]


def test_a_command_that_is_refused_leaves_the_record_of_the_run_alone() -> None:
    run = make_run("outputs/mine", ["seed=4"])
    typed = "hydra.run.dir=outputs/mine", "seed=5"
    with pytest.raises(UsageError, match="has the checkpoints of another run"):
        ask(*typed)
    with lock(run), pytest.raises(UsageError, match="in use by"):
        ask(*typed, "checkpoint.resume=auto")
    request = ask(*typed, "checkpoint.resume=auto")
    assert request.config is not None
    assert request.config.hydra.output_subdir == RESUMED  # until training starts


def test_auto_says_when_it_starts_afresh() -> None:
    make_run(f"{HOME}/run", [], step=12)
    request = auto("seed=7")
    assert request.arguments == ["checkpoint.resume=auto", "seed=7"]
    assert "starting afresh" in request.notes[0]
    assert auto("hydra.run.dir=outputs/here").arguments[-1] == "hydra.run.dir=outputs/here"


def test_a_runs_folder_brings_neither_its_own_trust_nor_callbacks_for_hydra(tmp_path: Path) -> None:
    run = tmp_path / "downloaded"
    (run / "checkpoints" / "step_00000012").mkdir(parents=True)
    (run / ".hydra").mkdir()
    recorded = "- model._target_=theirs.Net\n- security.trusted=[theirs]\n"
    recorded += "- +hydra.callbacks.own._target_=theirs.Callback\n"
    (run / ".hydra" / "overrides.yaml").write_text(recorded)
    found = merge_recorded_overrides([f"checkpoint.resume={run}"], sweeps=False).overrides
    assert found == ["model._target_=theirs.Net", f"checkpoint.resume={run}"]


def test_a_resume_without_the_runs_folder_of_options_is_refused_with_the_flag_to_type() -> None:
    run, options = make_run(RUN, []), Path("mine").absolute()
    (run / ".hydra" / "overrides.yaml").write_text("- optimizer=own\n")
    (options / "optimizer").mkdir(parents=True)
    (options / "optimizer" / "own.yaml").write_text("defaults: [adamw]\nlr: 0.02\n")
    sources = [{"path": str(options), "provider": "hydra.searchpath in command-line"}]
    record = {"hydra": {"runtime": {"cwd": str(Path.cwd()), "config_sources": sources}}}
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps(record))
    for job in ("train", "evaluate"):
        with pytest.raises(UsageError, match=f"options in {options}; add --config-dir={options}"):
            ask(f"job={job}", f"checkpoint.resume={RUN}")
    asked = ask("--config-dir=mine", f"checkpoint.resume={RUN}")
    assert asked.config is not None and asked.config.optimizer.lr == 0.02
    (options / "top.yaml").write_text("defaults: [config, _self_]\noptimizer: {lr: 0.03}\n")
    asked = ask("--config-dir=mine", "--config-name=top", f"checkpoint.resume={RUN}")
    assert asked.config is not None and asked.config.optimizer.lr == 0.03
    record["hydra"]["job"] = {"config_name": "top"}
    (run / ".hydra" / "hydra.yaml").write_text(json.dumps(record))
    with pytest.raises(UsageError, match="with the config top; type --config-name=top"):
        ask("--config-dir=mine", f"checkpoint.resume={RUN}")
    for wrong in ({"provider": 3, "path": [4]}, {"provider": "command-line"}, 5, None):
        record["hydra"] = {"runtime": {"config_sources": [wrong]}, "job": {"config_name": 6}}
        (run / ".hydra" / "hydra.yaml").write_text(json.dumps(record))
        assert ask("--config-dir=mine", f"checkpoint.resume={RUN}").config is not None
    shutil.rmtree(options)
    with pytest.raises(ConfigError, match="no option 'own'"):
        ask(f"checkpoint.resume={RUN}")
