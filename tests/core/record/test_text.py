"""Errors in one line, and text that a shell and Hydra read back as it was."""

import logging
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from runner.core.config.spelling import parse_override
from runner.core.errors import ConfigError
from runner.core.record import text
from runner.core.record.console import close_logging, set_up_logging
from runner.core.record.history import History
from runner.core.record.storage import read_record
from runner.core.record.text import (
    LONGEST_TEXT,
    describe_error,
    limit_length,
    quote_for_shell,
    shorten,
    summarize_error,
)
from runner.core.security.registry import construct

NAMES = [
    "/srv/plain-1.5/a_b", "mit Leerzeichen äöü/x", "it's", 'a "quoted" one', "$HOME/`id`;&", "a\\b",
    "1,2", "[a", "{b}", "a=b", "~", "C:\\x", "",
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, in_features: int, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, width)  # WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # FORWARD


def marked(mark: str) -> tuple[str, int]:
    """This file, and the number of the line with that mark."""
    lines = Path(__file__).read_text().splitlines()
    return __file__, next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def test_an_error_is_placed_in_the_users_model_or_where_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as raised:
        construct(Net, {"width": "abc"}, {"in_features": 4}, "model")
    text, *place = describe_error(raised.value)
    assert text.startswith("TypeError: empty()") and text.endswith("; Net got model.width")
    assert tuple(place) == marked("WIDTH")
    with pytest.raises(RuntimeError) as of_torch:
        Net(4)(torch.zeros(2, 3))
    assert describe_error(of_torch.value)[1:] == marked("FORWARD")
    with pytest.raises(FileNotFoundError) as of_ours:
        read_record(tmp_path / "gone")
    trail = of_ours.value.__traceback__
    assert trail is not None
    of_ours.value.__traceback__ = trail.tb_next  # without this test's own line
    text, file, _ = describe_error(of_ours.value)
    assert text.startswith("FileNotFoundError: ") and file != __file__


def test_a_reason_that_is_too_long_ends_between_two_words() -> None:
    reason = "torch 2.13.0 took 0.85 ms, e.g. for x.csv, and 1.25 more"
    for most in range(5, len(reason)):
        words = shorten(reason, most).removesuffix(" …").split()
        assert words == reason.split()[: len(words)]


def test_a_quoted_command_is_read_back_unchanged_by_a_shell() -> None:
    for name in NAMES:
        (word,) = shlex.split(quote_for_shell("data.path", name))
        assert parse_override(word).parsed.value() == name
    with pytest.raises(ConfigError, match="quoted twice: 'data.path=\"häuser.csv\"'$"):
        parse_override("data.path=häuser.csv")


def test_a_long_text_keeps_its_beginning_and_its_end_and_no_part_of_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert limit_length("x" * LONGEST_TEXT) == "x" * LONGEST_TEXT
    monkeypatch.setattr(text, "mask_secrets", lambda value: value.replace("hidden", "${T}"))
    short = limit_length("a" * 47 + "hidden" + "b" * 1000 + "end", 100)
    assert short.startswith("a" * 47 + "${T … (") and short.endswith("end") and "hid" not in short
    assert "characters left out" in short


def test_a_long_exception_is_short_in_log_history_and_summary(tmp_path: Path) -> None:
    error = ValueError("y" * 3_000_000)
    assert len(summarize_error(error)) < 5_000
    assert len(describe_error(raised(error))[0]) < 5_000
    set_up_logging("info", tmp_path)
    try:
        logging.getLogger("runner").error("failed: %s", error, exc_info=error)
    finally:
        close_logging()
    assert (tmp_path / "run.log").stat().st_size < 20_000
    history = History(tmp_path)
    history.add("exception", str(error), step=1, category="code", error=error, say=False)
    history.write()
    assert (tmp_path / "debug" / "history.json").stat().st_size < 50_000


def raised(error: Exception) -> Exception:
    try:
        raise error
    except ValueError as caught:
        return caught
