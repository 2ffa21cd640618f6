"""Pinned memory of any size, for copies from a GPU."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

MIN_REGISTERED_BYTES = 2**20  # smaller tensors lose little by torch's rounding


def pinned_tensor_like(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return new pinned memory for a copy, so that copies run while the host enqueues the next.

    torch rounds pinned memory up to a power of two, so a large tensor gets memory of its size.
    """
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
