"""Hydra's work for one choice of groups is done once a session; values are set on copies of it.

A config takes a quarter of the time. Processes that tests start compose as Hydra does alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig

from runner.core.config.groups import CONF

compose_defaults = ConfigLoaderImpl._compose_config_from_defaults_list
REPLACED = [
    (config_loader_impl, "create_defaults_list", create_defaults_list),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_defaults),
]


def install() -> None:
    """Replace the two steps of Hydra that depend on groups alone."""
    lists: dict[Any, DefaultsList] = {}
    configs: dict[int, DictConfig] = {}  # by the list of defaults, which `lists` keeps

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
            return compose_defaults(self, defaults, repo)
        if id(defaults) not in configs:
            configs[id(defaults)] = compose_defaults(self, defaults, repo)
        return copy.deepcopy(configs[id(defaults)])

    config_loader_impl.create_defaults_list = defaults_of
    ConfigStore.__deepcopy__ = lambda store, _: store  # type: ignore[attr-defined]  # never changed
    ConfigLoaderImpl._compose_config_from_defaults_list = config_of  # type: ignore[method-assign]


def _stays(source: ConfigSource) -> bool:
    """Whether no test can have changed what lies there."""
    return source.scheme() in ("pkg", "structured") or source.path == str(CONF)


def _schemas() -> int:
    """How many there are at the top: a test may have added some."""
    return len(ConfigStore.instance().repo)
