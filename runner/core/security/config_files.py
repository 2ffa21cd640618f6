"""Check config files and composed configs while Hydra is in use.

Whenever a config is composed (for a run, a sweep job, an arm, or Hydra's help), each foreign file
is checked before it is parsed, each config before it is used, and each job before its folder is
created. Class names are checked by `registry.find_allowed_package` when a `RunConfig` is made.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError
from yaml.composer import ComposerError  # type: ignore[import-untyped]

from runner.core.errors import ConfigError, RunnerError, SecurityError, error_text
from runner.core.record.hydra_files import YAML_LOADER, YAML_VALUE_ERRORS, check_events
from runner.core.schemas.security import NAME, SecurityConfig, SecurityLevel
from runner.core.security import cli_overrides, secrets
from runner.core.security.cli_overrides import CliOverrides, is_below, iterate_leaves
from runner.core.security.paths import check_output_path, check_subfolder

MAX_CONFIG_CHARS = 1 << 16
MAX_INTERPOLATIONS = 5_000  # interpolations resolved per config
MAX_RESOLVED_CHARS = 1 << 20
LEVELS = list(SecurityLevel)  # least strict first
WORD = re.compile(r"\w+")
BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
RESUME_KEYS = ("checkpoint.resume", "sweep.resume", "replay.path")
NO_FILE_KEYS = ("search.storage", "monitoring.sinks")
"""Keys of places to write, which a file cannot choose freely."""
RESERVED_GROUPS = ("security", "schema", "hydra")
"""Groups with permissions and types, in which no file may replace one of ours."""
CLI_ONLY_GROUPS = {"launcher": "isolated", "job_logging": "none", "hydra_logging": "none"}
"""Groups of Hydra whose option config.yaml overrides, so that Hydra ignores other files' choice."""
HYDRA_CHOICE = re.compile(r"(?:(?:override|optional) +)*/?hydra/(\w+)")


@dataclass
class ConfigFileChecker:
    """Checks of Hydra's config files; those in `builtin_folders` are not checked."""

    builtin_folders: Sequence[Path]
    cli: CliOverrides = field(default_factory=CliOverrides)
    resumed_folders: list[Path] = field(default_factory=list)  # folders of runs to resume
    foreign_files: list[str] = field(default_factory=list)  # paths read so far
    user_folders: Sequence[Path] = ()  # with groups in addition to ours
    primary: str = "config"  # name of the config that is composed
    replaced_options: dict[str, str] = field(default_factory=dict)  # of ours, by the user's file

    @property
    def notes(self) -> list[str]:
        """A line for each of our options that a file of the user has replaced."""
        return [
            f"{option}: {os.path.relpath(path)} replaces the runner's option of that name"
            for option, path in self.replaced_options.items()
        ]

    def check_reserved_names(self) -> None:
        """Raise SecurityError if a user's folder has config.yaml or an option of our permissions,
        types or Hydra's groups."""
        for folder in self.user_folders:
            paths = [path for group in RESERVED_GROUPS for path in (folder / group).rglob("*.yaml")]
            for path in (folder / "config.yaml", *sorted(paths)):
                name = path.relative_to(folder).as_posix()
                is_ours = ConfigStore.instance().get_type(name) is ObjectType.CONFIG
                is_ours = is_ours or any((f / name).is_file() for f in self.builtin_folders)
                if is_ours and path.is_file() and not self._is_builtin(str(path)):
                    problem = f"{path}: is refused: {name} is a file of the runner or of Hydra"
                    raise SecurityError(f"{problem}, and cannot be replaced; rename it")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Patch Hydra so that reading, composing and starting a job are checked."""
        sources = cast(list[type[ConfigSource]], Plugins.instance().discover(ConfigSource))
        source: Any = next(cls for cls in sources if cls.scheme() == "file")
        loader: Any = ConfigLoaderImpl
        job: Any = HydraConfig
        original_load, original_compose = source.load_config, loader.load_configuration
        original_set_config = job.set_config

        def load_config(source: Any, config_path: str) -> ConfigResult:
            name = source._normalize_file_name(config_path)
            path = os.path.join(source.path, name)
            theirs = (f for f in self.user_folders if (f / name).is_file())
            folder = next((f for f in theirs if not self._is_builtin(str(f / name))), None)
            if folder is not None and self._is_builtin(path):
                source, path = type(source)(source.provider, f"file://{folder}"), str(folder / name)
                self.replaced_options["=".join(config_path.rsplit("/", 1))] = path
            if self._is_builtin(path) or not os.path.exists(path):
                return cast(ConfigResult, original_load(source, config_path))
            return self._read(source, path, config_path)

        def load_configuration(loader: Any, *args: Any, **kwargs: Any) -> DictConfig:
            self.foreign_files.clear()
            reset_interpolation_counters()
            try:
                config: DictConfig = original_compose(loader, *args, **kwargs)
            except (RunnerError, HydraException, OmegaConfBaseException, YAMLError):
                raise
            except Exception as error:  # Hydra assumes that its own config node is intact
                raise self._composition_error(error) from error
            check_security_group(config, self.cli.security)
            if OmegaConf.select(config, "hydra.sweeper.params"):
                from runner.core.security.outside_places import check_sweep_parameters

                check_sweep_parameters(config)
            check_resume_paths(config, self.cli)
            if any(raw_value(config, key) for key in NO_FILE_KEYS):
                from runner.core.security.outside_places import check_outside_places

                check_outside_places(config, self.cli)
            return config

        def set_config(job: Any, config: DictConfig) -> None:
            if not OmegaConf.is_missing(config.hydra.runtime, "output_dir"):  # it will be created
                self.check_folders(config, config.hydra.mode is RunMode.MULTIRUN)
            original_set_config(job, config)

        source.load_config, loader.load_configuration = load_config, load_configuration
        job.set_config = set_config
        try:
            yield
        finally:
            source.load_config, loader.load_configuration = original_load, original_compose
            job.set_config = original_set_config

    def check_folders(self, config: DictConfig, sweeps: bool) -> None:
        """Raise SecurityError if a Hydra folder lies outside the output roots and was not typed."""
        keys = ["hydra.sweep.dir", "hydra.sweep.subdir"] if sweeps else ["hydra.run.dir"]
        output_folder, *subfolders = (secrets.read_path(config, key) for key in keys)
        if self.cli.strict or not self.cli.has(keys[0]):
            check_output_path(keys[0], output_folder, self.resumed_folders, self.cli.strict)
        for subfolder in subfolders:
            check_subfolder(keys[1], str(subfolder), output_folder)
        if OmegaConf.select(config, "hydra.output_subdir") is not None:
            subfolder = secrets.read_path(config, "hydra.output_subdir")
            folder = output_folder.joinpath(*subfolders)
            check_subfolder("hydra.output_subdir", str(subfolder), folder)
        name = str(secrets.read_path(config, "hydra.job.name"))
        if not NAME.fullmatch(name.replace("-", "_")):
            raise SecurityError(f"hydra.job.name: {name!r} is refused: it names a file")

    def _composition_error(self, error: Exception) -> ConfigError:
        fix = "check the part below hydra against Hydra's own config"
        if isinstance(error, ValueError):  # in the defaults list
            fix = "fix the defaults list"
        elif isinstance(error, RecursionError):
            fix = "a defaults list must not lead back to its own file; give the file another name"
        where = ", ".join(self.foreign_files) or "the command line"
        return ConfigError(where, f"Hydra cannot compose it ({error_text(error)})", fix)

    def _read(self, source: Any, path: str, config_path: str) -> ConfigResult:
        """Check a foreign file as text, then parse the same text."""
        path = os.path.realpath(path)
        self.foreign_files.append(path)
        if self.cli.strict:
            problem = "security=strict reads no configs from other folders"
            raise SecurityError(f"{path}: is refused: {problem}")
        text = _read_text(path)
        try:
            header = ConfigSource._get_header_dict(text[:512])
        except ValueError as error:
            problem = f"its first line is not a valid header: {error}"
            raise ConfigError(path, problem, "write # @package _global_") from error
        config = _parse_yaml(path, text)
        self._check_hydra_choices(path, config_path, config)
        if not self.cli.off:
            check_foreign_file(path, config_path, header.get("package") or "", config)
        return ConfigResult(source.provider, f"file://{source.path}", config, header)

    def _check_hydra_choices(self, path: str, config_path: str, config: Any) -> None:
        """Raise ConfigError for an option of a Hydra group that Hydra ignores in this file."""
        tree: Any = OmegaConf.to_container(config, resolve=False)
        defaults = tree.get("defaults") if isinstance(tree, dict) else None
        entries = defaults if isinstance(defaults, list) else []
        pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
        for key, option in pairs if config_path != self.primary else ():
            match = HYDRA_CHOICE.fullmatch(str(key).strip())
            group = match[1] if match else ""
            if group in CLI_ONLY_GROUPS and option != CLI_ONLY_GROUPS[group]:
                if not self.cli.has(f"hydra/{group}"):
                    fix = f"remove it there and type hydra/{group}={option}"
                    problem = f"hydra/{group}: {option} has no effect in this file"
                    raise ConfigError(os.path.relpath(path), problem, fix)

    def _is_builtin(self, path: str) -> bool:
        return any(Path(os.path.realpath(path)).is_relative_to(f) for f in self.builtin_folders)


def check_foreign_file(path: str, group: str, package: str, config: Any) -> None:
    """Raise SecurityError if a config file sets Hydra keys other than FILE_HYDRA_KEYS.

    `group` is its path in the config folder. Groups and packages of Hydra's are refused; its
    defaults list may select installed options.
    """
    tree: Any = OmegaConf.to_container(config, resolve=False)
    tree = tree if isinstance(tree, dict) else {}
    defaults = [str(text) for pair in iterate_leaves(tree.get("defaults"), "") for text in pair]
    for text in (group, package, *(text.partition("@")[2] for text in defaults)):
        if "hydra" in WORD.findall(text):
            problem = "a config file cannot add to Hydra's config"
            raise SecurityError(f"{path}: {text} is refused: {problem}")
    hydra = tree.get("hydra")
    for key, value in () if hydra is None else iterate_leaves(hydra, "hydra"):
        is_interpolated = is_below(key, ("hydra.sweeper",)) and "${" in str(value)
        is_factory = bool(set(key.split(".")) & set(cli_overrides.FACTORY_KEYS))
        if not is_below(key, cli_overrides.FILE_HYDRA_KEYS) or is_factory or is_interpolated:
            allowed_on_cli = is_below(key, cli_overrides.CLI_HYDRA_KEYS) and not is_factory
            way_out = f"if you mean it, type {key}=…" if allowed_on_cli else "leave it out"
            names = ", ".join(cli_overrides.FILE_HYDRA_KEYS)
            allowed = f"a config file may set plain values of {names}"
            raise SecurityError(f"{key}: {value} is refused: {allowed}; {way_out}")


def check_security_group(config: DictConfig, cli_security: SecurityConfig) -> None:
    """Raise SecurityError if the `security` group allows more than was typed."""
    if "security" not in config:
        return
    tree: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    group = tree["security"] if isinstance(tree["security"], dict) else {"level": tree["security"]}
    level = str(group.get("level"))
    least = min(LEVELS.index(cli_security.level), LEVELS.index(SecurityLevel.standard))
    if level not in SecurityLevel.__members__ or LEVELS.index(SecurityLevel[level]) < least:
        raise _permission_error("security.level", level)
    for name in ("trusted", "environment", "allow_pickle", "pinned"):
        additional = [str(x) for x in group.get(name) or () if x not in getattr(cli_security, name)]
        if additional:
            raise _permission_error(f"security.{name}", f"[{','.join(additional)}]")


def _permission_error(key: str, value: str) -> SecurityError:
    problem = "a config file cannot grant permissions"
    return SecurityError(f"{key}: {value} is refused: {problem}; to allow it, type {key}={value}")


def check_resume_paths(config: DictConfig, cli: CliOverrides) -> None:
    """Raise SecurityError if a config file names a run outside the output roots to resume."""
    for key in RESUME_KEYS:
        value = select(config, key)
        if value not in (None, "", "None", "none", "auto") and not cli.has(key):
            check_output_path(key, value)


def select(config: DictConfig, key: str) -> Any:
    """Return a value; None if it cannot be resolved, which is reported when the config is made."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        if refusal := secrets.find_refusal(error):
            raise refusal from None
        return None


def raw_value(config: DictConfig, key: str) -> Any:
    """Return the unresolved value of a key in a group."""
    group, _, name = key.partition(".")
    if (parent := config._get_node(group)) is None:
        return None
    tree: Any = OmegaConf.to_container(parent, resolve=False)
    return tree.get(name) if isinstance(tree, dict) else tree


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, f"is not text: {error}", "save it as UTF-8") from error
    if len(text) > MAX_CONFIG_CHARS:
        raise SecurityError(f"{path}: has more than {MAX_CONFIG_CHARS} characters, the limit")
    return text


def _parse_yaml(path: str, text: str) -> Any:
    try:
        check_events(text.encode())
    except ComposerError as error:
        where = f"{path}:{error.problem_mark.line + 1}"
        raise SecurityError(f"{where}: {error.problem} are refused: write the values") from None
    except YAMLError:
        pass  # the reader reports it
    else:
        _check_base_60(path, text)
    try:
        return OmegaConf.load(io.StringIO(text))
    except YAMLError as error:
        reason = " ".join(str(error).replace('in "<file>", ', "at ").split())
        raise ConfigError(path, reason, "fix that file") from error
    except OmegaConfBaseException:  # some are a ValueError too
        raise
    except YAML_VALUE_ERRORS as error:  # e.g. `0x_`, which YAML resolves as a number
        raise ConfigError(path, f"has a value that cannot be read: {error}", "fix it") from error
    except OSError as error:  # a number or a boolean
        raise ConfigError(path, "is not a mapping", "write settings as key: value") from error


def _check_base_60(path: str, text: str) -> None:
    """Raise ConfigError for a value such as 1:20:30, which YAML reads as the number 4830."""
    for event in yaml.parse(text, YAML_LOADER) if BASE_60.search(text) else ():
        plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
        if plain and BASE_60.fullmatch(event.value):
            problem = f"{event.value} would be read as a number in base 60"
            fix = f"quote it ('{event.value}') or write the number"
            raise ConfigError(f"{path}:{event.start_mark.line + 1}", problem, fix)


_resolved = {"values": 0, "chars": 0}  # interpolations since the last composition


def reset_interpolation_counters() -> None:
    """Reset the interpolation counters before a config is resolved."""
    _resolved.update(values=0, chars=0)


def limit_interpolations() -> None:
    """Limit how many interpolations OmegaConf resolves: ten lines can make 10**10 values."""
    original: Any = Container._resolve_interpolation_from_parse_tree
    if getattr(original, "bounded", False):
        return

    def bounded(container: Container, *args: Any, **kwargs: Any) -> Any:
        _resolved["values"] += 1
        if _resolved["values"] > MAX_INTERPOLATIONS or _resolved["chars"] > MAX_RESOLVED_CHARS:
            limit = f"{MAX_INTERPOLATIONS} values or {MAX_RESOLVED_CHARS} characters"
            refusal = SecurityError(f"config: its interpolations exceed {limit}; write the values")
            raise InterpolationResolutionError("too many references") from refusal
        node = original(container, *args, **kwargs)
        value = None if node is None or isinstance(node, Container) else node._value()
        _resolved["chars"] += len(value) if isinstance(value, str) else 0
        return node

    bounded.bounded = True  # type: ignore[attr-defined]
    Container._resolve_interpolation_from_parse_tree = bounded  # type: ignore[method-assign, assignment]
