"""Parse `benchmark.arms` and the command line into one composed config per arm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from runner.core.config.aliases import find_options
from runner.core.config.composing import compose_raw, typed
from runner.core.config.groups import GROUP_ALIASES, group_options
from runner.core.config.run_config import RunConfig
from runner.core.config.spelling import (
    EXCLUSIVE,
    normalize_overrides,
    parse_override,
    sweep_overrides,
)
from runner.core.errors import ConfigError
from runner.core.format import nearest
from runner.core.module_path import python_command
from runner.core.record.text import escape_control_chars as escape
from runner.core.schemas.data import LOADING_KEYS
from runner.core.schemas.device import DistributedKind
from runner.core.schemas.jobs import BenchmarkConfig
from runner.core.security.secrets import check_name

KEY = "benchmark.arms"
NAMED_ARM = re.compile(r"(?P<name>\w[\w .,+-]{0,39}): +(?P<rest>\S.*)", re.DOTALL)
SHARED_GROUPS = ("job", "benchmark", "sweep", "hydra")
"""Config groups that apply to the whole benchmark: they cannot differ between arms."""
RESERVED_FOLDERS = ("attribution", "comparison")
"""Folder names that the benchmark itself uses; no arm may have them."""


@dataclass(frozen=True)
class Arm:
    """One way to train: a name and a complete run config."""

    name: str  # as typed: a level, or overrides with spaces between them
    config: RunConfig
    overrides: list[str] = field(default_factory=list)  # of this arm alone
    command: str = ""  # shell command that trains the same config outside the benchmark
    folder: str = ""  # run folder relative to the benchmark's; "": nothing is written


def compose_arms(
    settings: BenchmarkConfig,
    overrides: Sequence[str],
    folders: Sequence[Path] = (),
    config_name: str = "config",
    others: int = 0,
) -> list[Arm]:
    """Compose each of `benchmark.arms` on top of the command line's `overrides`.

    Raises ConfigError for an arm that is unknown, given twice or reads other data, for fewer than
    two arms with the `others` of the caller, and for an unknown `benchmark.reference`.
    """
    levels = list(group_options(*folders)["optimization"])
    base_overrides = [text for text in overrides if _config_group(text) not in SHARED_GROUPS]
    compose = partial(compose_raw, config_name=config_name, folders=folders)
    flags = [f"--config-dir={folder}" for folder in folders]
    flags += [] if config_name == "config" else [f"--config-name={config_name}"]
    arms: list[Arm] = []
    for text in settings.arms:
        check_name(KEY, text, "type that key for all arms, outside of benchmark.arms")
        name, arm_overrides = _parse_arm(text, levels)
        keys = {_override_key(override) for override in arm_overrides}
        keys |= {EXCLUSIVE[key] for key in keys if key in EXCLUSIVE}
        merged = [text for text in base_overrides if _override_key(text) not in keys]
        merged += arm_overrides
        try:
            config = typed(compose(normalize_overrides(["job=train", *merged], compose, folders)))
        except ConfigError as error:
            raise ConfigError(KEY, f"{escape(name)}: {error}") from error
        if config.distributed.kind is not DistributedKind.none:
            is_own = any(key.startswith("distributed") for key in keys)
            problem = f"arms are compared as single processes, but arm {escape(name)} has several"
            fix = "leave distributed out; a sweep (-m) shows the seconds of distributed runs"
            raise ConfigError(KEY if is_own else "distributed", problem, fix)
        # a recipe may ask for the benchmark
        has_recipe = any(parse_override(one).key == "experiment" for one in merged)
        job = ["job=train"] if has_recipe else []
        command = shlex.join([*python_command(), *flags, *job, *merged])
        folder = _unique_folder(name, [*RESERVED_FOLDERS, *(arm.folder for arm in arms)])
        arm = Arm(name, config, arm_overrides, command, folder)
        _check_arm(arm, arms)
        arms.append(arm)
    _check_arms(arms, settings, others)
    return arms


def _check_arms(arms: Sequence[Arm], settings: BenchmarkConfig, others: int) -> None:
    if len(arms) + others < 2 or not arms:
        problem = f"needs two arms or more, got {len(arms)}"
        raise ConfigError(KEY, problem, "e.g. benchmark.arms=[none,basic]")
    reference_arm(arms, settings)
    check_budget(settings, len(arms))
    if settings.attribute and not requests_techniques(arms[-1].config):
        problem = f"the last arm, {escape(arms[-1].name)}, enables no technique"
        fix = "make the level to attribute the last arm"
        raise ConfigError("benchmark.attribute", problem, fix)


def requests_techniques(config: RunConfig) -> bool:
    """Return whether the config requests any technique."""
    optimization = config.optimization
    return bool(optimization.extra) or any(t.enabled for _, t in optimization.techniques())


def reference_arm(arms: Sequence[Arm], settings: BenchmarkConfig) -> Arm:
    """Return the arm that the others are compared with. Raises ConfigError if it does not exist."""
    by_name = {arm.name: arm for arm in arms}
    reference = arms[0].name if settings.reference is None else " ".join(settings.reference.split())
    if reference not in by_name:
        problem, fix = f"{escape(reference)} is not an arm", _suggest(reference, list(by_name))
        raise ConfigError("benchmark.reference", problem, escape(fix))
    return by_name[reference]


def _suggest(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"use one of {', '.join(names)}"


def check_budget(settings: BenchmarkConfig, arms: int) -> None:
    """Raise ConfigError if the budget is too short for each process to have one turn."""
    processes = arms + settings.control
    minimum_s = processes * settings.block_s
    if settings.budget_s < minimum_s:
        problem = f"{settings.budget_s:g} s is not enough for a turn of each of {processes} "
        problem += f"processes, {settings.block_s:g} s"
        fix = f"use {minimum_s * 10:g} or more, or a smaller benchmark.block_s"
        raise ConfigError("benchmark.budget_s", problem, fix)


def _parse_arm(text: str, levels: Sequence[str]) -> tuple[str, list[str]]:
    match, escaped = NAMED_ARM.fullmatch(text.strip()), escape(text)
    try:
        words = shlex.split(match["rest"] if match else text)
        names = [find_options("optimization", word, levels) for word in words]
        overrides = [f"optimization={name}" if name in levels else name for name in names]
        keys = [_override_key(word) for word in overrides if "=" in word or word.startswith("~")]
    except (ValueError, ConfigError) as error:
        raise ConfigError(KEY, f"{escaped} cannot be read: {error}") from error
    if not words:
        raise ConfigError(KEY, "an arm is empty", f"levels are {', '.join(levels)}")
    for word in overrides:
        _check_override(word, levels)
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(KEY, f"{escaped} sets {repeated[0]} twice")
    return match["name"].strip() if match else " ".join(text.split()), overrides


def _check_override(word: str, levels: Sequence[str]) -> None:
    problem, fix = "", ""
    if "=" not in word and not word.startswith("~"):
        problem, fix = "is neither a level nor an override", _suggest(word, levels)
    elif sweep_overrides([word]):
        problem, fix = "names several values", "write one arm per value"
    elif _config_group(word) in (*SHARED_GROUPS, "security"):  # one answer to what is trusted
        problem, fix = "applies to the whole benchmark", "set it on the command line"
    if problem:
        raise ConfigError(KEY, f"{escape(word)} {problem}", fix)


def _config_group(override: str) -> str:
    return re.split(r"[./]", parse_override(override).key)[0]


def _override_key(override: str) -> str:
    key = parse_override(override).key
    return GROUP_ALIASES.get(key, key)


def _unique_folder(name: str, reserved: Sequence[str]) -> str:
    """Return a folder name made from `name` that is easy to type and not in `reserved`."""
    stem = folder = re.sub(r"[^A-Za-z0-9.=+]+", "-", name).strip("-.")[:60] or "arm"
    number, folded = 1, {other.casefold() for other in reserved}  # for file systems that fold case
    while folder.casefold() in folded:
        number += 1
        folder = f"{stem}-{number}"
    return folder


def _check_arm(arm: Arm, previous: Sequence[Arm]) -> None:
    if arm.config.checkpoint.resume != "none":
        raise ConfigError("checkpoint.resume", "must be none: benchmark arms start at step 0")
    for other in previous:
        both = escape(f"{other.name} and {arm.name}")
        if other.name == arm.name:
            raise ConfigError(KEY, f"{escape(arm.name)} is listed twice")
        if _effective_values(other.config) == _effective_values(arm.config):
            problem = f"{both} are the same (optimization level {arm.config.optimization.level})"
            fix = "remove one, or give it another level, such as optimization=none"
            raise ConfigError(KEY, problem, fix)
        if difference := _describe_data_difference(other.config, arm.config):
            fix = "arms need the same samples; to compare data, sweep: -m data=…"
            raise ConfigError(KEY, f"{both} train on different data: {difference}", fix)


def _effective_values(config: RunConfig) -> dict[str, Any]:
    """Return the config without the keys that do not change what an arm computes."""
    values = asdict(config)
    for key in ("name", "monitoring", *SHARED_GROUPS[:3]):
        del values[key]
    if values["optimization"]["level"] != "auto":  # which says nothing yet of its techniques
        del values["optimization"]["level"]
    return values


def _describe_data_difference(config: RunConfig, other: RunConfig) -> str:
    """Return the first data key in which the configs differ, with both values; "" if none does."""
    data, other_data = asdict(config.data), asdict(other.data)
    keys = [
        k for k in data | other_data if k not in LOADING_KEYS and data.get(k) != other_data.get(k)
    ]
    return f"data.{keys[0]} is {data.get(keys[0])} and {other_data.get(keys[0])}" if keys else ""
