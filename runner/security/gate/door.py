"""Every file that somebody else may have made comes in here.

It is read once: what was hashed and checked is what is loaded. There is no second way in that is
tried when the first refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.security.gate.policy import Policy
from runner.security.trust import Assessment


@dataclass(frozen=True)
class Opened:
    """What a file held, and what is thought of it."""

    content: Any  # safetensors: dict of tensors; torch: plain data; npy: array; npz: dict of them
    assessment: Assessment


def open_file(path: Path, policy: Policy, sha256: str | None = None) -> Opened:
    """Read, check and load one file, on the CPU, within a limited process where it is foreign.

    With `sha256` it must be that very file. Raises SecurityError naming the type, the place in
    the file, why, and the way out; CheckpointError where it is not there or not what it was.
    """
    raise NotImplementedError


def assess_file(path: Path, policy: Policy, deep: bool = True) -> Assessment:
    """The verdict alone; nothing is raised for what is wrong with the file.

    Without `deep` its structure is looked at and its values are not.
    """
    raise NotImplementedError
