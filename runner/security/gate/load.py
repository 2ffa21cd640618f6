"""From bytes that were checked to what they hold; the only place that parses content."""

from __future__ import annotations

import inspect
import io
import json
import math
import mmap
import pickle
import threading
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import safe_open
from torch import _weights_only_unpickler

from runner.security.gate.format import Buffer

PICKLED = ("pickle", "torch_zip", "torch_legacy")  # formats that are a pickle, or have one in them
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
# Not of torch's public interface; a torch that has it no more makes copies.
SHARES = "overall_storage" in inspect.signature(torch.serialization._load).parameters


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
        return _torch(data, kind, True, place if kind == "torch_zip" else "")
    if place and kind == "npy":  # copied where it is written to, which nobody does
        return np.asarray(np.load(place, mmap_mode="c", allow_pickle=False))
    if kind == "npy":
        return _array(data)
    return _arrays(data)


def _arrays(data: Buffer) -> Any:
    """One array, or a dict of those of an archive."""
    found = np.load(io.BufferedReader(_View(data)), allow_pickle=False)
    if isinstance(found, np.ndarray):
        return found
    return {name: found[name] for name in found.files}


def _tensors(data: Buffer) -> dict[str, torch.Tensor]:
    """Of a safetensors file that was checked: its tensors lie in the memory that it was read to.

    The library would copy each of them, which takes longer than the rest of the gate.
    """
    memory = _own(data) or bytearray(data)
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


def _array(data: Buffer) -> np.ndarray:
    """Of an npy file that was checked: it lies in the memory that the file was read to."""
    file = io.BufferedReader(_View(data))
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    read = readers.get(npy.read_magic(file))
    if read is None:  # with names of columns that are not Latin
        file.seek(0)
        return np.asarray(np.load(file, allow_pickle=False))
    shape, by_column, kind = read(file)
    if kind.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    count = math.prod(shape)
    if not count * kind.itemsize:
        return np.empty(shape, kind, "F" if by_column else "C")
    flat = np.frombuffer(_own(data) or bytearray(data), kind, count, file.tell())
    return flat.reshape(shape, order="F" if by_column else "C")


def _own(data: Buffer) -> mmap.mmap | None:
    """The memory that a file was read to, where these bytes are all of it and ours to change."""
    memory = data.obj if isinstance(data, memoryview) else None
    if isinstance(memory, mmap.mmap) and not memoryview(memory).readonly:
        return memory
    return None


def unpickled(data: Buffer, kind: str) -> Any:
    """What its pickle makes, which is to run it: only for bytes that the user named by digest."""
    if kind == "pickle":
        return pickle.loads(data)  # noqa: S301
    return _torch(data, kind, False)


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


def _torch(data: Buffer, kind: str, weights_only: bool, place: str = "") -> Any:
    # torch writes b"" as bytes(), and `meanings` has seen to it that there is no more to it
    allowed = torch.serialization.safe_globals([(bytes, "builtins.bytes")])
    with _LOCK, allowed, torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        if place:
            return torch.load(place, "cpu", weights_only=weights_only, mmap=True)
        memory = _own(data)
        if kind == "torch_zip" and weights_only and SHARES and memory is not None:
            return _sharing(data, memory)
        return torch.load(
            io.BufferedReader(_View(data)), map_location="cpu", weights_only=weights_only
        )


def _sharing(data: Buffer, memory: mmap.mmap) -> Any:
    """What `torch.load` does with a file that is mapped, for one that lies in memory.

    Its storages are parts of that memory; a copy of them takes almost as long as the sha256.
    """
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    reader = torch._C.PyTorchFileReader(io.BufferedReader(_View(data)))
    return torch.serialization._load(  # type: ignore[no-untyped-call]
        reader, "cpu", _weights_only_unpickler, overall_storage=whole, encoding="utf-8"
    )
