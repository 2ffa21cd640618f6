"""Records that somebody forged say on the terminal what they say, and do nothing there."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from runner.core.errors import StorageError
from runner.core.jobs import run_report as report
from runner.core.record.console import print_stdout
from runner.core.record.summary import Summary
from runner.measure import table
from runner.measure.discover import compare_folders
from runner.report import main
from tests.measure.planted import job, run, sweep, technique

LINE = "FORGED: all is well"
HOSTILE = (
    f"evil\x1b[2J\x1b]8;;http://evil.test\x07\x9b31m\x07\u202e\u2028\u061c\r\n{LINE}\x00"
    "[red]R[/red][link=http://evil.test]L[/link]:boom:"
)
CODES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e]")
STYLED = re.compile(r"\x1b\[[\d;]*m")  # colours of ours
VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.e+-]*|true|false|null')  # or a key, in JSON


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without colours of ours; it has no codes and no line of another's."""
    bare = [STYLED.sub("", text) for text in capsys.readouterr()]
    for text in bare:
        assert not CODES.findall(text)
        assert not [line for line in text.splitlines() if line.strip().startswith(LINE)]
    return bare[0]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "2000", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)


def test_the_console_escapes_text_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    text = Text(HOSTILE.replace("\n", ""))
    grid = Table(title=HOSTILE, caption=HOSTILE)
    grid.add_column(HOSTILE, footer=HOSTILE)
    grid.add_column(text)
    grid.add_row(HOSTILE, text)
    print_stdout(grid, HOSTILE, text)
    shown = printed(capsys)
    assert shown.count("[red]R[/red][link=http://evil.test]L[/link]:boom:") == 8
    assert "\\x1b]8;;http://evil.test\\x07" in shown


@pytest.mark.parametrize("record", ["2/summary.json", "sweep.json"])
def test_a_record_of_which_any_value_or_key_is_forged_is_shown_as_text(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = technique("amp", "engaged", "why", kernel="flash")
    more: dict[str, Any] = {"git": {"commit": "abc", "branch": "main"}, "techniques": [entry]}
    more |= {"faults": {"spike": 1}, "device": {"name": "a CPU"}, "versions": {"torch": "2"}}
    jobs = [job(0, "none"), job(1, "basic"), job(2, "ultra", "failed", "no memory")]
    folder = sweep(tmp_path / "runs", jobs)
    run(folder / "0", ["optimization=none"])
    run(folder / "1", ["optimization=basic"], 1500.0)
    run(folder / "2", ["optimization=ultra"], 1.0, "failed", reason="why", **more)
    text, count = json.dumps(json.loads((folder / record).read_text())), 0
    for match in VALUE.finditer(text):
        forged = f"{text[: match.start()]}{json.dumps(HOSTILE)}{text[match.end() :]}"
        (folder / record).write_text(forged)
        print_stdout(table.ComparisonScreen(compare_folders([folder])), crop=False)
        with suppress(StorageError, TypeError, ValueError, AttributeError):  # it does not fit
            summary = Summary.read(folder / "2")
            print_stdout(report.RunSummaryTable(summary, folder / "2"), crop=False)
        count += "evil" in printed(capsys)
    assert count > 3  # or nothing of it was shown at all


def test_headings_and_names_of_folders_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"val/{HOSTILE}"
    outer = tmp_path / HOSTILE.replace("/", "").replace("\0", "")
    for number in range(2):
        run(outer / f"{number}\x1b[31m", [f"seed={number}"], metrics={name: 0.9}, monitor=name)
    assert main([str(outer)]) == 0
    shown = printed(capsys)
    assert "val/evil\\x1b[2J" in shown and "comparison evil\\x1b[2J" in shown
