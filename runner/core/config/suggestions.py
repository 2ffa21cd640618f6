"""Suggestions for unknown options and keys: similar names, and what other programs call them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.core.config import aliases
from runner.core.config.groups import MIN_SIMILARITY
from runner.core.errors import ConfigError
from runner.core.format import nearest

BATCH_SIZE = "training.batch_size"
NUMBERED_DEVICE = re.compile(r"(?:gpu|cuda):(\d+)")


@dataclass(frozen=True)
class Suggester:
    """Suggests overrides for a mistake, in the context of the chosen options."""

    groups: Mapping[str, Mapping[str, str]]
    choices: list[str]  # valid options, e.g. `data=cancer`
    composes: Callable[[list[str]], bool]

    def first_composing(self, guesses: Iterable[list[str]]) -> list[str]:
        """Return the first guess that composes with the chosen options, or an empty list."""
        for guess in guesses:
            keys = {text.partition("=")[0] for text in guess}
            others = [text for text in self.choices if text.partition("=")[0] not in keys]
            if self.composes([*others, *guess]):
                return guess
        return []

    def for_option(self, group: str, value: str) -> Iterator[list[str]]:
        """Yield guesses for an option that does not exist."""
        name = value.casefold()
        if value.startswith("["):
            yield [f"{group}={value.strip('[]').replace(' ', '')}"]
        if alias := aliases.OPTION_ALIASES.get(group, {}).get(name):
            yield alias.split()
        if group == "device" and (numbered := NUMBERED_DEVICE.fullmatch(name)):
            yield ["device=cuda", f"device.index={numbered[1]}"]
        if group == "data" and (kind := aliases.OPTION_BY_SUFFIX.get(Path(name).suffix)):
            yield [f"data={kind}", f"data.path={value}"]
        if group == "model" and name.startswith(aliases.TORCHVISION_PREFIXES):
            yield [f"model._target_=torchvision.models.{value}", "security.trusted=[torchvision]"]
        if group == "optimizer" and (torch_name := nearest(value, aliases.TORCH_OPTIMIZERS, 0.8)):
            if torch_name.casefold() not in self.groups[group]:
                yield [f"optimizer.name={torch_name}"]
        if option := nearest(value, self.groups[group]):
            yield [f"{group}={option}"]

    def for_key(self, key: str, value: str, i: int, config: DictConfig) -> Iterator[list[str]]:
        """Yield guesses for a key whose i-th part does not exist."""
        parts = key.split(".")
        name = parts[-1].casefold().replace("-", "_")
        group = self.find_group(parts[0]) if len(parts) > 1 else ""
        keys = [self.nearest_key(key, i, config, MIN_SIMILARITY)]
        batch_size = OmegaConf.select(config, BATCH_SIZE, default=0)
        if overrides := aliases.find_overrides(name, value, batch_size):
            yield overrides
        if group and len(parts) == 2 and name in aliases.OPTION_KEYS:
            keys.append(group)
        keys.append(aliases.find_key(name))
        if name in self.groups or (group and name in config and name != "name"):
            keys.append(name)
        if name != "_target_" and not aliases.find_replacement(key):
            leaves = {leaf.rpartition(".")[2]: leaf for leaf in reversed(list(_all_keys(config)))}
            keys.append(leaves.get(nearest(name, leaves, 0.8) or "", ""))
            keys.append(self.nearest_key(key, i, config))
        for guess in dict.fromkeys(filter(None, keys)):
            yield from self.assign(guess, value)

    def nearest_key(self, key: str, i: int, config: DictConfig, cutoff: float = 0.6) -> str:
        """Return the key with the existing name nearest to its i-th part; "" without one."""
        parts = key.split(".")
        node: Any = OmegaConf.select(config, ".".join(parts[:i])) if i else config
        name = nearest(parts[i], own_keys(node) + ([] if i else list(self.groups)), cutoff)
        return ".".join([*parts[:i], name, *parts[i + 1 :]]) if name else ""

    def assign(self, key: str, value: str) -> Iterator[list[str]]:
        """Yield overrides that set a key, which may be a group or follow other overrides."""
        *others, last = key.split()
        if last not in self.groups:
            yield [*others, f"{last}={value}"]
            if last.startswith("+"):  # the key may exist already
                yield [*others, f"{last[1:]}={value}"]
        elif all(option in self.groups[last] for option in value.split(",")):
            yield [f"{last}={value}"]
        else:
            yield from self.for_option(last, value)

    def find_group(self, name: str) -> str:
        """Return our group for a name, here or in other programs; "" without one."""
        group = name if name in self.groups else aliases.find_key(name)
        return group if group in self.groups else ""

    def option_error(self, group: str, value: str) -> ConfigError:
        """Return the error about an option that does not exist."""
        others = [text for text in self.choices if text.partition("=")[0] != group]
        suggestion = replace(self, choices=others).first_composing(self.for_option(group, value))
        if group == "checkpoint" and not suggestion:
            suggestion = [f"checkpoint.resume={value}"]
        fallback = f"use one of {', '.join(self.groups[group])}"
        if group == "experiment" and (replacement := aliases.find_replacement(value)):
            suggestion, fallback = [], f"{replacement}; {fallback}"
        if group == "model" and not (suggestion and suggestion[0].startswith("model=")):
            fallback += "; for your own class set model._target_ and security.trusted"
        if group == "data" and not suggestion:
            fallback += "; your own data: data=tabular|images|arrays|text data.path=…"
        return suggestion_error(group, f"no option {value!r}", suggestion, fallback)


def suggestion_error(
    key: str, problem: str, suggestion: Sequence[str], fallback: str = ""
) -> ConfigError:
    """Return the error about a key, with a `suggestion` that composes and the text `fallback`."""
    guess = f"did you mean {format_command(suggestion)}?" if suggestion else ""
    return ConfigError(key, problem, " ".join(part for part in (guess, fallback) if part))


def format_command(overrides: Sequence[str]) -> str:
    """Return the overrides as typed, with -m if they sweep."""
    command = " ".join(overrides)
    if "," in command or "(" in command:
        from runner.core.config.spelling import sweep_overrides  # imports Hydra

        return f"-m {command}" if sweep_overrides(overrides) else command
    return command


def own_keys(node: DictConfig | None) -> list[str]:
    """Return the keys of a node to name; none of a mapping that is null."""
    hidden = ("kind", "arguments", "_target_") if "arguments" in (node or ()) else ()
    return [str(key) for key in node or () if key not in hidden]


def _all_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        if prefix or key != "hydra":
            yield f"{prefix}{key!s}"
            node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
            if isinstance(node, DictConfig) and not node._is_none():
                yield from _all_keys(node, f"{prefix}{key!s}.")
