"""Weights by their names, out of a file, a checkpoint's folder or a run's, through the gate."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.checkpoint import folder as folders
from runner.checkpoint.content import check_state
from runner.checkpoint.manifest import MODEL
from runner.errors import ConfigError
from runner.record.text import escape_control_chars
from runner.security.files.formats import is_model_name
from runner.security.files.loader import open_file
from runner.security.files.policy import Policy
from runner.security.trust import Severity, Trust

log = logging.getLogger("runner")

KEY = "model.weights"
BELOW = ("state_dict", "model", "model_state_dict", "weights")
"""Where training programs put a state_dict in the dict that they save."""
COMPILED = "_orig_mod."  # what torch.compile puts before the names in each module that it wraps
SHOWN = 3  # names of each kind, in a message
CHARACTERS = 160  # of a name and what is said of it


@dataclass(frozen=True)
class Weights:
    """What was read, by name, and where it is from."""

    path: Path
    held: Mapping[str, Any]
    sha256: str  # of the file
    trust: Trust
    notes: list[str] = field(default_factory=list)


def read_weights(path: Path, policy: Policy) -> Weights:
    """The weights in a file, a checkpoint's folder, or the newest good checkpoint of a run's.

    Raises ConfigError for what holds none, SecurityError and CheckpointError as the gate does.
    """
    if path.name == MODEL and folders.is_checkpoint(path.parent):
        path = path.parent  # whose manifest vouches for it
    if path.is_dir():
        root = path if path.name == folders.FOLDER else path / folders.FOLDER
        if folders.is_checkpoint(path):
            return _of_ours(folders.load(path, policy, check_state))
        restored = folders.load_newest(root, policy, check_state)
        if restored is not None:
            return _of_ours(restored)
        if not (path / MODEL).is_file():
            there = sorted(p.name for p in path.iterdir() if is_model_name(p.name))
            raise ConfigError(
                KEY, f"{path} has no checkpoint and no {MODEL} in it",
                f"name one of its files: {some(there)}" if there else "name a file",
            )  # fmt: skip
        path = path / MODEL
    found = open_file(path, policy)
    facts = found.facts
    for reason in found.assessment.reasons:
        if reason.severity is Severity.WARNING:
            log.warning("%s: %s: %s", KEY, path, escape_control_chars(str(reason)))
    held = {
        name.replace(COMPILED, ""): value
        for name, value in _state_dict(found.content, path, facts.format).items()
    }
    return Weights(path, held, facts.sha256, found.assessment.trust)


def _of_ours(restored: folders.Restored) -> Weights:
    for warning in restored.warnings:
        log.warning("%s: %s", KEY, warning)
    averaged = restored.state["update"]["average"]
    notes = ["the weights themselves, not their average (optimizer.ema)"] if averaged else []
    return Weights(restored.path / MODEL, restored.model, restored.sha256, restored.trust, notes)


def _state_dict(content: Any, path: Path, kind: str) -> Mapping[str, Any]:
    """The tensors by name, wherever they lie in what was saved."""
    if isinstance(content, nn.Module):  # unpickled, as security.allow_pickle said
        content = content.state_dict()
    below = [content.get(key) for key in BELOW] if isinstance(content, Mapping) else []
    for found in (*below, content):
        named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
        if named and any(isinstance(value, Tensor) for value in found.values()):
            return dict(found)
    keys = f" with {some(map(str, content))}" if isinstance(content, Mapping) else ""
    raise ConfigError(
        KEY, f"{path} ({kind}){keys} holds no tensors by name, plain or below {', '.join(BELOW)}",
        "save model.state_dict(), with safetensors or torch.save",
    )  # fmt: skip


def some(names: Iterable[str], most: int = SHOWN) -> str:
    """The first of them, and how many there are."""
    found = list(names)
    more = f", … ({len(found)} in all)" if len(found) > most else ""
    return ", ".join(map(short, found[:most])) + more


def short(text: str) -> str:
    """A name that may be of any length, in one line."""
    return escape_control_chars(text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…")
