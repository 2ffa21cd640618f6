"""Records that somebody forged say on the terminal what they say, and do nothing there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from runner.errors import StorageError
from runner.record.console import print_stdout
from runner.report import run as report
from runner.report import table
from runner.report.__main__ import main
from runner.report.discover import of_folders
from runner.training.summary import Summary
from tests.report.planted_results import technique
from tests.report.planted_runs import job, run, sweep

LINE = "FORGED: all is well"
HOSTILE = (
    f"evil\x1b[2J\x1b]8;;http://evil.test\x07\x9b31m\x07\u202e\u2028\u061c\r\n{LINE}\x00"
    "[red]R[/red][link=http://evil.test]L[/link]:boom:"
)
CODES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e]")
STYLED = re.compile(r"\x1b\[[\d;]*m")  # colours of ours


def check_output(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    check_text(shown.out)
    check_text(shown.err)
    return shown.out


def check_text(shown: str) -> None:
    bare = STYLED.sub("", shown)
    assert not CODES.findall(bare)
    assert not [line for line in bare.splitlines() if line.strip().startswith(LINE)]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "2000", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)


def test_the_console_escapes_text_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    grid = Table(title=HOSTILE, caption=HOSTILE)
    grid.add_column(HOSTILE, footer=HOSTILE)
    grid.add_column(Text(HOSTILE.replace("\n", "")))
    grid.add_row(HOSTILE, Text(HOSTILE.replace("\n", "")))
    print_stdout(grid, HOSTILE, Text(HOSTILE.replace("\n", "")))
    shown = capsys.readouterr().out
    check_text(shown)
    assert shown.count("[red]R[/red][link=http://evil.test]L[/link]:boom:") == 8
    assert "\\x1b]8;;http://evil.test\\x07" in shown


Tree = dict[str, Any] | list[Any]


def forgeries(tree: Tree) -> Iterator[Tree]:
    """`tree` with one value, or one key, replaced by hostile text, for each that it has."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            if isinstance(value[key], dict | list):
                yield from places(value[key], (*path, key))

    for *above, last in places(tree, ()):
        for rename in (False, True):
            forged = copy.deepcopy(tree)
            parent: Any = forged
            for key in above:
                parent = parent[key]
            if not rename:
                parent[last] = HOSTILE
            elif isinstance(parent, dict):
                parent[f"{last}{HOSTILE}"] = parent[last]
            else:
                parent.insert(0, HOSTILE)
            yield forged


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    entry = technique("amp", "engaged", "why", kernel="flash")
    more: dict[str, Any] = {"git": {"commit": "abc", "branch": "main"}, "techniques": [entry]}
    more |= {"faults": {"spike": 1}, "device": {"name": "a CPU"}, "versions": {"torch": "2"}}
    jobs = [job(0, "none"), job(1, "basic"), job(2, "ultra", "failed", "no memory")]
    folder = sweep(tmp_path / "runs", jobs)
    run(folder / "0", ["optimization=none"])
    run(folder / "1", ["optimization=basic"], 1500.0)
    run(folder / "2", ["optimization=ultra"], 1.0, "failed", reason="why", **more)
    return folder


@pytest.mark.parametrize("record", ["2/summary.json", "sweep.json"])
def test_a_forged_record_is_shown_as_text(
    record: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, count = json.loads((runs / record).read_text()), 0
    for forged in forgeries(tree):
        (runs / record).write_text(json.dumps(forged))
        print_stdout(table.terminal(of_folders([runs])), crop=False)
        with suppress(StorageError, TypeError, ValueError, AttributeError):  # it does not fit
            summary = Summary.read(runs / "2")
            print_stdout(report.EndTable(summary, runs / "2"), crop=False)
        count += "evil" in check_output(capsys)
    assert count > 3  # or nothing of it was shown at all


def test_headings_and_names_of_folders_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"val/{HOSTILE}"
    outer = tmp_path / HOSTILE.replace("/", "").replace("\0", "")
    for number in range(2):
        place = outer / f"{number}\x1b[31m"
        run(place, [f"seed={number}"], metrics={name: 0.9}, monitor=name)
    assert main([str(outer)]) == 0
    shown = STYLED.sub("", check_output(capsys))
    assert "best val/evil\\x1b[2J" in shown and "comparison evil\\x1b[2J" in shown
