"""Settings as one types them come back as they were, from a shell and from Hydra."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from runner.errors import ConfigError
from runner.overrides.spelling import read
from runner.record.typed import in_shell, resuming

NAMES = [
    "/srv/plain-1.5/a_b", "mit Leerzeichen äöü/x", "it's", 'a "quoted" one', "$HOME/`id`;&", "a\\b",
    "1,2", "[a", "{b}", "a=b", "~", "C:\\x", "",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pasted_into_a_shell_is_read_as_it_was(name: str) -> None:
    (word,) = shlex.split(in_shell("data.path", name))
    assert read(word).parsed.value() == name


def test_a_plain_folder_is_not_quoted() -> None:
    assert resuming(Path("outputs/runs/a/b")) == "checkpoint.resume=outputs/runs/a/b"


def test_a_value_that_cannot_be_read_is_shown_as_it_is_to_be_typed() -> None:
    with pytest.raises(ConfigError, match="quoted twice: 'data.path=\"häuser.csv\"'$"):
        read("data.path=häuser.csv")
