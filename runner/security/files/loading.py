"""Identify, check and load the bytes of one file, independent of its origin.

Content is parsed only by torch's `weights_only` loader, safetensors, or numpy without pickle;
`unpickle` is for files that the user has allowed by digest.
"""

from __future__ import annotations

import mmap
import pickle
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from runner.findings import Reason, Severity
from runner.security.files import values
from runner.security.files.formats import CONVERT, DAMAGED, Refused, identify, printable
from runner.security.files.policy import FileLimits
from runner.security.files.rules import check_zip

NEEDS_PICKLE = "torch.weights_only"  # reason code: only an unrestricted unpickler could load it
LOADER_MESSAGE = re.compile(
    r"(?:WeightsUnpickler error: |^)(?P<gist>[^\n]*?(?:GLOBAL|Unsupported)[^\n]*?)"
    r"(?: Please use| was not an allowed|$)",
    re.MULTILINE,
)
# torch collects sparse tensors to validate in one global list, which a load in another thread would
# clear, so that neither would be validated.
_LOCK = threading.Lock()


@dataclass
class Examined:
    """Format, reasons, and content (None if the file is refused)."""

    format: str = "unknown"
    reasons: list[Reason] = field(default_factory=list)
    content: Any = None
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file

    @property
    def refused(self) -> bool:
        """Whether the file must not be used."""
        return any(reason.severity is Severity.REFUSAL for reason in self.reasons)


def examine(
    data: bytes | mmap.mmap,
    place: str,
    name: str,
    limits: FileLimits,
    rules: bool = True,
    deep: bool = True,
) -> Examined:
    """Check and load the bytes of the file called `name`; `place` is a path to the same bytes.

    `rules` checks archives against the zip rules, needless if the digest is known; `deep` warns of
    unusual values in tensors. Failures become reasons; it never raises.
    """
    examined = Examined()
    try:
        examined.format = identify(data, name)
        if rules and examined.format in ("torch_zip", "npz"):
            check_zip(data, limits)
        content, examined.metadata = load(place, examined.format)
        tensors = values.check_types(content, len(data), limits)
        examined.reasons += values.check_values(tensors) if deep else []
        examined.content = content
    except Refused as refused:
        examined.reasons.append(refused.reason)
    except Exception as error:  # parsers raise a dozen types
        examined.reasons.append(parser_refusal(error, examined.format))
    return examined


def load(place: str, kind: str) -> tuple[Any, dict[str, str]]:
    """Return content on the CPU, and a safetensors file's metadata. Raises what the parser does.

    Tensors of safetensors and zip files are private (copy-on-write) mappings of the file.
    """
    if kind == "safetensors":
        with safe_open(place, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    if kind in ("npy", "npz"):
        opened = np.load(place, allow_pickle=False)
        if isinstance(opened, np.ndarray):
            return opened, {}
        with opened:
            return {name: opened[name] for name in opened.files}, {}
    return _load_torch(place, kind, weights_only=True), {}


def unpickle(place: str, kind: str) -> Any:
    """Unpickle a file, which may run any code: only for files allowed by digest."""
    try:
        return _load_torch(place, kind, weights_only=False)
    except Exception:  # not written by torch.save
        if kind != "pickle":
            raise
        return pickle.loads(Path(place).read_bytes())  # noqa: S301


def _load_torch(place: str, kind: str, weights_only: bool) -> Any:
    # torch.save pickles b"" as a call of bytes, which torch.load does not allow
    allowed = torch.serialization.safe_globals([(bytes, "builtins.bytes")])
    with _LOCK, allowed, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        mapped = kind == "torch_zip"
        return torch.load(place, "cpu", weights_only=weights_only, mmap=mapped)


def parser_refusal(error: Exception, kind: str) -> Reason:
    """Convert a parser's exception to a refusal in one line."""
    text = str(error)
    match = LOADER_MESSAGE.search(text) if kind in ("torch_zip", "pickle") else None
    if match is not None:
        evidence = f"torch's weights_only loader refuses it: {printable(match['gist'].strip(' .'))}"
    else:
        parser = {"safetensors": "safetensors", "npy": "numpy", "npz": "numpy"}.get(kind, "torch")
        gist = printable((text.strip() or "no reason given").splitlines()[0].partition(". ")[0])
        evidence = f"{parser} cannot read it: {type(error).__name__}: {gist}"
    if match is not None or kind == "pickle":
        return Reason(NEEDS_PICKLE, Severity.REFUSAL, "", evidence, CONVERT)
    way_out = CONVERT if "weights_only" in text else DAMAGED
    return Reason("format.malformed", Severity.REFUSAL, "", evidence, way_out)
