"""Parsing of typed overrides, and their normal form for Hydra."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from runner.core.config.groups import GROUP_ALIASES, USER_CLASS_GROUPS, group_options
from runner.core.errors import ConfigError
from runner.core.record.text import quote_for_hydra, quote_for_shell
from runner.core.schemas.data import DataConfig
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.models import ModelConfig

OVERRIDE_PATTERN = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=@]+)(?P<rest>.*)", re.DOTALL)
NAMED_KEYS = re.compile(r"\+{0,2}data\.(types|date_formats)[.=]")  # of columns
SHARED_KEYS = {
    "data": {f.name for f in fields(DataConfig)},  # how data is split and loaded
    "model": {f.name for f in fields(ModelConfig)},
}
"""Keys of a group that keep their meaning when a user's class replaces the option."""
EXCLUSIVE = {"training.steps": "training.epochs", "training.epochs": "training.steps"}
"""Setting one of these unsets the other, which a recipe may have set."""
LEVEL_LABEL = "optimization.level"  # set by the group's options alone
LIST_KEYS = frozenset(
    "benchmark.arms data.ignore data.parts debug.gradcheck.skip debug.hooks device.affinity "
    "model.weights_except monitoring.sinks objective.metrics optimization.auto.without "
    "optimization.extra optimizer.freeze security.allow_pickle security.environment "
    "security.pinned security.trusted".split()
)
"""Keys whose value is a list, in which a single name needs no brackets."""
TEXT_KEYS = frozenset(["predict.prompt"])
"""Keys whose value is a text as it is typed, with spaces at its ends, commas and brackets."""
SINGLE_NAME = re.compile(r"(?!null$)[\w*][\w.*/-]*")
SAMPLE_JOBS = 24  # jobs of a sweep that are checked before it starts; Hydra checks the rest

Compose = Callable[[list[str]], DictConfig]


@dataclass(frozen=True)
class CliOverride:
    """One override, split into `sign`, `key` and `rest`, which is `=` and the value."""

    sign: str  # nothing, +, ++ or ~
    key: str
    rest: str
    parsed: Override

    def __str__(self) -> str:
        return f"{self.sign}{self.key}{self.rest}"

    @property
    def value(self) -> str:
        """The value as typed."""
        return self.rest.partition("=")[2]

    def values(self) -> list[str]:
        """Return the values of a sweep over this key, or the ends of an interval; [] for a glob."""
        sweep = self.parsed.value() if self.parsed.is_sweep_override() else None
        if isinstance(sweep, IntervalSweep):
            return [str(end) for end in (sweep.start, sweep.end)]
        if not self.parsed.is_discrete_sweep() or type(self.parsed.value()).__name__ == "Glob":
            return []
        return list(islice(self.parsed.sweep_string_iterator(), 1 << 10))


def parse_override(text: str) -> CliOverride:
    """Parse an override. Raises ConfigError if it is invalid."""
    if NAMED_KEYS.match(text):
        from runner.core.config.column_names import encode_names  # imported only if used

        text = encode_names(text)
    key, _, value = text.partition("=")
    if key in TEXT_KEYS and value not in ("", "null") and value[0] not in "'\"":
        text = f"{key}={quote_for_hydra(value)}"
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(text, "gives no value", f"write {text.lstrip('+')}=…") from error
        key, _, value = text.partition("=")
        reason = " ".join(str(error).partition("\nSee ")[0].splitlines()[-1].split())
        fix = f"values with special characters are quoted twice: {quote_for_shell(key, value)}"
        if NAMED_KEYS.match(text):
            example = f"'+{key.lstrip('+')}={{\"a (b)\": …}}'"
            fix = f"names with special characters are in double quotes: {example}"
        problem = f"{text} cannot be read ({reason})"
        raise ConfigError(key.lstrip("+~") or text, problem, fix) from error
    if (match := OVERRIDE_PATTERN.match(text)) is None:
        raise ConfigError(text, "names no key", "write key=value")
    return CliOverride(match["sign"], match["key"], match["rest"], parsed)


def check_job_keys(keys: Iterable[str], kinds: Collection[JobKind]) -> None:
    """Raise ConfigError for a key of a job that is none of `kinds`, where it has no effect."""
    others = {kind.name for kind in JobKind if kind not in kinds}
    for key in keys:
        if (group := key.partition(".")[0]) in others:
            raise ConfigError(key, f"is for job={group}", f"add job={group}, or leave it out")


def normalize_overrides(
    overrides: Sequence[str], compose: Compose, folders: Sequence[Path] = ()
) -> list[str]:
    """Normalise overrides for Hydra: aliases of groups, and arguments of users' classes.

    `compose` is used to find a group's `_target_` if no override sets it. `folders` have further
    options, whose names take precedence over other words for ours.
    """
    options = group_options(*folders)
    groups = {group: options[group] for group in group_options()}
    _check_spaces(overrides, groups)
    normal = [_normalize(parse_override(text), groups) for text in overrides]
    for group in USER_CLASS_GROUPS:
        normal = _rename_arguments(group, normal, compose)
    keys = {override.key for override in normal}
    search = [o.key for o in normal if o.key == "experiment" and o.value == "search"]
    recipe = keys & {"experiment", "training"} - set(search)
    unset = [EXCLUSIVE[k] for k in keys & set(EXCLUSIVE) if recipe and EXCLUSIVE[k] not in keys]
    return [*map(str, normal), *(f"{key}=null" for key in unset)]


def _check_spaces(overrides: Sequence[str], groups: Collection[str]) -> None:
    """Raise ConfigError for words without a key that follow one: `seed=0 1`."""
    for number, text in enumerate(overrides):
        rest = overrides[number + 1 :]
        words = [*takewhile(lambda word: "=" not in word and word[:1] not in "+~-", rest)]
        is_key = words and words[0].partition(".")[0] in groups  # its value is missing
        if words and "=" in text and not is_key:
            key, _, first = text.partition("=")
            fix = f"several values are a sweep: -m {key}={','.join([first, *words])}; a text with "
            fix += f"spaces is quoted: {quote_for_shell(key, ' '.join([first, *words]))}"
            raise ConfigError(key, f"{' '.join(words)!r} follows its value after a space", fix)


def _normalize(override: CliOverride, groups: dict[str, dict[str, str]]) -> CliOverride:
    key, value = GROUP_ALIASES.get(override.key, override.key), override.value.strip()
    if key == LEVEL_LABEL:
        fix = f"write optimization={value or 'none'}"
        raise ConfigError(key, "is the label of a level, and enables nothing", fix)
    if key in LIST_KEYS and SINGLE_NAME.fullmatch(value):
        return parse_override(f"{override.sign}{key}=[{value}]")
    if key not in groups:
        return replace(override, key=key)
    if value not in groups[key] and override.sign != "~":
        from runner.core.config.aliases import find_options  # imported only if needed

        rest = find_options(key, override.rest, groups[key])
        override = parse_override(f"{override.sign}{key}{rest}")
    if isinstance(override.parsed.value(), bool | int | float | None):
        override = parse_override(f"{key}='{override.value}'")  # Hydra reports it as no option
    sign = "" if override.sign == "+" else override.sign  # `+experiment=…` is accepted too
    return replace(override, sign=sign, key=key)


def _rename_arguments(
    group: str, overrides: list[CliOverride], compose: Compose
) -> list[CliOverride]:
    """Rename `+model.width=64` to `+model.arguments.width=64` if the group has a user's class."""
    targets = [o.value for o in overrides if o.key == f"{group}._target_" and o.sign != "~"]
    target = next((t for t in targets if t not in ("", "null")), "")
    if not targets and any(_is_argument(o, group) for o in overrides):  # a recipe may set it
        others = [str(o) for o in overrides if not _is_argument(o, group)]
        target = compose(first_job(others))[group].get("_target_") or ""
    return [_pass_to_class(o, group, target) for o in overrides] if target else overrides


def _pass_to_class(override: CliOverride, group: str, target: str) -> CliOverride:
    name = override.key.removeprefix(f"{group}.")
    if _is_argument(override, group):
        return replace(override, key=f"{group}.arguments.{name}")
    shared = SHARED_KEYS.get(group)
    if shared is not None and name != override.key and name.partition(".")[0] not in shared:
        problem = f"belongs to an option that {group}._target_={target} replaces"
        fix = f"write +{override.key}{override.rest} to hand it to that class"
        raise ConfigError(override.key, problem, fix)
    return override


def _is_argument(override: CliOverride, group: str) -> bool:
    name = override.key.removeprefix(f"{group}.")
    is_reserved = name.partition(".")[0] in ("_target_", "arguments", "kind")
    return override.sign in ("+", "++") and name != override.key and not is_reserved


def with_argument_keys(keys: set[str]) -> set[str]:
    """Return the keys, and those under which `+model.width` is recorded for a user's class."""
    pairs = [key.partition(".") for key in keys]
    return keys | {f"{g}.arguments.{name}" for g, _, name in pairs if g in USER_CLASS_GROUPS}


def sweep_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides that sweep over several values."""
    parsed = (parse_override(text).parsed for text in overrides)
    return [override for override in parsed if override.is_sweep_override()]


def first_job(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a sweep's first job."""
    return sample_jobs(overrides)[0]


def sample_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of jobs that cover each value of a sweep, at most SAMPLE_JOBS."""
    fixed: list[str] = []
    values: list[list[str]] = []
    for override in map(parse_override, overrides):
        if not override.parsed.is_sweep_override():
            fixed.append(str(override))
        elif choices := override.values()[:SAMPLE_JOBS]:
            values.append([f"{override.parsed.get_key_element()}={value}" for value in choices])
    first = [choices[0] for choices in values]
    jobs = [fixed + first]
    for i, choices in enumerate(values):
        jobs += [[*fixed, *first[:i], value, *first[i + 1 :]] for value in choices[1:]]
    return jobs[:SAMPLE_JOBS]
