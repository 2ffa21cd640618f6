"""Mistakes in the user's own config files, answered as those on the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, StorageError
from runner.overrides.groups import CONF, chosen
from runner.overrides.spelling import Compose, Typed, read
from runner.overrides.suggestions import Mistake, Suggestions, nearest
from runner.record import hydra_files

HEADER = re.compile(r"\s*#\s*@\s*package\s+_global_\s*")
WrongKey = Callable[[Typed, Suggestions, DictConfig], Mistake | None]


def problem_in_files(
    folders: Sequence[Path], suggestions: Suggestions, compose: Compose, wrong_key: WrongKey
) -> tuple[str, Mistake] | None:
    """What is wrong in a chosen option's file that is not ours: the file and the mistake."""
    for choice in suggestions.choices:
        group, _, option = choice.partition("=")
        for folder in folders:
            path = folder / group / f"{option}.yaml"
            if path.is_file() and not path.resolve().is_relative_to(CONF.resolve()):
                others = [one for one in suggestions.choices if one != choice]
                around = replace(suggestions, choices=others)
                if mistake := _problem(path, group, around, compose, wrong_key):
                    return os.path.relpath(path), mistake
    return None


def file_of(name: str, folders: Sequence[Path]) -> str:
    """The path of the config that Hydra calls by that name, where it is the user's; else ""."""
    paths = (folder / f"{name}.yaml" for folder in folders)
    return next((os.path.relpath(path) for path in paths if path.is_file()), "")


def _problem(
    path: Path, group: str, around: Suggestions, compose: Compose, wrong_key: WrongKey
) -> Mistake | None:
    try:
        body, text = hydra_files.read_yaml(path), path.read_text(encoding="utf-8")
    except (StorageError, OSError, ValueError):
        return None
    if body is not None and not isinstance(body, dict):
        return Mistake(
            "", f"holds a {type(body).__name__}", (), "write keys: `training: {steps: 3}`"
        )
    package = _package(text)
    if group == "experiment" and package != "_global_":
        return _wrong_package(text, package)
    for mistake in _wrong_defaults(body or {}, group, around, package):
        return mistake
    keys = {key: value for key, value in (body or {}).items() if key != "defaults"}
    inner = keys if package == "_global_" else {group: keys}
    try:
        config = compose([*around.choices, *_options(body, around)])
    except (HydraException, OmegaConfBaseException, ValueError):
        return None
    for mistake in _wrong_keys(inner, around, config, wrong_key):
        return mistake
    return None


def _package(text: str) -> str | None:
    try:
        return ConfigSource._get_header_dict(text)["package"]
    except ValueError:
        return ""


def _wrong_package(text: str, package: str | None) -> Mistake:
    fix = "make `# @package _global_` its first line"
    if package:
        return Mistake(
            "", f"is put into the package {package!r}, which is no part of a run", (), fix
        )
    lines = (number for number, line in enumerate(text.splitlines(), 1) if HEADER.fullmatch(line))
    if number := next(lines, None):
        problem = f"has `# @package _global_` in line {number}, below what ends the file's header"
        return Mistake("", problem, (), fix)
    return Mistake(
        "", "lacks `# @package _global_`, so its keys are put under `experiment`", (), fix
    )


def _wrong_defaults(
    body: Mapping[str, Any], home: str, around: Suggestions, package: str | None
) -> Iterator[Mistake]:
    """Entries of the defaults list that Hydra does not find, or takes for something else."""
    for entry, option in _entries(body):
        name = entry.split()[-1].partition("@")[0]
        group = name.lstrip("/")
        if group.startswith(("hydra/", "schema/")) or not isinstance(option, str):
            continue
        key = f"defaults: {entry}"
        if package != "_global_" and not name.startswith("/"):
            continue  # of the same folder
        if group not in around.groups:
            near = around.group_of(group) or nearest(group, around.groups)
            there = f"there are {', '.join(around.groups)}"
            meant = around.first([[f"{near}={option}"]] if near else [])
            yield Mistake(key, f"no config group {group!r}", meant, "" if meant else there)
        elif option not in around.groups[group]:
            yield replace(around.wrong_option(group, option), key=key)
        elif not name.startswith("/"):
            problem = f"{group} is looked for in the folder {home}"
            yield Mistake(key, problem, around.first([[f"{group}={option}"]]))
        elif group in chosen() and "override" not in entry.split():
            meant = around.first([[f"{group}={option}"]])
            yield Mistake(key, f"{group} has an option already", meant)


def _entries(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for entry in body.get("defaults") or []:
        if isinstance(entry, dict):
            yield from ((str(key), option) for key, option in entry.items())


def _options(body: Mapping[str, Any] | None, around: Suggestions) -> list[str]:
    """The options of our groups that the file's defaults list names."""
    named = [(entry.split()[-1].lstrip("/"), option) for entry, option in _entries(body or {})]
    return [f"{g}={o}" for g, o in named if isinstance(o, str) and o in around.groups.get(g, ())]


def _wrong_keys(
    body: Mapping[str, Any], around: Suggestions, config: DictConfig, wrong_key: WrongKey
) -> Iterator[Mistake]:
    for key, value in body.items():
        if key in around.groups and isinstance(value, str):
            meant = tuple(next(around.of_option(key, value), ()))
            yield Mistake(str(key), "an option is named in the defaults list", meant)
        elif "." in str(key):
            meant = around.first([[f"{key}={_typed(value)}"]])
            yield Mistake(str(key), "is one name with a dot in it", meant)
    for path, value in _leaves(body):
        try:
            typed = read(f"{path}={_typed(value)}")
        except ConfigError:
            continue
        if mistake := wrong_key(typed, around, config):
            yield mistake


def _leaves(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed(value: object) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def in_yaml(overrides: Sequence[str], groups: Mapping[str, object]) -> str:
    """The overrides as a config file has them."""
    parts = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key in groups:
            parts.append(f"`override /{key}: {value}` in its defaults list")
            continue
        *above, last = key.lstrip("+").split(".")
        nested = f"{last}: {value}"
        for name in reversed(above):
            nested = f"{name}: {{{nested}}}"
        parts.append(f"`{nested}`")
    return " and ".join(parts)
