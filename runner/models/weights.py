"""`model.weights`: initial weights from a file or another run.

The model is initialised in full first, so that fresh parts and the random state are the same as
without `model.weights`. All weights are compared with the model before any of them is loaded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import ConfigError
from runner.models.stored import KEY, SHOWN, StoredWeights, read_weights, short, some
from runner.record.text import shorten
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice

log = logging.getLogger("runner")

EXCEPT = "model.weights_except"


@dataclass
class WeightsFit:
    """Mapping of stored weights to a model's state, and the misfits."""

    own: dict[str, Any]  # the model's state by name
    fresh: list[str]  # names of the model that keep their values
    unused: list[str]  # names of the file that are not loaded
    prefix: str = ""  # of all names in the file; the model lacks it
    sources: dict[str, str] = field(default_factory=dict)  # names in the file by the model's names
    converted: Counter[str] = field(default_factory=Counter)
    misfits: dict[str, str] = field(default_factory=dict)  # problem by name

    def select(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of `part` to load, by the model's names and in its dtypes."""
        chosen = {name: part[source] for name, source in self.sources.items() if source in part}
        for name, value in chosen.items():
            if isinstance(self.own[name], Tensor):
                chosen[name] = _convert(name, value, self.own[name].dtype)
        return chosen


def start_from(model: nn.Module, path: Path, fresh: Sequence[str], policy: FilePolicy) -> Choice:
    """Load the weights at `path` into the model, except for `fresh`; return the choice.

    Loads parameters and buffers in the model's dtypes: all of them or, with ConfigError, none. Also
    raises SecurityError and CheckpointError for a refused file.
    """
    weights = read_weights(path, policy)
    fit = fit_to(model, weights, fresh)
    try:
        for part in weights.parts(policy):
            chosen = fit.select(part)
            part.clear()
            model.load_state_dict(chosen, strict=False)  # `fit_to` has checked for missing names
            chosen.clear()  # before the next part is read
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = shorten(str(error), 300)
        raise ConfigError(
            KEY, f"{weights.path}: cannot be loaded into the model: {reason}"
        ) from error
    made = Choice(KEY, f"{weights.path}, sha256 {weights.sha256}", _summary(weights, fit))
    log.info("%s: %s: %s", KEY, made.value, made.reason)
    return made


def fit_to(model: nn.Module, weights: StoredWeights, fresh: Sequence[str]) -> WeightsFit:
    """Compare the weights with the model, without changing it. Raises ConfigError."""
    own: dict[str, Any] = model.state_dict(keep_vars=True)  # tied names have the same object
    # before the prefix is determined: a loss saved with the model has another one
    unused = [name for name in weights.tensors if _matches(name, fresh)]
    fit = WeightsFit(own, [name for name in own if _matches(name, fresh)], unused)
    rest = [name for name in weights.tensors if name not in set(unused)]
    fit.prefix = _prefix(rest, own)
    tensors = {name.removeprefix(fit.prefix): weights.tensors[name] for name in rest}
    fit.unused += [name for name in tensors if _matches(name, fresh)]
    for pattern in fresh:
        if not any(_matches(name, [pattern]) for name in (*fit.fresh, *fit.unused)):
            raise ConfigError(
                EXCEPT,
                f"no parameter is named {short(pattern)} in the model or in {weights.path}",
                f"the model has {some(own, 2 * SHOWN)}",
            )
    tensors = {name: value for name, value in tensors.items() if not _matches(name, fresh)}
    tied: dict[object, list[str]] = {}
    for name, value in own.items():
        tied.setdefault(id(value) if isinstance(value, Tensor) else name, []).append(name)
    for names in tied.values():
        _fit_one(names, tensors, fit)
    unknown = {name: value for name, value in tensors.items() if name not in own}
    fit.misfits |= {name: f"{_shape(value)}is not in the model" for name, value in unknown.items()}
    if fit.misfits:
        raise _misfit(weights, fit)
    if not fit.sources:
        raise ConfigError(
            EXCEPT, f"leaves no weights in {weights.path} to load", "name fewer parts"
        )
    return fit


def _prefix(names: list[str], own: Mapping[str, Any]) -> str:
    """Return the prefix of a wrapper (`module.`, `_orig_mod.`, `model.`) on all names, or ""."""
    prefix = ""
    while names and not any(name in own for name in names):
        first = names[0].partition(".")[0] + "."
        if not all(name.startswith(first) for name in names):
            return ""
        prefix, names = prefix + first, [name.removeprefix(first) for name in names]
    return prefix


def _fit_one(names: list[str], tensors: Mapping[str, Any], fit: WeightsFit) -> None:
    """Fit one value of the model, under all the names that are tied to it."""
    present = [name for name in names if name in tensors]
    fresh = [name for name in names if name in fit.fresh]
    if present and fresh:
        raise ConfigError(
            EXCEPT,
            f"{fresh[0]} is left out, but is the same tensor as {present[0]}, which is loaded",
            "name both, or neither",
        )
    if not present:
        missing = f"{_shape(fit.own[names[0]])}is not in the file"
        fit.misfits |= dict.fromkeys(() if fresh else names, missing)
        return
    own, first = fit.own[names[0]], tensors[present[0]]
    if wrong := _wrong(first, own):
        fit.misfits[present[0]] = wrong
    for name in present[1:]:
        if not _same(tensors[name], first):
            fit.misfits[name] = f"differs from {present[0]}, which is the same tensor in the model"
    fit.sources.update(dict.fromkeys(names, fit.prefix + present[0]))
    if isinstance(own, Tensor) and not wrong and first.dtype != own.dtype:
        fit.converted[f"{_type(first.dtype)} to {_type(own.dtype)}"] += 1


def _wrong(value: Any, own: Any) -> str:
    """Return why `value` cannot replace the model's own, or ""."""
    if not isinstance(own, Tensor):  # extra state, which its module checks itself
        return ""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return f"is not a dense tensor; the model's has shape {list(own.shape)}"
    if value.shape != own.shape:
        return f"has shape {list(value.shape)}, expected {list(own.shape)}"
    if value.dtype != own.dtype and not (value.is_floating_point() and own.is_floating_point()):
        return f"is {_type(value.dtype)}, expected {_type(own.dtype)}"
    return ""


def _convert(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    converted = value.detach().to(dtype)
    if value.dtype != dtype and torch.finfo(dtype).max < torch.finfo(value.dtype).max:
        if bool((converted.float().isfinite() != value.isfinite()).any()):
            problem = f"{name} has values that are too large for {_type(dtype)}"
            raise ConfigError(KEY, problem, "use a model of the file's dtype")
    return converted


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and (a.is_meta or torch.equal(a, b))


def _misfit(weights: StoredWeights, fit: WeightsFit) -> ConfigError:
    """Return the error with all misfits, and a suggestion of parts to leave out."""
    parts = [f"{name} {problem}" for name, problem in fit.misfits.items()]
    sound = [name for name in fit.sources if name not in fit.misfits]
    places = dict.fromkeys(_module_of(name, sound) for name in fit.misfits)
    fix = f"set the matching model (model=…, its sizes), or leave out parts with {EXCEPT}"
    if sound and len(places) <= SHOWN:
        fix = f"to start without these parts, add '{EXCEPT}=[{','.join(places)}]'"
    count = len(fit.misfits)
    return ConfigError(
        KEY, f"{weights.path} does not fit the model in {count} tensors: {some(parts)}", fix
    )


def _module_of(name: str, sound: Iterable[str]) -> str:
    """Return the name of its module, or `name` itself if another part of that fits."""
    module = name.rpartition(".")[0]
    return name if not module or any(n.startswith(f"{module}.") for n in sound) else module


def _shape(value: Any) -> str:
    return f"{list(value.shape)} " if isinstance(value, Tensor) else ""


def _summary(weights: StoredWeights, fit: WeightsFit) -> str:
    """Return a short text on what was loaded."""
    parts = [weights.trust.name.lower(), f"{len(fit.sources):,} tensors"]
    parts += [f"{count:,} converted from {how}" for how, count in fit.converted.items()]
    if fit.prefix:
        parts.append(f"prefix {short(fit.prefix)} removed")
    if fit.fresh:
        parts.append(f"fresh: {some(fit.fresh)}")
    if left := [name for name in fit.unused if name not in fit.fresh]:
        parts.append(f"left out of the file: {some(left)}")
    return "; ".join([*parts, *weights.notes])


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name or a module that contains it; `*` matches anything."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
