"""Names, values and errors of other people stay text wherever they are shown or written."""

from __future__ import annotations

import dataclasses
import html
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markdown as python_markdown
import pytest
from rich.console import Console, RenderableType

from runner.core.config.groups import CONF
from runner.core.findings import Choice, Reason, Severity, Trust
from runner.core.interfaces.hook import Cost
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.jobs import run_report
from runner.core.record import markdown as md
from runner.core.record.console import close_logging, set_up_logging
from runner.core.record.history import History
from runner.core.record.summary import CheckpointPaths, Summary
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.provenance import Assessment, FileFacts
from runner.diagnose.replay import job as replay_job
from runner.diagnose.replay.results import (
    Attempt,
    Blame,
    Cause,
    Ratio,
    Replay,
    ReplayAttempt,
    SourceLine,
    StepPhase,
    TensorStats,
)
from runner.measure import comparison as comparing
from runner.measure import page, table
from runner.scan import job as scan
from tests import runs
from tests.measure import planted

FORGED = "2026-01-01T00:00:00.000 INFO    runner: all is well"
HOSTILE = (
    f"evil\n{FORGED}\r\x1b[2J\x1b]8;;http://evil.test\x07\x9b31m\u202e\u2028[red]R[/red]"
    "[link=http://evil.test]L[/link]![p](http://evil.test/p.png)[a](javascript:x)|"
    "</td></title></style></script><script>document.title='owned'</script>"
    "\"'><img src=x onerror=\"document.title='owned'\"><!-- `` ``` \\ &amp; ${x} =1+1"
)
CODES = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
STYLED = re.compile(r"\x1b\[[\d;]*m")  # colours, which are ours
KEPT = {"status", "overrides", "format", "claim", "parity", "kind"}  # words of ours, not theirs


def poisoned(value: Any, keep: frozenset[str] = frozenset(KEPT)) -> Any:
    """The same with all text in it hostile, at any depth; names of keys too."""
    if isinstance(value, Enum) or value is None:
        return value
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, dict):
        return {(k if k in FIXED else f"{k}{HOSTILE}"): poisoned(v, keep) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(poisoned(item, keep) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(
            value, **{k: v if k in keep else poisoned(v, keep) for k, v in own.items()}
        )
    return value


FIXED = {"name", "kind", "commit", "branch", "dirty", "cpu", "cores", "device", "torch", "python",
         "status", "techniques", "requested", "engaged", "reason", "evidence", "known", "bytes",
         "file", "throughput", "memory", "metrics", "device_name"}  # fmt: skip


def summary() -> Summary:
    return poisoned(
        Summary(
            status="stopped", reason="because", steps=5, metrics={"val/accuracy/cat": 0.5},
            techniques=[TechniqueStatus("amp", True, True, "why", {"kernel": "flash"}),
                        TechniqueStatus("compile", True, False, "why not")],
            tools=[Cost("profile", 1, 0.1, "found")], faults={"spike": 2},
            checkpoint=CheckpointPaths("checkpoints/a", "checkpoints/b"),
            device={"name": "a CPU"}, versions={"torch": "2"}, config_hash="abc", command="python",
            name="a run", choices=[Choice("micro_batch", "8", "it fits")], monitor="val/accuracy",
            best=0.5, git={"commit": "abc", "branch": "main", "dirty": False},
        )
    )  # fmt: skip


def replay() -> Replay:
    stats = [TensorStats("a", [2], "float32", 1)]
    found = Cause(
        StepPhase.forward, "cause", "layer.1", "Linear", "mul", SourceLine("a.py", 3, "x = y"),
        stats, stats, ["weight"], "grown", [1], [Ratio("a", 2.0)], [Ratio("1", 2.0)], ["note"],
    )  # fmt: skip
    attempt = Attempt(1.0, 2.0, "error", True, ["amp"], {"c": "d"}, "failed")
    blame = Blame("amp", ["amp"], ["amp"], [ReplayAttempt(["amp"], attempt)])
    return poisoned(
        Replay("captures/x", "run", 3, "non_finite", "message", 1.0, None, attempt, True, True,
               found, "seen", blame, "reproduce.py", [1], ["do this"])
    )  # fmt: skip


def comparison() -> comparing.Comparison:
    arms = [
        planted.reference(),
        planted.arm("ultra", 2.0, techniques=[planted.technique("amp")]),
    ]
    found = comparing.compare_arms(planted.result(*arms), None)
    return poisoned(found)


def failed_comparison() -> comparing.Comparison:
    rows = [
        comparing.ComparisonRow(["seed=1"], "done", name="one", summary={"status": "done"}),
        comparing.ComparisonRow(["seed=2"], "failed", "reason", name="two", command="python"),
    ]
    return poisoned(
        comparing.Comparison("title", rows, reference="one", notes=["note"], command="python")
    )


def scanned() -> scan.ScanResult:
    assessment = Assessment("x", Trust.REFUSED, files={"x": FileFacts("ab" * 32, 9, "npy")})
    assessment.reasons.append(Reason("zip.overlap", Severity.REFUSAL, "member", "seen", "do"))
    rows = [scan.ScanRow("file", assessment)]
    return poisoned(scan.ScanResult("x", SecurityLevel.strict, 1, rows))


# on a terminal


def shown(what: RenderableType, width: int) -> str:
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    screen.print(what, crop=False)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A run's folder with faults of hostile messages."""
    history = History(tmp_path)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        history.add("spike", HOSTILE, step=1, category="code", action=HOSTILE, error=error,
                    capture=f"debug/captures/{HOSTILE}", say=False)  # fmt: skip
    history.write()
    return tmp_path


SCREENS = {
    "summary": lambda folder: run_report.RunSummaryTable(summary(), folder),
    "replay": lambda folder: replay_job.terminal_report(replay()),
    "comparison": lambda folder: table.ComparisonScreen(comparison()),
    "failures": lambda folder: table.ComparisonScreen(failed_comparison()),
    "scan": lambda folder: scan.render_terminal(scanned(), 30),
}
PAGES = {
    "summary": lambda folder: run_report.render_report(summary(), folder),
    "replay": lambda folder: replay_job.markdown_report(replay()),
    "comparison": lambda folder: page.render_markdown(comparison()),
    "failures": lambda folder: page.render_markdown(failed_comparison()),
    "config": lambda folder: md.code(HOSTILE, "yaml"),
}


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [80, 2000])
def test_a_terminal_shows_text_as_text(name: str, width: int, faulty: Path) -> None:
    said = shown(SCREENS[name](faulty), width)
    bare = STYLED.sub("", said)
    assert not CODES.findall(bare)
    assert not [line for line in bare.splitlines() if line.strip().startswith(FORGED[:20])] or (
        width == 80  # where a long line is folded, anything may stand first; it is indented
    )
    if width == 2000:
        assert "[red]R[/red]" in bare
        assert "[link=http://evil.test]L[/link]" in bare


# on a page


class Tags(HTMLParser):
    """Which elements a page has, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [v or "" for k, v in attrs if k in ("href", "src") or k.startswith("on")]


PLAIN_TAGS = {"p", "h1", "h2", "h3", "table", "thead", "tbody", "tr", "th", "td", "strong", "em",
              "code", "pre", "ul", "ol", "li", "hr", "br", "blockquote", "div", "span"}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_markdown_has_no_element_or_link_of_others(name: str, faulty: Path) -> None:
    text = PAGES[name](faulty)
    made = python_markdown.markdown(text, extensions=["tables", "fenced_code"])
    found = Tags()
    found.feed(made)
    assert found.names <= PLAIN_TAGS, found.names - PLAIN_TAGS
    assert found.links == []
    assert not CODES.findall(text.replace("\n", ""))
    unfenced = re.sub(r"^(`{3,})\w*\n.*?\n\1$", "", text, flags=re.S | re.M)
    assert "`````" not in unfenced or name == "config"
    assert not [x for x in unfenced.splitlines() if x.strip().startswith(FORGED)]


@pytest.mark.parametrize("make", [comparison, failed_comparison])
def test_a_page_has_the_elements_that_it_has_anyway(make: Any) -> None:
    found = Tags()
    text = page.render_html(make())
    found.feed(text)
    assert "img" not in found.names
    assert not [link for link in found.links if "evil" in link or link.startswith("javascript")]
    assert text.count("<script") == text.count("</script>")
    assert "<script>document.title" not in text
    assert "default-src 'none'" in html.unescape(text) and "unsafe-inline" not in text


# in a log


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    set_up_logging("debug", tmp_path)
    yield tmp_path / "run.log"
    close_logging()


LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} [A-Z]+ +[\w.]+: |  \| ")


def test_each_line_of_the_log_is_ours(log_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("runner")
    log.warning("%s", HOSTILE)
    log.error("a worker said %s", [HOSTILE, Path(HOSTILE[:60].replace("/", ""))])
    log.info(HOSTILE.replace("%", ""), extra={"live": False})
    try:
        raise type("E\nvil", (Exception,), {})(HOSTILE)
    except Exception as error:
        log.error("it failed: %s", error, exc_info=error)
    History(None).add(HOSTILE, HOSTILE, step=1, category="code", action=HOSTILE)
    lines = log_file.read_text().split("\n")[:-1]
    assert len(lines) > 6
    assert [line for line in lines if not LINE.match(line)] == []
    assert not [line for line in lines if line.startswith(FORGED)]
    assert not CODES.findall("".join(lines))
    said = capfd.readouterr().err
    assert not CODES.findall(said.replace("\n", ""))
    assert not [line for line in said.splitlines() if line.startswith(FORGED[:10])]


@pytest.mark.parametrize("typed", [[f"model={HOSTILE[:60]}"], ["--config-dir", HOSTILE[:60]]])
def test_any_command_line_mistake_is_one_line(typed: list[str], tmp_path: Path) -> None:
    done = runs.command(tmp_path, *typed)
    assert done.returncode in (2, 3)
    said = done.stderr
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not CODES.findall(said.replace("\n", ""))


# the network

WITHOUT_SOCKETS = """
import runpy, sys

NAMES = ("__new__", "connect", "bind", "getaddrinfo", "gethostbyname")

def refuse(event, arguments):
    if event in [f"socket.{name}" for name in NAMES]:
        raise PermissionError(event)

sys.addaudithook(refuse)
sys.argv = ["runner", *sys.argv[1:]]
runpy.run_module("runner", run_name="__main__", alter_sys=True)
"""


def test_a_run_asks_for_no_socket(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_SOCKETS, "data=digits", "training.steps=6",
         "device=cpu", "optimization=none", "training.validate_every=3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "runs").glob("*/*")
    assert (folder / "report.md").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    assert "socket." not in done.stderr + (folder / "run.log").read_text()


def test_no_command_of_ours_makes_tensorboard_listen_to_others() -> None:
    sources = [*(CONF.parent / "runner").rglob("*.py"), CONF.parent / "README.md"]
    assert not [path for path in sources if re.search(r"--bind.all|--host[ =]0", path.read_text())]
