"""Weights by their names, out of a file, shards, a checkpoint's folder or a run's."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runner.checkpoint import folder as folders
from runner.checkpoint import reading
from runner.checkpoint.content import check_state
from runner.checkpoint.manifest import MODEL
from runner.errors import ConfigError
from runner.findings import Severity, Trust
from runner.format import listed
from runner.record.text import escape_control_chars
from runner.security.files.policy import FilePolicy

if TYPE_CHECKING:
    from runner.security.files.loader import Opened

log = logging.getLogger("runner")

KEY = "model.weights"
BELOW = ("state_dict", "model", "model_state_dict", "weights")
"""Where training programs put a state_dict in the dict that they save."""
INDEX_SUFFIX = ".index.json"
FILES = (MODEL, f"{MODEL}{INDEX_SUFFIX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX_SUFFIX}")
"""What a Hugging Face folder holds its weights in."""
LARGEST_INDEX = 1 << 26  # bytes
WHOLE_COPY = "get a whole copy of the folder"
COMPILED = "_orig_mod."  # what torch.compile puts before the names in each module that it wraps
SHOWN = 3  # names of each kind, in a message
CHARACTERS = 160  # of a name in a message


@dataclass(frozen=True)
class Shard:
    """One of the files that a model's weights lie in."""

    path: Path
    sha256: str
    trust: Trust

    def read(self, policy: FilePolicy) -> dict[str, Any]:
        """Its tensors by name; it must still be the file that was examined."""
        from runner.security.files.loader import open_file  # only where a file is read

        return _named_tensors(open_file(self.path, policy, self.sha256), self.path)


@dataclass(frozen=True)
class StoredWeights:
    """What was read, by name, and where it is from."""

    path: Path
    tensors: Mapping[str, Any]  # of shards: tensors on the meta device, with shape and type alone
    sha256: str  # of the file; of shards: over their digests and names
    trust: Trust
    notes: list[str] = field(default_factory=list)
    shards: tuple[Shard, ...] = ()

    def parts(self, policy: FilePolicy) -> Iterator[dict[str, Any]]:
        """Its tensors by name: all, or one shard after the other."""
        if not self.shards:
            yield dict(self.tensors)
        for shard in self.shards:
            yield shard.read(policy)


def read_weights(path: Path, policy: FilePolicy) -> StoredWeights:
    """The weights in a file, a checkpoint's folder, the newest good checkpoint of a run's, or a
    Hugging Face folder (`model.safetensors`, `pytorch_model.bin`, or their shards by an index).

    Raises ConfigError for what holds none, SecurityError and CheckpointError for what is refused.
    """
    if path.name == MODEL and folders.is_checkpoint(path.parent):
        path = path.parent  # whose manifest has its digest
    if path.is_dir():
        root = path if path.name == folders.FOLDER else path / folders.FOLDER
        if folders.is_checkpoint(path):
            return _of_ours(reading.load(path, policy, check_state))
        restored = reading.load_newest(root, policy, check_state)
        if restored is not None:
            return _of_ours(restored)
        path = _file_in(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _read_shards(path, policy)
    from runner.security.files.loader import open_file

    opened = open_file(path, policy)
    _log_warnings(opened, path)
    return StoredWeights(
        path, _named_tensors(opened, path), opened.facts.sha256, opened.assessment.trust
    )


def _file_in(folder: Path) -> Path:
    """The file of a folder that holds its weights, or the index of them."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    from runner.security.files.formats import is_model_name

    others = sorted(p.name for p in folder.iterdir() if is_model_name(p.name))
    raise ConfigError(
        KEY,
        f"{folder} has no checkpoint and none of {', '.join(FILES)} in it",
        f"name one of its files: {some(others)}" if others else "name a file",
    )


def _read_shards(index: Path, policy: FilePolicy) -> StoredWeights:
    """Examine each shard; of its tensors only shapes and types are kept."""
    from runner.security.files.loader import open_file
    from runner.security.files.sandbox import Sandbox

    by_name = _read_index(index)
    tensors: dict[str, Any] = {}
    shards: list[Shard] = []
    with Sandbox() as sandbox:  # one process for all
        for name in sorted(set(by_name.values())):
            path = index.parent / name
            opened = open_file(path, policy, sandbox=sandbox)
            _log_warnings(opened, path)
            for key, value in _named_tensors(opened, path).items():
                if key in tensors:
                    raise ConfigError(KEY, f"{index}: two shards have {short(key)}", WHOLE_COPY)
                tensors[key] = value.to("meta") if isinstance(value, Tensor) else value
            shards.append(Shard(path, opened.facts.sha256, opened.assessment.trust))
    missing = {name.replace(COMPILED, "") for name in by_name} - tensors.keys()
    if missing:
        raise ConfigError(KEY, f"{index}: no shard has {some(sorted(missing))}", WHOLE_COPY)
    text = "".join(f"{shard.sha256}  {shard.path.name}\n" for shard in shards)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    notes = [f"in {len(shards)} shards"]
    return StoredWeights(index, tensors, sha256, min(s.trust for s in shards), notes, tuple(shards))


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ConfigError for what is no index of files beside it."""
    try:
        if index.stat().st_size > LARGEST_INDEX:
            raise ValueError(f"it has more than {LARGEST_INDEX >> 20} MiB")
        by_name: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        if not by_name or any(file != Path(file).name for file in by_name.values()):
            raise ValueError("its weight_map names no files beside it")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = f"{index} is no index of shards: {short(str(error))}"
        raise ConfigError(KEY, text, WHOLE_COPY) from error
    return by_name


def _log_warnings(opened: Opened, path: Path) -> None:
    for reason in opened.assessment.reasons:
        if reason.severity is Severity.WARNING:
            log.warning("%s: %s: %s", KEY, path, escape_control_chars(str(reason)))


def _named_tensors(opened: Opened, path: Path) -> dict[str, Any]:
    state = _state_dict(opened.content, path, opened.facts.format)
    return {name.replace(COMPILED, ""): value for name, value in state.items()}


def _of_ours(restored: folders.Restored) -> StoredWeights:
    for warning in restored.warnings:
        log.warning("%s: %s", KEY, warning)
    averaged = restored.state["update"]["average"]
    notes = ["the weights themselves, not their average (optimizer.ema)"] if averaged else []
    return StoredWeights(
        restored.path / MODEL, restored.model, restored.sha256, restored.trust, notes
    )


def _state_dict(content: Any, path: Path, kind: str) -> Mapping[str, Any]:
    """The tensors by name, wherever they lie in what was saved."""
    if isinstance(content, nn.Module):  # unpickled, as security.allow_pickle said
        content = content.state_dict()
    nested = isinstance(content, Mapping)
    for state in (*(content.get(key) for key in BELOW), content) if nested else ():
        named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
        if named and any(isinstance(value, Tensor) for value in state.values()):
            return dict(state)
    keys = f" with {some(map(str, content))}" if nested else ""
    raise ConfigError(
        KEY,
        f"{path} ({kind}){keys} holds no tensors by name, plain or below {', '.join(BELOW)}",
        "save model.state_dict(), with safetensors or torch.save",
    )


def some(names: Iterable[str], most: int = SHOWN) -> str:
    """The first of them, and how many more there are."""
    return listed(map(short, names), most)


def short(text: str) -> str:
    """A name that may be of any length, in one line."""
    return escape_control_chars(text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…")
