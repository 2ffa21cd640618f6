"""What is left behind: damaged records survived, jobs whose files have changed, job contexts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runner.core.config.composing import compose
from runner.core.errors import StorageError
from runner.core.record.text import quote_for_hydra
from runner.core.schemas.sweep import JOB_VARIABLE
from runner.scale.sweep import identity, job_context
from runner.scale.sweep.state import Sweep

from .conftest import environment

JOB = {"number": 0, "overrides": ["seed=0"], "folder": "0"}
OUTSIDE = ("/elsewhere", "../0", "a/../../b", "", ".", "a\0b", "x" * 5000, "\ud800")


@pytest.mark.parametrize("text", ["a\\b", "a\\", "it's", "a\\'b", "${x}", "\\${x}", "a,b", "[1]"])
def test_any_path_is_read_back_as_it_is(text: str) -> None:
    value = OverridesParser.create().parse_override(f"key={quote_for_hydra(text)}").value()
    assert OmegaConf.create({"key": value}).key == text


@pytest.mark.parametrize(
    "jobs",
    [
        *([JOB | {"folder": name}] for name in OUTSIDE),
        5,
        [JOB | {"seconds": "long"}],
        [JOB | {"overrides": "seed=0"}],
        [JOB, JOB],
    ],
)
def test_a_record_with_other_keys_or_paths_counts_as_damaged(tmp_path: Path, jobs: Any) -> None:
    whole = {"command": "", "hash": "", "started": "", "jobs": jobs}
    (tmp_path / "sweep.json").write_text(json.dumps(whole))
    with pytest.raises(StorageError, match="damaged"):
        Sweep.read(tmp_path)


def job_hash(*overrides: str) -> str:
    for cached in (identity.file_stamp, identity.code_hash):
        cached.cache_clear()
    return identity.job_hash(compose(["data=cancer", *overrides]))


@pytest.mark.parametrize(
    ("files", "override"),
    [
        (["cats/1.png"], "data=images data.path=."),
        (["own.py"], "security.trusted=[own]"),
        (["checkpoints/step_00000005/manifest.json"], "job=evaluate checkpoint.resume=."),
        (["w.pt"], "model.weights=w.pt"),
        (["model.safetensors"], "model.weights=."),
    ],
    ids=["data", "trusted code", "checkpoint", "weights", "folder of weights"],
)
def test_a_job_is_another_one_once_a_file_that_it_reads_has_changed(
    files: list[str], override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hashes = []
    for text in ("WIDTH = 1\n", "WIDTH = 22\n"):
        for file in map(Path, files):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        hashes.append(job_hash(*override.split()))
    Path(files[0]).with_name("back").symlink_to(tmp_path)  # a loop
    assert hashes[0] != hashes[1]
    assert "data.path" not in override or job_hash(*override.split()) == hashes[1]


def test_other_code_of_the_runner_or_another_variable_is_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose(["data=cancer"])
    before = identity.job_hash(config)
    assert before == identity.job_hash(config) != identity.job_hash(config, {"TOKEN": "1"})
    monkeypatch.setattr(identity, "code_hash", lambda package: f"{package}, edited")
    assert identity.job_hash(config) != before


def context(stdin: int, **variables: str) -> str:
    """What a process with that stdin takes for its job's."""
    code = "from runner.scale.sweep.job_context import take_job_context; print(take_job_context())"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment() | variables, text=True, stdin=stdin,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return process.communicate(timeout=30)[0]


def test_a_job_takes_its_context_from_the_process_that_holds_the_pipe_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_context, "known_secrets", dict)  # those of other tests
    for stdin in (subprocess.DEVNULL, subprocess.PIPE):  # of a variable that was left behind
        assert context(stdin, **{JOB_VARIABLE: "1"}) == f"{job_context.JobContext()}\n"
    variables, reads, writes = job_context.parent_death_pipe(["seed=3"], folder_trusted=False)
    try:
        assert context(reads) == f"{job_context.JobContext()}\n"
        given = job_context.JobContext(["seed=3"], folder_trusted=False)
        assert context(reads, **variables) == f"{given}\n"
    finally:
        os.close(reads)
        os.close(writes)
