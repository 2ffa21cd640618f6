"""One file's bytes: their format, what is wrong with them, what they hold. Knows of no trust.

Content is parsed by torch's `weights_only` loader, safetensors, or numpy without pickle, and by
nothing else; `unpickle` is for files whose digest the user typed.
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

NEEDS_PICKLE = "torch.weights_only"  # the code of what only an unrestricted unpickler may load
LOADER_MESSAGE = re.compile(
    r"(?:WeightsUnpickler error: |^)(?P<gist>[^\n]*?(?:GLOBAL|Unsupported)[^\n]*?)"
    r"(?: Please use| was not an allowed|$)",
    re.MULTILINE,
)
# torch collects the sparse tensors that it has yet to validate in one list of the process: a load
# in another thread would clear it, and neither would be validated.
_LOCK = threading.Lock()


@dataclass
class Examined:
    """The format, what is wrong, and the content; that is None where the file is refused."""

    format: str = "unknown"
    reasons: list[Reason] = field(default_factory=list)
    content: Any = None
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file

    @property
    def refused(self) -> bool:
        """Whether nothing of it may be used."""
        return any(reason.severity is Severity.REFUSAL for reason in self.reasons)


def examine(
    data: bytes | mmap.mmap,
    place: str,
    name: str,
    limits: FileLimits,
    rules: bool = True,
    deep: bool = True,
) -> Examined:
    """Check the bytes of the file called `name` and load them; `place` is a path to the same bytes.

    `rules`: hold an archive against the rules, which a known digest makes needless. `deep`: warn of
    odd values in tensors. Raises nothing.
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
    except Exception as error:  # a parser's own refusal, of a dozen types
        examined.reasons.append(parser_refusal(error, examined.format))
    return examined


def load(place: str, kind: str) -> tuple[Any, dict[str, str]]:
    """Content on the CPU and a safetensors file's metadata. Raises whatever the parsers raise.

    Tensors of safetensors and zips are parts of the mapped file: no copy, written to on their own.
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
    """What its pickle makes, which is to run it: only for files that the user named by digest."""
    try:
        return _load_torch(place, kind, weights_only=False)
    except Exception:  # no file by torch.save
        if kind != "pickle":
            raise
        return pickle.loads(Path(place).read_bytes())  # noqa: S301


def _load_torch(place: str, kind: str, weights_only: bool) -> Any:
    # torch.save writes b"" as a call of bytes, which torch.load has not on its list
    allowed = torch.serialization.safe_globals([(bytes, "builtins.bytes")])
    with _LOCK, allowed, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        mapped = kind == "torch_zip"
        return torch.load(place, "cpu", weights_only=weights_only, mmap=mapped)


def parser_refusal(error: Exception, kind: str) -> Reason:
    """What the parser said, in one line."""
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
