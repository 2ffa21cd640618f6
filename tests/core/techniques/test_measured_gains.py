"""What earlier runs measured decides in a run that is too short to measure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.core.techniques.compile import KEY
from runner.core.techniques.measured_gains import MeasuredGains
from tests import runs

COMPILED = ("data=digits", "model=mlp", "device.threads=1", "optimization=advanced")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def break_even() -> tuple[int, str, MeasuredGains]:
    with runs.opened(*COMPILED) as run:
        (choice,) = [c for c in run.choices if c.key == KEY]
        assert run.gains is not None
        return choice.value, choice.reason, run.gains


def test_break_even_counts_a_cold_compile_or_what_the_last_one_took(tmp_path: Path) -> None:
    _, reason, gains = break_even()
    assert "; 30 s of compiling may take 10% of the run" in reason
    code = tmp_path / "code" / "fxgraph"
    code.mkdir(parents=True)
    gains.store("compilation", [2.5, str(code.parent)])
    assert "; 2.5 s of compiling, as the last time, may take 10%" in break_even()[1]
    shutil.rmtree(code)  # the cache is cold again
    assert "; 30 s of compiling may take 10% of the run" in break_even()[1]


def test_break_even_of_a_measured_gain_is_when_it_has_paid_the_compile_time_back() -> None:
    _, _, gains = break_even()
    gains.store("compile", [2.0, 5.0, True])
    steps, reason, _ = break_even()
    assert steps == 10_000  # 30 s in steps that each save 3 ms
    assert reason.startswith("an earlier run saved 3 ms a step")
    gains.store("compile", [5.0, 2.0, False])
    assert "saved" not in break_even()[1]


@pytest.mark.slow
def test_a_compiled_run_stores_how_long_compiling_took(tmp_path: Path) -> None:
    with runs.opened(*COMPILED) as run:
        assert run.gains is not None
        assert run.gains.compile_seconds() is None
    summary = runs.trained(*COMPILED, "optimization.compile.min_steps=1", "training.steps=3")
    evidence = runs.status(summary, "compile").evidence
    (path,) = (tmp_path / "cache" / "runner" / "gains").iterdir()
    seconds, folder = json.loads(path.read_text())["compilation"]
    assert seconds == evidence["seconds"]
    assert any(Path(folder).iterdir())


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"amp": 3}', '{"amp": [1, 2]}', '{"amp": ["x", 1, 1]}']
)
def test_a_damaged_file_counts_as_nothing_measured(text: str) -> None:
    gains = MeasuredGains(lambda: "facts")
    gains.path.parent.mkdir(parents=True)
    gains.path.write_text(text)
    assert gains.gain("amp") is gains.compile_seconds() is None
    gains.store("amp", [1.0, 2.0, True])
    assert gains.gain("amp") == (1.0, 2.0, True)


def test_without_a_home_folder_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    gains = MeasuredGains(lambda: "facts")
    gains.fix_path()
    gains.store("amp", [1.0, 2.0, True])
    assert gains.gain("amp") is gains.compile_seconds() is None


def test_other_facts_have_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[Any] = [["model", 8], ["model", 9]]
    first, second = (MeasuredGains(lambda one=one: one) for one in facts)
    first.store("amp", [1.0, 2.0, True])
    assert second.gain("amp") is None
