"""Identify, check and load the bytes of one file, independent of its origin.

Content is parsed only by torch's `weights_only` loader, safetensors, or numpy without pickle;
`unpickle` is for files that the user has allowed by digest. Loaded content has exact types: an
attribute on a dict or tensor can shadow one of its methods, so that a check and the user of a
value see different data.
"""

from __future__ import annotations

import math
import mmap
import pickle
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from runner.core.findings import Reason, Severity
from runner.core.security.files.file_rules import check_pickles, check_zip
from runner.core.security.files.formats import (
    CONVERT,
    DAMAGED,
    SAVE_AGAIN,
    FileRefusal,
    check_safetensors_header,
    identify_format,
    printable,
)
from runner.core.security.files.policy import FileLimits

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
    """Check and load the bytes of the file called `name`; `path` leads to the same bytes.

    Archives are checked unless the digest is known; `deep` warns of unusual values. Never raises.
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
        tensors = check_types(content, len(data), limits)
        examination.reasons += check_values(tensors) if deep else []
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
        message = printable(match["message"].strip(" ."))
        evidence = f"torch's weights_only loader refuses it: {message}"
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


# -- loaded content: exact types, sizes and strides, and the magnitude of numbers ------------------

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set)
TENSORS = (Tensor, torch.nn.Parameter)  # a torch.nn.Buffer is a Tensor with two attributes
PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, np.ndarray)
    + (torch.dtype, torch.device, torch.Size, torch.layout, torch.qscheme)
    + (torch.storage.TypedStorage, torch.UntypedStorage)
)
MAX_MAGNITUDE = 1e10  # weights are many orders of magnitude smaller
EXPANDED_VALUES = 100_000  # values in nested containers, plus EXPANDED_RATIO per stored value
EXPANDED_RATIO = 1_000
VISITS = 0  # no id of an object
MAX_WARNINGS = 20  # tensors that are reported
PACKED_DTYPE = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers per byte; has no reductions
WAY_OUT = "check its origin before you use it; check_model examines it further"

KeyPath = tuple[Any, ...]  # keys and indices leading to a value
LocatedTensor = tuple[KeyPath, Tensor]


def check_types(content: Any, size: int, limits: FileLimits) -> list[LocatedTensor]:
    """Return all tensors with their key paths. Raises FileRefusal for anything but plain data."""
    tensors: list[LocatedTensor] = []
    visited = {VISITS: 0}
    count = _visit(content, (), limits.depth, visited, tensors)
    if count > EXPANDED_VALUES + EXPANDED_RATIO * visited[VISITS]:
        evidence = f"it repeats its parts to {count:,} values"
        raise FileRefusal("content.expanded", "", evidence, SAVE_AGAIN)
    total = sum(p.numel() * p.element_size() for _, t in tensors for p in _strided_parts(t))
    if total > limits.may_expand(size):
        evidence = f"its tensors would take {total:,} bytes, and the file has {size:,}"
        raise FileRefusal("tensor.expanded", "", evidence, "save them with .clone()")
    return tensors


def _visit(
    value: Any, path: KeyPath, depth: int, visited: dict[int, int], tensors: list[LocatedTensor]
) -> int:
    """Visit nested values depth first, and return their number, shared ones counted each time.

    `visited`: id → that number, or 0 until all of it was visited; at VISITS the number of calls.
    """
    visited[VISITS] += 1
    if count := type(value) in PLAIN or visited.get(id(value), 0):
        return count
    if id(value) in visited or len(path) > depth:
        problem = f"contains itself, or is nested more than {depth} deep"
        raise FileRefusal("content.depth", format_key_path(path[:4]), problem, SAVE_AGAIN)
    visited[id(value)] = 0
    count = 1
    for key, child in _children(value, path):
        count += _visit(child, (*path, key), depth, visited, tensors)
    if type(value) in TENSORS:
        _check_tensor(value, path)
        tensors.append((path, value))
    visited[id(value)] = count
    return count


def _children(value: Any, key_path: KeyPath) -> Iterator[tuple[Any, Any]]:
    """Yield contained values by key, index or attribute. Raises FileRefusal for other objects."""
    kind = type(value)
    if kind in SEQUENCES:
        yield from enumerate(value)
    elif kind in MAPPINGS:
        for key, child in dict.items(value):
            yield "key", key
            yield key, child
    elif kind not in TENSORS:
        evidence = f"is a {kind.__module__}.{kind.__qualname__}"
        raise FileRefusal("content.type", format_key_path(key_path), evidence, SAVE_AGAIN)
    for name, child in getattr(value, "__dict__", {}).items():
        if hasattr(kind, name):
            evidence = f"has an attribute in place of its {name}"
            raise FileRefusal("content.attribute", format_key_path(key_path), evidence, SAVE_AGAIN)
        yield name, child


def _check_tensor(tensor: Tensor, key_path: KeyPath) -> None:
    """Raise FileRefusal for tensors with hooks, on a device, or beyond their storage."""
    problem = ""
    if tensor._backward_hooks:
        problem = "has hooks, which would be called"
    elif tensor.device.type != "cpu":
        problem = f"is on the device {tensor.device}"
    elif tensor.layout is torch.strided and not tensor.is_nested and _out_of_storage(tensor):
        problem = "reaches beyond its storage"
    if problem:
        fix = "save a plain one: .detach().clone()"
        raise FileRefusal("tensor.kind", format_key_path(key_path), problem, fix)


def _out_of_storage(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + 1 + sum((n - 1) * step for n, step in steps)
    return last * tensor.element_size() > tensor.untyped_storage().nbytes()


def _strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors it consists of; the values of a sparse tensor come last."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def format_key_path(key_path: KeyPath) -> str:
    """Format a key path as Python would write it."""
    parts = [f"[{key}]" if type(key) is not str else f".{printable(key, 60)}" for key in key_path]
    return "".join(parts).removeprefix(".")


def check_values(tensors: list[LocatedTensor]) -> list[Reason]:
    """Return a warning for each tensor with NaN, infinities or very large numbers."""
    warnings = []
    for path, tensor in tensors:
        numbers = _float_values(tensor.detach())
        if numbers is None:
            continue
        low, high = (end.item() for end in torch.aminmax(numbers))
        if max(-low, high) <= MAX_MAGNITUDE:  # False for NaN, which `max` may drop
            continue
        code, evidence = "weights.magnitude", f"ranges from {low:.3g} to {high:.3g}"
        if not (math.isfinite(low) and math.isfinite(high)):
            code, evidence = "weights.not_finite", f"holds {'NaN' if low != low else 'an infinity'}"
        warnings.append(Reason(code, Severity.WARNING, format_key_path(path), evidence, WAY_OUT))
    if len(warnings) > MAX_WARNINGS:
        more = f"{len(warnings) - MAX_WARNINGS:,} more tensors like these"
        warnings[MAX_WARNINGS:] = [Reason("weights.more", Severity.WARNING, "", more)]
    return warnings


def _float_values(tensor: Tensor) -> Tensor | None:
    """Return its values as a strided tensor for `aminmax`; None if there is nothing to check."""
    if tensor.is_quantized or tensor.is_nested or tensor.dtype is PACKED_DTYPE:
        return None
    numbers = _strided_parts(tensor)[-1]
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    if not numbers.numel() or not numbers.is_floating_point():
        return None
    return numbers if numbers.element_size() > 1 else numbers.to(torch.float32)
