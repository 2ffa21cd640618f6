"""How config files are read, and configs composed, for as long as this process is at work.

Whatever has a config composed (a run, each job of a sweep, an arm, a help text of Hydra's), the
same is looked at: every file before it is parsed, and every config before it is used.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from runner.errors import ConfigError, RunnerError, SecurityError
from runner.record.hydra_files import NO_VALUE
from runner.security.intent import bounds
from runner.security.intent.composed import check_composed
from runner.security.intent.expansion import check_expansion
from runner.security.intent.levels import check_within
from runner.security.intent.raw import check_values, look
from runner.security.intent.said import Said, security_of
from runner.security.intent.written import check_job


@dataclass
class Reading:
    """`ours` are folders whose files are looked at no further, the first one of them with groups
    of ours; `said` is what was typed.
    """

    ours: Sequence[Path]
    said: Said = field(default_factory=Said)
    seen: dict[str, str] = field(default_factory=dict)  # sha256 by path

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While entered, Hydra reads no file, composes no config and begins no job unseen."""
        Plugins.instance()
        sources = cast(list[type[ConfigSource]], Plugins.instance().discover(ConfigSource))
        file: Any = next(one for one in sources if one.scheme() == "file")
        loader: Any = ConfigLoaderImpl
        stores: Any = ConfigRepository
        about: Any = HydraConfig
        before = file.load_config, stores.load_config, loader.load_configuration, about.set_config
        read_file, find, compose, begin = before
        reading = self

        def load_config(source: Any, config_path: str) -> ConfigResult:
            path = os.path.join(source.path, source._normalize_file_name(config_path))
            path = os.path.realpath(path)
            if reading._is_ours(path) or not os.path.exists(path):
                found: ConfigResult = read_file(source, config_path)
                return found
            _check_not_ours(config_path, path)
            return reading._result(source, path)

        def load_named(repository: Any, config_path: str) -> ConfigResult | None:
            _check_below(config_path)
            found: ConfigResult | None = find(repository, config_path)
            return found

        def load_configuration(
            loader: Any, config_name: str | None, overrides: list[str], *rest: Any, **named: Any
        ) -> DictConfig:
            try:
                config: DictConfig = compose(loader, config_name, overrides, *rest, **named)
            except (RunnerError, HydraException, OmegaConfBaseException, YAMLError):
                raise
            except Exception as error:  # Hydra takes it for granted that its own part is whole
                raise reading._not_composed(error) from error
            reading.check(config, overrides)
            return config

        def set_config(about: Any, config: DictConfig) -> None:
            if not OmegaConf.is_missing(config.hydra.runtime, "output_dir"):  # a job is begun
                check_job(config, reading.said)
            begin(about, config)

        file.load_config, stores.load_config = load_config, load_named
        loader.load_configuration, about.set_config = load_configuration, set_config
        try:
            yield
        finally:
            file.load_config, stores.load_config = before[:2]
            loader.load_configuration, about.set_config = before[2:]

    def check(self, config: DictConfig, overrides: Sequence[str]) -> None:
        """Raise SecurityError for what a config that was just composed may not ask for."""
        typed = security_of(overrides, self.ours[0])
        check_within(typed, self.said.security)
        check_expansion(config)
        check_composed(config, self.said, typed)

    def _not_composed(self, error: Exception) -> ConfigError:
        where = ", ".join(self.seen) or "the command line"
        return ConfigError(
            where, f"Hydra cannot compose it ({type(error).__name__}: {error})",
            "mend what it names" if isinstance(error, ValueError)  # of the list of defaults
            else "is what stands below hydra: a part that Hydra knows, and whole?",
        )  # fmt: skip

    def _result(self, source: Any, path: str) -> ConfigResult:
        if self.said.strict:
            raise SecurityError(
                f"{path}: is refused under security=strict: it takes no configs of other folders"
            )
        if not self.said.off and not Path(path).is_relative_to(os.path.realpath(source.path)):
            raise SecurityError(
                f"{path}: is refused: a link leads there, out of {source.path}; copy the file"
            )
        text = self.read(path)
        try:
            header = ConfigSource._get_header_dict(text[:512])
        except ValueError as error:
            raise ConfigError(
                path, f"its first line is no header: {error}", "write # @package _global_"
            ) from error
        try:
            config = OmegaConf.load(io.StringIO(text))
        except YAMLError as error:
            told = " ".join(str(error).replace('in "<file>", ', "at ").split())
            raise ConfigError(path, told, "mend that file") from error
        except OmegaConfBaseException:  # some are a ValueError too
            raise
        except NO_VALUE as error:
            check_values(text, path)
            raise ConfigError(path, f"cannot be read ({error})", "mend that file") from error
        except OSError as error:  # a number, or a flag
            raise ConfigError(
                path, "is no group of settings", "write them as key: value"
            ) from error
        return ConfigResult(
            provider=source.provider, path=f"file://{source.path}", config=config, header=header
        )

    def read(self, path: str) -> str:
        """The text of a file that may be composed. Raises SecurityError or ConfigError."""
        try:
            with open(path, "rb") as file:
                data = file.read(bounds.ALL_TEXT + 1)
        except OSError as error:
            raise ConfigError(path, f"cannot be read: {error.strerror}") from error
        if len(data) > bounds.ALL_TEXT:
            raise SecurityError(f"{path}: is larger than {bounds.ALL_TEXT} bytes: no config is")
        digest = hashlib.sha256(data).hexdigest()
        if self.seen.setdefault(path, digest) != digest:
            raise SecurityError(
                f"{path}: has changed since it was checked; start again once it stays as it is"
            )
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(path, f"is no text: {error}", "save it as UTF-8") from error
        look(text, path, self.said.security.names)
        return text

    def _is_ours(self, path: str) -> bool:
        return any(Path(path).is_relative_to(folder) for folder in self.ours)


def _check_below(name: str) -> None:
    """Options and configs are named below their folder: a way out of it would lead anywhere."""
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or name.startswith("/") or "://" in name or "\0" in name:
        raise SecurityError(
            f"{name}: is refused: a config is named below its folder; type --config-dir=FOLDER"
        )


def _check_not_ours(name: str, path: str) -> None:
    """A file is found before what we tell Hydra of a name: types and launchers would be gone."""
    known = ConfigStore.instance().get_type(f"{name.removesuffix('.yaml')}.yaml")
    if known == ObjectType.CONFIG or name.partition("/")[0] == "schema":
        raise SecurityError(
            f"{path}: is refused: it would stand in for {name} of the runner or a plugin; "
            "give it another name"
        )
