"""What is left behind: no secrets, nested folders found again, damaged records survived."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.composing import compose
from runner.errors import StorageError
from runner.record.text import quote_for_hydra
from runner.sweep import identity, job
from runner.sweep.command import domains
from runner.sweep.state import Sweep

from .conftest import NET, environment, only, statuses, sweep, told

JOB = {"number": 0, "overrides": ["seed=0"], "folder": "0"}


def test_a_secret_is_in_no_file_of_a_sweep_in_nested_folders(folder: Path) -> None:
    typed = ["seed=0", *NET, "security.environment=[HIDDEN]",
             "+model.how=${oc.env:HIDDEN}", "hydra.sweep.subdir='g/${hydra.job.num}'"]  # fmt: skip
    done = sweep(folder, *typed, HIDDEN="hunter-2")
    assert done.returncode == 0, done.stderr
    assert statuses(only(folder)) == ["done"]
    files = [path for path in only(folder).rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter-2" in path.read_bytes()]
    assert "oc.env" in told(only(folder))["jobs"][0]["command"]


def test_what_an_interpolation_comes_to_is_told_to_no_other_job() -> None:
    jobs = [([f"+model.token=${{oc.env:{n}}}", f"seed={i}"], {"model.token": n, "seed": i})
            for i, n in enumerate("AB")]  # fmt: skip
    assert domains(jobs) == "++monitoring.domains={seed:[0,1]}"


@pytest.mark.parametrize("text", ["a\\b", "a\\", "it's", "a\\'b", "${x}", "\\${x}", "a,b", "[1]"])
def test_any_path_is_read_back_as_it_is(text: str) -> None:
    value = OverridesParser.create().parse_override(f"key={quote_for_hydra(text)}").value()
    assert OmegaConf.create({"key": value}).key == text


@pytest.mark.parametrize(
    "jobs",
    [
        5,
        [JOB | {"folder": "a\0b"}],
        [JOB | {"folder": "x" * 5000}],
        [JOB | {"folder": "../0"}],
        [JOB | {"folder": "\ud800"}],
        [JOB | {"seconds": "long"}],
        [JOB | {"overrides": "seed=0"}],
        [JOB, JOB],
    ],
)
def test_a_record_of_other_things_is_a_damaged_one(tmp_path: Path, jobs: Any) -> None:
    whole = {"command": "", "hash": "", "started": "", "jobs": jobs}
    (tmp_path / "sweep.json").write_text(json.dumps(whole))
    with pytest.raises(StorageError, match="damaged"):
        Sweep.read(tmp_path)


def test_a_job_is_another_one_once_a_file_of_its_data_has_changed(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    config = compose(["data=images", f"data.path={tmp_path}"])
    hashes = []
    for text in ("one", "three"):
        (tmp_path / "cats" / "1.png").write_text(text)
        identity.stamp.cache_clear()
        hashes.append(identity.job_hash(config))
    (tmp_path / "cats" / "back").symlink_to(tmp_path)  # a loop
    identity.stamp.cache_clear()
    assert hashes[0] != hashes[1] == identity.job_hash(config)


def test_other_code_of_a_package_that_is_trusted_is_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["data=cancer", "security.trusted=[own]"])
    hashes = []
    for text in ("WIDTH = 1\n", "WIDTH = 2\n"):
        (tmp_path / "own.py").write_text(text)
        identity.code_hash.cache_clear()
        hashes.append(identity.job_hash(config))
    assert hashes[0] != hashes[1]


def test_a_job_is_another_one_with_another_checkpoint_or_variable(tmp_path: Path) -> None:
    manifest = tmp_path / "checkpoints" / "step_00000005" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("of step 5")
    config = compose(["job=evaluate", "data=cancer", f"checkpoint.resume={tmp_path}"])
    first = identity.job_hash(config)
    assert first == identity.job_hash(config) != identity.job_hash(config, {"TOKEN": "1"})
    manifest.write_text("of another step 5")
    assert identity.job_hash(config) != first


def test_a_job_is_another_one_with_other_weights(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    for path in (file, tmp_path):
        config, hashes = compose([f"model.weights={path}"]), []
        for text in ("one", "three"):
            for place in (file, tmp_path / "model.safetensors"):
                place.write_text(text)
            identity.stamp.cache_clear()
            hashes.append(identity.job_hash(config))
        assert len(set(hashes)) == 2


@pytest.mark.parametrize("left", ["garbage", "5", "[]", '{"token": "", "overrides": ["seed=3"]}'])
def test_a_variable_that_somebody_left_behind_makes_no_job(left: str) -> None:
    code = "from runner.sweep.job import take_job_context; print(take_job_context().overrides)"
    for stdin in (subprocess.DEVNULL, subprocess.PIPE):
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={**environment(), job.VARIABLE: left}, text=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        said, _ = process.communicate(timeout=30)
        assert (process.returncode, said) == (0, "[]\n")


def test_a_job_takes_its_context_from_the_process_that_holds_the_pipe() -> None:
    code = "from runner.sweep.job import take_job_context; print(take_job_context())"
    variables, reads, writes = job.parent_death_pipe(["seed=3"], chosen=False)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment() | variables, text=True, stdin=reads,
            capture_output=True,
        )  # fmt: skip
    finally:
        os.close(reads)
        os.close(writes)
    assert done.stdout == f"{job.JobContext(['seed=3'], chosen=False)}\n", done.stderr
