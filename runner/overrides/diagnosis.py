"""What is wrong with an override that Hydra refused, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from runner.data import config as data_config
from runner.errors import ConfigError
from runner.models import config as model_config
from runner.overrides.groups import options
from runner.overrides.spelling import Compose, Typed, read

TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
PER_OPTION: dict[str, Mapping[str, type]] = {
    "data": data_config.OPTIONS,
    "model": model_config.OPTIONS,
}
KINDS = {"Integer": "an int", "Float": "a number", "Boolean": "true or false", "str": "a text"}


def explain(
    error: Exception, overrides: Sequence[str], compose: Compose, folders: Sequence[Path] = ()
) -> ConfigError:
    """The error as one line that names the key and the nearest valid one.

    `compose` composes other overrides; `folders` are those that hold more groups than ours.
    """
    groups = options(*folders)
    typed = [read(text) for text in overrides]
    if any(o.key == "hydra.searchpath" for o in typed):  # groups that we do not see
        return translated(error)
    for override in typed:
        if found := _several_values(override, error) or _wrong_option(override, groups):
            return found
    choices = [str(o) for o in typed if o.key in groups and o.sign != "~"]
    try:
        config = compose(choices)
    except (HydraException, OmegaConfBaseException, ValueError):
        return translated(error)
    for override in typed:
        if override.key in groups or override.key.startswith("hydra/"):
            continue
        if found := _wrong_key(override, groups, config) or _wrong_item(override, config):
            return found
    scalars = [o for o in typed if isinstance(o.parsed.value(), str | int | float)]
    return translated(error, {o.key: o.value for o in scalars})


def _several_values(override: Typed, error: Exception) -> ConfigError | None:
    if not override.parsed.is_sweep_override() or "--multirun" not in str(error):
        return None
    return ConfigError(
        override.key,
        f"{override.value} names several values",
        f"add -m to run one after the other, or write {override.key}=[{override.value}] for a list",
    )


def _wrong_option(override: Typed, groups: dict[str, dict[str, str]]) -> ConfigError | None:
    if override.key not in groups or override.sign == "~" or not override.value.strip():
        return None
    group, wanted = override.key, override.value
    if wanted.startswith("["):
        several = wanted.strip("[]").replace(" ", "")
        return ConfigError(group, "takes one option", f"to run several: -m {group}={several}")
    if wanted in groups[group] or not re.fullmatch(r"[\w.-]+", wanted):
        return None
    if group == "optimizer" and (name := nearest(wanted, TORCH_OPTIMIZERS, 0.8)):
        return ConfigError(
            group, f"no option {wanted!r}", f"any class of torch.optim goes: optimizer.name={name}"
        )
    near = nearest(wanted, groups[group])
    fix = f"did you mean {group}={near}? " if near else ""
    return ConfigError(group, f"no option {wanted!r}", f"{fix}there are {', '.join(groups[group])}")


def _wrong_key(
    override: Typed, groups: dict[str, dict[str, str]], config: DictConfig
) -> ConfigError | None:
    """The first part of a dotted key that is not there, if that is what is wrong."""
    node: Any = config
    parts = override.key.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, ListConfig):
            return None
        if not isinstance(node, DictConfig):
            path = ".".join(parts[:i])
            return ConfigError(override.key, f"{path} is a value and has no keys", f"set {path}=…")
        if part in node.keys():  # of a key without a value yet `part in node` says no
            node = None if OmegaConf.is_missing(node, part) else node._get_node(part)
            continue
        if OmegaConf.get_type(node) is dict and i:  # free keys, as in optimizer.options
            return _free_key(override)
        return _absent_key(override, parts, i, node) if i else _absent(override, groups, config)
    return None


def _free_key(override: Typed) -> ConfigError | None:
    if override.sign:
        return None
    return ConfigError(override.key, "is not there yet", f"add it: +{override}")


def _absent(override: Typed, groups: dict[str, dict[str, str]], config: DictConfig) -> ConfigError:
    """Nothing on the top level has this name."""
    first, _, rest = override.key.partition(".")
    group = nearest(first, groups)
    if group and not rest and (near := nearest(override.value, groups[group])):
        return ConfigError(first, f"no config group {first!r}", f"did you mean {group}={near}?")
    if near := nearest(first, [*groups, *(str(k) for k in config)]):
        what = "group" if near in groups else "key"
        guess = f"{near}.{rest}={override.value}" if rest else f"{near}={override.value}"
        if near in groups and not rest:
            guess = f"{near}={'|'.join(groups[near])}"
        return ConfigError(first, f"no config {what} {first!r}", f"did you mean {guess}?")
    leaves = {key.rpartition(".")[2]: key for key in reversed(list(_keys(config)))}
    leaf = nearest(override.key.rpartition(".")[2], leaves, 0.8)
    fix = f"did you mean {leaves[leaf]}={override.value}?" if leaf else ""
    fix = fix or f"there are {', '.join(groups)}"
    return ConfigError(override.key, f"no config group or key {first!r}", fix)


def _absent_key(override: Typed, parts: list[str], i: int, node: DictConfig) -> ConfigError:
    """Something has no key of this name."""
    path = ".".join(parts[:i])
    there = [str(k) for k in node if k not in ("kind", "arguments", "_target_")]
    near = nearest(parts[i], there)
    guess = f"did you mean {'.'.join([path, near, *parts[i + 1 :]])}? " if near else ""
    kind = "" if OmegaConf.is_missing(node, "kind") else node.get("kind")
    problem = f"no key {parts[i]!r} in {path}"
    if path in PER_OPTION and kind:
        problem += f"={kind}"
        others = [k for k, schema in PER_OPTION[path].items() if parts[i] in fields_of(schema)]
        guess += f"{path}={'|'.join(others)} has it; " if others else ""
    return ConfigError(override.key, problem, f"{guess}there are {', '.join(there)}")


def _wrong_item(override: Typed, config: DictConfig) -> ConfigError | None:
    """What is wrong with a list of parts, such as the rules of stability.recovery."""
    try:
        node = OmegaConf.select(config, override.key)
    except OmegaConfBaseException:
        return None
    part = node._metadata.element_type if isinstance(node, ListConfig) else None
    if override.sign == "~" or not isinstance(part, type) or not is_dataclass(part):
        return None
    value = override.parsed.value()
    if isinstance(value, dict):
        return ConfigError(override.key, "is a list", f"write {override.key}=[{override.value}]")
    if isinstance(value, str | int | float):
        first = f"[{{{_key_for(value, part)}: {override.value}}}]"
        return ConfigError(override.key, "is a list", f"write {override.key}={first}")
    for i, item in enumerate(value if isinstance(value, list) else []):
        key = f"{override.key}[{i}]"
        if not isinstance(item, dict):
            return ConfigError(
                key, f"{item} is no part with keys of its own",
                f"write {override.key}=[{{{_key_for(item, part)}: {item}}}]",
            )  # fmt: skip
        there = [field.name for field in fields(part)]
        for name, inner in item.items():
            if str(name) not in there:
                near = nearest(str(name), there)
                guess = f"did you mean {near}? " if near else ""
                return ConfigError(
                    f"{key}.{name}", "there is no such key", f"{guess}there are {', '.join(there)}"
                )
            try:
                OmegaConf.merge(OmegaConf.structured(part), {str(name): inner})
            except ValidationError as error:
                return _wrong_type(error, f"{key}.")
    return None


def _key_for(item: object, part: type) -> str:
    """The key of the part that such a value is probably for."""
    for name, kind in get_type_hints(part).items():
        if isinstance(kind, type) and issubclass(kind, Enum) and str(item) in kind.__members__:
            return name
    return fields(part)[0].name


def translated(error: Exception, values: Mapping[str, str] | None = None) -> ConfigError:
    """Hydra's own words on one line, led by the key where the error knows it.

    `values` are those of the keys that one value was typed for.
    """
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__
    if isinstance(inner, ValidationError):
        return _wrong_type(inner, values=values or {})
    if inner is not None:
        first = (inner.msg or str(inner)).partition("\n")[0]
        known = getattr(inner.object_type, "__dataclass_fields__", None)
        if known and isinstance(inner, ConfigKeyError):  # in a list of parts
            fix = f"there are {', '.join(known)}"
            return ConfigError(inner.full_key or "config", "there is no such key", fix)
        if first.startswith("Cannot merge DictConfig with ListConfig"):
            key = inner.full_key or "config"
            return ConfigError(key, "is a list", f"write {key}=[…]")
        return ConfigError(inner.full_key or "config", first)
    lines = [line for line in str(error).splitlines() if not line.startswith("See ")]
    text = " ".join(" ".join(lines).partition("Config search path")[0].split())
    return ConfigError("config", text or type(error).__name__)


def _wrong_type(
    error: ValidationError, within: str = "", values: Mapping[str, str] = MappingProxyType({})
) -> ConfigError:
    key = within + (error.full_key or "config")
    first = (error.msg or str(error)).partition("\n")[0]
    if found := re.search(r"Value '(.*)' of type .* could not be converted to (\w+)", first):
        return ConfigError(key, f"{found[1]!r} is not {KINDS.get(found[2], found[2])}")
    if found := re.search(r"Value '(.*)' is not a valid bool", first):
        return ConfigError(key, f"{found[1]!r} is not true or false")
    if found := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", first):
        near = nearest(found[1], found[2].split(", "))
        fix = (f"did you mean {near}?" if within else f"did you mean {key}={near}?") if near else ""
        return ConfigError(key, f"{found[1]!r} is not one of {found[2]}", fix)
    if "is not a ListConfig" in first:
        value = values.get(key)
        problem = "is a list" if value is None else f"{value!r} is not a list"
        return ConfigError(key, problem, f"write {key}=[{value or '…'}]")
    if found := re.search(r"Cannot convert '(list|dict)' to string: '(.*)'$", first):
        return ConfigError(key, f"{found[2]} is a {found[1]}, where one value belongs")
    if found := re.search(r"Value (.*) \((list|dict)\) is not a valid input", first):
        return ConfigError(key, f"{found[1]} is a {found[2]}, where one value belongs")
    if "not Optional" in first or "is None" in first:
        return ConfigError(key, "null is no value for it")
    if "not a subclass" in first or "incompatible" in first:
        switch = f"{key}.enabled=true" if "bool" in first else f"{key}.<key>=…"
        return ConfigError(key, "is a part with keys of its own", f"set {switch}")
    return ConfigError(key, first)


def fields_of(schema: type) -> set[str]:
    """The keys that a schema has."""
    return {field.name for field in fields(schema)}


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` most like `word`, capitals aside."""
    folded = {name.casefold(): name for name in names}
    found = get_close_matches(word.casefold(), folded, 1, cutoff)
    return folded[found[0]] if found else None


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        if prefix == "" and key == "hydra":
            continue
        yield f"{prefix}{key!s}"
        node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _keys(node, f"{prefix}{key!s}.")
