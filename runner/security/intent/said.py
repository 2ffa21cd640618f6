"""What was typed: the only place where anything may be allowed that is not by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityConfig, SecurityLevel
from runner.security.intent import bounds
from runner.security.intent.keys import check_key
from runner.security.intent.names import check_any, valued

OPEN, CLOSE = "[{(", "]})"


@dataclass(frozen=True)
class Said:
    """What the command line says; `values` are those of its keys, the last one of each."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def off(self) -> bool:
        """Whether nothing is looked at that could be called."""
        return self.security.level is SecurityLevel.off

    @property
    def strict(self) -> bool:
        """Whether nothing of other people's is read."""
        return self.security.level is SecurityLevel.strict

    @property
    def searchpath(self) -> list[str]:
        """Folders with more config groups, as Hydra names them."""
        found = self.values.get("hydra.searchpath")
        return [str(one) for one in found] if isinstance(found, list) else []

    def has(self, key: str) -> bool:
        """Whether a value for this key was typed, by itself or in a mapping above it."""
        if key in self.values:
            return True
        above, _, last = key.rpartition(".")
        found = self.values.get(above) if above else None
        return isinstance(found, dict) and last in found


def read_overrides(overrides: Sequence[str], ours: Path) -> Said:
    """Take in what was typed. SecurityError for what nobody may ask for; what cannot be read is
    left for others to say.
    """
    check_text(overrides)
    parsed = [one for text in overrides if (one := parse(text)) is not None]
    check_jobs(parsed)
    values: dict[str, Any] = {}
    for one in parsed:
        check_key(one.key_or_group, one.package)
        if not one.is_delete():
            values[one.key_or_group] = one.value()
    if [one.key_or_group for one in parsed].count("hydra.searchpath") > 1:
        raise SecurityError("hydra.searchpath: comes twice: Hydra takes the first; type one list")
    said = Said(_security(parsed, ours), values)
    for one in parsed:
        _check_names(one, said.security.names)
    for folder in said.searchpath:
        if "://" in folder and not folder.startswith("file://"):
            raise SecurityError(
                f"hydra.searchpath: {folder} is refused: it would import a package; "
                "use file://FOLDER"
            )
    return said


def _check_names(override: Override, trusted: Sequence[str]) -> None:
    value, key = override.value(), override.key_or_group
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        one = one.text if isinstance(one, QuotedString) else one
        if key.rpartition(".")[2] == "_target_":
            named = [(key, one)]
        else:
            named = list(valued(one, key, ("_target_",)))
        for where, target in named:
            if isinstance(target, str) and target and "${" not in target:
                check_any(target, where, trusted)


def parse(text: str) -> Override | None:
    """An override taken apart, or None where it is none."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError):
        return None


def check_text(overrides: Sequence[str]) -> None:
    """Raise SecurityError for overrides that would take long to read at all."""
    if len(overrides) > bounds.OVERRIDES or sum(map(len, overrides)) > bounds.ALL_TEXT:
        raise SecurityError(f"{len(overrides)} overrides are refused: put them into a file")
    for text in overrides:
        key = text.partition("=")[0][:80]
        if len(text) > bounds.TEXT:
            raise SecurityError(f"{key}: a value of {len(text)} characters is refused")
        depth = deepest = 0
        for letter in text:
            depth += (letter in OPEN) - (letter in CLOSE)
            deepest = max(deepest, depth)
        if deepest > bounds.NESTED or text.count("${") > bounds.REFERENCES:
            raise SecurityError(f"{key}: is refused: it is nested {deepest} deep")


def check_jobs(parsed: Sequence[Override], where: str = "") -> None:
    """Raise SecurityError where a sweep would have more jobs than anybody waits for."""
    jobs = 1
    for one in parsed:
        count = _count(one)
        jobs *= max(1, count)
        if jobs > bounds.JOBS:
            raise SecurityError(
                f"{where or one.key_or_group}: a sweep of {jobs} jobs is refused, more than "
                f"{bounds.JOBS}; name fewer values"
            )


def _count(override: Override) -> int:
    if not override.is_sweep_override():
        return 1
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if isinstance(value, RangeSweep):
        numbers = (value.start, value.stop, value.step)
        if any(n is None or not isfinite(float(n)) for n in numbers) or not value.step:
            raise SecurityError(
                f"{override.key_or_group}: a range needs a beginning, an end and a step that are "
                "numbers"
            )
        start, stop, step = (Decimal(str(n)) for n in numbers)
        return max(0, ceil((stop - start) / step))
    return 1  # a glob has no more values than there are files


def security_of(overrides: Sequence[str], ours: Path) -> SecurityConfig:
    """What these overrides say about security, wherever they come from."""
    parsed = (parse(text) for text in overrides if "security" in text)
    return _security([one for one in parsed if one is not None], ours)


def _security(parsed: Sequence[Override], ours: Path) -> SecurityConfig:
    """The `security` group as typed, on top of nothing but our own files."""
    config = OmegaConf.structured(SecurityConfig)
    typed = [one for one in parsed if one.key_or_group.partition(".")[0] == "security"]
    for one in typed:
        value = one.value()
        if one.is_sweep_override():
            raise SecurityError(
                f"{one.key_or_group}: is not swept over: a sweep has one answer to what is trusted"
            )
        if "${" in (one.input_line or ""):
            raise SecurityError(f"{one.key_or_group}: stands for another value; type it out")
        if one.package is not None or one.is_delete():
            continue
        config = _with(config, one.key_or_group, value, ours)
    made = OmegaConf.to_object(config)
    if not isinstance(made, SecurityConfig):
        raise ConfigError("security", "is not that group")
    return made


def _with(config: DictConfig, key: str, value: Any, ours: Path) -> DictConfig:
    try:
        if key != "security":
            if key == "security.trusted" and isinstance(value, str):
                value = [value]
            OmegaConf.update(config, key.partition(".")[2], value, merge=False)
            return config
        if isinstance(value, str):
            file = ours / "security" / f"{value}.yaml"
            value = OmegaConf.load(file) if value.isidentifier() and file.is_file() else {}
        merged = OmegaConf.merge(config, value)
    except (OmegaConfBaseException, ValueError, TypeError):  # composing says what is wrong
        return config
    return merged if isinstance(merged, DictConfig) else config
