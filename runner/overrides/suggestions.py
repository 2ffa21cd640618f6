"""What was probably meant by a key or an option, and which of these guesses compose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from runner.errors import ConfigError
from runner.overrides import aliases
from runner.overrides.spelling import CliOverride, sweep_overrides

DEVICE = re.compile(r"(?:gpu|cuda):(\d+)")


def suggestion(key: str, problem: str, meant: Iterable[str], otherwise: str = "") -> ConfigError:
    """The error about a key; `meant` are overrides that compose, `otherwise` what else to say."""
    guess = f"did you mean {command(meant)}?" if meant else ""
    return ConfigError(key, problem, " ".join(part for part in (guess, otherwise) if part))


def command(overrides: Iterable[str]) -> str:
    """The overrides as they are typed, with -m where they are of a sweep."""
    texts = list(overrides)
    return " ".join([*(["-m"] if sweep_overrides(texts) else []), *texts])


@dataclass(frozen=True)
class Suggestions:
    """Guesses in the context of the options that were chosen."""

    groups: Mapping[str, Mapping[str, str]]
    choices: list[str]  # valid options, as `data=cancer`
    composes: Callable[[list[str]], bool]

    def first(self, guesses: Iterable[list[str]]) -> tuple[str, ...]:
        """The first guess that composes with the chosen options; empty where none does."""
        tried: list[list[str]] = []
        for guess in guesses:
            if guess in tried:
                continue
            tried.append(guess)
            named = {text.partition("=")[0] for text in guess}
            others = [text for text in self.choices if text.partition("=")[0] not in named]
            if self.composes([*others, *guess]):
                return tuple(guess)
        return ()

    def of_option(self, group: str, value: str) -> Iterator[list[str]]:
        """What an option that does not exist may be meant for."""
        existing, folded = self.groups[group], value.casefold()
        if value.startswith("["):
            yield [f"{group}={value.strip('[]').replace(' ', '')}"]
        yield from ([f"{group}={name}"] for name in existing if _bare(name) == _bare(value))
        if ours := aliases.OPTIONS.get(group, {}).get(folded):
            yield [f"{group}={ours}"]
            if ours == "gpt":
                yield ["data=stdlib_text", "model=gpt"]
        if group == "device" and (numbered := DEVICE.fullmatch(folded)):
            yield ["device=cuda", f"device.index={numbered[1]}"]
        if group == "data" and (kind := aliases.FILES.get(Path(folded).suffix)):
            yield [f"data={kind}", f"data.path={value}"]
        if group == "model" and _bare(value).startswith(aliases.TORCHVISION):
            yield [f"model._target_=torchvision.models.{value}", "security.trusted=[torchvision]"]
        if group == "optimizer" and (name := nearest(value, aliases.TORCH_OPTIMIZERS, 0.8)):
            yield [f"optimizer.name={name}"]
        if near := nearest(value, existing):
            yield [f"{group}={near}"]

    def of_key(self, override: CliOverride, config: DictConfig) -> Iterator[list[str]]:
        """What an unknown key may be meant for: other programs' names, then misspellings."""
        *path, last = override.key.split(".")
        name, value = last.casefold().replace("-", "_"), override.value
        if ours := aliases.VALUES.get(name, {}).get(value.strip("'\"").casefold()):
            yield ours.split()
        group = self.group_of(path[0]) if path else ""
        if group and len(path) == 1 and name in aliases.NAMES_OF_OPTIONS:
            yield from self._assign(group, value)
        if key := aliases.key_of(name):
            yield from self._assign(key, value)
        if last in self.groups or (path and last in config and last != "name"):
            yield from self._assign(last, value)
        if not replacement(override.key):
            yield from self._misspelled(override, config)

    def _misspelled(self, override: CliOverride, config: DictConfig) -> Iterator[list[str]]:
        first, dot, tail = override.key.partition(".")
        tops = [str(key) for key in config if key != "hydra"]
        for top in filter(None, (self.group_of(first), nearest(first, [*self.groups, *tops]))):
            if dot:
                yield [f"{top}.{tail}={override.value}"]
            else:
                yield from self._assign(top, override.value)
        leaves = {key.rpartition(".")[2]: key for key in reversed(list(_keys(config)))}
        if leaf := nearest(override.key.rpartition(".")[2], leaves, 0.8):
            yield [f"{leaves[leaf]}={override.value}"]

    def _assign(self, key: str, value: str) -> Iterator[list[str]]:
        """A key, which may be a group or follow other overrides, with that value."""
        *others, last = key.split()
        if last not in self.groups:
            yield [*others, f"{last}={value}"]
            if last.startswith("+"):  # the key may exist already
                yield [*others, f"{last[1:]}={value}"]
        elif all(option in self.groups[last] for option in value.split(",")):
            yield [f"{last}={value}"]
        else:
            yield from self.of_option(last, value)

    def group_of(self, name: str) -> str:
        """Our group of that name, here or in other programs; "" where there is none."""
        ours = aliases.GROUPS.get(name.casefold()) or aliases.key_of(name.casefold())
        return name if name in self.groups else ours if ours in self.groups else ""

    def wrong_option(self, group: str, value: str) -> ConfigError:
        """The error about an option that does not exist."""
        others = [text for text in self.choices if text.partition("=")[0] != group]
        meant = replace(self, choices=others).first(self.of_option(group, value))
        otherwise = f"there are {', '.join(self.groups[group])}"
        if group == "model" and not (meant and meant[0].startswith("model=")):
            otherwise += "; a class of your own goes by model._target_ and security.trusted"
        if group == "data" and not meant:
            otherwise += "; your own data: data=tabular|images|arrays|text data.path=…"
        return suggestion(group, f"no option {value!r}", meant, otherwise)


def replacement(key: str) -> str:
    """What there is in place of something that has no key here."""
    parts = key.casefold().replace("-", "_").split(".")
    return next((aliases.ABSENT[part] for part in parts if part in aliases.ABSENT), "")


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` most like `word`, capitals aside."""
    folded = {name.casefold(): name for name in names}
    similar = get_close_matches(word.casefold(), folded, 1, cutoff)
    return folded[similar[0]] if similar else None


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.casefold())


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        if prefix or key != "hydra":
            yield f"{prefix}{key!s}"
            node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
            if isinstance(node, DictConfig) and not node._is_none():
                yield from _keys(node, f"{prefix}{key!s}.")
