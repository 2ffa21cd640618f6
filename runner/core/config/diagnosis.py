"""Diagnosis of overrides and config files that Hydra rejected, with suggestions that compose."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.core.config import suggestions
from runner.core.config.aliases import OWN_CLASSES, OWN_SCHEDULE, find_replacement
from runner.core.config.groups import MIN_SIMILARITY, group_options
from runner.core.config.run_config import SCHEMAS
from runner.core.config.spelling import CliOverride, Compose, first_job, parse_override
from runner.core.config.suggestions import BATCH_SIZE, Suggester, own_keys
from runner.core.errors import ConfigError, StorageError, install_command
from runner.core.record import hydra_files
from runner.core.record.column_overrides import list_override
from runner.core.record.text import escape_control_chars
from runner.core.schemas.data import decode_name

CONVERSION_ERROR = re.compile(
    r"Value '(?P<value>.*)' (?:of type '\w+' could not be converted to (?P<kind>Integer|Float)"
    r"|is not a valid bool)"
)
KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
PLUGIN_HINT = (
    "plugins of packages: pip install hydra-joblib-launcher, hydra-submitit-launcher (SLURM; "
    f"{install_command('slurm')}), hydra-ray-launcher ({install_command('ray')}) or "
    "hydra-optuna-sweeper"
)
JOBS_WITH_RUN = ("evaluate", "predict")
EXAMPLE = "checkpoint.resume=outputs/runs/…"
HEADER = 500  # characters of a csv's first line, in a message


def explain_error(
    error: Exception,
    overrides: Sequence[str],
    compose: Compose,
    composes: Callable[[list[str]], bool],
    folders: Sequence[Path] = (),
) -> ConfigError:
    """Return the error in one line with the key and a suggestion that `composes`."""
    parsed = [parse_override(text) for text in overrides]
    groups = group_options(*folders)
    unnamed = [o for o in parsed if o.key in groups and "${" in o.value]
    if unnamed and (translated := translate(error)).key == "_dummy_":  # Hydra's defaults list
        message = str(translated).partition(": ")[2]
        return ConfigError(unnamed[0].key, message, "type the name of an option")
    if any(o.key == "hydra.searchpath" for o in parsed) and not folders:  # groups of a package
        return translate(error)
    options = [o for o in parsed if o.key in groups and o.sign != "~"]
    chosen = first_job([*map(str, options), *_batch_sizes(parsed)])
    suggester = Suggester(groups, chosen, composes)
    for override in parsed:
        value = override.value.strip().strip("'\"")
        is_valid = not value or value in groups.get(override.key, [value]) or "${" in value
        if not (is_valid or override.sign == "~" or override.parsed.is_sweep_override()):
            return suggester.option_error(override.key, value)
    several = _check_several_values(parsed, suggester) if "--multirun" in str(error) else None
    if problem := several or _check_config_files(folders, suggester, compose):
        return problem
    try:
        config = compose(chosen)
    except COMPOSE_ERRORS:
        return translate(error, folders)
    key_overrides = [o for o in parsed if o.key not in groups and "/" not in o.key]
    wrong_keys = (_check_key(override, suggester, config) for override in key_overrides)
    problem = _check_run_named(parsed) or next(filter(None, wrong_keys), None)
    return problem or translate(error, folders)


def _batch_sizes(overrides: Sequence[CliOverride]) -> list[str]:
    """Return the overrides of the batch size, by which some suggestions are computed."""
    valid = (o for o in overrides if o.key == BATCH_SIZE and re.fullmatch(r"[\d,]+", o.value))
    return [str(override) for override in valid]


def _check_several_values(
    parsed: Sequence[CliOverride], suggester: Suggester
) -> ConfigError | None:
    """Return the error about several values without -m; None if no sweep or list composes."""
    sweeps = [override for override in parsed if override.parsed.is_sweep_override()]
    for override in sweeps:
        allowed = suggester.groups.get(override.key, override.values())
        if wrong := next((value for value in override.values() if value not in allowed), None):
            return suggester.option_error(override.key, wrong)
    first, fixes = sweeps[0], []
    if suggester.first_composing([[str(override) for override in sweeps]]):
        command = suggestions.format_command([*map(str, sweeps)])
        fixes.append(f"to run one after the other: {command}")
    as_list = f"{first.sign}{first.key}=[{first.value}]"
    if first.key not in suggester.groups and suggester.first_composing([[as_list]]):
        fixes.append(f"for a list: {as_list}")
    problem = f"{first.value} names several values"
    return ConfigError(first.key, problem, "; ".join(fixes)) if fixes else None


def _check_run_named(parsed: Sequence[CliOverride]) -> ConfigError | None:
    """Return the error about `data.*` keys without a run, if the job needs one."""
    typed = {override.key: override.value for override in parsed}
    job, names_run = typed.get("job"), {"data", "checkpoint.resume", "model.weights"} & typed.keys()
    if job in JOBS_WITH_RUN and not names_run and any(key.startswith("data.") for key in typed):
        return ConfigError("checkpoint.resume", f"job={job} needs a run", f"name it: {EXAMPLE}")
    return None


def _check_key(
    override: CliOverride, suggester: Suggester, config: DictConfig
) -> ConfigError | None:
    """Return the error about the first part of a dotted key that does not exist, if any."""
    node: Any = config
    parts = override.key.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, ListConfig):
            return None
        if not isinstance(node, DictConfig):
            path = ".".join(parts[:i])
            return ConfigError(override.key, f"{path} is a value and has no keys", f"set {path}=…")
        if part not in node.keys():  # `part in node` is False for a missing value
            return _unknown_key_error(override, i, node, suggester, config)
        node = None if OmegaConf.is_missing(node, part) else node._get_node(part)
    exists = override.sign == "+" and not isinstance(node, DictConfig)
    fix = f"drop the +: {override.key}{override.rest}"
    return ConfigError(override.key, "already exists", fix) if exists else None


def _unknown_key_error(
    override: CliOverride, i: int, node: DictConfig, suggester: Suggester, config: DictConfig
) -> ConfigError | None:
    """Return the error about the i-th part of a key, which is missing in its parent `node`."""
    parts = override.key.split(".")
    path, part = ".".join(parts[:i]), parts[i]
    if i and OmegaConf.get_type(node) is dict:  # free keys, e.g. in optimizer.options
        fix = f"add it: +{override}"
        return None if override.sign else ConfigError(override.key, "does not exist yet", fix)
    problem = f"no key {part!r} in {path}" if i else f"no config group or key {part!r}"
    existing = f"use one of {', '.join(own_keys(node) if i else suggester.groups)}"
    kinds: list[str] = []
    if path in SCHEMAS and not OmegaConf.is_missing(node, "kind") and node.kind:
        problem += f"={node.kind}"
        kinds = [kind for kind, s in SCHEMAS[path].items() if part in s.__dataclass_fields__]
    if kinds:
        existing = f"{path}={'|'.join(kinds)} has it; {existing}"
    guesses = suggester.for_key(override.key, override.value, i, config)
    suggestion = [] if kinds else suggester.first_composing(guesses)
    nearest_key = suggester.nearest_key(override.key, i, config, MIN_SIMILARITY)
    group = suggester.find_group(part)
    if nearest_key and not suggestion:  # the key exists, and only its value is wrong
        existing = f"did you mean {nearest_key}? {existing}"
    elif not i and isinstance(config.get(group), DictConfig):
        existing = f"{group} has {', '.join(own_keys(config[group]))}"
    if part == "_target_":
        existing = f"{OWN_SCHEDULE if path == 'schedule' else OWN_CLASSES}; {existing}"
    fallback = find_replacement(override.key) or ("" if suggestion and not i else existing)
    return suggestions.suggestion_error(override.key, problem, suggestion, fallback)


def unnamed_target(path: Path) -> ConfigError:
    """Return the error for `data.target` without a value; it shows the header of a csv."""
    fix = "name the column to predict: data.target=…"
    if path.suffix.lower() in (".csv", ".tsv", ".txt") and path.is_file():
        with suppress(OSError), path.open(errors="replace") as lines:
            header = escape_control_chars(lines.readline(HEADER).strip())
            fix += f"; the first line of {path.name} is: {header}"
    return ConfigError("data.target", "has no value", fix)


# -- user config files ---------------------------------------------------------------------------


def _check_config_files(
    folders: Sequence[Path], suggester: Suggester, compose: Compose
) -> ConfigError | None:
    """Return the error in the user's own file of a chosen option, led by its path."""
    for choice in suggester.choices:
        group, _, option = choice.partition("=")
        others = [other for other in suggester.choices if other != choice]
        for path in (folder / group / f"{option}.yaml" for folder in folders):
            wrong = _file_errors(path, group, replace(suggester, choices=others), compose)
            if path.is_file() and (error := next(wrong, None)):
                return ConfigError(os.path.relpath(path), str(error))
    return None


def _file_errors(
    path: Path, group: str, suggester: Suggester, compose: Compose
) -> Iterator[ConfigError]:
    try:
        body = hydra_files.read_yaml(path)
        package = ConfigSource._get_header_dict(path.read_text(encoding="utf-8-sig"))["package"]
    except (StorageError, OSError, ValueError):
        return
    if group == "experiment" and package != "_global_":
        problem = "lacks `# @package _global_` as its first line"
        yield ConfigError("package", problem, "without it no key has an effect")
    if not isinstance(body, dict):
        return
    entries = [e for e in body.pop("defaults", None) or [] if isinstance(e, dict)]
    pairs = [(str(key).split()[-1].lstrip("/"), o) for e in entries for key, o in e.items()]
    chosen = {key: str(option) for key, option in pairs if key in suggester.groups}
    for key, option in chosen.items():
        if option not in suggester.groups[key]:
            yield suggester.option_error(key, option)
    overrides = list(_as_overrides(body if package == "_global_" else {group: body}))
    options = [f"{key}={option}" for key, option in chosen.items()]
    try:
        config = compose([*suggester.choices, *options, *_batch_sizes(overrides)])
    except COMPOSE_ERRORS:
        return
    for override in overrides:
        if override.key in suggester.groups:
            fix = f"write `override /{override}` there".replace("=", ": ")
            yield ConfigError(override.key, "an option is named in the defaults list", fix)
        elif wrong := _check_key(override, suggester, config):
            yield wrong


def _as_overrides(body: Mapping[str, Any], prefix: str = "") -> Iterator[CliOverride]:
    """Yield the values of a config file as overrides, except those that cannot be typed."""
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from _as_overrides(value, f"{prefix}{key}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        try:
            yield parse_override(f"{prefix}{key}={text}")
        except ConfigError:
            continue


# -- messages of Hydra and OmegaConf -------------------------------------------------------------


OTHER_FORMS = {
    r"Cannot merge DictConfig with ListConfig": "must be a list, [a,b] or [{key: value}], got keys",
    r"Cannot merge ListConfig with DictConfig": "must be keys with values, {k: value}, got a list",
    r"Cannot assign \w+ to Dict": "its items must be keys with values: [{key: value}]",
    r"Cannot convert '(list|dict)' to string": "must be a text, not a list or keys",
}
"""Messages of OmegaConf about a value of another form."""


def conversion_problem(text: str) -> str:
    """Reword OmegaConf's message about a value of the wrong type; other messages stay."""
    match = CONVERSION_ERROR.match(text)
    if match is None:
        return next((need for form, need in OTHER_FORMS.items() if re.match(form, text)), text)
    value, kind = match["value"], match["kind"] or "bool"
    fix = ""
    with suppress(ValueError, OverflowError):  # 1e3 is a float in YAML
        if kind == "Integer" and float(value).is_integer():
            fix = f"; write {int(float(value))}"
    return f"must be {KINDS[kind]}, got {value!r}{fix}"


def _full_key(error: Exception, inner: OmegaConfBaseException) -> str:
    """Return the key of an error; OmegaConf makes items of a list apart, with keys of their own."""
    typed = re.search(r"overrid(?:e|ing) '?([\w.@/]+)", str(error))
    key = str(inner.full_key or "")
    if typed is None or key.startswith(typed[1].split(".")[0]):
        return key or "config"
    return f"{typed[1]}: {key}" if key and not key.isdigit() else typed[1]


def translate(error: Exception, folders: Sequence[Path] = ()) -> ConfigError:
    """Return Hydra's message on one line, led by the user's file and the key if it has them."""
    if isinstance(error, ConfigError):
        return error
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OmegaConfBaseException):
        inner = inner.__cause__ or inner.__context__
    if inner is None:
        lines = [line for line in str(error).splitlines() if not line.startswith("See ")]
        text = " ".join(" ".join(lines).partition("Config search path")[0].split())
        if name := re.match(r"Cannot find primary config ('.+?')\.", text):
            fix = "" if folders else "--config-dir=FOLDER names the folder of that file"
            return ConfigError("--config-name", f"there is no config {name[1]}", fix)
        fix = PLUGIN_HINT if re.search(r"Could not find 'hydra/(launcher|sweeper)/", text) else ""
        return ConfigError("config", text or type(error).__name__, fix)
    source = re.match(r"In '([^']+)': ", str(error))
    paths = [folder / f"{source[1]}.yaml" for folder in folders] if source else []
    file = next((f"{os.path.relpath(path)}: " for path in paths if path.is_file()), "")
    key = _full_key(error, inner)
    problem = conversion_problem((inner.msg or str(inner)).partition("\n")[0])
    fields = getattr(inner.object_type, "__dataclass_fields__", {})
    fix = ""
    if union := re.match(r"Value (.*) of type .*'(Optional\[)?Union\[int, str\]", problem):
        problem = f"must be a whole number or a word, got {union[1]}"
    elif "not a subclass" in problem or "incompatible" in problem:
        problem = f"must be keys and their values, got {problem.rpartition('value: ')[2]}"
        example = f"'{key.partition('[')[0]}=[{{key: value}}]'" if key.endswith("]") else ""
        fix = f"in quotes: {example}" if example else f"set one, as {key}.enabled=true"
    elif fields and (leaf := re.split(r"\W+", key)[-1]) not in fields:
        fix = f"use one of {', '.join(fields)}"
    elif "<enum" in problem:
        members = get_type_hints(inner.object_type)[leaf].__members__
        problem = problem.partition(" a valid")[0] + " valid"
        fix = f"use one of {', '.join(members)}"
    if (column := key.removeprefix("data.types.")) != key:
        fix = f"to leave the column out, use {list_override('data.ignore', [decode_name(column)])}"
    return ConfigError(f"{file}{key}", problem, fix)
