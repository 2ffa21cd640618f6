"""`model.weights`: initial weights from a file or another run.

The model is initialised in full first, so that fresh parts and the random state are the same as
without `model.weights`. All weights are compared with the model before any of them is loaded.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner import rooms
from runner.core.checkpoint import folder as folders
from runner.core.checkpoint import reading
from runner.core.checkpoint.manifest import MODEL
from runner.core.checkpoint.state_schema import check_state
from runner.core.errors import ConfigError
from runner.core.findings import Choice, Severity, Trust
from runner.core.format import count_noun, join_names
from runner.core.record.text import escape_control_chars, shorten
from runner.core.security.files.policy import FilePolicy

if TYPE_CHECKING:
    from runner.core.security.files.loader import LoadedFile

log = logging.getLogger("runner")

EXCEPT_KEY = "model.weights_except"
KEY = "model.weights"
STATE_DICT_KEYS = ("state_dict", "model", "model_state_dict", "weights")
"""Keys of the state_dict in the dicts that training programs save."""
INDEX_SUFFIX = ".index.json"
WEIGHT_FILES = tuple(
    f"{name}{suffix}" for name in (MODEL, "pytorch_model.bin") for suffix in ("", INDEX_SUFFIX)
)
"""Weight files of a Hugging Face folder, in order of preference."""
COPY_FIX = "get a whole copy of the folder"
COMPILE_PREFIX = "_orig_mod."  # prefix by torch.compile of names in modules that it wraps
MAX_NAMES = 3  # names of each kind, in a message
MAX_NAME_LENGTH = 160  # of a name in a message


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
        problem = f"{weights.path}: cannot be loaded into the model: {shorten(str(error), 300)}"
        raise ConfigError(KEY, problem) from error
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
            problem = f"no parameter of model or {weights.path} is named {shorten_name(pattern)}"
            fix = f"the model has {list_names(model_state, 2 * MAX_NAMES)}"
            raise ConfigError(EXCEPT_KEY, problem, fix)
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
        problem = f"leaves no weights in {weights.path} to load"
        raise ConfigError(EXCEPT_KEY, problem, "name fewer parts")
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


# -- stored weights by name: in a file, shards, a checkpoint or a run ------------------------------


@dataclass(frozen=True)
class Shard:
    """One of several files with a model's weights."""

    path: Path
    sha256: str
    trust: Trust

    def read(self, policy: FilePolicy) -> dict[str, Any]:
        """Read its tensors by name; the file must have the digest that was checked."""
        from runner.core.security.files.loader import open_file  # imported only if used

        return _named_tensors(open_file(self.path, policy, self.sha256), self.path)


@dataclass(frozen=True)
class StoredWeights:
    """Weights by name, and their source."""

    path: Path
    tensors: Mapping[str, Any]  # of shards: on the meta device
    sha256: str  # of the file; of shards: over their digests and names
    trust: Trust
    notes: list[str] = field(default_factory=list)
    shards: tuple[Shard, ...] = ()

    def parts(self, policy: FilePolicy) -> Iterator[dict[str, Any]]:
        """Yield the tensors by name: all at once, or shard by shard."""
        if not self.shards:
            yield dict(self.tensors)
        for shard in self.shards:
            yield shard.read(policy)


def read_weights(path: Path, policy: FilePolicy) -> StoredWeights:
    """Read weights of a file, a checkpoint, a run (its best or newest good one), or a Hugging Face
    folder (`model.safetensors`, `pytorch_model.bin`, or their shards by an index).

    Raises ConfigError if there are none, SecurityError and CheckpointError if they are refused.
    """
    from runner.core.security.files.loader import check_weights_folder, open_file

    if path.name == MODEL and folders.is_checkpoint(path.parent):
        path = path.parent  # its manifest has the digest
    if path.is_dir():
        root = path if path.name == folders.FOLDER else path / folders.FOLDER
        if folders.is_checkpoint(path):
            return _from_checkpoint(reading.load_checkpoint(path, policy, check_state))
        restored = reading.load_newest(root, policy, check_state, best_first=True)
        if restored is not None:
            return _from_checkpoint(restored)
        check_weights_folder(path, policy)
        path = _find_weight_file(path)
    elif path.name.endswith(INDEX_SUFFIX):
        check_weights_folder(path.parent, policy)
    if path.name.endswith(INDEX_SUFFIX):
        return _read_shards(path, policy)

    opened = open_file(path, policy)
    _log_warnings(opened, path)
    tensors = _named_tensors(opened, path)
    return StoredWeights(path, tensors, opened.facts.sha256, opened.assessment.trust)


def _find_weight_file(folder: Path) -> Path:
    """Return the weight file of a folder, or the index of its shards."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    from runner.core.security.files.formats import is_model_name

    others = sorted(p.name for p in folder.iterdir() if is_model_name(p.name))
    problem = f"{folder} has no checkpoint and none of {', '.join(WEIGHT_FILES)} in it"
    fix = f"name one of its files: {list_names(others)}" if others else "name a file"
    raise ConfigError(KEY, problem, fix)


def _read_shards(index: Path, policy: FilePolicy) -> StoredWeights:
    """Check each shard; keep only the shapes and dtypes of its tensors."""
    from runner.core.security.files.folder_rules import read_index
    from runner.core.security.files.formats import FileRefusal
    from runner.core.security.files.loader import open_file

    try:
        by_name = read_index(index)
    except FileRefusal as refusal:  # with security=off
        raise ConfigError(KEY, f"{index}: {refusal}", COPY_FIX) from None
    tensors: dict[str, Any] = {}
    shards: list[Shard] = []
    make_sandbox = rooms.find("files", "sandbox", f"{KEY}={index}")
    with make_sandbox() as sandbox:  # one process for all shards
        for name in sorted(set(by_name.values())):
            path = index.parent / name
            opened = open_file(path, policy, sandbox=sandbox)
            _log_warnings(opened, path)
            for key, value in _named_tensors(opened, path).items():
                if key in tensors:
                    problem = f"{index}: two shards have {shorten_name(key)}"
                    raise ConfigError(KEY, problem, COPY_FIX)
                tensors[key] = value.to("meta") if isinstance(value, Tensor) else value
            shards.append(Shard(path, opened.facts.sha256, opened.assessment.trust))
    missing = {name.replace(COMPILE_PREFIX, "") for name in by_name} - tensors.keys()
    if missing:
        raise ConfigError(KEY, f"{index}: no shard has {list_names(sorted(missing))}", COPY_FIX)
    text = "".join(f"{shard.sha256}  {shard.path.name}\n" for shard in shards)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    notes = [f"in {len(shards)} shards"]
    return StoredWeights(index, tensors, sha256, min(s.trust for s in shards), notes, tuple(shards))


def _log_warnings(opened: LoadedFile, path: Path) -> None:
    for reason in opened.assessment.reasons:
        if reason.severity is Severity.WARNING:
            log.warning("%s: %s: %s", KEY, path, escape_control_chars(str(reason)))


def _named_tensors(opened: LoadedFile, path: Path) -> dict[str, Any]:
    state = _find_state_dict(opened.content, path, opened.facts.format)
    return {name.replace(COMPILE_PREFIX, ""): value for name, value in state.items()}


def _from_checkpoint(restored: folders.RestoredCheckpoint) -> StoredWeights:
    for warning in restored.warnings:
        log.warning("%s: %s", KEY, warning)
    averaged = restored.state["update"]["average"]
    notes = [f"of step {restored.step:,}{folders.describe_links(restored.path)}"]
    if averaged:
        notes.append("the raw weights, not their average (optimizer.ema)")
    path = restored.path / MODEL
    return StoredWeights(path, restored.model, restored.sha256, restored.trust, notes)


def _find_state_dict(content: Any, path: Path, kind: str) -> Mapping[str, Any]:
    """Return the tensors by name, at the top of the saved dict or below one of STATE_DICT_KEYS."""
    if isinstance(content, nn.Module):  # unpickled with security.allow_pickle
        content = content.state_dict()
    nested = isinstance(content, Mapping)
    for state in (*(content.get(key) for key in STATE_DICT_KEYS), content) if nested else ():
        is_named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
        if is_named and any(isinstance(value, Tensor) for value in state.values()):
            return dict(state)
    keys = f" with {list_names(map(str, content))}" if nested else ""
    places = f"at the top or under {', '.join(STATE_DICT_KEYS)}"
    problem = f"{path} ({kind}){keys} holds no named tensors, {places}"
    raise ConfigError(KEY, problem, "save model.state_dict(), with safetensors or torch.save")


def list_names(names: Iterable[str], limit: int = MAX_NAMES) -> str:
    """Return the first names, and the total if there are more."""
    return join_names(map(shorten_name, names), limit)


def shorten_name(text: str) -> str:
    """Shorten a name to MAX_NAME_LENGTH characters, in one line."""
    is_long = len(text) > MAX_NAME_LENGTH
    return escape_control_chars(text[: MAX_NAME_LENGTH - 1] + "…" if is_long else text)
