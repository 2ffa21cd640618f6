"""What was probably meant by a key or an option, and which of these guesses compose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from runner.overrides import aliases
from runner.overrides.spelling import Typed, sweeps

TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
DEVICE = re.compile(r"(?:gpu|cuda):(\d+)")


@dataclass(frozen=True)
class Mistake:
    """A key that is wrong, what is wrong with it, and what helps."""

    key: str
    problem: str
    meant: tuple[str, ...] = ()  # overrides that compose
    otherwise: str = ""  # what else there is to say

    @property
    def fix(self) -> str:
        """What to type."""
        guess = f"did you mean {command(self.meant)}?" if self.meant else ""
        return " ".join(part for part in (guess, self.otherwise) if part)


def command(overrides: Iterable[str]) -> str:
    """The overrides as they are typed, with -m where they are of a sweep."""
    texts = list(overrides)
    return " ".join([*(["-m"] if sweeps(texts) else []), *texts])


@dataclass(frozen=True)
class Suggestions:
    """Guesses in the context of the options that were chosen."""

    groups: Mapping[str, Mapping[str, str]]
    choices: list[str]  # of options that are there, as `data=cancer`
    composes: Callable[[list[str]], bool]

    def first(self, guesses: Iterable[list[str]]) -> tuple[str, ...]:
        """The first guess that composes with the chosen options; empty where none does."""
        tried = []
        for guess in guesses:
            if guess in tried:
                continue
            tried.append(guess)
            named = {text.partition("=")[0] for text in guess}
            kept = [text for text in self.choices if text.partition("=")[0] not in named]
            if self.composes([*kept, *guess]):
                return tuple(guess)
        return ()

    def of_option(self, group: str, value: str) -> Iterator[list[str]]:
        """What an option that is not there may be meant for."""
        there, bare = self.groups[group], _bare(value)
        yield from ([f"{group}={name}"] for name in there if _bare(name) == bare)
        if known := aliases.OPTIONS.get(group, {}).get(value.casefold()):
            yield from (guess.split() for guess in known.split(" | "))
        if group == "device" and (numbered := DEVICE.fullmatch(value.casefold())):
            yield ["device=cuda", f"device.index={numbered[1]}"]
        if group == "data" and (kind := aliases.FILES.get(Path(value).suffix.casefold())):
            yield [f"data={kind}", f"data.path={value}"]
        elif group == "data" and "/" in value:
            yield ["data=images", f"data.path={value}"]
        if group == "model" and bare.startswith(tuple(map(_bare, aliases.TORCHVISION))):
            yield [f"model._target_=torchvision.models.{value}", "security.trusted=[torchvision]"]
        if group == "optimizer" and (name := nearest(value, TORCH_OPTIMIZERS, 0.8)):
            yield [f"optimizer.name={name}"]
        if near := nearest(value, there):
            yield [f"{group}={near}"]

    def of_key(self, typed: Typed, config: DictConfig) -> Iterator[list[str]]:
        """What a key that is not there may be meant for: other programs' names, then slips."""
        *path, last = typed.key.split(".")
        name, value = last.casefold().replace("-", "_"), typed.value
        if known := aliases.VALUES.get(name, {}).get(value.strip("'\"").casefold()):
            yield known.split()
        group = self.group_of(path[0]) if path else ""
        if group and len(path) == 1 and name in aliases.NAMES_OF_OPTIONS:
            yield from self._set(group, value)
        if ours := aliases.key_of(name):
            yield from self._set(ours, value)
        if last in self.groups or (path and last in config and last != "name"):
            yield from self._set(last, value)
        if not instead(typed.key):
            yield from self._slip(typed, config)

    def _slip(self, typed: Typed, config: DictConfig) -> Iterator[list[str]]:
        first, *rest = typed.key.split(".")
        tail, value = "".join(f".{part}" for part in rest), typed.value
        tops = [str(key) for key in config if key != "hydra"]
        for top in filter(None, (self.group_of(first), nearest(first, [*self.groups, *tops]))):
            if tail:
                yield [f"{top}{tail}={value}"]
            else:
                yield from self._set(top, value)
        leaves = {key.rpartition(".")[2]: key for key in reversed(list(_keys(config)))}
        if leaf := nearest(typed.key.rpartition(".")[2], leaves, 0.8):
            yield [f"{leaves[leaf]}={value}"]

    def _set(self, key: str, value: str) -> Iterator[list[str]]:
        """A key, which may be a group or stand behind others, with that value."""
        *others, last = key.split()
        if last in self.groups:
            if all(one in self.groups[last] for one in value.split(",")):
                yield [f"{last}={value}"]
            else:
                yield from self.of_option(last, value)
            return
        yield [*others, f"{last}={value}"]
        if last.startswith("+"):  # it may be there
            yield [*others, f"{last[1:]}={value}"]

    def group_of(self, name: str) -> str:
        """The group that goes by such a name here or elsewhere; "" where none does."""
        ours = aliases.GROUPS.get(name.casefold()) or aliases.key_of(name.casefold())
        return name if name in self.groups else ours if ours in self.groups else ""

    def wrong_option(self, group: str, value: str) -> Mistake:
        """What to say of an option that is not there."""
        others = [text for text in self.choices if text.partition("=")[0] != group]
        meant = replace(self, choices=others).first(self.of_option(group, value))
        otherwise = f"there are {', '.join(self.groups[group])}"
        if meant and meant[0].startswith("optimizer.name="):
            otherwise = "any class of torch.optim goes by optimizer.name"
        if group == "model" and not (meant and meant[0].startswith("model=")):
            otherwise += "; a class of your own goes by model._target_ and security.trusted"
            if any("torchvision" in text for text in meant) and find_spec("torchvision") is None:
                otherwise += "; torchvision is not installed"
        if group == "data" and not meant:
            otherwise += "; your own data: data=tabular|images|arrays|text data.path=…"
        return Mistake(group, f"no option {value!r}", meant, otherwise)


def instead(key: str) -> str:
    """What there is in place of something that has no key here."""
    parts = key.casefold().replace("-", "_").split(".")
    return next((aliases.NOT_THERE[part] for part in parts if part in aliases.NOT_THERE), "")


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` most like `word`, capitals aside."""
    folded = {name.casefold(): name for name in names}
    similar = get_close_matches(word.casefold(), folded, 1, cutoff)
    return folded[similar[0]] if similar else None


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.casefold())


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        if prefix == "" and key == "hydra":
            continue
        yield f"{prefix}{key!s}"
        node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _keys(node, f"{prefix}{key!s}.")
