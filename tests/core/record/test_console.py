import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from logging.config import dictConfig
from pathlib import Path

import pytest
from rich.live import Live
from rich.text import Text

from runner.core import masking
from runner.core.record.console import (
    EscapingConsole,
    close_logging,
    console,
    has_log_file,
    restore_logging,
    set_up_logging,
    supports_live_display,
)

log = logging.getLogger("runner")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, levels = logging.getLogger(), (logging.getLogger().level, log.level)
    yield
    close_logging()
    root.setLevel(levels[0])
    log.setLevel(levels[1])


def test_a_handler_that_other_code_has_put_back_prints_no_line_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", tmp_path)
    earlier = list(logging.getLogger().handlers)
    set_up_logging("info", tmp_path)
    for handler in earlier:  # as a test or a notebook restores them
        logging.getLogger().addHandler(handler)
    set_up_logging("info", tmp_path)
    log.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert sum("once" in line for line in lines(tmp_path)) == 1


def lines(folder: Path) -> list[str]:
    return (folder / "run.log").read_text().splitlines()


EVIL = ["a\n2026-01-01 ERROR forged"]
EVIL += [f"a{x}b" for x in ("\r\n", "\x1b[2K", "\u2028", "\x85", "\u202e", "\udcff")]


def test_no_message_can_pass_for_two_lines_or_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("info", tmp_path)
    for text in EVIL:
        log.info("the file %s is bad", text)
        shown = capsys.readouterr().err
        assert len(shown.splitlines()) == 1 and shown.strip().isprintable()
    assert len(lines(tmp_path)) == len(EVIL)


LEVEL = {"level": "CRITICAL", "propagate": False}
SILENCED = {
    "runner": {**LEVEL, "filters": ["other"]},
    "runner.core.device.device": LEVEL,
    "py.warnings": LEVEL,
}


@pytest.mark.parametrize("loggers", [SILENCED, {}])  # {}: `disable_existing_loggers` does it
def test_no_other_set_up_of_logs_keeps_ours_quiet(
    loggers: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: logging.getLogger(name).level for name in SILENCED}
    root = logging.getLogger()
    handlers = list(root.handlers)
    filters = {"other": {"name": "other"}}
    dictConfig({"version": 1, "filters": filters, "loggers": loggers, "root": {"level": "ERROR"}})
    try:
        set_up_logging("info", tmp_path)
        for name in SILENCED:
            logging.getLogger(name).warning("from %s", name)
        log.info("at work")
        close_logging()
    finally:
        for handler in handlers:  # pytest's own
            root.addHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        for name in root.manager.loggerDict:  # torch's, too
            logging.getLogger(name).disabled = False
    for text in (capsys.readouterr().err, (tmp_path / "run.log").read_text()):
        assert all(f"from {name}" in text for name in SILENCED) and "at work" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda: dictConfig({"version": 1, "root": {"level": "ERROR", "handlers": []}}),
        lambda: logging.basicConfig(force=True, handlers=[logging.NullHandler()]),
        lambda: logging.getLogger().handlers.clear(),
        lambda: logging.disable(logging.CRITICAL),
        logging.shutdown,
        lambda: [handler.setLevel("CRITICAL") for handler in logging.getLogger().handlers],
        lambda: [logging.getLogger(name).setLevel("CRITICAL") for name in ("runner", "")],
    ],
)
def test_logging_that_other_code_sets_up_during_a_run_is_restored_and_named_once(
    change: Callable[[], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level, names = list(root.handlers), root.level, set(root.manager.loggerDict)
    root.handlers.clear()  # pytest's own
    try:
        set_up_logging("info", tmp_path)
        for number in range(2):
            change()
            restore_logging()
            log.info("line %d", number)
        assert has_log_file()
        close_logging()
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:], root.level = handlers, level
        for name in names:
            logging.getLogger(name).disabled = False
        logging.getLogger("runner").setLevel(logging.NOTSET)
    for text in (capsys.readouterr().err, (tmp_path / "run.log").read_text()):
        assert "line 0" in text and "line 1" in text
        named = text.count("other code has set up logging again")
        assert named == (change is not logging.shutdown)  # the closed file is opened again


def test_without_a_set_up_of_ours_nothing_of_a_programs_logging_changes() -> None:
    close_logging()
    root = logging.getLogger()
    logging.disable(logging.INFO)
    before = list(root.handlers), root.level, logging.getLogger("runner").level
    restore_logging()
    assert root.manager.disable == logging.INFO
    logging.disable(logging.NOTSET)
    assert before == (list(root.handlers), root.level, logging.getLogger("runner").level)


def test_a_pipe_whose_reader_has_gone_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = open(write, "w", buffering=1)  # noqa: SIM115  # closed below, with what it still holds
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("info", tmp_path)
    log.info("one")
    log.info("two")
    assert len(lines(tmp_path)) == 2
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_warning_that_repeats_is_said_once_and_a_wrong_call_is_not_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would raise
    set_up_logging("info", tmp_path)
    log.info("%d steps", "many")
    for sample in range(40):
        logging.getLogger("runner").warning("sample %d is %.2f wide", sample, sample / 3)
        logging.getLogger("runner").info("line %d", sample)
    close_logging()
    for text in (capsys.readouterr().err, (tmp_path / "run.log").read_text()):
        assert text.count("wide") == 1 and text.count("line ") == 40
        assert "sample 0 is 0.00 wide" in text
        assert "'%d steps' (its arguments do not fit" in text


def test_every_other_handler_writes_what_ours_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking, "_variable_by_text", {})
    monkeypatch.setattr(masking, "_pattern", None)
    masking.add_secret("TOKEN", "canary-4b1d")
    stream = io.StringIO()
    theirs = [logging.StreamHandler(stream), logging.FileHandler(tmp_path / "other.log")]
    monkeypatch.setattr(log, "handlers", [])
    set_up_logging("info", tmp_path)
    before = logging.getLogger().handlers
    monkeypatch.setattr(logging.getLogger(), "handlers", [theirs[0], *before, theirs[1]])
    try:
        raise ValueError("cannot log in with canary-4b1d\x1b[2J\nforged")
    except ValueError:
        log.error("with %s\nand %r", "canary-4b1d", {"x": "canary-4b1d"}, exc_info=True)
    theirs[1].close()
    for text in (stream.getvalue(), (tmp_path / "other.log").read_text()):
        first, *rest = text.splitlines()
        assert first == "with ${oc.env:TOKEN}\\nand {'x': '${oc.env:TOKEN}'}"
        assert rest and all(line.startswith("  | ") for line in rest)
        assert "canary" not in text and "\x1b" not in text
        assert "ValueError: cannot log in with ${oc.env:TOKEN}\\x1b[2J" in text
    assert "canary" not in (tmp_path / "run.log").read_text()
    close_logging()
    assert logging.getLogRecordFactory() is logging.LogRecord


def test_a_line_of_the_log_takes_a_live_display_away_before_it_and_draws_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    screen, stream = console(), sys.stderr
    set_up_logging("info", None)
    with Live(Text("one\ntwo"), console=screen, auto_refresh=False) as live:
        live.refresh()
        drawn = len(stream.getvalue())  # type: ignore[attr-defined]
        log.warning("something")
        said = stream.getvalue()[drawn:]  # type: ignore[attr-defined]
    assert said.index("\x1b[1A\x1b[2K") < said.index("something") < said.index("one")


def test_a_cell_of_a_notebook_gets_lines_and_no_display_that_moves_the_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    screen = EscapingConsole(force_terminal=True, _environ={"TERM": "xterm-color"})
    assert supports_live_display(screen)
    monkeypatch.setenv("JPY_PARENT_PID", "7")
    assert not supports_live_display(screen)
