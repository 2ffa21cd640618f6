"""Hydra's work for one choice of groups is done once a session; values are set on copies of it.

A config takes a third of the time, and one whose groups are new half of it. The processes of
`tests/forks.py` begin with what their server has composed; others compose as Hydra does alone.
"""

from __future__ import annotations

import pickle  # noqa: TID251  # of our own
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, _utils, base, flag_override
from omegaconf.errors import OmegaConfBaseException

from runner.core.config.composing import compose_raw
from runner.core.config.groups import CONF, group_options
from runner.core.errors import ConfigError

compose_defaults = ConfigLoaderImpl._compose_config_from_defaults_list
find_search_path = ConfigLoaderImpl._process_config_searchpath
interpolation_map = defaults_list._create_interpolation_map
register = SourcesRegistry.register
PLACES = ("pkg://", "structured://", f"file://{CONF}")
HAS_DEFAULTS = "HYDRA_REMOVE_TOP_LEVEL_DEFAULTS"
EVERY = 8  # beginnings of so many configs are kept
_begun: dict[tuple[Any, ...], bytes] = {}  # by the configs that were merged
_schema_copies: dict[int, tuple[ConfigNode, bytes]] = {}
MOST_JOBS = 6  # of a sweep
_read: dict[tuple[str, str, str], bytes] = {}  # by the place that configs lie in, and the name
REPLACED: list[tuple[Any, str, Any]] = [
    (config_loader_impl, "create_defaults_list", create_defaults_list),
    (defaults_list, "_create_interpolation_map", interpolation_map),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_defaults),
    (ConfigLoaderImpl, "_process_config_searchpath", find_search_path),
    (ConfigStore, "load", ConfigStore.load),
    *((module, "parse", module.parse) for module in (base, _utils)),
]


def install() -> None:
    """Replace the steps of Hydra that depend on groups alone, and reading what was read before."""
    lists: dict[Any, DefaultsList] = {}
    configs: dict[int, bytes] = {}  # by the list of defaults, which `lists` keeps

    def defaults_of(
        repo: Any, config_name: Any, overrides_list: Sequence[Override], **how: bool
    ) -> DefaultsList:
        if not all(map(_stays, repo.get_sources())):
            return create_defaults_list(repo, config_name, list(overrides_list), **how)
        groups = [o for o in overrides_list if repo.group_exists(o.key_or_group)]
        key = (config_name, *(o.input_line for o in groups), *how.items(), _schemas())
        if key not in lists:
            lists[key] = create_defaults_list(repo, config_name, groups, **how)
        values = [o for o in overrides_list if o not in groups and not o.is_sweep_override()]
        return replace(lists[key], config_overrides=values + lists[key].config_overrides)

    def config_of(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        if not any(defaults is known.defaults for known in lists.values()):
            return _merge(self, defaults, repo)
        if id(defaults) not in configs:
            configs[id(defaults)] = pickle.dumps(_merge(self, defaults, repo))
        config: DictConfig = _copy(configs[id(defaults)])
        return config

    config_loader_impl.create_defaults_list = defaults_of
    defaults_list._create_interpolation_map = _interpolation_map
    ConfigStore.__deepcopy__ = lambda store, _: store  # type: ignore[attr-defined]  # never changed
    ConfigStore.load = _load_schema  # type: ignore[method-assign]
    base.parse = _utils.parse = lru_cache(maxsize=4096)(base.parse)  # type: ignore[attr-defined]
    ConfigLoaderImpl._compose_config_from_defaults_list = config_of  # type: ignore[method-assign]
    ConfigLoaderImpl._process_config_searchpath = _search_path  # type: ignore[method-assign]
    SourcesRegistry.register = _register  # type: ignore[method-assign]


def _merge(loader: ConfigLoaderImpl, defaults: Sequence[ResultDefault], repo: Any) -> DictConfig:
    """What a list of defaults composes to, from the beginning that an earlier list had, too."""
    keys: list[Any] = [_schemas()]
    for default in defaults:
        loaded = repo.load_config(default.config_path)
        if loaded is None or not loaded.path.startswith(PLACES):
            break
        keys.append((default.config_path, default.package, default.primary, loaded.path))
    done = next((n for n in range(len(keys), 0, -1) if tuple(keys[:n]) in _begun), 1)
    config = _copy(_begun[*keys[:done]]) if done > 1 else OmegaConf.create()
    try:
        with flag_override(config, "no_deepcopy_set_nodes", True):
            for number, default in enumerate(defaults[done - 1 :], done):
                config.merge_with(loader._load_single_config(default, repo).config)
                if number % EVERY == 0 and number < len(keys):
                    _begun[*keys[: number + 1]] = pickle.dumps(config)
    except OmegaConfBaseException:  # for Hydra's own message
        return compose_defaults(loader, list(defaults), CachingConfigRepository(repo.delegate))
    config._set_flag("no_deepcopy_set_nodes", None)  # of a beginning
    _remove_defaults(config)
    return config


def _remove_defaults(config: Any) -> None:
    """The lists of defaults that schemas brought with them."""
    if isinstance(config, DictConfig) and not (config._is_none() or config._is_missing()):
        if config._get_flag(HAS_DEFAULTS):
            config._set_flag(HAS_DEFAULTS, None)
            with flag_override(config, ["readonly", "struct"], False):
                config.pop("defaults", None)
        for key in config:
            _remove_defaults(config._get_node(key))


def _load_schema(store: ConfigStore, config_path: str) -> ConfigNode:
    """A copy of a config that is a class."""
    schema = store._load(config_path)
    if id(schema) not in _schema_copies:
        _schema_copies[id(schema)] = schema, pickle.dumps(schema)
    copied: ConfigNode = _copy(_schema_copies[id(schema)][1])
    return copied


def compose_groups(typed: Sequence[str]) -> None:
    """Do the work for the options that were typed, for processes that are forked from this one."""
    known, groups = group_options(), list[list[str]]()
    for group, _, typed_options in (text.partition("=") for text in typed):
        options = typed_options.split(",")  # several in a sweep
        if set(options) <= known.get(group, {}).keys():
            groups.append([f"{group}={option}" for option in options])
    for chosen in islice(product(*groups), MOST_JOBS):
        with suppress(ConfigError):
            compose_raw(chosen, hydra_too=True)


def look_for_plugins_again() -> None:
    """Hydra looks again in the places where its plugins can be, as in a process of its own."""
    for found in (Plugins, SourcesRegistry):
        Singleton._instances.pop(found, None)


def _register(registry: SourcesRegistry, source: Any) -> None:
    """Hydra has found a kind of place that configs can lie in."""
    if source.scheme() in ("pkg", "file"):
        REPLACED.append((source, "load_config", source.load_config))
        source.load_config = _reading_once(source.load_config)
    register(registry, source)


def _reading_once(load: Callable[..., ConfigResult]) -> Callable[..., ConfigResult]:
    """What reads a config, but one that no test can have changed only once."""

    def load_config(self: ConfigSource, config_path: str) -> ConfigResult:
        if not _stays(self):
            return load(self, config_path)
        key = (self.provider, self.path, config_path)
        if key not in _read:
            _read[key] = pickle.dumps(load(self, config_path))
        result: ConfigResult = _copy(_read[key])
        return result

    return load_config


def _copy(pickled: bytes) -> Any:
    return pickle.loads(pickled)  # noqa: S301  # our own; a deep copy takes five times as long


def _interpolation_map(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """What references of a list of defaults can name, for a list that has some."""
    if any(default.is_interpolation() for default in defaults):
        return interpolation_map(overrides, defaults, self_added)
    return OmegaConf.create()


def _search_path(self: Any, config_name: Any, overrides: list[Override], repo: Any) -> None:
    """Our primary config names no further folders, so that it is not read for them."""
    typed = any(override.get_key_element() == "hydra.searchpath" for override in overrides)
    if config_name != "config" or typed or not all(map(_stays, repo.get_sources())):
        find_search_path(self, config_name, overrides, repo)


def _stays(source: ConfigSource) -> bool:
    """Whether no test can have changed what lies there."""
    return source.scheme() in ("pkg", "structured") or source.path == str(CONF)


def _schemas() -> int:
    """How many there are at the top: a test may have added some."""
    return len(ConfigStore.instance().repo)
