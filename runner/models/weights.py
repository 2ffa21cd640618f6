"""`model.weights`: the weights that a run starts from, out of a file or a run of the user's.

The model is made in full before. So what stays fresh has the values it would have had without, and
no random state is another one. Everything is held against the model before any of it is loaded.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import ConfigError
from runner.models.stored import KEY, SHOWN, Shard, Weights, read_weights, short, some
from runner.record.text import shorten
from runner.security.files.policy import Policy
from runner.techniques.base import Choice

log = logging.getLogger("runner")

EXCEPT = "model.weights_except"
PLAIN = re.compile(r"(\*\.)?[\w.]+")


@dataclass
class Fit:
    """Which of the weights go where in a model, and what is in the way of that."""

    taken: dict[str, Any] = field(default_factory=dict)  # by the model's names, in its types
    sources: dict[str, str] = field(default_factory=dict)  # names in the file, by the model's
    prefix: str = ""  # of all names in the file, that the model does not have
    fresh: list[str] = field(default_factory=list)  # names of the model that keep their values
    unused: list[str] = field(default_factory=list)  # names of the file that are not loaded
    converted: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)  # names that do not fit, and why

    @property
    def misfits(self) -> list[str]:
        """The names of all that is in the way."""
        return [*self.other, *self.missing, *self.unknown]


def start_from(model: nn.Module, path: Path, fresh: Sequence[str], policy: Policy) -> Choice:
    """Load the weights at `path` into the model, but for what `fresh` names; say what was done.

    Parameters and buffers, in the model's own types, wherever it lies. All of them or, with
    ConfigError, none. Also raises SecurityError and CheckpointError for a refused file.
    """
    weights = read_weights(path, policy)
    fit = fit_to(model, weights, fresh)
    try:
        for part in _parts(weights, fit, policy):
            model.load_state_dict(part, strict=False)  # what is missing was looked at
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = shorten(str(error), 300)
        raise ConfigError(KEY, f"{weights.path}: the model does not load it: {reason}") from error
    made = Choice(KEY, f"{weights.path}, sha256 {weights.sha256}", "; ".join(_told(weights, fit)))
    log.info("%s: %s: %s", KEY, made.value, made.reason)
    return made


def _parts(weights: Weights, fit: Fit, policy: Policy) -> Iterator[dict[str, Any]]:
    """All that is taken; of shards one after the other, each released before the next is read."""
    if not weights.shards:
        yield fit.taken
    for shard in weights.shards:
        part = _taken_of(shard, fit, policy)
        yield part
        part.clear()


def _taken_of(shard: Shard, fit: Fit, policy: Policy) -> dict[str, Any]:
    """What the shard holds of the taken values, in the model's types."""
    held, part = shard.read(policy), {}
    for name, like in fit.taken.items():
        value = held.get(fit.sources[name])
        if value is None:
            continue
        part[name] = value.to(like.dtype) if isinstance(like, Tensor) else value
        if isinstance(like, Tensor) and _overflows(value, part[name]):
            raise ConfigError(
                KEY,
                f"{shard.path}: {name} has values that are too large for {_type(like.dtype)}",
                "use a model of the file's own type",
            )
    return part


def fit_to(model: nn.Module, weights: Weights, fresh: Sequence[str]) -> Fit:
    """Hold the weights against the model; nothing of it is changed. Raises ConfigError."""
    own: dict[str, Any] = model.state_dict(keep_vars=True)  # the same object where names are tied
    fit = Fit(fresh=[name for name in own if _matches(name, fresh)])
    # before the prefix is looked for: a loss that was saved with the model has another one
    fit.unused = [name for name in weights.held if _matches(name, fresh)]
    rest = [name for name in weights.held if name not in set(fit.unused)]
    fit.prefix = _prefix(rest, own)
    held = {name.removeprefix(fit.prefix): weights.held[name] for name in rest}
    fit.unused += [name for name in held if _matches(name, fresh)]
    for pattern in fresh:
        if not any(_matches(name, [pattern]) for name in (*fit.fresh, *fit.unused)):
            raise ConfigError(
                EXCEPT,
                f"nothing is called {short(pattern)}, in the model or in {weights.path}",
                f"the model has {some(own, 2 * SHOWN)}",
            )
    held = {name: value for name, value in held.items() if not _matches(name, fresh)}
    tied: dict[object, list[str]] = {}
    for name, value in own.items():
        tied.setdefault(id(value) if isinstance(value, Tensor) else name, []).append(name)
    for names in tied.values():
        _place(names, own[names[0]], held, fit)
    fit.unknown = [name for name in held if name not in own]
    if fit.misfits:
        if not fit.other and not fresh and _renames(model, weights.held):
            return Fit(taken=dict(weights.held))
        raise _misfit(weights, fit, held, own)
    if not fit.taken:
        raise ConfigError(EXCEPT, f"leaves nothing of {weights.path} to load", "name fewer parts")
    return fit


def _renames(model: nn.Module, held: Mapping[str, Any]) -> bool:
    """Whether its modules know these names, as weight_norm does those of old files."""
    try:
        copy.deepcopy(model).load_state_dict(held)
    except Exception:  # a hook of the user's may raise any
        return False
    return True


def _prefix(names: list[str], own: Mapping[str, Any]) -> str:
    """What a wrapper (`module.`, `_orig_mod.`, `model.`) put before all names; else nothing."""
    prefix = ""
    while names and not any(name in own for name in names):
        first = names[0].partition(".")[0] + "."
        if not all(name.startswith(first) for name in names):
            return ""
        prefix, names = prefix + first, [name.removeprefix(first) for name in names]
    return prefix


def _place(names: list[str], own: Any, held: Mapping[str, Any], fit: Fit) -> None:
    """One value of the model, under all the names that are tied to it."""
    there = [name for name in names if name in held]
    kept = [name for name in names if name in fit.fresh]
    if there and kept:
        raise ConfigError(
            EXCEPT,
            f"{kept[0]} stays fresh, and is the same tensor as {there[0]}, which does not",
            "name both, or neither",
        )
    if not there:
        fit.missing += [] if kept else names
        return
    first = held[there[0]]
    if wrong := _wrong(first, own):
        fit.other[there[0]] = wrong
        return
    for name in there[1:]:
        if not _same(held[name], first):
            fit.other[there[0]] = "is tied to another one"
            fit.other[name] = f"is not equal to {there[0]}, which is the same tensor in the model"
    if isinstance(own, Tensor) and first.dtype != own.dtype:
        was, first = first, first.detach().to(own.dtype)
        fit.converted[f"{_type(was.dtype)} to {_type(own.dtype)}"] += 1
        if not was.is_meta and _overflows(was, first):
            fit.other[there[0]] = f"has values that are too large for {_type(own.dtype)}"
    fit.taken.update(dict.fromkeys(names, first))
    fit.sources.update(dict.fromkeys(names, fit.prefix + there[0]))


def _overflows(was: Tensor, now: Tensor) -> bool:
    """Whether finite numbers became infinite in a narrower type."""
    if was.dtype == now.dtype or torch.finfo(now.dtype).max >= torch.finfo(was.dtype).max:
        return False
    return bool((now.float().isfinite() != was.isfinite()).any())


def _wrong(found: Any, own: Any) -> str:
    """Why it cannot take the place of the model's own; nothing where it can."""
    if not isinstance(own, Tensor):  # the extra state of a module, which knows itself what it loads
        return ""
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        return f"is no plain tensor, and the model's is {list(own.shape)}"
    if found.shape != own.shape:
        return f"is {list(found.shape)}, and the model's {list(own.shape)}"
    if found.dtype != own.dtype and not (found.is_floating_point() and own.is_floating_point()):
        return f"is {_type(found.dtype)}, and the model's {_type(own.dtype)}"
    return ""


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype
    return a is b or (alike and (a.is_meta or torch.equal(a, b)))


def _misfit(
    weights: Weights, fit: Fit, held: Mapping[str, Any], own: Mapping[str, Any]
) -> ConfigError:
    """All that is in the way, and what to leave out where that is little."""
    parts = []
    if fit.other:
        parts.append(some([f"{name} {why}" for name, why in fit.other.items()]))
    if fit.missing:
        parts.append(f"the file lacks {some([_shaped(n, own[n]) for n in fit.missing])}")
    if fit.unknown:
        parts.append(f"the model has no {some([_shaped(n, held[n]) for n in fit.unknown])}")
    names = fit.misfits
    places = list(dict.fromkeys(_place_of(name, fit.taken) for name in names))
    last = {name.rpartition(".")[2] for name in names}
    if len(places) > SHOWN and len(last) == 1:  # such as num_batches_tracked, in old files
        places = [f"*.{last.pop()}"]
    few = fit.taken and len(places) <= SHOWN and all(map(PLAIN.fullmatch, places))
    return ConfigError(
        KEY,
        f"{weights.path} does not fit the model, in {len(names)} names: {'; '.join(parts)}",
        f"to start without these parts, add '{EXCEPT}=[{','.join(places)}]'"
        if few
        else f"name the model that it is of (model=…, its sizes), or what to leave out by {EXCEPT}",
    )


def _place_of(name: str, taken: Mapping[str, Any]) -> str:
    """The module, unless something else in it fits."""
    module = name.rpartition(".")[0]
    return name if not module or any(n.startswith(f"{module}.") for n in taken) else module


def _shaped(name: str, value: Any) -> str:
    return f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name


def _told(weights: Weights, fit: Fit) -> list[str]:
    """What was done, in a few words each."""
    told = [weights.trust.name.lower(), f"{len(fit.taken):,} tensors"]
    told += [f"{count:,} converted from {how}" for how, count in fit.converted.items()]
    if fit.prefix:
        told.append(f"{short(fit.prefix)} before their names left off")
    if fit.fresh:
        told.append(f"fresh: {some(fit.fresh)}")
    if left := [name for name in fit.unused if name not in fit.fresh]:
        told.append(f"left out of the file: {some(left)}")
    return told + weights.notes


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one is the name, or that of a module that it lies in; `*` is anything."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
