"""Snapshots of a run in host memory, and their file format."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor

from runner.core.record.storage import HashedFile
from runner.core.security.files.encode import TIED, encode

# Read by every safetensors since 0.4.3. Tensors of other dtypes are stored with the state.
DTYPES = {torch.uint8: "U8", torch.bool: "BOOL", torch.bfloat16: "BF16"}
DTYPES |= {torch.complex64: "C64"}  # since 0.6
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
DTYPES |= {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (64, 32, 16)}
DTYPES |= {getattr(torch, f"int{bits}"): f"I{bits}" for bits in (64, 32, 16, 8)}
MIN_REGISTERED_BYTES = 2**20  # smaller tensors lose little by torch's rounding


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run on the CPU, in memory that training does not change."""

    tensors: dict[str, Tensor]  # of the model; contiguous, none sharing memory
    tied: dict[str, str]  # names of tied tensors, by which name they are stored
    extra: dict[str, Any]  # other entries of the model's state, as plain data
    state: dict[str, Any]  # of the run, as plain data

    @property
    def model(self) -> dict[str, Any]:
        """The model's state dict, including tied names."""
        return {**self.tensors, **{a: self.tensors[n] for a, n in self.tied.items()}, **self.extra}


class Copier:
    """Takes snapshots; with `reuse`, into the memory of the last one, as new pages take longest."""

    def __init__(self, reuse: bool) -> None:
        self._reuse = reuse
        self._previous: dict[str, Tensor] = {}

    def take(
        self, model: dict[str, Any], state: dict[str, Any], with_state: Collection[str] = ()
    ) -> Snapshot:
        """Copy to the host, with a host sync; TypeError names what cannot be saved.

        Entries of the model named in `with_state` are stored with the state.
        """
        copies: dict[str, Tensor] = {}
        devices: set[torch.device] = set()

        def copy_tensor(path: str, tensor: Tensor, contiguous: bool = False) -> Tensor:
            devices.add(tensor.device)
            copies[path] = _copy(tensor, self._previous.get(path), contiguous)
            return copies[path]

        tensors: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        tied: dict[str, str] = {}
        seen: dict[tuple[Any, ...], str] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, value in model.items():
                path = f"model[{name!r}]"
                if name in with_state or not (isinstance(value, Tensor) and _is_storable(value)):
                    extra[name] = encode(value, path, copy_tensor)
                elif (first := seen.setdefault(_memory_key(value, name), name)) != name:
                    tied[name] = first
                else:
                    tensors[name] = copy_tensor(path, encode(value, path), contiguous=True)
            plain_state = encode(state, "state", copy_tensor)
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # its copies were only enqueued
        if self._reuse:
            self._previous = copies
        return Snapshot(tensors, tied, extra, plain_state)


def write_tensors(snapshot: Snapshot, file: HashedFile) -> None:
    """Write the model as a safetensors file, one tensor at a time, without another copy."""
    # widest dtypes first, so that all tensors are aligned in a mapped file
    order = sorted(snapshot.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    metadata = {"format": "pt", TIED: json.dumps(snapshot.tied, sort_keys=True)}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, tensor in order:
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in order:
        file.write(tensor.reshape(-1).view(torch.uint8).numpy())


def write_state(snapshot: Snapshot, file: HashedFile) -> None:
    """Write the run's state, and the entries of the model that safetensors cannot hold."""
    torch.save({"state": snapshot.state, "model": snapshot.extra}, cast("IO[bytes]", file))


def _is_storable(value: Tensor) -> bool:
    return value.layout is torch.strided and value.dtype in DTYPES and not value.is_meta


def _memory_key(value: Tensor, name: str) -> tuple[Any, ...]:
    """Return a key that is equal for names of one tensor; overlapping views are stored twice."""
    if value.numel() == 0 or value.data_ptr() == 0:
        return (name,)
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride()


def _copy(tensor: Tensor, target: Tensor | None, contiguous: bool) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    if target is not None and (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
        target = None
    if target is None or not (contiguous or target.stride() == tensor.stride()):
        memory_format = torch.contiguous_format if contiguous else torch.preserve_format
        if tensor.is_cuda:
            target = pinned_tensor_like(tensor, memory_format)
        else:
            target = torch.empty_like(tensor, device="cpu", memory_format=memory_format)
    return target.copy_(tensor, non_blocking=tensor.is_cuda)


def pinned_tensor_like(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return new pinned memory, for large tensors not rounded up to a power of two as by torch."""
    if tensor.nbytes >= MIN_REGISTERED_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        shape = torch.empty_like(tensor, device="meta", memory_format=memory_format)
        memory = RegisteredMemory.create(tensor.nbytes, tensor.device)
        if memory is not None:
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes)
            return flat.view(tensor.dtype).as_strided(shape.shape, shape.stride())
    return torch.empty_like(tensor, device="cpu", memory_format=memory_format, pin_memory=True)


class RegisteredMemory(mmap.mmap):
    """Memory that the GPU's driver has pinned, until the last tensor in it is freed."""

    address: int | None = None  # if registered
    owner = 0  # process

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> RegisteredMemory | None:
        """Return memory of at least this size; None if the driver cannot pin it."""
        memory = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):  # a fork would copy pinned pages
            memory.madvise(mmap.MADV_DONTFORK)
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if int(driver.cudaHostRegister(address, nbytes, 0)):
            with suppress(RuntimeError):  # else the next operation would raise the driver's error
                torch.zeros(1, dtype=torch.float32, device=device)
            return None
        memory.address, memory.owner = address, os.getpid()
        return memory

    def __del__(self) -> None:
        if self.address is not None and os.getpid() == self.owner:
            with suppress(Exception):  # at exit CUDA may have ended before
                driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                driver.cudaHostUnregister(self.address)
