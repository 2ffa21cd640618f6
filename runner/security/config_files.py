"""Check config files and composed configs while Hydra is in use.

Whenever a config is composed (for a run, a sweep job, an arm, or Hydra's help), each foreign file
is checked before it is parsed, each config before it is used, and each job before its folder is
created. Class names are checked by `registry.permit` when a `RunConfig` is made.
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

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]
from yaml.composer import ComposerError  # type: ignore[import-untyped]

from runner.errors import ConfigError, RunnerError, SecurityError
from runner.record.hydra_files import NO_VALUE, check_events
from runner.security import secrets
from runner.security.cli_overrides import (
    FACTORIES,
    FILE_KEYS,
    TYPED_KEYS,
    CliOverrides,
    check_job_count,
    is_below,
    leaves,
    parse,
)
from runner.security.config import NAME, SecurityConfig, SecurityLevel
from runner.security.paths import check_below, check_place

FILE_BYTES = 1 << 16
RESOLUTIONS = 5_000  # interpolations resolved per config
RESOLVED_LETTERS = 1 << 20
LEVELS = list(SecurityLevel)  # least strict first
WORD = re.compile(r"\w+")
CONTINUED = ("checkpoint.resume", "sweep.resume", "replay.path")


@dataclass
class ConfigFiles:
    """Checks of Hydra's config files; files in the folders `ours` are not checked."""

    ours: Sequence[Path]
    typed: CliOverrides = field(default_factory=CliOverrides)
    continued: list[Path] = field(default_factory=list)  # folders of runs to resume
    others: list[str] = field(default_factory=list)  # foreign files read so far

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Patch Hydra so that reading, composing and starting a job are checked."""
        sources = cast(list[type[ConfigSource]], Plugins.instance().discover(ConfigSource))
        source: Any = next(one for one in sources if one.scheme() == "file")
        loader: Any = ConfigLoaderImpl
        job: Any = HydraConfig
        read, compose, begin = source.load_config, loader.load_configuration, job.set_config

        def load_config(source: Any, config_path: str) -> ConfigResult:
            path = os.path.join(source.path, source._normalize_file_name(config_path))
            if self._is_ours(path) or not os.path.exists(path):
                return cast(ConfigResult, read(source, config_path))
            return self._read(source, path, config_path)

        def load_configuration(loader: Any, *args: Any, **named: Any) -> DictConfig:
            self.others.clear()
            restart_reference_count()
            try:
                config: DictConfig = compose(loader, *args, **named)
            except (RunnerError, HydraException, OmegaConfBaseException, YAMLError):
                raise
            except Exception as error:  # Hydra assumes that its own config node is intact
                raise self._not_composed(error) from error
            check_level(config, self.typed.security)
            check_parameters(config)
            check_continued(config, self.typed)
            return config

        def set_config(job: Any, config: DictConfig) -> None:
            if not OmegaConf.is_missing(config.hydra.runtime, "output_dir"):  # it will be created
                self.check_folders(config, config.hydra.mode is RunMode.MULTIRUN)
            begin(job, config)

        source.load_config, loader.load_configuration = load_config, load_configuration
        job.set_config = set_config
        try:
            yield
        finally:
            source.load_config, loader.load_configuration, job.set_config = read, compose, begin

    def check_folders(self, config: DictConfig, sweeps: bool) -> None:
        """Raise SecurityError if a Hydra folder lies outside the output roots and was not typed."""
        keys = ["hydra.sweep.dir", "hydra.sweep.subdir"] if sweeps else ["hydra.run.dir"]
        home, *below = (secrets.place(config, key) for key in keys)
        if self.typed.strict or not self.typed.has(keys[0]):
            check_place(keys[0], home, self.continued, self.typed.strict)
        for inner in below:
            check_below(keys[1], str(inner), home)
        if OmegaConf.select(config, "hydra.output_subdir") is not None:
            inner = secrets.place(config, "hydra.output_subdir")
            check_below("hydra.output_subdir", str(inner), home.joinpath(*below))
        name = str(secrets.place(config, "hydra.job.name"))
        if not NAME.fullmatch(name.replace("-", "_")):
            raise SecurityError(
                f"hydra.job.name: {name!r} is refused: it becomes part of a file name"
            )

    def _not_composed(self, error: Exception) -> ConfigError:
        fix = "check the part below hydra against Hydra's own config"
        if isinstance(error, ValueError):  # in the defaults list
            fix = "fix the defaults list"
        where = ", ".join(self.others) or "the command line"
        return ConfigError(where, f"Hydra cannot compose it ({type(error).__name__}: {error})", fix)

    def _read(self, source: Any, path: str, config_path: str) -> ConfigResult:
        """Check a foreign file as text, then parse the same text."""
        path = os.path.realpath(path)
        self.others.append(path)
        if self.typed.strict:
            raise SecurityError(
                f"{path}: is refused: security=strict reads no configs from other folders"
            )
        text = _read_text(path)
        try:
            header = ConfigSource._get_header_dict(text[:512])
        except ValueError as error:
            raise ConfigError(
                path, f"its first line is not a valid header: {error}", "write # @package _global_"
            ) from error
        config = _parsed(path, text)
        if not self.typed.off:
            check_file(path, config_path, header.get("package") or "", config)
        return ConfigResult(
            provider=source.provider, path=f"file://{source.path}", config=config, header=header
        )

    def _is_ours(self, path: str) -> bool:
        return any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in self.ours)


def check_file(path: str, group: str, package: str, config: Any) -> None:
    """Raise SecurityError if a config file sets Hydra keys other than FILE_KEYS.

    `group` is its path in the config folder. Groups and packages of Hydra's are refused; its
    defaults list may select installed options.
    """
    tree: Any = OmegaConf.to_container(config, resolve=False)
    tree = tree if isinstance(tree, dict) else {}
    defaults = [str(text) for pair in leaves(tree.get("defaults"), "") for text in pair]
    for text in (group, package, *(text.partition("@")[2] for text in defaults)):
        if "hydra" in WORD.findall(text):
            raise SecurityError(
                f"{path}: {text} is refused: a config file cannot add to Hydra's config"
            )
    for key, value in leaves(tree["hydra"], "hydra") if tree.get("hydra") is not None else ():
        called = is_below(key, ("hydra.sweeper",)) and "${" in str(value)
        if not is_below(key, FILE_KEYS) or set(key.split(".")) & set(FACTORIES) or called:
            typed = is_below(key, TYPED_KEYS) and not set(key.split(".")) & set(FACTORIES)
            way_out = f"if you mean it, type {key}=…" if typed else "leave it out"
            raise SecurityError(
                f"{key}: {value} is refused: a config file may only set plain values of "
                f"{', '.join(FILE_KEYS)}; {way_out}"
            )


def check_level(config: DictConfig, typed: SecurityConfig) -> None:
    """Raise SecurityError if the `security` group allows more than was typed."""
    if "security" not in config:
        return
    tree: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    group = tree["security"] if isinstance(tree["security"], dict) else {"level": tree["security"]}
    level = str(group.get("level"))
    least = min(LEVELS.index(typed.level), LEVELS.index(SecurityLevel.standard))
    if level not in SecurityLevel.__members__ or LEVELS.index(SecurityLevel[level]) < least:
        raise _not_typed("security.level", level)
    for name in ("trusted", "environment", "allow_pickle", "pinned"):
        more = [str(one) for one in group.get(name) or () if one not in getattr(typed, name)]
        if more:
            raise _not_typed(f"security.{name}", f"[{','.join(more)}]")


def _not_typed(key: str, value: str) -> SecurityError:
    return SecurityError(
        f"{key}: {value} is refused: a config file cannot grant permissions; "
        f"to allow it, type {key}={value}"
    )


def check_parameters(config: DictConfig) -> None:
    """Raise SecurityError if a sweep's parameters set keys that may only be typed."""
    parameters = OmegaConf.select(config, "hydra.sweeper.params")
    tree: Any = OmegaConf.to_container(parameters, resolve=False) if parameters else {}
    parsed = []
    for name, value in tree.items():
        one = parse(f"{name}={value}")
        if one is None:
            raise ConfigError("hydra.sweeper.params", f"{name[:80]} cannot be read")
        words = WORD.findall(f"{one.key_or_group} {one.package}")
        if {"security", "hydra", *FACTORIES} & set(words):
            raise SecurityError(
                f"hydra.sweeper.params: {name} is refused: a config file cannot set it"
            )
        parsed.append(one)
    check_job_count(parsed, "hydra.sweeper.params")


def check_continued(config: DictConfig, typed: CliOverrides) -> None:
    """Raise SecurityError if a config file names a run outside the output roots to resume."""
    for key in CONTINUED:
        try:
            value = OmegaConf.select(config, key)
        except OmegaConfBaseException:  # reported when the config is made
            continue
        if value not in (None, "", "None", "none", "auto") and not typed.has(key):
            check_place(key, value)


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(path, f"is not text: {error}", "save it as UTF-8") from error
    if len(text) > FILE_BYTES:
        raise SecurityError(
            f"{path}: has more than {FILE_BYTES} characters, the limit for a config"
        )
    return text


def _parsed(path: str, text: str) -> Any:
    try:
        check_events(text.encode())
    except ComposerError as error:
        line = error.problem_mark.line + 1
        raise SecurityError(
            f"{path}:{line}: {error.problem} are refused: write the values"
        ) from None
    except YAMLError:
        pass  # the reader reports it
    try:
        return OmegaConf.load(io.StringIO(text))
    except YAMLError as error:
        reason = " ".join(str(error).replace('in "<file>", ', "at ").split())
        raise ConfigError(path, reason, "fix that file") from error
    except OmegaConfBaseException:  # some are a ValueError too
        raise
    except NO_VALUE as error:  # e.g. `0x_`, which YAML resolves as a number
        raise ConfigError(path, f"has a value that cannot be read: {error}", "fix it") from error
    except OSError as error:  # a number or a boolean
        raise ConfigError(path, "is not a mapping", "write settings as key: value") from error


class _Followed:
    """Counters of resolved interpolations and their characters since the last composition."""

    count = letters = 0


def restart_reference_count() -> None:
    """Reset the interpolation counters before a config is resolved."""
    _Followed.count = _Followed.letters = 0


def bound_references() -> None:
    """Limit how many interpolations OmegaConf resolves: ten lines can make 10**10 values."""
    original: Any = Container._resolve_interpolation_from_parse_tree
    if getattr(original, "bounded", False):
        return

    def bounded(container: Container, *args: Any, **named: Any) -> Any:
        _Followed.count += 1
        if _Followed.count > RESOLUTIONS or _Followed.letters > RESOLVED_LETTERS:
            raise InterpolationResolutionError("too many references") from SecurityError(
                "config: its interpolations expand beyond "
                f"{RESOLUTIONS} values or {RESOLVED_LETTERS} characters; write the values"
            )
        node = original(container, *args, **named)
        value = None if node is None or isinstance(node, Container) else node._value()
        _Followed.letters += len(value) if isinstance(value, str) else 0
        return node

    bounded.bounded = True  # type: ignore[attr-defined]
    Container._resolve_interpolation_from_parse_tree = bounded  # type: ignore[method-assign, assignment]
