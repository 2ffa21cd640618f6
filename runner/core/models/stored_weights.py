"""Stored weights by name: in a file, shards, a checkpoint's folder or a run's folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runner import rooms
from runner.core.checkpoint import folder as folders
from runner.core.checkpoint import reading
from runner.core.checkpoint.manifest import MODEL
from runner.core.checkpoint.state_schema import check_state
from runner.core.errors import ConfigError
from runner.core.findings import Severity, Trust
from runner.core.format import join_names
from runner.core.record.text import escape_control_chars
from runner.core.security.files.policy import FilePolicy

if TYPE_CHECKING:
    from runner.core.security.files.loader import LoadedFile

log = logging.getLogger("runner")

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
    """Read weights from a file, a checkpoint, a run's best checkpoint (the newest good one if there
    is no good best one), or a Hugging Face folder (`model.safetensors`, `pytorch_model.bin`, or
    their shards by an index).

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
    return StoredWeights(
        path, _named_tensors(opened, path), opened.facts.sha256, opened.assessment.trust
    )


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
    with rooms.find(
        "files", "sandbox", f"{KEY}={index}"
    )() as sandbox:  # one process for all shards
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
    notes = ["the raw weights, not their average (optimizer.ema)"] if averaged else []
    return StoredWeights(
        restored.path / MODEL, restored.model, restored.sha256, restored.trust, notes
    )


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
    if len(text) > MAX_NAME_LENGTH:
        text = text[: MAX_NAME_LENGTH - 1] + "…"
    return escape_control_chars(text)
