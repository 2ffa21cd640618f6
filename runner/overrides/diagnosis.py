"""What is wrong with an override that Hydra refused, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
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
from runner.overrides import aliases
from runner.overrides.groups import options
from runner.overrides.own_files import file_of, in_yaml, problem_in_files
from runner.overrides.spelling import Compose, Typed, one_of_each, read
from runner.overrides.suggestions import Mistake, Suggestions, command, instead, nearest

PER_OPTION: dict[str, Mapping[str, type]] = {
    "data": data_config.OPTIONS,
    "model": model_config.OPTIONS,
}
KINDS = {"Integer": "an int", "Float": "a number", "Boolean": "true or false", "str": "a text"}


def explain(
    error: Exception,
    overrides: Sequence[str],
    compose: Compose,
    composes: Callable[[list[str]], bool],
    folders: Sequence[Path] = (),
) -> ConfigError:
    """The error as one line that names the key and what composes in its place.

    `compose` composes other overrides, `composes` says whether they make a config; `folders` are
    those that hold more groups than ours.
    """
    typed = [read(text) for text in overrides]
    if any(o.key == "hydra.searchpath" for o in typed) and not folders:  # groups that we do not see
        return translated(error)
    groups = options(*folders)
    chosen = [o for o in typed if o.key in groups and o.sign != "~"]
    suggestions = Suggestions(groups, one_of_each([str(o) for o in chosen]), composes)
    if plugin := _missing_plugin(typed, error):
        return plugin
    for override in chosen:
        if mistake := _wrong_option(override, suggestions):
            return _told(mistake)
    several = [o for o in typed if o.parsed.is_sweep_override() and "--multirun" in str(error)]
    if several and (mistake := _several_values(several, suggestions)):
        return _told(mistake)
    if in_file := problem_in_files(folders, suggestions, compose, wrong_key):
        return _in_file(*in_file, suggestions)
    try:
        config = compose(suggestions.choices)
    except (HydraException, OmegaConfBaseException, ValueError):
        return translated(error, folders=folders)
    for override in typed:
        if override.key in groups or override.key.startswith("hydra/"):
            continue
        if mistake := wrong_key(override, suggestions, config):
            return _told(mistake)
        if found := _wrong_item(override, config):
            return found
    scalars = [o for o in typed if isinstance(o.parsed.value(), str | int | float)]
    return translated(error, {o.key: o.value for o in scalars}, folders)


def _in_file(path: str, mistake: Mistake, suggestions: Suggestions) -> ConfigError:
    where = f"{path}: {mistake.key}" if mistake.key else path
    guess = f"did you mean {in_yaml(mistake.meant, suggestions.groups)}?" if mistake.meant else ""
    fix = " ".join(part for part in (guess, mistake.otherwise) if part)
    return ConfigError(where, mistake.problem, fix)


def added(
    name: str, overrides: Sequence[str], compose: Compose, composes: Callable[[list[str]], bool],
    folders: Sequence[Path],
) -> ConfigError | None:  # fmt: skip
    """What to say of a key that was added with `+` and that no schema has."""
    groups = options(*folders)
    typed = [read(text) for text in overrides]
    chosen = one_of_each([str(o) for o in typed if o.key in groups and o.sign != "~"])
    suggestions, config = Suggestions(groups, chosen, composes), compose(chosen)
    for override in typed:
        if override.key == name or override.key.startswith(f"{name}."):
            if mistake := wrong_key(replace(override, sign=""), suggestions, config):
                return _told(mistake)
    return None


def _told(mistake: Mistake) -> ConfigError:
    return ConfigError(mistake.key, mistake.problem, mistake.fix)


def _missing_plugin(typed: Sequence[Typed], error: Exception) -> ConfigError | None:
    """An option of Hydra's own groups that is not there: most are packages to install."""
    for override in typed:
        group, option = override.key, override.value
        if not group.startswith("hydra/") or f"'{group}/{option}'" not in str(error):
            continue
        there = " ".join(str(error).partition("Available options in")[2].split()[1:])
        there = there.partition(" Config search path")[0].replace(" ", ", ")
        if known := aliases.PLUGINS.get(nearest(option, aliases.PLUGINS, 0.8) or ""):
            package, caution = known
            fix = f"pip install {package}" + (f" ({caution})" if caution else "")
            return ConfigError(group, f"{option} is a plugin that is not installed", fix)
        near = nearest(option, there.split(", "))
        guess = f"did you mean {group}={near}? " if near else ""
        return ConfigError(group, f"no option {option!r}", f"{guess}there are {there}")
    return None


def _several_values(several: Sequence[Typed], suggestions: Suggestions) -> Mistake | None:
    """Several values without -m: a sweep, or a list; None where neither composes."""
    first, ways = several[0], []
    for override in several:
        if override.key in suggestions.groups and override.parsed.is_discrete_sweep():
            for value in override.parsed.sweep_string_iterator():
                if value not in suggestions.groups[override.key]:
                    return suggestions.wrong_option(override.key, value)
    if meant := suggestions.first([[str(o) for o in several]]):
        ways.append(f"to run one after the other: {command(meant)}")
    listed = [f"{first.sign}{first.key}=[{first.value}]"]
    if first.key not in suggestions.groups and suggestions.first([listed]):
        ways.append(f"for a list: {command(listed)}")
    if not ways:
        return None
    return Mistake(first.key, f"{first.value} names several values", (), "; ".join(ways))


def _wrong_option(override: Typed, suggestions: Suggestions) -> Mistake | None:
    group, wanted = override.key, override.value.strip().strip("'\"")
    if not wanted or wanted in suggestions.groups[group]:
        return None
    if wanted.startswith("["):
        names = wanted.strip("[]").replace(" ", "")
        meant = suggestions.first([[f"{group}={names}"]])
        return Mistake(group, "takes one option", meant, "" if meant else "name one")
    if (
        override.parsed.is_sweep_override()
        or "${" in wanted
        or wanted.partition("/")[0] in ("schema",)
    ):
        return None
    return suggestions.wrong_option(group, wanted)


def wrong_key(override: Typed, suggestions: Suggestions, config: DictConfig) -> Mistake | None:
    """The first part of a dotted key that is not there, if that is what is wrong."""
    node: Any = config
    parts = override.key.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, ListConfig):
            return None
        if not isinstance(node, DictConfig):
            path = ".".join(parts[:i])
            return Mistake(override.key, f"{path} is a value and has no keys", (), f"set {path}=…")
        if part in node.keys():  # of a key without a value yet `part in node` says no
            node = None if OmegaConf.is_missing(node, part) else node._get_node(part)
            continue
        if OmegaConf.get_type(node) is dict and i:  # free keys, as in optimizer.options
            if override.sign:
                return None
            return Mistake(override.key, "is not there yet", (), f"add it: +{override}")
        if i:
            return _absent_key(override, parts, i, node, suggestions, config)
        return _absent(override, suggestions, config)
    return None


def _absent(override: Typed, suggestions: Suggestions, config: DictConfig) -> Mistake:
    """Nothing on the top level has this name."""
    first = override.key.partition(".")[0]
    meant = suggestions.first(suggestions.of_key(override, config))
    otherwise = "" if meant else instead(override.key) or _keys_of(suggestions, first, config)
    what, like = "group or key", re.split(r"[.=]", meant[-1])[0] if meant else ""
    if nearest(first, [like]):  # a slip
        what = "group" if like in suggestions.groups else "key"
    return Mistake(override.key, f"no config {what} {first!r}", meant, otherwise)


def _keys_of(suggestions: Suggestions, name: str, config: DictConfig) -> str:
    """The keys of the group that is meant, or all groups."""
    group = suggestions.group_of(name)
    if group and isinstance(config.get(group), DictConfig):
        return f"{group} has {', '.join(_own_keys(config[group]))}"
    return f"there are {', '.join(suggestions.groups)}"


def _own_keys(node: DictConfig) -> list[str]:
    return [str(key) for key in node if key not in ("kind", "arguments", "_target_")]


def _absent_key(
    override: Typed, parts: list[str], i: int, node: DictConfig, suggestions: Suggestions,
    config: DictConfig,
) -> Mistake:  # fmt: skip
    """Something has no key of this name."""
    path, there = ".".join(parts[:i]), _own_keys(node)
    kind = "" if OmegaConf.is_missing(node, "kind") else node.get("kind")
    problem, others = f"no key {parts[i]!r} in {path}", ""
    if path in PER_OPTION and kind:
        problem += f"={kind}"
        having = [k for k, schema in PER_OPTION[path].items() if parts[i] in fields_of(schema)]
        others = f"{path}={'|'.join(having)} has it; " if having else ""
    near = nearest(parts[i], there)
    key = ".".join([path, near or "", *parts[i + 1 :]])
    slip = [[f"{override.sign}{key}{override.rest}"]] if near else []
    guesses = slip if near and nearest(parts[i], [near], 0.8) else []
    known = [] if others else list(suggestions.of_key(override, config))
    meant = suggestions.first([*guesses, *known, *slip])
    if near and not meant:  # the key is there, and its value is another mistake
        others += f"did you mean {key}? "
    listed = f"there are {', '.join(there)}"
    return Mistake(override.key, problem, meant, instead(override.key) or f"{others}{listed}")


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


def translated(
    error: Exception, values: Mapping[str, str] | None = None, folders: Sequence[Path] = ()
) -> ConfigError:
    """Hydra's own words on one line, led by the key where the error knows it, and by the file
    where that is one of `folders`.

    `values` are those of the keys that one value was typed for.
    """
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    named = re.match(r"In '([^']+)': ", str(error))
    path = file_of(named[1], folders) if named else ""
    if isinstance(inner, ValidationError):
        return _wrong_type(inner, f"{path}: " if path else "", values=values or {})
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
