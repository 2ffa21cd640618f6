"""What configs of other people may not do: one table of rules, a good and a bad sample beside each.

Names of classes are not checked here: `registry.permit` answers for each as a `RunConfig` is made.
What is typed counts as the intent of who types it, so a rule asks only of what came from files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # what OmegaConf reads files with
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from runner.errors import ConfigError, SecurityError
from runner.security import secrets
from runner.security.cli_overrides import CliOverrides, check_job_count, parse
from runner.security.config import SecurityConfig, SecurityLevel
from runner.security.paths import check_below, check_place, literal_folder
from runner.security.registry import NAME

FILE_BYTES = 1 << 18
VALUE_LETTERS = 1 << 16
REFERENCES = 1000  # `${…}` in one value
DEPTH = 40  # of mappings and lists in a file
NODES = 20_000  # values in a file, each counted as often as an alias repeats it
RESOLUTIONS = 5_000  # references that are followed while one config is resolved
RESOLVED_LETTERS = 1 << 20
LEVELS = list(SecurityLevel)  # from the least to the most

FILE_KEYS = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir"),
    *("hydra.job.name", "hydra.sweeper.params", "hydra.sweeper.n_trials"),
    *("hydra.sweeper.direction", "hydra.sweeper.max_batch_size"),
)
"""All that a file of another folder sets of Hydra's own part."""
FILLED_IN = (
    *("hydra.runtime.choices", "hydra.runtime.config_sources", "hydra.runtime.cwd"),
    *("hydra.overrides", "hydra.job.config_name", "hydra.job.override_dirname"),
)
CONTINUED = ("checkpoint.resume", "sweep.resume", "replay.path")


@dataclass(frozen=True)
class File:
    """The text of a config file of another folder."""

    path: str
    text: str

    @cached_property
    def root(self) -> yaml.Node | None:
        """Its nodes, aliases shared; None for what is no YAML, which the reader says."""
        try:
            return yaml.compose(self.text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            return None
        except RecursionError:
            raise SecurityError(f"{self.path}: is nested deeper than {DEPTH}") from None


@dataclass(frozen=True)
class Composed:
    """A config that was just composed, with Hydra's own part."""

    config: DictConfig
    overrides: Sequence[str]
    typed: CliOverrides  # by who started the process
    security: SecurityConfig  # what `overrides` say about security
    defaults: Sequence[Mapping[str, Any]] = ()
    """Hydra's part as our files and Hydra's make it; empty where no file of others was read."""


@dataclass(frozen=True)
class ConfigRule:
    """A check that raises SecurityError, with bodies of an experiment file that pass and do not."""

    check: Callable[[Any], None]
    good: str
    bad: str
    typed: tuple[str, ...] = ()  # overrides beside it


FILE_RULES: list[ConfigRule] = []
CONFIG_RULES: list[ConfigRule] = []


def rule(
    table: list[ConfigRule], good: str, bad: str, *typed: str
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Put a check into a table, with its samples."""

    def add(check: Callable[[Any], None]) -> Callable[[Any], None]:
        table.append(ConfigRule(check, good, bad, typed))
        return check

    return add


@rule(FILE_RULES, good="seed: 3", bad="seed: 3\n# " + "x" * FILE_BYTES)
def check_size(file: File) -> None:
    """A config file is small."""
    if len(file.text) > FILE_BYTES:
        raise SecurityError(f"{file.path}: is larger than {FILE_BYTES} characters: no config is")


@rule(
    FILE_RULES,
    good="optimizer: {options: {a: &a {x: 1}, b: *a}}",
    bad="optimizer: {options: {a: &a [" + "1," * 150 + "], b: &b [" + "*a," * 150 + "]}}",
)
def check_nodes(file: File) -> None:
    """Aliases are counted as often as they repeat a value, before anything is made of the text."""
    sizes: dict[int, int] = {}  # by id of a node; 0 while it is counted

    def count(node: yaml.Node, depth: int) -> int:
        where = f"{file.path}:{node.start_mark.line + 1}"
        if depth > DEPTH or sizes.get(id(node)) == 0:
            raise SecurityError(f"{where}: is nested deeper than {DEPTH}, or refers to itself")
        if isinstance(node, yaml.ScalarNode):
            if len(node.value) > VALUE_LETTERS or node.value.count("${") > REFERENCES:
                raise SecurityError(f"{where}: a value of {len(node.value)} characters is refused")
        elif id(node) not in sizes:
            sizes[id(node)] = 0
            sizes[id(node)] = 1 + sum(count(inner, depth + 1) for inner in _inner_nodes(node))
            if sizes[id(node)] > NODES:
                raise SecurityError(
                    f"{where}: grows beyond {NODES} values, each counted as often as an alias "
                    "repeats it; write it without aliases"
                )
        return sizes.get(id(node), 1)

    if file.root is not None:
        count(file.root, 0)


def _inner_nodes(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [inner for pair in node.value for inner in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


@rule(FILE_RULES, good="name: search", bad="hydra: {searchpath: ['pkg://evil_pkg']}")
def check_searchpath(file: File) -> None:
    """Hydra reads a file's `hydra.searchpath`, which may import packages, before it composes."""
    waiting, seen = [file.root] if file.root is not None else [], set[int]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode) and node.value.strip() == "searchpath":
            raise SecurityError(
                f"{file.path}:{node.start_mark.line + 1}: searchpath is refused: a config file "
                "brings no other folders along; type hydra.searchpath=[file://FOLDER], or "
                "--config-dir=FOLDER"
            )
        if id(node) not in seen:
            seen.add(id(node))
            waiting += _inner_nodes(node)


@rule(CONFIG_RULES, good="security: {level: strict}", bad="security: {trusted: [evil_pkg]}")
def check_security(composed: Composed) -> None:
    """A file may raise the level and lower a limit; nothing else of the group."""
    check_level(composed.config, composed.security)
    check_within(composed.security, composed.typed.security)


@rule(
    CONFIG_RULES,
    good="hydra: {run: {dir: outputs/own}, job: {name: own}}",
    bad="hydra: {callbacks: {x: {_target_: evil_pkg.Payload}}}",
)
def check_hydra(composed: Composed) -> None:
    """A file sets FILE_KEYS of Hydra's own part; the rest is ours, Hydra's, or was typed."""
    if not composed.defaults or composed.typed.off:
        return
    tree: Any = OmegaConf.to_container(composed.config.hydra, resolve=False)
    recorded = tree["overrides"]["task"] + tree["overrides"]["hydra"]
    if sorted(recorded) != sorted(composed.overrides):
        raise SecurityError("hydra.overrides: is refused in a config file: Hydra fills it in")
    given = {one.key_or_group for text in composed.overrides if (one := parse(text))}
    known = [dict(leaves(defaults, "hydra")) for defaults in composed.defaults]
    for key, value in leaves(tree, "hydra"):
        free = (*FILE_KEYS, *FILLED_IN, *given)
        usual = any(defaults.get(key, ...) == value for defaults in known)
        if not usual and not any(f"{key}.".startswith(f"{one}.") for one in free):
            raise SecurityError(
                f"{key}: is refused in a config file, which sets of Hydra's keys "
                f"{', '.join(one.removeprefix('hydra.') for one in FILE_KEYS)}; "
                f"if you mean it, type {key}=…"
            )


@rule(
    CONFIG_RULES,
    "hydra: {sweeper: {params: {seed: '1,2'}}}",
    "hydra: {sweeper: {params: {security.trusted: '[evil_pkg]'}}}",
    "-m",
)
def check_parameters(composed: Composed) -> None:
    """`hydra.sweeper.params`: a file's overrides, which a job would take for typed ones."""
    params = OmegaConf.select(composed.config, "hydra.sweeper.params")
    if not composed.defaults or not isinstance(params, DictConfig):
        return
    parsed = []
    tree: Any = OmegaConf.to_container(params, resolve=False)
    for name, value in tree.items():
        text = f"{name}={value}"
        one = parse(text) if len(text) < VALUE_LETTERS else None
        if one is None:
            raise ConfigError("hydra.sweeper.params", f"{text[:80]} cannot be read")
        places = (one.key_or_group.lstrip("+~"), one.package or "")
        groups = {place.replace("/", ".").split(".")[0] for place in places}
        if groups & {"security", "hydra"} and not composed.typed.has(
            f"hydra.sweeper.params.{name}"
        ):
            raise SecurityError(
                f"hydra.sweeper.params: {name} is refused: a config file cannot type for you"
            )
        parsed.append(one)
    check_job_count(parsed, "hydra.sweeper.params")


@rule(
    CONFIG_RULES,
    good="hydra: {run: {dir: 'outputs/own/${name}'}}",
    bad="hydra: {run: {dir: ../ran}}",
)
def check_paths(composed: Composed) -> None:
    """Folders that Hydra makes, as they would be for a run and for the first job of a sweep."""
    for keys in (("hydra.run.dir",), ("hydra.sweep.dir", "hydra.sweep.subdir")):
        with _numbered(composed.config, keys):
            check_written(composed.config, composed.typed, sweeps=len(keys) > 1)


@rule(
    CONFIG_RULES, good="checkpoint: {resume: outputs/a}", bad="checkpoint: {resume: /elsewhere/a}"
)
def check_continued(composed: Composed) -> None:
    """What a run continues from or adds to, where a file says so, was written here."""
    for key in CONTINUED:
        value = _value(composed.config, key)
        if value not in (None, "", "None", "none", "auto") and not composed.typed.has(key):
            check_place(key, value, _typed_roots(composed.typed))


def check_job(config: DictConfig, typed: CliOverrides) -> None:
    """Raise SecurityError for the folder a job is about to make, now that it has its number."""
    check_written(config, typed, sweeps=config.hydra.mode is RunMode.MULTIRUN)


def check_written(config: DictConfig, typed: CliOverrides, sweeps: bool) -> None:
    """Raise SecurityError for places of Hydra's outside the output roots that nobody typed."""
    folder = _value(config, "hydra.runtime.output_dir")
    subfolder, home = _value(config, "hydra.output_subdir"), _value(config, "hydra.sweep.dir")
    places = {"hydra.sweep.subdir" if sweeps else "hydra.run.dir": folder}
    if sweeps:
        places["hydra.sweep.dir"] = home
    if folder is not None and subfolder is not None:
        places["hydra.output_subdir"] = os.path.join(str(folder), str(subfolder))
    for key, value in places.items():
        if value is not None:
            check_place(key, value, _typed_roots(typed), typed.strict)
    if sweeps and folder is not None and home is not None:
        check_below("hydra.sweep.subdir", str(folder), Path(str(home)))
    name = _value(config, "hydra.job.name")
    if name is not None and not NAME.fullmatch(str(name).replace("-", "_")):
        raise SecurityError(f"hydra.job.name: {name!r} is refused: it is part of a file's name")


@contextmanager
def _numbered(config: DictConfig, keys: Sequence[str]) -> Iterator[None]:
    """While entered, the config has what Hydra fills in for a job; a copy would take longer."""
    job, runtime = config.hydra.job, config.hydra.runtime
    before = {name: OmegaConf.to_container(job, resolve=False)[name] for name in ("num", "id")}  # type: ignore[index,call-overload]
    with open_dict(config):
        job.num, job.id = 0, "0"
        parts = [_value(config, key) for key in keys]
        folder = runtime._get_node("output_dir")._value()
        runtime.output_dir = "???" if None in parts else os.path.join(*map(str, parts))
        try:
            yield
        finally:
            job.num, job.id = before["num"], before["id"]
            runtime.output_dir = folder


def _value(config: DictConfig, key: str) -> Any:
    """What a key resolves to, None where that fails. SecurityError where it shows a secret."""
    try:
        value, source = secrets.resolved(config, key.split("."))
    except (OmegaConfBaseException, AttributeError, KeyError, TypeError):
        return None
    if source is not None:
        raise secrets.shows(key, source)
    return value


def _typed_roots(typed: CliOverrides) -> list[Path]:
    """Folders that somebody typed: their own decision, but not under strict."""
    if typed.strict:
        return []
    folders: list[Path | None] = []
    for key, value in typed.values.items():
        if not isinstance(value, str):
            continue
        if key.startswith("hydra.") and key.rpartition(".")[2] == "dir":
            folders.append(literal_folder(value))
        elif key in ("checkpoint.resume", "sweep.resume") and value not in ("none", "auto"):
            place = Path(os.path.realpath(value))  # a run's folder, or one of its checkpoints
            inner = (one.parent for one in (place, place.parent) if one.name == "checkpoints")
            folders.append(next(inner, place))
    return [one for one in folders if one is not None and one != one.parent]  # not the root


def check_level(config: DictConfig, typed: SecurityConfig) -> None:
    """Raise SecurityError for a `security` group that allows more than was typed."""
    if "security" not in config:
        return
    tree: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    group = tree["security"]
    if not isinstance(group, dict):
        raise SecurityError("security: is refused: it is no group of settings")
    for key, value in leaves(group, "security"):
        if isinstance(value, str) and "${" in value:
            raise SecurityError(f"{key}: {value} is refused: it stands for another value")
    level = str(group.get("level"))
    if level not in SecurityLevel.__members__:
        raise ConfigError("security.level", f"must be off, standard or strict, got {level!r}")
    _check_allowed(group, SecurityLevel[level], typed, LEVELS.index(typed.level))
    for name, limit in vars(typed.limits).items():
        given = (group.get("limits") or {}).get(name)
        if (math.inf if given is None else given) > (math.inf if limit is None else limit):
            raise _not_from_a_file(f"security.limits.{name}", given, "raise a limit")


def check_within(inner: SecurityConfig, typed: SecurityConfig) -> None:
    """Raise SecurityError where overrides composed later (an arm's) allow more than was typed.

    They may leave out what was typed, as the overrides of a config do that is only looked into.
    """
    _check_allowed(vars(inner), inner.level, typed, min(LEVELS.index(typed.level), 1))


def _check_allowed(
    group: Mapping[str, Any], level: SecurityLevel, typed: SecurityConfig, least: int
) -> None:
    if LEVELS.index(level) < least:
        raise _not_from_a_file("security.level", level.name, "lower the level")
    for name, value in vars(typed).items():
        if isinstance(value, list):
            more = [str(one) for one in group.get(name) or () if one not in value]
            if more:
                raise _not_from_a_file(f"security.{name}", f"[{','.join(more)}]", "allow more")


def _not_from_a_file(key: str, value: object, what: str) -> SecurityError:
    return SecurityError(
        f"{key}: {value} is refused: a config file cannot {what}; "
        f"if you mean it, type {key}={value}"
    )


def leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping or list, by its dotted key."""
    inner = enumerate(node) if isinstance(node, list) else ()
    for name, value in node.items() if isinstance(node, Mapping) else inner:
        if isinstance(value, Mapping | list):
            yield from leaves(value, f"{key}.{name}")
        else:
            yield f"{key}.{name}", value
    if not isinstance(node, Mapping | list):
        yield key, node


class _Followed:
    """How many references were followed since a config was composed, and to how much text."""

    count = letters = 0


def restart_reference_count() -> None:
    """Begin to count anew: a config is about to be resolved."""
    _Followed.count = _Followed.letters = 0


def bound_references() -> None:
    """Let OmegaConf follow so many references and no more: ten lines can make 10**10 values."""
    original: Any = Container._resolve_interpolation_from_parse_tree
    if getattr(original, "bounded", False):
        return

    def bounded(container: Container, *args: Any, **named: Any) -> Any:
        _Followed.count += 1
        if _Followed.count > RESOLUTIONS or _Followed.letters > RESOLVED_LETTERS:
            raise InterpolationResolutionError("too many references") from SecurityError(
                "config: its references grow beyond "
                f"{RESOLUTIONS} values or {RESOLVED_LETTERS} characters; write it without them"
            )
        node = original(container, *args, **named)
        value = None if node is None or isinstance(node, Container) else node._value()
        _Followed.letters += len(value) if isinstance(value, str) else 0
        return node

    bounded.bounded = True  # type: ignore[attr-defined]
    Container._resolve_interpolation_from_parse_tree = bounded  # type: ignore[method-assign, assignment]
