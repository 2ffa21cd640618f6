"""Names, values and errors of other people stay text wherever they are shown or written."""

from __future__ import annotations

import dataclasses
import html
import io
import logging
import re
from collections.abc import Iterator
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import markdown as python_markdown
import pytest
from rich.console import Console, RenderableType

from runner.core.config.groups import CONF
from runner.core.jobs import run_report
from runner.core.record import markdown as md
from runner.core.record.console import close_logging, set_up_logging
from runner.core.record.history import History
from runner.core.record.summary import Summary
from runner.diagnose.replay import job as replay_job
from runner.diagnose.replay.results import Replay
from runner.measure import comparison as comparing
from runner.measure import page, table
from runner.scan import job as scan
from tests import runs

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
OURS = {"status": "stopped", "format": "npz", "claim": "faster", "parity": "same", "kind": "x"}
KEYS = "name commit branch torch python cpu step samples".split()  # of ours in a dict
PLAIN: dict[Any, Any] = {int: 3, float: 0.5, bool: True, NoneType: None}


def filled(kind: Any, /, **own: Any) -> Any:
    """A value of this type with hostile text wherever it holds text, at any depth."""
    args, own = get_args(kind), {**OURS, **own}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, localns={"SearchRecord": NoneType})
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return kind(**{n: own[n] if n in own else filled(hints[n]) for n in names})  # type: ignore[operator]
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(filled(arg) for arg in args if arg is not Ellipsis)
    if get_origin(kind) is dict:
        return {HOSTILE: filled(args[1]), **{name: filled(args[1]) for name in KEYS}}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    return filled(args[0]) if args else PLAIN.get(kind, HOSTILE)


def summary() -> Summary:
    return filled(Summary, distributed={}, export={}, model_check={})


def comparison() -> comparing.Comparison:
    rows = [filled(comparing.ComparisonRow, status="done") for _ in range(2)]
    return filled(comparing.Comparison, kind="benchmark", rows=rows, root=None)


def failed_comparison() -> comparing.Comparison:
    rows = [filled(comparing.ComparisonRow, status=status) for status in ("done", "failed")]
    return filled(comparing.Comparison, kind="sweep", rows=rows, root=None, benchmark=None)


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
    "replay": lambda folder: replay_job.terminal_report(filled(Replay)),
    "comparison": lambda folder: table.ComparisonScreen(comparison()),
    "failures": lambda folder: table.ComparisonScreen(failed_comparison()),
    "scan": lambda folder: scan.render_terminal(filled(scan.ScanResult), 30),
}
PAGES = {
    "summary": lambda folder: run_report.render_report(summary(), folder),
    "replay": lambda folder: replay_job.markdown_report(filled(Replay)),
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
    typed = "data=digits training.steps=6 device=cpu optimization=none training.validate_every=3"
    done = runs.python("-P", "-c", WITHOUT_SOCKETS, *typed.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "runs").glob("*/*")
    assert (folder / "report.md").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    assert "socket." not in done.stderr + (folder / "run.log").read_text()


def test_no_command_of_ours_makes_tensorboard_listen_to_others() -> None:
    sources = [*(CONF.parent / "runner").rglob("*.py"), CONF.parent / "README.md"]
    assert not [path for path in sources if re.search(r"--bind.all|--host[ =]0", path.read_text())]
