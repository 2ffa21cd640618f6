"""Pickles written opcode by opcode, as no honest program would write them.

Each function returns the bytes of a piece; a piece leaves one value on the unpickler's stack unless
it says otherwise.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


def whole(*pieces: bytes, protocol: int = 2) -> bytes:
    """A pickle of these pieces; the last value is what it yields."""
    return pickle.PROTO + bytes([protocol]) + b"".join(pieces) + pickle.STOP


def value(plain: Any) -> bytes:
    """Plain data, without a memo."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 3)
    pickler.fast = True
    pickler.dump(plain)
    return out.getvalue()[2:-1]  # without PROTO and STOP


def name(module: str, attribute: str) -> bytes:
    """GLOBAL: the attribute of a module; in protocol 4 it may have dots."""
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def stack_name(module: bytes | str, attribute: bytes | str) -> bytes:
    """STACK_GLOBAL: the same of two texts, or of two pieces that leave text."""
    parts = [value(part) if isinstance(part, str) else part for part in (module, attribute)]
    return b"".join(parts) + pickle.STACK_GLOBAL


def together(*pieces: bytes) -> bytes:
    """One tuple of the pieces' values."""
    return pickle.MARK + b"".join(pieces) + pickle.TUPLE


def call(function: bytes, *arguments: bytes) -> bytes:
    """REDUCE: the function called with the arguments."""
    return function + together(*arguments) + pickle.REDUCE


def new(kind: bytes, *arguments: bytes) -> bytes:
    """NEWOBJ: `kind.__new__(kind, *arguments)`."""
    return kind + together(*arguments) + pickle.NEWOBJ


def build(instance: bytes, state: bytes) -> bytes:
    """BUILD: the instance with that state."""
    return instance + state + pickle.BUILD


def mapping(**items: bytes) -> bytes:
    """A dict of the pieces' values."""
    pairs = b"".join(value(key) + piece for key, piece in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS


def put(index: int) -> bytes:
    """BINPUT: remembers the value on top; leaves the stack as it is."""
    return pickle.BINPUT + bytes([index])


def get(index: int) -> bytes:
    """BINGET: the remembered value."""
    return pickle.BINGET + bytes([index])


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    """A storage as torch writes it: a persistent id that names a member of the archive."""
    parts = (value("storage"), name("torch", kind), *map(value, (key, "cpu", count)))
    return together(*parts) + pickle.BINPERSID


def tensor_arguments(
    key: str, count: int, size: tuple[int, ...], stride: tuple[int, ...], kind: str = "FloatStorage"
) -> list[bytes]:
    """The arguments from which torch rebuilds a tensor that views a storage."""
    hooks = call(name("collections", "OrderedDict"))
    return [storage(key, count, kind), *map(value, (0, size, stride, False)), hooks]


def tensor(*of: Any, **more: str) -> bytes:
    """A tensor as torch writes it; see `tensor_arguments`."""
    return call(name("torch._utils", "_rebuild_tensor_v2"), *tensor_arguments(*of, **more))
