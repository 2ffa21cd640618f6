"""Check what a config names outside of the output folders: places to write.

A file may name a place below the output roots; others have to be typed. So have some keys that a
sweep's parameters would set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.core.errors import ConfigError, SecurityError
from runner.core.masking import REFERENCE
from runner.core.schemas.sweep import storage_path
from runner.core.security import cli_overrides, secrets
from runner.core.security.cli_overrides import CliOverrides, is_below, iterate_leaves
from runner.core.security.config_files import NO_FILE_KEYS, WORD, raw_value, select
from runner.core.security.paths import check_output_path

FOLDER_KEYS = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"),
    *("hydra.output_subdir", "hydra.job.name"),
)
"""Keys that `ConfigFileChecker.check_folders` checks."""
ADDRESS_KEY = "distributed.rendezvous"  # of earlier versions, from which pickles were read
WRITTEN_KEYS = ("search.storage", "monitoring.sinks")
"""With FOLDER_KEYS all keys that name a place to write, also by arguments of a class."""
URL_PARTS = set("?#%")  # with which a URL names another file than its text


def check_outside_places(config: DictConfig, cli: CliOverrides) -> None:
    """Raise SecurityError for a place that a file names and that was not typed."""
    config = config.copy()
    with open_dict(config):
        config.pop("hydra", None)  # as when the run's config is made, on which values may depend
    for key in WRITTEN_KEYS:
        for text in () if cli.has(key) and not cli.strict else _texts(config, key):
            if "://" in text and URL_PARTS & set(text):
                raise _refusal(key, text, "a file may name a place by a path alone")
            check_output_path(key, storage_path(text), strict=cli.strict)
    if select(config, "search.storage") is not None:
        secrets.read_path(config, "search.storage")


def _texts(config: DictConfig, key: str) -> Iterator[str]:
    """Yield the value of a key; of a class's arguments all texts that look like a path, but for a
    variable's value, which the user let the config read."""
    raw = raw_value(config, key)
    try:
        node = OmegaConf.select(config, key)
        is_tree = OmegaConf.is_config(node)
        value: Any = OmegaConf.to_container(node, resolve=True) if is_tree else node
    except OmegaConfBaseException as error:
        if refusal := secrets.find_refusal(error):
            raise refusal from None
        raise _refusal(key, raw, "its value is not known before the run") from error
    if not is_tree:
        yield from [] if value is None else [str(value)]
        return
    references = [REFERENCE.fullmatch(str(text)) for _, text in iterate_leaves(raw, key)]
    variables = {os.environ.get(match[1]) for match in references if match}
    for _, leaf in iterate_leaves(value, key):
        text = str(leaf)
        if ("/" in text or text.startswith(("~", ".."))) and text not in variables:
            yield text


def _refusal(key: str, value: object, problem: str) -> SecurityError:
    return SecurityError(f"{key}: {value} is refused: {problem}; if you mean it, type {key}=…")


def check_sweep_parameters(config: DictConfig) -> None:
    """Raise SecurityError if a sweep's parameters set keys that may only be typed."""
    parameters = OmegaConf.select(config, "hydra.sweeper.params")
    tree: Any = OmegaConf.to_container(parameters, resolve=False) if parameters else {}
    parsed = []
    for name, value in tree.items():
        override = cli_overrides.parse_override(f"{name}={value}")
        if override is None:
            raise ConfigError("hydra.sweeper.params", f"{name[:80]} cannot be read")
        words = WORD.findall(f"{override.key_or_group} {override.package}")
        key = override.key_or_group
        is_map = isinstance(override.value(), dict)  # of keys below this one
        keys = (*NO_FILE_KEYS, ADDRESS_KEY)
        refused = is_below(key, keys) or (is_map and any(is_below(k, (key,)) for k in keys))
        if refused or {"security", "hydra", *cli_overrides.FACTORY_KEYS} & set(words):
            problem = f"{name} is refused: a config file cannot set it"
            raise SecurityError(f"hydra.sweeper.params: {problem}")
        parsed.append(override)
    cli_overrides.check_job_count(parsed, "hydra.sweeper.params")
