"""From bytes that were checked to what they hold; the only place that parses content."""

from __future__ import annotations

import io
import json
import mmap
import pickle
import threading
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from runner.security.gate.format import Buffer

TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16,
    "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32,
    "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64, "I64": torch.int64,
    "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
# torch keeps the sparse tensors that it has yet to validate in one list of the process: a load in
# another thread would clear it, and neither would be validated.
_LOCK = threading.Lock()


def loaded(data: Buffer, kind: str, place: str = "") -> Any:
    """Tensors and plain data, on the CPU. Raises whatever the parsers raise.

    At `place` the same bytes can be opened as a file: then they are mapped where the format allows,
    for a look at them. A copy of a large file takes longer than its sha256.
    """
    if kind == "safetensors":
        if place:
            with safe_open(place, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _tensors(data)
    if kind in ("torch_zip", "torch_legacy"):
        return _torch(data, True, place if kind == "torch_zip" else "")
    if place and kind == "npy":  # copied where it is written to, which nobody does
        return np.asarray(np.load(place, mmap_mode="c", allow_pickle=False))
    found: Any = np.load(io.BufferedReader(_View(data)), allow_pickle=False)
    return found if kind == "npy" else {name: found[name] for name in found.files}


def _tensors(data: Buffer) -> dict[str, torch.Tensor]:
    """Of a safetensors file that was checked: its tensors lie in the memory that it was read to.

    The library would copy each of them, which takes longer than the rest of the gate.
    """
    memory = data.obj if isinstance(data, memoryview) else None
    if not isinstance(memory, mmap.mmap) or memoryview(memory).readonly:
        memory = bytearray(data)  # what is not ours to write into
    length = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(bytes(data[8:length]))
    table.pop("__metadata__", None)
    found: dict[str, torch.Tensor] = {}
    for name, row in sorted(table.items()):  # the order in which the library has them
        kind = TYPES[row["dtype"]]
        start, end = (length + offset for offset in row["data_offsets"])
        if start == end:
            found[name] = torch.empty(row["shape"], dtype=kind)
            continue
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=end - start, offset=start)
        flat = flat if start % kind.itemsize == 0 else flat.clone()
        found[name] = flat.view(kind).reshape(row["shape"])
    return found


def unpickled(data: Buffer, kind: str) -> Any:
    """What its pickle makes, which is to run it: only for bytes that the user named by digest."""
    if kind == "pickle":
        return pickle.loads(data)  # noqa: S301
    return _torch(data, False)


class _View(io.RawIOBase):
    """Bytes as a file that is read without a copy of them being made first."""

    def __init__(self, data: Buffer) -> None:
        self._data, self._at = memoryview(data), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)


def _torch(data: Buffer, weights_only: bool, place: str = "") -> Any:
    # torch writes b"" as bytes(), and `meanings` has seen to it that there is no more to it
    allowed = torch.serialization.safe_globals([(bytes, "builtins.bytes")])
    with _LOCK, allowed, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        if place:
            return torch.load(place, "cpu", weights_only=weights_only, mmap=True)
        return torch.load(
            io.BufferedReader(_View(data)), map_location="cpu", weights_only=weights_only
        )
