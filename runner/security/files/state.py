"""Files of tensors, arrays or a run's state, read by the restricted loaders.

Our own files are, too: a manifest that was made by hand fits its files, whatever is in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.errors import CheckpointError, SecurityError
from runner.security.config import SecurityLevel
from runner.security.files.encode import TIED
from runner.security.files.loader import Opened, open_file
from runner.security.files.policy import FilePolicy

STRICT = FilePolicy(SecurityLevel.strict)  # no pickle, whatever a config allows


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU; tied names get the same tensor.

    Raises SecurityError for a file that is refused though its digest fits, and CheckpointError, in
    one line, for one that is not there or not what it was.
    """
    found = open_file(path, STRICT, sha256)
    tensors: dict[str, Tensor] = found.content
    _expect(found, path, "safetensors")
    try:
        for alias, name in json.loads(found.metadata.get(TIED, "{}")).items():
            if alias in tensors:
                raise ValueError(f"{alias!r} is a tensor, and is said to be another one's name")
            tensors[alias] = tensors[name]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {_line(error)}") from error
    return tensors


def read_state(path: Path, sha256: str) -> Any:
    """What `torch.save` wrote after `encode`, on the CPU.

    Raises SecurityError for a file that wants more than plain data, and CheckpointError for one
    that is not there or not what it was.
    """
    found = open_file(path, STRICT, sha256)
    _expect(found, path, "torch_zip")
    return found.content


def read_arrays(path: Path, policy: FilePolicy) -> Any:
    """A user's `.npy` as one array, or his `.npz` as a dict of them; never a pickle.

    Raises SecurityError for what is refused.
    """
    found = open_file(path, policy, sandboxed=False)
    _expect(found, path, "npy", "npz")
    return found.content


def _expect(found: Opened, path: Path, *kinds: str) -> None:
    kind = found.facts.format
    if kind not in kinds:
        raise SecurityError(f"{path}: refused: it is {kind} and should be {kinds[0]}")


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
