"""A config as somebody might hand it over: what is typed, and the files that come with it."""

from __future__ import annotations

from dataclasses import dataclass, field

EXPERIMENT = "# @package _global_\n"


@dataclass(frozen=True)
class Case:
    """`says` is part of the message; `mistake`: the answer is a ConfigError, and no refusal."""

    name: str
    typed: list[str]
    files: dict[str, str] = field(default_factory=dict)
    says: str = ""
    mistake: bool = False


def by_file(name: str, body: str, says: str, *typed: str, mistake: bool = False) -> Case:
    """An experiment of another folder, chosen on the command line."""
    files = {"theirs/experiment/own.yaml": EXPERIMENT + body}
    flags = ["--config-dir=theirs", "experiment=own", *typed]
    return Case(name, flags, files, says, mistake)


def typed(name: str, *words: str, says: str = "", mistake: bool = False) -> Case:
    """Nothing but the command line."""
    return Case(name, list(words), {}, says, mistake)
