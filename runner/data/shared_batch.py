"""A batch in anonymous shared memory, and its descriptor through a socket.

torch's own pipes send a number by which the receiver fetches the descriptor from the sender while
it unpickles, for as long as that takes: one that stands still hangs it. Here the descriptor comes
with the message. The memory has no name, so none is left over, and none of `/dev/shm` is used.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.security.pickle_transfer import dumps_outline, loads_outline

HEADER = struct.Struct("qqq")  # number of the request, start of the pickle, bytes in all
ALIGNMENT = 64  # of each storage, as torch allocates
POPULATE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class _View(NamedTuple):
    """What stands for a tensor in the pickle."""

    place: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def send(to: socket.socket, number: int, value: Any) -> None:
    """Copy a nest of tensors and send it. Raises OSError, and what pickling it raises."""
    storages: dict[int, tuple[int, Tensor]] = {}  # by address: place in the memory, bytes
    end = 0

    def outline(part: Any) -> _View | None:
        nonlocal end
        if type(part) is not Tensor or not _is_plain(part):
            return None  # pickled as it is
        storage = part.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            storages[address] = end, torch.empty(0, dtype=torch.uint8).set_(storage)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        place, bytes_ = storages[address]
        offset, stride = int(part.storage_offset()), part.stride()
        return _View(place, bytes_.numel(), part.dtype, offset, tuple(part.shape), stride)

    pickled = dumps_outline(value, outline)
    memory = _anonymous_file()
    try:
        for place, bytes_ in storages.values():
            _write(memory, bytes_.numpy(), place)
        _write(memory, pickled, end)
        header = HEADER.pack(number, end, end + len(pickled))
        socket.send_fds(to, [header], [memory])
    finally:
        os.close(memory)


def receive(source: socket.socket) -> tuple[int, Any]:
    """The number and the value of a message that is there. EOFError where there is none."""
    header, descriptors, _, _ = socket.recv_fds(source, HEADER.size, 1)
    if len(header) < HEADER.size or not descriptors:
        raise EOFError
    number, start, end = HEADER.unpack(header)
    try:
        memory = mmap.mmap(descriptors[0], end, POPULATE)
    finally:
        os.close(descriptors[0])
    storages: dict[int, torch.UntypedStorage] = {}

    def fill(view: _View) -> Tensor:
        tensor = torch.empty(0, dtype=view.dtype)
        if not view.nbytes:
            return tensor.as_strided(view.size, view.stride)
        if view.place not in storages:
            bytes_ = torch.frombuffer(
                memory, dtype=torch.uint8, count=view.nbytes, offset=view.place
            )
            storages[view.place] = bytes_.untyped_storage()
        return tensor.set_(storages[view.place], view.offset, view.size, view.stride)

    value = loads_outline(memory[start:end], fill)
    # a list for torch.load, which would hold a batch of sparse tensors for ever
    getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()
    return number, value


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    quirks = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return dense and not quirks


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, values: Any, place: int) -> None:
    rest = memoryview(values)
    while rest:
        count = os.pwrite(file, rest, place)
        rest, place = rest[count:], place + count
