"""The arms of a benchmark: what was typed, as configs that can be compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from runner.benchmark.config import BenchmarkConfig
from runner.composing import compose_raw, typed
from runner.config import RunConfig
from runner.data.config import LOADING
from runner.errors import ConfigError
from runner.overrides.groups import ALIASES, options
from runner.overrides.spelling import (
    EXCLUSIVE,
    normalize_overrides,
    parse_override,
    sweep_overrides,
)
from runner.overrides.suggestions import nearest
from runner.record.text import escape_control_chars

KEY = "benchmark.arms"
NAMED = re.compile(r"(?P<name>\w[\w .,+-]{0,39}): +(?P<rest>\S.*)", re.DOTALL)
LEVEL = re.compile(r"[\w.-]+")
NOT_OF_ARMS = ("job", "benchmark", "sweep", "hydra")
"""What is typed for the benchmark, and not for its arms."""
TAKEN = ("attribution", "claims", "comparison")
"""Folders that lie beside those of the arms."""


@dataclass(frozen=True)
class Arm:
    """One way to train: a name and the config that it stands for."""

    name: str  # as typed: a level, or overrides with spaces between them
    config: RunConfig
    overrides: list[str] = field(default_factory=list)  # what sets it apart from the others
    command: str = ""  # trains the same by itself
    folder: str = ""  # its run's, relative to the benchmark's; "" leaves nothing behind
    base: str = ""  # the level that its overrides are on top of, where it names none itself


def arms_of(
    settings: BenchmarkConfig,
    overrides: Sequence[str],
    folders: Sequence[Path] = (),
    config_name: str = "config",
    others: int = 0,
) -> list[Arm]:
    """Each of `benchmark.arms`, composed on top of the `overrides` that were typed.

    Raises ConfigError for an arm that is unknown, comes twice or reads other data, for fewer than
    two (with `others`, which the caller adds), and for a `benchmark.reference` that is none of
    them.
    """
    levels = options(*folders)["optimization"]
    base = [text for text in overrides if not _is_of(parse_override(text).key, NOT_OF_ARMS)]
    compose = partial(compose_raw, config_name=config_name, folders=folders)
    arms: list[Arm] = []
    for text in settings.arms:
        name, own = _apart(text, levels)
        merged = [*_under(base, own), *own]
        try:
            config = typed(compose(normalize_overrides(["job=train", *merged], compose)))
        except ConfigError as error:
            raise ConfigError(KEY, f"{_shown(name)}: {error}") from error
        again = [*_flags(folders, config_name), *_train(merged), *merged]
        command = shlex.join(["python", "-m", "runner", *again])
        folder = _folder(name, [*TAKEN, *(arm.folder for arm in arms)])
        arm = Arm(name, config, own, command, folder, _base(config, own, merged))
        _check_new(arm, arms)
        arms.append(arm)
    if len(arms) + others < 2 or not arms:
        _refuse_number(arms)
    reference_of(arms, settings)
    check_budget(settings, len(arms))
    if settings.attribute and not asks(arms[-1].config):
        raise ConfigError(
            "benchmark.attribute",
            f"the last arm, {_shown(arms[-1].name)}, asks for no technique",
            "put the level that is to be looked into last",
        )
    return arms


def asks(config: RunConfig) -> bool:
    """Whether any technique is asked for."""
    optimization = config.optimization
    return bool(optimization.extra) or any(t.enabled for _, t in optimization.techniques())


def reference_of(arms: Sequence[Arm], settings: BenchmarkConfig) -> Arm:
    """The arm that the others are held against. Raises ConfigError if there is no such."""
    if settings.reference is None:
        return arms[0]
    wanted = " ".join(settings.reference.split())
    for arm in arms:
        if arm.name == wanted:
            return arm
    names = [arm.name for arm in arms]
    near = nearest(wanted, names)
    fix = f"did you mean {_shown(near)}?" if near else f"there are {', '.join(map(_shown, names))}"
    raise ConfigError("benchmark.reference", f"{_shown(wanted)} is none of the arms", fix)


def check_budget(settings: BenchmarkConfig, arms: int) -> None:
    """Raises ConfigError where the time is too short for each arm to have one turn."""
    turns = arms + settings.control
    least = turns * settings.block_s
    if settings.budget_s < least:
        raise ConfigError(
            "benchmark.budget_s",
            f"{settings.budget_s:g} s is not enough for one turn of {settings.block_s:g} s for each"
            f" of {turns} processes",
            f"use {least * 10:g} or more, or a smaller benchmark.block_s",
        )


def _apart(text: str, levels: Sequence[str] | dict[str, str]) -> tuple[str, list[str]]:
    """An arm as typed: its name, and the overrides that it stands for."""
    named = NAMED.fullmatch(text.strip())
    rest = named["rest"] if named else text
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(KEY, f"{_shown(text)} cannot be read ({error})") from error
    if not words:
        raise ConfigError(KEY, "an arm is empty", f"there are {', '.join(levels)}")
    own = [_override(word, text, levels) for word in words]
    keys = [ALIASES.get(parse_override(word).key, parse_override(word).key) for word in own]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(KEY, f"{_shown(text)} sets {twice} twice", "leave one away")
    return named["name"].strip() if named else " ".join(text.split()), own


def _override(word: str, text: str, levels: Sequence[str] | dict[str, str]) -> str:
    if word in levels:
        return f"optimization={word}"
    if "=" not in word and not word.startswith("~"):
        near = nearest(word, levels) if LEVEL.fullmatch(word) else None
        fix = f"did you mean {near}? " if near else ""
        raise ConfigError(
            KEY, f"{_shown(word)} is neither a level nor an override",
            f"{fix}levels are {', '.join(levels)}; an override is written key=value",
        )  # fmt: skip
    try:
        key = parse_override(word).key
        if sweep_overrides([word]):
            raise ConfigError(
                KEY, f"{_shown(word)} names several values", "write an arm for each of them"
            )
    except ConfigError as error:
        if error.key == KEY:
            raise
        raise ConfigError(KEY, f"{_shown(text)}: {error}") from error
    if _is_of(key, (*NOT_OF_ARMS, "security")):  # one answer to what is trusted
        raise ConfigError(
            KEY, f"{_shown(word)} is about the benchmark, not about one arm",
            "write it on the command line",
        )  # fmt: skip
    return word


def _is_of(key: str, parts: Sequence[str]) -> bool:
    return re.split(r"[./]", key)[0] in parts


def _under(base: Sequence[str], own: Sequence[str]) -> list[str]:
    """What was typed for all arms and is left standing by an arm's own."""
    keys = {ALIASES.get(parse_override(text).key, parse_override(text).key) for text in own}
    keys |= {EXCLUSIVE[key] for key in keys if key in EXCLUSIVE}
    return [
        o for o in base if ALIASES.get(parse_override(o).key, parse_override(o).key) not in keys
    ]


def _base(config: RunConfig, own: Sequence[str], merged: Sequence[str]) -> str:
    """The level that an arm did not ask for and has, and whether anybody asked for it."""
    level = {"optimization", "experiment"}
    if level & {parse_override(o).key for o in own}:
        return ""
    default = "" if level & {parse_override(o).key for o in merged} else ", the default"
    return f"optimization={config.optimization.level}{default}"


def _flags(folders: Sequence[Path], config_name: str) -> list[str]:
    found = [f"--config-dir={folder}" for folder in folders]
    return found if config_name == "config" else [*found, f"--config-name={config_name}"]


def _train(overrides: Sequence[str]) -> list[str]:
    """A recipe may ask for the benchmark itself."""
    return ["job=train"] if any(parse_override(o).key == "experiment" for o in overrides) else []


def _folder(name: str, taken: Sequence[str]) -> str:
    """A folder's name that can be read and typed, and that no other arm has."""
    stem = re.sub(r"[^A-Za-z0-9.=+]+", "-", name).strip("-.")[:60] or "arm"
    free = (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3)))
    folded = {one.casefold() for one in taken}  # file systems that make no difference
    return next(one for one in free if one.casefold() not in folded)


def _check_new(arm: Arm, before: Sequence[Arm]) -> None:
    if arm.config.checkpoint.resume != "none":
        raise ConfigError(
            "checkpoint.resume", "a benchmark starts every arm afresh", "leave it away"
        )
    for other in before:
        if other.name == arm.name:
            raise ConfigError(KEY, f"{_shown(arm.name)} comes twice", "leave one away")
        if _work(other.config) == _work(arm.config):
            same = f"{_shown(other.name)} and {_shown(arm.name)} are the same"
            raise ConfigError(KEY, same, _way_out(other, arm))
        differing = _differing_data(other.config, arm.config)
        if differing:
            raise ConfigError(
                KEY, f"{_shown(other.name)} and {_shown(arm.name)} read other data: {differing}",
                "compare ways to train on the same samples; for the rest, sweep: -m data=…",
            )  # fmt: skip


def _way_out(one: Arm, other: Arm) -> str:
    """What to do about two arms that are the same: what they set may be on in their level."""
    based = [arm for arm in (one, other) if arm.base]
    if based:
        names = " and ".join(_shown(arm.name) for arm in based)
        return (
            f"{names} {'is' if len(based) == 1 else 'are'} on top of {based[0].base}; "
            "write optimization=none in an arm for its overrides alone"
        )
    return "leave one away; what a difference of nothing looks like is measured anyway"


def _work(config: RunConfig) -> dict[str, Any]:
    """All that what an arm does depends on."""
    found = asdict(config)
    for key in ("name", "monitoring", *NOT_OF_ARMS[:3]):
        del found[key]
    if found["optimization"]["level"] != "auto":  # which says nothing yet of what it comes to
        del found["optimization"]["level"]
    return found


def _differing_data(one: RunConfig, other: RunConfig) -> str:
    """The first key of the data in which they differ, with both values; empty if in none."""
    ours, theirs = asdict(one.data), asdict(other.data)
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        a, b = ours.get(key), theirs.get(key)
        if key not in LOADING and a != b:
            return f"data.{key} is {a} and {b}"
    return ""


def _refuse_number(arms: Sequence[Arm]) -> None:
    if not arms:
        raise ConfigError(KEY, "names no arm", "e.g. benchmark.arms=[none,basic]")
    name = arms[0].name
    plain = "basic" if arms[0].config.optimization.level == "none" else "none"
    typed_name = name if LEVEL.fullmatch(name) else f'"{name}"'
    raise ConfigError(
        KEY, f"{_shown(name)} has nothing to be held against",
        f"add an arm: 'benchmark.arms=[{plain},{typed_name}]'",
    )  # fmt: skip


def _shown(text: str) -> str:
    return escape_control_chars(text)
