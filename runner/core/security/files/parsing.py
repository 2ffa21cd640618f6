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

from runner.core.findings import Reason, Severity
from runner.core.security.files import content_checks
from runner.core.security.files.formats import (
    CONVERT,
    DAMAGED,
    FileRefusal,
    check_safetensors_header,
    identify_format,
    printable,
)
from runner.core.security.files.pickle_rules import check_pickles
from runner.core.security.files.policy import FileLimits
from runner.core.security.files.zip_rules import check_zip

NEEDS_PICKLE = "torch.weights_only"  # reason code: only an unrestricted unpickler could load it
LOADER_MESSAGE = re.compile(
    r"(?:WeightsUnpickler error: |^)(?P<message>[^\n]*?(?:GLOBAL|Unsupported)[^\n]*?)"
    r"(?: Please use| was not an allowed|$)",
    re.MULTILINE,
)
# torch collects sparse tensors to validate in one global list, which a load in another thread would
# clear, so that neither would be validated.
_LOCK = threading.Lock()


@dataclass
class Examination:
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
    path: str,
    name: str,
    limits: FileLimits,
    check_archive: bool = True,
    deep: bool = True,
) -> Examination:
    """Check and load the bytes of the file called `name`; `path` is a path to the same bytes.

    `check_archive` applies the rules for archives, pickles and headers, needless if the digest is
    known; `deep` warns of unusual values in tensors. Failures become reasons; it never raises.
    """
    examination = Examination()
    try:
        examination.format = identify_format(data, name)
        if check_archive and examination.format in ("torch_zip", "npz"):
            check_zip(data, limits)
        if check_archive and examination.format in ("torch_zip", "pickle"):
            check_pickles(data, examination.format)
        if check_archive and examination.format == "safetensors":
            check_safetensors_header(data)
        content, examination.metadata = load_content(path, examination.format)
        tensors = content_checks.check_types(content, len(data), limits)
        examination.reasons += content_checks.check_values(tensors) if deep else []
        examination.content = content
    except FileRefusal as refusal:
        examination.reasons.append(refusal.reason)
    except Exception as error:  # parsers raise a dozen types
        examination.reasons.append(parser_refusal(error, examination.format))
    return examination


def load_content(path: str, kind: str) -> tuple[Any, dict[str, str]]:
    """Return content on the CPU, and a safetensors file's metadata. Raises what the parser does.

    Tensors of safetensors and zip files are private (copy-on-write) mappings of the file.
    """
    if kind == "safetensors":
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    if kind in ("npy", "npz"):
        opened = np.load(path, allow_pickle=False)
        if isinstance(opened, np.ndarray):
            return opened, {}
        with opened:
            return {name: opened[name] for name in opened.files}, {}
    return _load_torch(path, kind, weights_only=True), {}


def unpickle(path: str, kind: str) -> Any:
    """Unpickle a file, which may run any code: only for files allowed by digest."""
    try:
        return _load_torch(path, kind, weights_only=False)
    except Exception:  # not written by torch.save
        if kind != "pickle":
            raise
        return pickle.loads(Path(path).read_bytes())  # noqa: S301


def _load_torch(path: str, kind: str, weights_only: bool) -> Any:
    # torch.save pickles b"" as a call of bytes, which torch.load does not allow
    allowed = torch.serialization.safe_globals([(bytes, "builtins.bytes")])
    with _LOCK, allowed, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        mapped = kind == "torch_zip"
        return torch.load(path, "cpu", weights_only=weights_only, mmap=mapped)


def parser_refusal(error: Exception, kind: str) -> Reason:
    """Convert a parser's exception to a refusal in one line."""
    text = str(error)
    match = LOADER_MESSAGE.search(text) if kind in ("torch_zip", "pickle") else None
    if match is not None:
        evidence = (
            f"torch's weights_only loader refuses it: {printable(match['message'].strip(' .'))}"
        )
    else:
        parser = {"safetensors": "safetensors", "npy": "numpy", "npz": "numpy"}.get(kind, "torch")
        message = printable((text.strip() or "no reason given").splitlines()[0].partition(". ")[0])
        evidence = f"{parser} cannot read it: {type(error).__name__}: {message}"
    if match is not None or kind == "pickle":
        return Reason(NEEDS_PICKLE, Severity.REFUSAL, "", evidence, CONVERT)
    way_out = CONVERT if "weights_only" in text else DAMAGED
    if "Object arrays" in text:  # intact, but it holds pickled Python objects
        way_out = "save it with a numeric dtype"
    return Reason("format.malformed", Severity.REFUSAL, "", evidence, way_out)
