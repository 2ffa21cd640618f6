"""Copies of a run's state in host memory, and their file formats."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor

from runner.record.storage import HashedFile
from runner.security.files.encode import TIED, encode

# Readable by safetensors from 0.4.3 on. Tensors of other dtypes are saved with the state.
DTYPES = {torch.uint8: "U8", torch.bool: "BOOL", torch.bfloat16: "BF16"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
DTYPES |= {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (64, 32, 16)}
DTYPES |= {getattr(torch, f"int{bits}"): f"I{bits}" for bits in (64, 32, 16, 8)}


@dataclass(frozen=True)
class Snapshot:
    """A copy of model and state on the CPU, not shared with training."""

    tensors: dict[str, Tensor]  # of the model; contiguous, without shared memory
    tied: dict[str, str]  # further names of tied tensors -> the name they are stored under
    extra: dict[str, Any]  # rest of the model's state_dict, as plain data
    state: dict[str, Any]  # of the run, as plain data

    @property
    def model(self) -> dict[str, Any]:
        """The model's state_dict, with all names of tied tensors."""
        return {**self.tensors, **{a: self.tensors[n] for a, n in self.tied.items()}, **self.extra}


class Copier:
    """Takes snapshots; with `reuse`, each overwrites the memory of the previous one.

    New memory costs a page fault per 4 KiB, which is most of a copy's time.
    """

    def __init__(self, reuse: bool) -> None:
        self._reuse = reuse
        self._before: dict[str, Tensor] = {}

    def take(
        self, model: dict[str, Any], state: dict[str, Any], beside: Collection[str] = ()
    ) -> Snapshot:
        """Copy model and state; syncs the host. TypeError names a value that cannot be copied.

        Entries of the model named in `beside` are saved with the state, not as tensors.
        """
        taken: dict[str, Tensor] = {}
        devices: set[torch.device] = set()

        def keep(place: str, tensor: Tensor, packed: bool = False) -> Tensor:
            devices.add(tensor.device)
            taken[place] = _copy(tensor, self._before.get(place), packed)
            return taken[place]

        tensors: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        tied: dict[str, str] = {}
        seen: dict[tuple[Any, ...], str] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, value in model.items():
                place = f"model[{name!r}]"
                if name in beside or not (isinstance(value, Tensor) and _fits(value)):
                    extra[name] = encode(value, place, keep)
                elif (first := seen.setdefault(_memory(value, name), name)) != name:
                    tied[name] = first
                else:
                    tensors[name] = keep(place, encode(value, place), packed=True)
            plain = encode(state, "state", keep)
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # the copies were asynchronous
        if self._reuse:
            self._before = taken
        return Snapshot(tensors, tied, extra, plain)


def write_tensors(snapshot: Snapshot, file: HashedFile) -> None:
    """Write the model as a safetensors file, one tensor at a time, without another copy."""
    # widest dtype first, so that tensors are aligned for readers that map the file
    order = sorted(snapshot.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", TIED: json.dumps(snapshot.tied, sort_keys=True)}
    }
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
    """Write the run's state, and the part of the model's that safetensors cannot store."""
    torch.save({"state": snapshot.state, "model": snapshot.extra}, cast("IO[bytes]", file))


def _fits(value: Tensor) -> bool:
    return value.layout is torch.strided and value.dtype in DTYPES and not value.is_meta


def _memory(value: Tensor, name: str) -> tuple[Any, ...]:
    """Return a key that is equal for two names of one tensor, but not for overlapping tensors."""
    if value.numel() == 0 or value.data_ptr() == 0:
        return (name,)
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride()


def _copy(tensor: Tensor, into: Tensor | None, packed: bool) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    if (
        into is None
        or into.dtype != tensor.dtype
        or into.shape != tensor.shape
        or not (packed or into.stride() == tensor.stride())
    ):
        into = torch.empty_like(
            tensor,
            device="cpu",
            memory_format=torch.contiguous_format if packed else torch.preserve_format,
            pin_memory=tensor.is_cuda,  # so that many copies run while the host queues the next
        )
    return into.copy_(tensor, non_blocking=tensor.is_cuda)
