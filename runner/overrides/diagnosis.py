"""What is wrong with an override or a config file that Hydra refused, and what composes instead."""

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
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.data.config import OPTIONS as DATA
from runner.errors import ConfigError, StorageError
from runner.models.config import OPTIONS as MODELS
from runner.overrides.groups import options
from runner.overrides.spelling import CliOverride, Compose, first_job, parse_override
from runner.overrides.suggestions import Suggestions, command, nearest, replacement, suggestion
from runner.record import hydra_files

Composes = Callable[[list[str]], bool]
SCHEMAS: dict[str, Mapping[str, type]] = {"data": DATA, "model": MODELS}
UNCOMPOSED = (HydraException, OmegaConfBaseException, ValueError)
TYPES = {"Integer": "an int", "Float": "a number", "Boolean": "true or false", "str": "a text"}
PLUGINS = "or a plugin of a package: pip install hydra-joblib-launcher or hydra-optuna-sweeper"


def explain(
    error: Exception,
    overrides: Sequence[str],
    compose: Compose,
    composes: Composes,
    folders: Sequence[Path] = (),
) -> ConfigError:
    """The error as one line that names the key and what composes in its place.

    `compose` composes other overrides, `composes` says whether they make a config; `folders` hold
    more groups than ours.
    """
    parsed = [parse_override(text) for text in overrides]
    groups = options(*folders)
    chosen = first_job([str(o) for o in parsed if o.key in groups and o.sign != "~"])
    suggestions = Suggestions(groups, chosen, composes)
    if any(o.key == "hydra.searchpath" for o in parsed) and not folders:  # groups of a package
        return translate(error)
    for override in parsed:
        if override.key in groups and (wrong := _wrong_option(override, suggestions)):
            return wrong
    if "--multirun" in str(error) and (wrong := _several_values(parsed, suggestions)):
        return wrong
    if wrong := _wrong_file(folders, suggestions, compose):
        return wrong
    try:
        config = compose(suggestions.choices)
    except UNCOMPOSED:
        return translate(error, folders)
    keys = [o for o in parsed if o.key not in groups and "/" not in o.key]
    wrong_keys = (_wrong_key(override, suggestions, config) for override in keys)
    return next(filter(None, wrong_keys), None) or translate(error, folders)


def _wrong_option(override: CliOverride, suggestions: Suggestions) -> ConfigError | None:
    value = override.value.strip().strip("'\"")
    known = not value or value in suggestions.groups[override.key] or "${" in value
    if override.sign == "~" or known or override.parsed.is_sweep_override():
        return None
    return suggestions.wrong_option(override.key, value)


def _several_values(parsed: Sequence[CliOverride], suggestions: Suggestions) -> ConfigError | None:
    """Several values without -m: a sweep, or a list; None where neither composes."""
    swept = [override for override in parsed if override.parsed.is_sweep_override()]
    for override in swept:
        options_of = suggestions.groups.get(override.key, override.values())
        if wrong := next((value for value in override.values() if value not in options_of), None):
            return suggestions.wrong_option(override.key, wrong)
    first, ways = swept[0], []
    if meant := suggestions.first([[str(override) for override in swept]]):
        ways.append(f"to run one after the other: {command(meant)}")
    listed = [f"{first.sign}{first.key}=[{first.value}]"]
    if first.key not in suggestions.groups and suggestions.first([listed]):
        ways.append(f"for a list: {command(listed)}")
    problem = f"{first.value} names several values"
    return ConfigError(first.key, problem, "; ".join(ways)) if ways else None


def _wrong_key(
    override: CliOverride, suggestions: Suggestions, config: DictConfig
) -> ConfigError | None:
    """The error about the first part of a dotted key that does not exist, if there is one."""
    node: Any = config
    parts = override.key.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, ListConfig):
            return None
        if not isinstance(node, DictConfig):
            path = ".".join(parts[:i])
            return ConfigError(override.key, f"{path} is a value and has no keys", f"set {path}=…")
        if part in node.keys():  # `part in node` is False for a key without a value
            node = None if OmegaConf.is_missing(node, part) else node._get_node(part)
        elif not i:
            return _unknown_top(override, suggestions, config)
        elif OmegaConf.get_type(node) is dict:  # free keys, as in optimizer.options
            fix = f"add it: +{override}"
            return None if override.sign else ConfigError(override.key, "is not there yet", fix)
        else:
            return _unknown_key(override, i, node, suggestions, config)
    return None


def _unknown_top(
    override: CliOverride, suggestions: Suggestions, config: DictConfig
) -> ConfigError:
    first = override.key.partition(".")[0]
    meant = suggestions.first(suggestions.of_key(override, config))
    what, similar = "group or key", re.split(r"[.=]", meant[-1])[0] if meant else ""
    if nearest(first, [similar]):
        what = "group" if similar in suggestions.groups else "key"
    group = suggestions.group_of(first)
    existing = f"there are {', '.join(suggestions.groups)}"
    if isinstance(config.get(group), DictConfig):
        existing = f"{group} has {', '.join(_own_keys(config[group]))}"
    otherwise = "" if meant else replacement(override.key) or existing
    return suggestion(override.key, f"no config {what} {first!r}", meant, otherwise)


def _unknown_key(
    override: CliOverride, i: int, node: DictConfig, suggestions: Suggestions, config: DictConfig
) -> ConfigError:
    """The i-th part of the key is not in `node`, which is the part before it."""
    parts = override.key.split(".")
    path, part, existing = ".".join(parts[:i]), parts[i], _own_keys(node)
    problem, others = f"no key {part!r} in {path}", ""
    if path in SCHEMAS and not OmegaConf.is_missing(node, "kind") and node.kind:
        problem += f"={node.kind}"
        having = [k for k, s in SCHEMAS[path].items() if part in s.__dataclass_fields__]  # type: ignore[attr-defined]
        others = f"{path}={'|'.join(having)} has it; " if having else ""
    near = nearest(part, existing) or ""
    key = ".".join([path, near, *parts[i + 1 :]])
    misspelled = [[f"{key}{override.rest}"]] if near else []
    surely = misspelled if near and nearest(part, [near], 0.8) else []
    known = [] if others else suggestions.of_key(override, config)
    meant = suggestions.first([*surely, *known, *misspelled])
    if near and not meant:  # the key exists, and its value is another mistake
        others += f"did you mean {key}? "
    otherwise = replacement(override.key) or f"{others}there are {', '.join(existing)}"
    return suggestion(override.key, problem, meant, otherwise)


def _own_keys(node: DictConfig) -> list[str]:
    return [str(key) for key in node if key not in ("kind", "arguments", "_target_")]


# -- files of the user's own ---------------------------------------------------------------------


def _wrong_file(
    folders: Sequence[Path], suggestions: Suggestions, compose: Compose
) -> ConfigError | None:
    """The error about the user's own file of an option that was chosen, led by its path."""
    for choice in suggestions.choices:
        group, _, option = choice.partition("=")
        others = [other for other in suggestions.choices if other != choice]
        for path in (folder / group / f"{option}.yaml" for folder in folders):
            wrong = _mistakes(path, group, replace(suggestions, choices=others), compose)
            if path.is_file() and (error := next(wrong, None)):
                return ConfigError(os.path.relpath(path), str(error))
    return None


def _mistakes(
    path: Path, group: str, suggestions: Suggestions, compose: Compose
) -> Iterator[ConfigError]:
    try:
        body, text = hydra_files.read_yaml(path), path.read_text(encoding="utf-8")
        package = ConfigSource._get_header_dict(text)["package"]
    except (StorageError, OSError, ValueError):
        return
    if group == "experiment" and package != "_global_":
        problem = "lacks `# @package _global_` as its first line"
        yield ConfigError("package", problem, "without it no key has an effect")
    if not isinstance(body, dict):
        return
    defaults = [e for e in body.pop("defaults", None) or [] if isinstance(e, dict)]
    named = [
        (str(key).split()[-1].lstrip("/"), o) for entry in defaults for key, o in entry.items()
    ]
    named = [(other, option) for other, option in named if other in suggestions.groups]
    for other, option in named:
        if option not in suggestions.groups[other]:
            yield suggestions.wrong_option(other, str(option))
    try:
        config = compose([*suggestions.choices, *(f"{other}={option}" for other, option in named)])
    except UNCOMPOSED:
        return
    yield from _wrong_keys(body if package == "_global_" else {group: body}, suggestions, config)


def _wrong_keys(
    body: Mapping[str, Any], suggestions: Suggestions, config: DictConfig
) -> Iterator[ConfigError]:
    for key, value in body.items():
        if key in suggestions.groups and isinstance(value, str):
            fix = f"write `override /{key}: {value}` there"
            yield ConfigError(str(key), "an option is named in the defaults list", fix)
        elif "." in str(key):
            fix = f"write `{str(key).replace('.', ': {', 1)}: …}}`"
            yield ConfigError(str(key), "is one name with a dot in it", fix)
    for path, value in _leaves(body):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        try:
            override = parse_override(f"{path}={text}")
        except ConfigError:
            continue
        if wrong := _wrong_key(override, suggestions, config):
            yield wrong


def _leaves(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# -- messages of Hydra and OmegaConf -------------------------------------------------------------


def translate(error: Exception, folders: Sequence[Path] = ()) -> ConfigError:
    """Hydra's message on one line, led by the user's file and the key where it knows them."""
    if isinstance(error, ConfigError):
        return error
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    if inner is None:
        return _without_key(str(error) or type(error).__name__)
    named = re.match(r"In '([^']+)': ", str(error))
    paths = [folder / f"{named[1]}.yaml" for folder in folders] if named else []
    file = next((f"{os.path.relpath(path)}: " for path in paths if path.is_file()), "")
    key, message = inner.full_key or "config", (inner.msg or str(inner)).partition("\n")[0]
    problem, fix = _wrong_value(key, message)
    known = getattr(inner.object_type, "__dataclass_fields__", {})
    if not fix and key.rpartition(".")[2] not in known:
        fix = f"there are {', '.join(known)}" if known else ""
    return ConfigError(f"{file}{key}", problem, fix)


def _without_key(message: str) -> ConfigError:
    lines = [line for line in message.splitlines() if not line.startswith("See ")]
    text = " ".join(" ".join(lines).partition("Config search path")[0].split())
    if match := re.search(r"Could not find '(hydra/\w+)/(.*?)'.*?Available options.*?: (.*)", text):
        group, option, existing = match[1], match[2], match[3].split()
        near = nearest(option, existing)
        guess = f"did you mean {group}={near}? " if near else ""
        fix = f"{guess}there are {', '.join(existing)}, {PLUGINS}"
        return ConfigError(group, f"no option {option!r}", fix)
    return ConfigError("config", text)


def _wrong_value(key: str, message: str) -> tuple[str, str]:
    """The problem and the fix that OmegaConf's message about a value amounts to."""
    if match := re.search(r"Value '(.*)' of type .* could not be converted to (\w+)", message):
        return f"{match[1]!r} is not {TYPES.get(match[2], match[2])}", ""
    if match := re.search(r"Value '(.*)' is not a valid bool", message):
        return f"{match[1]!r} is not true or false", ""
    if match := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", message):
        near = nearest(match[1], match[2].split(", "))
        return (
            f"{match[1]!r} is not one of {match[2]}",
            f"did you mean {key}={near}?" if near else "",
        )
    if "ListConfig" in message:
        return "is a list", f"write {key}=[…]"
    if match := re.search(r"(?:string: '|Value )(.*?)'? ?(?:\((?:list|dict)\).*)?$", message):
        return f"{match[1]} is not one value", ""
    if "not Optional" in message or "is None" in message:
        return "null is no value for it", ""
    if "not a subclass" in message or "incompatible" in message:
        return "is a part with keys of its own", f"set {key}.<key>=…, as {key}.enabled=true"
    return message, ""
