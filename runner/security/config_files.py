"""How config files are read and configs composed, for as long as this process is at work.

Whatever has a config composed (a run, each job of a sweep, an arm, a help text of Hydra's), the
rules check every file before it is parsed and every config before it is used.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from runner.errors import ConfigError, RunnerError, SecurityError
from runner.record.hydra_files import NO_VALUE
from runner.security.cli_overrides import CliOverrides, security_of_overrides
from runner.security.config_rules import (
    CONFIG_RULES,
    FILE_RULES,
    Composed,
    File,
    check_job,
    restart_reference_count,
)

_defaults: dict[tuple[object, ...], list[Any]] = {}  # Hydra's part, by the options of it


@dataclass
class ConfigFiles:
    """`ours` are folders whose files are not checked, the first one with groups of ours."""

    ours: Sequence[Path]
    typed: CliOverrides = field(default_factory=CliOverrides)
    others: list[str] = field(default_factory=list)  # files of other folders that were read

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While entered, Hydra reads no file, composes no config and begins no job unchecked."""
        sources = cast(list[type[ConfigSource]], Plugins.instance().discover(ConfigSource))
        source: Any = next(one for one in sources if one.scheme() == "file")
        loader: Any = ConfigLoaderImpl
        job: Any = HydraConfig
        read, compose, begin = source.load_config, loader.load_configuration, job.set_config

        def load_config(source: Any, config_path: str) -> ConfigResult:
            path = os.path.join(source.path, source._normalize_file_name(config_path))
            if self._is_ours(path) or not os.path.exists(path):
                return cast(ConfigResult, read(source, config_path))
            return self._read(source, path)

        def load_configuration(
            loader: Any, config_name: str | None, overrides: list[str], *rest: Any, **named: Any
        ) -> DictConfig:
            self.others.clear()
            restart_reference_count()
            try:
                config: DictConfig = compose(loader, config_name, overrides, *rest, **named)
            except (RunnerError, HydraException, OmegaConfBaseException, YAMLError):
                raise
            except Exception as error:  # Hydra takes it for granted that its own part is whole
                raise self._not_composed(error) from error
            self._check(config, overrides, compose)
            return config

        def set_config(job: Any, config: DictConfig) -> None:
            if not OmegaConf.is_missing(config.hydra.runtime, "output_dir"):  # about to be made
                check_job(config, self.typed)
            begin(job, config)

        source.load_config, loader.load_configuration = load_config, load_configuration
        job.set_config = set_config
        try:
            yield
        finally:
            source.load_config, loader.load_configuration, job.set_config = read, compose, begin

    def _check(self, config: DictConfig, overrides: Sequence[str], compose: Any) -> None:
        security = security_of_overrides(overrides, self.ours[0])
        defaults = self._hydra_defaults(overrides, compose) if self.others else []
        composed = Composed(config, overrides, self.typed, security, defaults)
        for rule in CONFIG_RULES:
            rule.check(composed)

    def _hydra_defaults(self, overrides: Sequence[str], compose: Any) -> list[Mapping[str, Any]]:
        """Hydra's part of our config, and of none, with the options of it that were typed."""
        options = [text for text in overrides if text.lstrip("+~").startswith("hydra/")]
        if (key := (self.ours[0], *options)) in _defaults:
            return _defaults[key]
        loader = ConfigLoaderImpl(create_config_search_path(str(self.ours[0])))
        found: list[Any] = []
        for name in ("config", None):
            try:
                config = compose(loader, name, options, RunMode.MULTIRUN)
            except HydraException as error:
                raise SecurityError(
                    f"{' '.join(options)}: is refused: an option of Hydra's in another folder; "
                    "type its keys"
                ) from error
            found.append(OmegaConf.to_container(config.hydra, resolve=False))
        _defaults[key] = found
        return found

    def _not_composed(self, error: Exception) -> ConfigError:
        fix = "is the part below hydra one that Hydra knows, and whole?"
        if isinstance(error, ValueError):  # of the list of defaults
            fix = "mend what it names"
        where = ", ".join(self.others) or "the command line"
        return ConfigError(where, f"Hydra cannot compose it ({type(error).__name__}: {error})", fix)

    def _read(self, source: Any, path: str) -> ConfigResult:
        """A file that is not ours: checked as text, then parsed from that very text."""
        path = os.path.realpath(path)
        self.others.append(path)
        if self.typed.strict:
            raise SecurityError(
                f"{path}: is refused under security=strict: it takes no configs of other folders"
            )
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(path, f"cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(path, f"is no text: {error}", "save it as UTF-8") from error
        for rule in FILE_RULES:
            rule.check(File(path, text))
        try:
            header = ConfigSource._get_header_dict(text[:512])
        except ValueError as error:
            raise ConfigError(
                path, f"its first line is no header: {error}", "write # @package _global_"
            ) from error
        return ConfigResult(
            provider=source.provider,
            path=f"file://{source.path}",
            config=_parsed(path, text),
            header=header,
        )

    def _is_ours(self, path: str) -> bool:
        return any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in self.ours)


def _parsed(path: str, text: str) -> Any:
    try:
        return OmegaConf.load(io.StringIO(text))
    except YAMLError as error:
        reason = " ".join(str(error).replace('in "<file>", ', "at ").split())
        raise ConfigError(path, reason, "mend that file") from error
    except OmegaConfBaseException:  # some are a ValueError too
        raise
    except NO_VALUE as error:  # `0x_`, which YAML takes for a number by its looks
        raise ConfigError(path, f"has a value that cannot be read: {error}", "mend it") from error
    except OSError as error:  # a number, or a flag
        raise ConfigError(path, "is no group of settings", "write them as key: value") from error
