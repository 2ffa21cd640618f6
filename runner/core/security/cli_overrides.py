"""Parse the command line for security: only typed overrides may relax it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.core.errors import ConfigError, SecurityError, UsageError
from runner.core.format import nearest
from runner.core.schemas.security import SecurityConfig, SecurityLevel

MAX_SWEEP_JOBS = 10_000
FILE_HYDRA_KEYS = (
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir"),
    *("hydra.job.name", "hydra.job.chdir", "hydra.sweeper.params", "hydra.sweeper.n_trials"),
    *("hydra.sweeper.direction", "hydra.sweeper.max_batch_size"),
)
"""Hydra keys that a config file may set."""
CLI_HYDRA_KEYS = (
    *FILE_HYDRA_KEYS,
    *("hydra.launcher", "hydra.sweeper", "hydra.searchpath", "hydra.mode", "hydra.verbose"),
)
"""Hydra keys that may be typed; options of its groups (`hydra/launcher=…`) are separate."""
FACTORY_KEYS = ("_target_", "custom_search_space")
"""Keys with a value that Hydra or one of its plugins imports and calls."""


@dataclass(frozen=True)
class CliOverrides:
    """The typed overrides; `values` has the last value of each key."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def off(self) -> bool:
        """Whether foreign names and files are not checked."""
        return self.security.level is SecurityLevel.off

    @property
    def strict(self) -> bool:
        """Whether foreign configs are refused."""
        return self.security.level is SecurityLevel.strict

    @property
    def searchpath(self) -> list[str]:
        """Additional config folders, in Hydra's notation."""
        folders = self.values.get("hydra.searchpath")
        return [str(one) for one in folders] if isinstance(folders, list) else []

    @property
    def search_folders(self) -> list[Path]:
        """The folders of `searchpath`."""
        return [Path(url.removeprefix("file://")) for url in self.searchpath]

    def has(self, key: str) -> bool:
        """Whether a value for this key was typed."""
        return key in self.values


def parse_overrides(overrides: Sequence[str], conf: Path) -> CliOverrides:
    """Parse the typed overrides; `conf` is the folder of our own configs.

    Raises SecurityError for overrides that are never allowed. An override that cannot be parsed is
    ignored here; Hydra reports it.
    """
    parsed = [override for text in overrides if (override := parse_override(text)) is not None]
    check_job_count(parsed)
    values = {o.key_or_group: o.value() for o in parsed if not o.is_delete()}
    cli = CliOverrides(_read_security(parsed), values)
    for override in parsed if not cli.off else ():
        _check_hydra_key(override)
    if [override.key_or_group for override in parsed].count("hydra.searchpath") > 1:
        raise SecurityError("hydra.searchpath: given twice, and Hydra uses one; type one list")
    for folder in cli.searchpath:
        _check_config_folder("hydra.searchpath", folder.removeprefix("file://"), cli, conf)
    return cli


def parse_override(text: str) -> Override | None:
    """Parse an override; None if it cannot be parsed."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError):
        return None


def is_below(key: str, keys: Sequence[str]) -> bool:
    """Whether the dotted key equals or lies below one of `keys`."""
    return any(f"{key}.".startswith(f"{other}.") for other in keys)


def iterate_leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf value of nested mappings and lists, with its dotted key."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from iterate_leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from iterate_leaves(value, f"{key}.{number}")
    else:
        yield key, node


def _check_hydra_key(override: Override) -> None:
    """Raise SecurityError for a Hydra key that may not be typed, ConfigError for a typo."""
    key, value, package = override.key_or_group, override.value(), override.package or ""
    if "hydra" in package.split("."):
        raise SecurityError(f"{key}: is refused: its package is in Hydra's own config")
    if key.partition(".")[0] != "hydra":
        return
    if not is_below(key, CLI_HYDRA_KEYS):
        if near := nearest(key, CLI_HYDRA_KEYS, 0.9):
            text = (override.input_line or "").partition("=")[2]
            raise ConfigError(key, "no such key", f"did you mean {near}={text}?")
        names = ", ".join(one.removeprefix("hydra.") for one in CLI_HYDRA_KEYS)
        raise SecurityError(f"{key}: is refused: allowed Hydra keys are {names}")
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        for path, leaf in iterate_leaves(one.text if isinstance(one, QuotedString) else one, key):
            if path.rpartition(".")[2] in FACTORY_KEYS:
                fix = "choose an option of the group, hydra/launcher=…"
                raise SecurityError(f"{path}: {leaf} is refused: {fix}")
            is_instantiated = is_below(key, ("hydra.launcher", "hydra.sweeper"))
            if is_instantiated and isinstance(leaf, str) and "${" in leaf:
                raise SecurityError(f"{path}: {leaf} is refused: interpolation is not allowed")


def resolve_config_folders(
    flags: dict[str, str | None], cli: CliOverrides, conf: Path
) -> dict[str, str]:
    """Return the folders of Hydra's flags as absolute paths; under strict only ours pass."""
    folders = {flag: text for flag, text in flags.items() if text is not None}
    for flag, text in folders.items():
        _check_config_folder(flag, text, cli, conf)
        if not Path(text).absolute().is_dir():
            raise UsageError(f"{flag}: there is no folder {text}")
    return {flag: str(Path(text).absolute()) for flag, text in folders.items()}


def _check_config_folder(key: str, text: str, cli: CliOverrides, conf: Path) -> None:
    if "://" in text:
        raise SecurityError(f"{key}: {text} is refused: it would import a package; name a folder")
    if cli.strict and not Path(text).resolve().is_relative_to(conf.resolve()):
        problem = "is refused: security=strict reads no configs from other folders"
        raise SecurityError(f"{key}={text}: {problem}; type its keys, or use security=standard")


def check_job_count(parsed: Sequence[Override], key: str = "") -> None:
    """Raise SecurityError for more than MAX_SWEEP_JOBS jobs in a sweep; expands no ranges."""
    jobs = 1
    for override in parsed:
        jobs *= max(1, _count_values(override))
        if jobs > MAX_SWEEP_JOBS:
            problem = f"a sweep of {jobs} jobs is refused, more than {MAX_SWEEP_JOBS}"
            raise SecurityError(f"{key or override.key_or_group}: {problem}; name fewer values")


def _count_values(override: Override) -> int:
    value = override.value() if override.is_sweep_override() else None
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1  # a glob has at most as many values as there are files
    ends = value.start, value.stop, value.step
    start, stop, step = (float("nan" if n is None else n) for n in ends)
    count = (stop - start) / step if step else float("nan")
    if not isfinite(count):
        key = override.key_or_group
        raise SecurityError(f"{key}: a range needs a start, an end and a step")
    return ceil(count - 1e-9)


def parse_security_overrides(overrides: Sequence[str]) -> SecurityConfig:
    """Return the security settings in these overrides."""
    parsed = (parse_override(text) for text in overrides if "security" in text)
    return _read_security([override for override in parsed if override is not None])


def _read_security(parsed: Sequence[Override]) -> SecurityConfig:
    """Return the `security` group as typed, on top of its defaults."""
    config = OmegaConf.structured(SecurityConfig)
    for item in parsed:
        key = item.key_or_group
        if "security" not in (key.partition(".")[0], *(item.package or "").split(".")):
            continue
        if item.is_sweep_override():
            raise SecurityError(f"{key}: cannot be swept: all jobs of a sweep share it")
        if "${" in (item.input_line or ""):
            raise SecurityError(f"{key}: interpolation is not allowed here; write the value")
        if item.package is not None or item.is_delete() or isinstance(item.value(), dict):
            raise SecurityError(f"{key}: is refused: type security=LEVEL, security.KEY=VALUE")
        name, value = key.partition(".")[2] or "level", item.value()
        is_list = name in ("trusted", "environment")
        with suppress(OmegaConfBaseException, ValueError, TypeError):  # composing reports it
            value = [value] if is_list and isinstance(value, str) else value
            OmegaConf.update(config, name, value, merge=False)
    security: SecurityConfig = OmegaConf.to_object(config)  # type: ignore[assignment]
    return security
