"""Pickles written opcode by opcode, as no honest program would write them.

Each function returns the bytes of a piece; a piece leaves one value on the unpickler's stack unless
it says otherwise.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any


def whole(*pieces: bytes, protocol: int = 2) -> bytes:
    """A pickle of these pieces; the last value is what it yields."""
    return pickle.PROTO + bytes([protocol]) + b"".join(pieces) + pickle.STOP


def value(plain: Any) -> bytes:
    """Plain data, without a memo; bytes already crafted go through `value` only inside `raw`."""
    match plain:
        case None:
            return pickle.NONE
        case bool():
            return pickle.NEWTRUE if plain else pickle.NEWFALSE
        case int() if -(2**31) <= plain < 2**31:
            return pickle.BININT + struct.pack("<i", plain)
        case int():
            packed = pickle.encode_long(plain)
            return pickle.LONG1 + bytes([len(packed)]) + packed
        case float():
            return pickle.BINFLOAT + struct.pack(">d", plain)
        case str():
            data = plain.encode()
            return pickle.BINUNICODE + struct.pack("<I", len(data)) + data
        case bytes():
            return pickle.BINBYTES + struct.pack("<I", len(plain)) + plain
        case tuple():
            return pickle.MARK + b"".join(map(value, plain)) + pickle.TUPLE
        case list():
            items = b"".join(map(value, plain))
            return pickle.EMPTY_LIST + pickle.MARK + items + pickle.APPENDS
        case dict():
            pairs = b"".join(value(k) + value(v) for k, v in plain.items())
            return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS
    raise TypeError(type(plain))


def name(module: str, attribute: str) -> bytes:
    """GLOBAL: what a module calls by that name; in protocol 4 it may have dots."""
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def stack_name(module: bytes | str, attribute: bytes | str) -> bytes:
    """STACK_GLOBAL: the same of two texts, or of two pieces that leave text."""
    parts = [value(part) if isinstance(part, str) else part for part in (module, attribute)]
    return b"".join(parts) + pickle.STACK_GLOBAL


def together(*pieces: bytes) -> bytes:
    """One tuple of what the pieces leave."""
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
    """A dict of what the pieces leave."""
    pairs = b"".join(value(key) + piece for key, piece in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS


def listing(*pieces: bytes) -> bytes:
    """A list of what the pieces leave."""
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(pieces) + pickle.APPENDS


def put(index: int) -> bytes:
    """BINPUT: remembers the value on top; leaves the stack as it is."""
    return pickle.BINPUT + bytes([index])


def get(index: int) -> bytes:
    """BINGET: what was remembered."""
    return pickle.BINGET + bytes([index])


def storage(key: str, count: int, kind: str = "FloatStorage", location: str = "cpu") -> bytes:
    """A storage as torch writes it: a persistent id that names a member of the archive."""
    return (
        together(value("storage"), name("torch", kind), value(key), value(location), value(count))
        + pickle.BINPERSID
    )


def tensor(
    key: str,
    count: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    kind: str = "FloatStorage",
) -> bytes:
    """A tensor that looks at a storage, as torch writes it."""
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        storage(key, count, kind),
        value(offset),
        value(size),
        value(stride),
        value(False),
        call(name("collections", "OrderedDict")),
    )
