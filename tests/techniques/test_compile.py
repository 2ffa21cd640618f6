"""Compiling says what it did, goes down when it fails, and is left out where it cannot pay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch._dynamo.variables.tensor import TensorVariable

from runner import build, compose, train
from runner.errors import DataError
from runner.record.console import close_logging, set_up_logging
from runner.techniques import compiler
from runner.techniques.base import TechniqueStatus
from runner.training.step import make_step
from runner.training.summary import Summary

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs g++ here"
)
ROOT = Path(__file__).resolve().parents[2]
QUIET = ["training.steps=4", "monitoring.progress=false", "device=cpu", "device.threads=2"]
TABLE = [
    *QUIET,
    "data=synthetic",
    "data.form=tabular",
    "data.features=16",
    "training.batch_size=32",
]
TINY = [*TABLE, "model.width=16", "model.depth=1"]
TEXT = [
    *QUIET,
    "data=stdlib_text",
    "model=gpt",
    "model.width=32",
    "model.depth=3",
    "model.heads=2",
    "data.sequence=16",
    "training.batch_size=4",
]


def trained(*overrides: str) -> Summary:
    with build(compose(list(overrides))) as run:
        return train(run)


def row(summary: Summary, name: str = "compile") -> TechniqueStatus:
    return next(row for row in summary.techniques if row.name == name)


@needs_compiler
@pytest.mark.usefixtures("my_package")
def test_a_graph_break_is_told_with_its_line() -> None:
    own = ["model._target_=my_package.Branching", "security.trusted=[my_package]"]
    broken = row(trained(*TABLE, "optimization=compile", *own))
    assert broken.engaged
    assert broken.evidence["graph_breaks"] == 1
    file, _, line = broken.evidence["broken_at"][0].rpartition(":")
    assert "if output.sum() > 0" in Path(file).read_text().splitlines()[int(line) - 1]
    assert "branching" in broken.evidence["why_broken"][0].lower()


def item(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def test_messages_of_the_compiler_are_one_line_on_the_screen_and_whole_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"({__file__}:{f.__code__.co_firstlineno + 1})" for f in (item, branch)]
    set_up_logging("info", tmp_path)
    with ExitStack() as scope:
        compiler.prepare(scope)
        # torch says it once a process, and another test may have had it said
        TensorVariable._warn_capture_scalar_outputs.cache_clear()
        torch.compile(item, backend="eager")(torch.ones(3))
        with pytest.raises(Exception, match="branching") as failed:
            torch.compile(branch, backend="eager", fullgraph=True)(torch.ones(3))
        gist = compiler.summarize_error(failed.value)
    close_logging()
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and f"Graph break from `Tensor.item()` {lines[0]}" in told[0]
    assert "\n" not in gist and gist.endswith(lines[1]) and len(gist) < 250
    logged = (tmp_path / "run.log").read_text()
    assert "capture_scalar_outputs = True" in logged and str(failed.value).split()[-1] in logged


@needs_compiler
def test_where_the_compiler_fails_the_run_goes_on_without_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no Python.h' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    code = (
        "from runner import build, compose, train\n"
        "import json, sys\n"
        "with build(compose(sys.argv[1:])) as run:\n"
        "    summary = train(run)\n"
        "print(json.dumps([vars(row) for row in summary.techniques if row.requested]))\n"
        "print(summary.status, summary.steps)\n"
    )
    for technique in ("compile", "whole_step"):
        asked = f"optimization.{technique}.enabled=true"
        done = subprocess.run(
            [sys.executable, "-c", code, *TINY, "optimization=basic", asked],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.splitlines()[-1] == "done 4"
        assert '"engaged": false' in done.stdout
        assert "CppCompileError" in done.stdout or "C++ compile" in done.stdout


@needs_compiler
def test_the_second_run_finds_what_the_first_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = row(trained(*TINY, "optimization=compile")).evidence
    second = row(trained(*TINY, "optimization=compile")).evidence
    assert (first["cache"], second["cache"]) == ("cold", "warm")


def test_a_short_run_stays_eager_when_its_step_is_timed() -> None:
    stays = row(trained(*TINY, "optimization=compile", "optimization.compile.min_steps=null"))
    assert not stays.engaged
    assert "do not pay it back" in stays.reason


@needs_compiler
def test_regional_compile_takes_the_blocks_and_validation_stays_eager() -> None:
    regional = ["optimization=compile", "optimization.compile.regional=true"]
    with build(compose([*TEXT, *regional])) as run:
        compiled = row(train(run))
        assert compiled.engaged
        assert [m for m in run.model.modules() if m._compiled_call_impl is not None] == list(
            run.model.blocks  # type: ignore[arg-type]
        )
    assert compiled.evidence["graph_breaks"] == 0
    assert compiled.evidence["recompiles"] == 0  # neither for evaluation nor for each block


@needs_compiler
def test_a_token_that_is_not_in_the_vocabulary_is_an_error_and_not_the_end_of_the_process() -> None:
    with build(compose([*TEXT, "model.depth=1", "optimization=compile"])) as run:
        inputs, target = next(run.train.batches(0))
        wrong = inputs.clone()
        wrong[0, 0] = 100_000
        make_step(run, (inputs, target))
        with pytest.raises(DataError, match="token id is out of range"):
            for place in run.train.placements:  # type: ignore[attr-defined]
                place((wrong, target))


def test_the_cache_is_one_folder_per_torch_and_cpu_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = compiler.cache_folder({"XDG_CACHE_HOME": "/cache"})
    assert here.parent == Path("/cache/runner/compiled") and torch.__version__ in here.name
    monkeypatch.setattr(compiler, "cpu_flags", lambda: frozenset({"another"}))
    assert compiler.cache_folder({"XDG_CACHE_HOME": "/cache"}) != here
    assert compiler.cache_folder({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == Path("/mine")
