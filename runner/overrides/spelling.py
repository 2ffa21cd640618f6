"""Overrides as people type them, and as Hydra understands them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from runner.data.config import DataConfig
from runner.errors import ConfigError
from runner.models.config import ModelConfig
from runner.overrides.groups import ALIASES, FOREIGN, options
from runner.record.text import quote_for_shell

SHAPE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[^=@]+)(?P<rest>.*)", re.DOTALL)
STAYS = {
    "data": {f.name for f in fields(DataConfig)},  # how it is split and loaded
    "model": {f.name for f in fields(ModelConfig)},
}
"""Keys of a group that mean the same when a class of the user's own takes the option's place."""
EXCLUDE = {"training.steps": "training.epochs", "training.epochs": "training.steps"}
"""Naming one of these takes the other one back, wherever that came from."""
LISTS = ("security.trusted", "security.environment")
MANY = 24  # values of a sweep that are looked at before it starts; Hydra looks at the rest

Compose = Callable[[list[str]], DictConfig]


@dataclass(frozen=True)
class Typed:
    """One override: `sign`, `key` and `rest`, which is `=` and the value, put it together again."""

    sign: str  # nothing, +, ++ or ~
    key: str
    rest: str
    parsed: Override

    def __str__(self) -> str:
        return f"{self.sign}{self.key}{self.rest}"

    @property
    def value(self) -> str:
        """The value as it was typed."""
        return self.rest.partition("=")[2]


def read(text: str) -> Typed:
    """Take an override apart. ConfigError says what is wrong with it."""
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(text, "gives no value", f"write {text.lstrip('+')}=…") from error
        lines = [line for line in str(error).splitlines() if not line.startswith("See ")]
        key, _, value = text.partition("=")
        several = value.startswith(("[", "{"))
        meant = "'key=[\"a value\"]'" if several else quote_for_shell(key, value)
        raise ConfigError(
            key.lstrip("+~") or text,
            f"{text} cannot be read ({' '.join(lines[1:]).strip() or lines[0]})",
            f"values with special characters are quoted twice: {meant}",
        ) from error
    shape = SHAPE.match(text)
    if shape is None:
        raise ConfigError(text, "names no key", "write key=value")
    return Typed(shape["sign"], shape["key"], shape["rest"], parsed)


def spelled(overrides: Sequence[str], compose: Compose) -> list[str]:
    """The overrides as Hydra wants them: other spellings of groups, arguments of foreign classes.

    `compose` is asked what a group's `_target_` is when no override says so.
    """
    known = options()
    found = []
    for text in overrides:
        typed = read(text)
        sign, key = typed.sign, ALIASES.get(typed.key, typed.key)
        if key in LISTS and typed.value.strip().isidentifier():
            typed = read(f"{sign}{key}=[{typed.value.strip()}]")  # one name needs no brackets
        if key in known and isinstance(typed.parsed.value(), bool | int | float | None):
            typed = read(f"{sign}{key}='{typed.value}'")  # no option; Hydra then says so
        if sign == "+" and key in known:  # `+experiment=…`, as other applications need it
            sign = ""
        found.append(Typed(sign, key, typed.rest, typed.parsed))
    for group in FOREIGN:
        found = _hand_over(group, found, compose)
    return [*(str(typed) for typed in found), *_taken_back({o.key for o in found})]


def _taken_back(keys: set[str]) -> list[str]:
    """`training.steps=100` is meant, also where the recipe says how many epochs."""
    if not keys & {"experiment", "training"}:
        return []
    return [f"{EXCLUDE[key]}=null" for key in keys & set(EXCLUDE) if EXCLUDE[key] not in keys]


def _hand_over(group: str, overrides: list[Typed], compose: Compose) -> list[Typed]:
    """With a class of the user's own, `+model.width=64` becomes `+model.arguments.width=64`."""
    targets = [o.value for o in overrides if o.key == f"{group}._target_" and o.sign != "~"]
    added = [o for o in overrides if _is_argument(o, group)]
    target = next((t for t in targets if t not in ("", "null")), "")
    if added and not targets:
        rest = [str(o) for o in overrides if o not in added]
        target = compose(one_of_each(rest))[group].get("_target_") or ""
    if not target:
        _refuse_arguments(group, added, [o for o in overrides if o not in added], compose)
        return overrides
    found = []
    for typed in overrides:
        name = typed.key.removeprefix(f"{group}.")
        if typed in added:
            typed = Typed(typed.sign, f"{group}.arguments.{name}", typed.rest, typed.parsed)
        elif name != typed.key and group in STAYS and name.partition(".")[0] not in STAYS[group]:
            raise ConfigError(
                typed.key, f"belongs to an option that {group}._target_={target} replaces",
                f"write +{typed.key}{typed.rest} to hand it to that class",
            )  # fmt: skip
        found.append(typed)
    return found


def with_arguments(keys: set[str]) -> set[str]:
    """The keys, and what `+model.width` is called once it is an argument of a foreign class."""
    found = set(keys)
    for group in FOREIGN:
        own = {key.removeprefix(f"{group}.") for key in keys if key.startswith(f"{group}.")}
        found |= {f"{group}.arguments.{name}" for name in own}
    return found


def _is_argument(typed: Typed, group: str) -> bool:
    name = typed.key.removeprefix(f"{group}.")
    ours = name.partition(".")[0] in ("_target_", "arguments", "kind")
    return typed.sign in ("+", "++") and name != typed.key and not ours


def _refuse_arguments(
    group: str, added: list[Typed], others: list[Typed], compose: Compose
) -> None:
    if not added:
        return
    config = compose(one_of_each([str(o) for o in others]))[group]
    for typed in added:
        name = typed.key.removeprefix(f"{group}.")
        if name in config:
            raise ConfigError(typed.key, "is there already", f"drop the +: {typed.key}{typed.rest}")
        own = [str(k) for k in config if k not in ("kind", "_target_", "arguments")]
        raise ConfigError(
            typed.key, f"{group}={config.kind} has no such key",
            f"it has {', '.join(own)}; "
            f"for a class of your own give {group}._target_=package.Class too",
        )  # fmt: skip


def sweeps(overrides: Sequence[str]) -> list[Override]:
    """Those that name several values to run one after the other."""
    return [parsed for text in overrides if (parsed := read(text).parsed).is_sweep_override()]


def one_of_each(overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep's first job."""
    return next(iter(some_jobs(overrides)))


def some_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Overrides of jobs of a sweep in which each value is met, or MANY of them."""
    fixed: list[str] = []
    values: list[list[str]] = []
    for text in overrides:
        parsed = read(text).parsed
        if not parsed.is_sweep_override():
            fixed.append(text)
        elif parsed.is_discrete_sweep() and not _is_glob(parsed):
            key = parsed.get_key_element()
            values.append([f"{key}={v}" for v in islice(parsed.sweep_string_iterator(), MANY)])
    jobs = [fixed + [v[0] for v in values]]
    for i, several in enumerate(values):
        first = [v[0] for v in values]
        jobs += [fixed + first[:i] + [v] + first[i + 1 :] for v in several[1:]]
    return jobs[:MANY]


def _is_glob(parsed: Override) -> bool:
    return type(parsed.value()).__name__ == "Glob"
