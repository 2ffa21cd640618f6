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

from runner.core.errors import ConfigError
from runner.core.format import count_noun
from runner.core.interfaces.technique import Choice
from runner.core.models.stored_weights import (
    KEY,
    MAX_NAMES,
    StoredWeights,
    list_names,
    read_weights,
    shorten_name,
)
from runner.core.record.text import shorten
from runner.core.security.files.policy import FilePolicy

log = logging.getLogger("runner")

EXCEPT_KEY = "model.weights_except"


@dataclass
class WeightMapping:
    """Mapping of stored weights to a model's state, and the misfits."""

    model_state: dict[str, Any]  # by name
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
            if isinstance(self.model_state[name], Tensor):
                chosen[name] = _convert(name, value, self.model_state[name].dtype)
        return chosen


def load_initial_weights(
    model: nn.Module, path: Path, fresh: Sequence[str], policy: FilePolicy
) -> Choice:
    """Load the weights at `path` into the model, except for `fresh`; return the choice.

    Loads parameters and buffers in the model's dtypes: all of them or, with ConfigError, none. Also
    raises SecurityError and CheckpointError for a refused file.
    """
    weights = read_weights(path, policy)
    mapping = map_weights(model, weights, fresh)
    try:
        for part in weights.parts(policy):
            chosen = mapping.select(part)
            part.clear()
            model.load_state_dict(chosen, strict=False)  # `map_weights` has checked the names
            chosen.clear()  # before the next part is read
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = shorten(str(error), 300)
        raise ConfigError(
            KEY, f"{weights.path}: cannot be loaded into the model: {reason}"
        ) from error
    choice = Choice(KEY, f"{weights.path}, sha256 {weights.sha256}", _summary(weights, mapping))
    log.info("%s: %s: %s", KEY, choice.value, choice.reason)
    return choice


def map_weights(model: nn.Module, weights: StoredWeights, fresh: Sequence[str]) -> WeightMapping:
    """Compare the weights with the model, without changing it. Raises ConfigError."""
    # tied names have the same object
    model_state: dict[str, Any] = model.state_dict(keep_vars=True)
    # before the prefix is determined: a loss saved with the model has another one
    unused = [name for name in weights.tensors if _matches(name, fresh)]
    kept = [name for name in model_state if _matches(name, fresh)]
    mapping = WeightMapping(model_state, kept, unused)
    loaded_names = [name for name in weights.tensors if name not in set(unused)]
    mapping.prefix = _prefix(loaded_names, model_state)
    tensors = {name.removeprefix(mapping.prefix): weights.tensors[name] for name in loaded_names}
    mapping.unused += [name for name in tensors if _matches(name, fresh)]
    for pattern in fresh:
        if not any(_matches(name, [pattern]) for name in (*mapping.fresh, *mapping.unused)):
            raise ConfigError(
                EXCEPT_KEY,
                f"no parameter is named {shorten_name(pattern)} in the model or in {weights.path}",
                f"the model has {list_names(model_state, 2 * MAX_NAMES)}",
            )
    tensors = {name: value for name, value in tensors.items() if not _matches(name, fresh)}
    tied: dict[object, list[str]] = {}
    for name, value in model_state.items():
        tied.setdefault(id(value) if isinstance(value, Tensor) else name, []).append(name)
    for names in tied.values():
        _map_tied(names, tensors, mapping)
    unknown = {name: value for name, value in tensors.items() if name not in model_state}
    problem = "is not in the model"
    mapping.misfits |= {name: f"{_shape_text(value)}{problem}" for name, value in unknown.items()}
    if mapping.misfits:
        raise _misfit_error(weights, mapping)
    if not mapping.sources:
        raise ConfigError(
            EXCEPT_KEY, f"leaves no weights in {weights.path} to load", "name fewer parts"
        )
    return mapping


def _prefix(names: list[str], own: Mapping[str, Any]) -> str:
    """Return the prefix of a wrapper (`module.`, `_orig_mod.`, `model.`) on all names, or ""."""
    prefix = ""
    while names and not any(name in own for name in names):
        first = names[0].partition(".")[0] + "."
        if not all(name.startswith(first) for name in names):
            return ""
        prefix, names = prefix + first, [name.removeprefix(first) for name in names]
    return prefix


def _map_tied(names: list[str], tensors: Mapping[str, Any], mapping: WeightMapping) -> None:
    """Fit one value of the model, under all the names that are tied to it."""
    present = [name for name in names if name in tensors]
    fresh = [name for name in names if name in mapping.fresh]
    if present and fresh:
        problem = f"{fresh[0]} is left out, but is the same tensor as {present[0]}, which is loaded"
        raise ConfigError(EXCEPT_KEY, problem, "name both, or neither")
    if not present:
        missing = f"{_shape_text(mapping.model_state[names[0]])}is not in the file"
        mapping.misfits |= dict.fromkeys(() if fresh else names, missing)
        return
    own, first = mapping.model_state[names[0]], tensors[present[0]]
    if mismatch := _mismatch(first, own):
        mapping.misfits[present[0]] = mismatch
    for name in present[1:]:
        if not _are_equal(tensors[name], first):
            problem = f"differs from {present[0]}, which is the same tensor in the model"
            mapping.misfits[name] = problem
    mapping.sources.update(dict.fromkeys(names, mapping.prefix + present[0]))
    if isinstance(own, Tensor) and not mismatch and first.dtype != own.dtype:
        mapping.converted[f"{_dtype_text(first.dtype)} to {_dtype_text(own.dtype)}"] += 1


def _mismatch(value: Any, own: Any) -> str:
    """Return why `value` cannot replace the model's own, or ""."""
    if not isinstance(own, Tensor):  # extra state, which its module checks itself
        return ""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return f"is not a dense tensor; the model's has shape {list(own.shape)}"
    if value.shape != own.shape:
        return f"has shape {list(value.shape)}, expected {list(own.shape)}"
    if value.dtype != own.dtype and not (value.is_floating_point() and own.is_floating_point()):
        return f"is {_dtype_text(value.dtype)}, expected {_dtype_text(own.dtype)}"
    return ""


def _convert(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    converted = value.detach().to(dtype)
    if value.dtype != dtype and torch.finfo(dtype).max < torch.finfo(value.dtype).max:
        if bool((converted.float().isfinite() != value.isfinite()).any()):
            problem = f"{name} has values that are too large for {_dtype_text(dtype)}"
            raise ConfigError(KEY, problem, "use a model of the file's dtype")
    return converted


def _are_equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b
    same_form = a.shape == b.shape and a.dtype == b.dtype
    return same_form and (a.is_meta or torch.equal(a, b))


def _misfit_error(weights: StoredWeights, mapping: WeightMapping) -> ConfigError:
    """Return the error with all misfits, and a suggestion of parts to leave out."""
    parts = [f"{name} {problem}" for name, problem in mapping.misfits.items()]
    fitting_names = [name for name in mapping.sources if name not in mapping.misfits]
    modules = dict.fromkeys(_module_of(name, fitting_names) for name in mapping.misfits)
    fix = f"set the matching model (model=…, its sizes), or leave out parts with {EXCEPT_KEY}"
    if fitting_names and len(modules) <= MAX_NAMES:
        fix = f"to start without these parts, add '{EXCEPT_KEY}=[{','.join(modules)}]'"
    where = f"in {count_noun(len(parts), 'tensor')}: {list_names(parts)}"
    return ConfigError(KEY, f"{weights.path} does not fit the model {where}", fix)


def _module_of(name: str, fitting_names: Iterable[str]) -> str:
    """Return the name of its module, or `name` itself if another part of that fits."""
    module = name.rpartition(".")[0]
    return name if not module or any(n.startswith(f"{module}.") for n in fitting_names) else module


def _shape_text(value: Any) -> str:
    return f"{list(value.shape)} " if isinstance(value, Tensor) else ""


def _summary(weights: StoredWeights, mapping: WeightMapping) -> str:
    """Return a short text on what was loaded."""
    parts = [weights.trust.name.lower(), count_noun(len(mapping.sources), "tensor")]
    parts += [f"{count:,} converted from {how}" for how, count in mapping.converted.items()]
    if mapping.prefix:
        parts.append(f"prefix {shorten_name(mapping.prefix)} removed")
    if mapping.fresh:
        parts.append(f"fresh: {list_names(mapping.fresh)}")
    if unused := [name for name in mapping.unused if name not in mapping.fresh]:
        parts.append(f"left out of the file: {list_names(unused)}")
    return "; ".join([*parts, *weights.notes])


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name or a module that contains it; `*` matches anything."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
