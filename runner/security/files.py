"""The door for files that hold tensors or a run's state: read, checked, and then parsed.

Parsing never runs code from the file: safetensors holds none, and the rest is loaded as plain
data (`weights_only`). What is parsed is the very bytes whose checksum was compared, so a file
that changes under our hands is not read twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pickle
import random
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from runner.errors import CheckpointError, SecurityError
from runner.storage import read_file

TIED = "tied"  # in a safetensors file's metadata: names that share another name's tensor, as JSON

_BASES: tuple[Any, ...] = (int, float, complex, str, bytes)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU; tied names get the same tensor.

    Raises CheckpointError, in one line, for a file that is not there or not what it was.
    """
    data = _read(path, sha256)
    try:
        tensors = safetensors.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for alias, name in json.loads(header.get("__metadata__", {}).get(TIED, "{}")).items():
            tensors[alias] = tensors[name]
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {_line(error)}") from error
    return tensors


def read_state(path: Path, sha256: str) -> Any:
    """What `torch.save` wrote after `encode`, on the CPU.

    Raises SecurityError for a file that wants more than plain data, and CheckpointError for one
    that is not there or not what it was.
    """
    data = _read(path, sha256)
    try:
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise SecurityError(
            f"{path}: refused: it holds more than plain data ({_unwanted(error)}); "
            "remove that checkpoint, or continue from another one by its path"
        ) from error
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path}: not a state file: {_line(error)}") from error


def encode(
    value: Any, place: str = "state", tensor: Callable[[str, Tensor], Tensor] | None = None
) -> Any:
    """The same value in tensors and plain containers, which is all that `read_state` loads.

    `tensor` is given each tensor with its place, and returns the one to keep. Arrays become
    tensors, random generators their state, dataclasses dicts, enums their value, paths text.
    Raises TypeError naming the place of anything else.
    """
    return _encode(value, place, tensor or (lambda _, found: found), ())


def _encode(
    value: Any, place: str, tensor: Callable[[str, Tensor], Tensor], within: tuple[int, ...]
) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return tensor(place, _bare(value, place))
    if isinstance(value, np.ndarray | np.generic):
        return _from_numpy(value, place, tensor, within)
    if id(value) in within:
        raise TypeError(f"{place} holds itself, which a checkpoint cannot")
    within = (*within, id(value))

    def inner(item: Any, where: str) -> Any:
        return _encode(item, where, tensor, within)

    simpler = _simplify(value)
    if simpler is not value:
        return inner(simpler, place)
    if isinstance(value, Mapping):
        return _encode_mapping(value, place, inner)
    if isinstance(value, list | deque):
        return [inner(x, f"{place}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(inner(x, f"{place}[{i}]") for i, x in enumerate(value))
    if isinstance(value, set | frozenset):
        return {_key(x, place) for x in value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return {name: inner(getattr(value, name), f"{place}.{name}") for name in names}
    raise TypeError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold; keep numbers, text, tensors, or lists and dicts of them"
    )


def _simplify(value: Any) -> Any:
    """One step towards plain data, or the value itself."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    for plain in _BASES:  # subclasses of them
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value


def _encode_mapping(
    value: Mapping[Any, Any], place: str, inner: Callable[[Any, str], Any]
) -> dict[Any, Any]:
    plain: dict[Any, Any] = {}
    for raw, item in value.items():
        key = _key(raw, place)
        where = f"{place}.{key}" if type(key) is str and key.isidentifier() else f"{place}[{key!r}]"
        if key in plain:
            raise TypeError(f"{place} has two keys that a checkpoint would both keep as {key!r}")
        plain[key] = inner(item, where)
    return plain


def _key(key: Any, place: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_key(part, place) for part in key)
    simpler = key.item() if isinstance(key, np.generic) else _simplify(key)
    if type(simpler) in _PLAIN:
        return simpler
    if simpler is not key and not isinstance(simpler, np.generic):
        return _key(simpler, place)
    raise TypeError(f"{place} has the key {key!r}, a {type(key).__name__}; use text or numbers")


def _bare(value: Tensor, place: str) -> Tensor:
    if value.is_meta:
        raise TypeError(f"{place} is a tensor on the meta device, which holds no values")
    try:
        bare = value.detach()
    except ValueError:
        raise TypeError(
            f"{place} is a lazy parameter that has no shape yet; run one batch through the model"
        ) from None
    if type(bare) is not Tensor:
        raise TypeError(
            f"{place} is a {type(bare).__qualname__}, which a checkpoint cannot hold; "
            "keep a plain tensor"
        )
    return bare


def _from_numpy(
    value: Any, place: str, tensor: Callable[[str, Tensor], Tensor], within: tuple[int, ...]
) -> Any:
    if isinstance(value, np.generic):
        item = value.item()
        if isinstance(item, np.generic):  # longdouble has no plain counterpart
            raise TypeError(f"{place} is a numpy.{value.dtype}, which a checkpoint cannot hold")
        return _encode(item, place, tensor, within)
    try:  # a copy in the order and byte order that torch takes
        return tensor(place, torch.from_numpy(value.astype(value.dtype.newbyteorder("="), "C")))
    except TypeError:
        raise TypeError(
            f"{place} is an array of {value.dtype}, which a checkpoint cannot hold; use .tolist()"
        ) from None


def _read(path: Path, sha256: str) -> bytes:
    data = read_file(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(
            f"{path}: damaged: its {len(data)} bytes do not match the recorded sha256"
        )
    return data


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]


def _unwanted(error: BaseException) -> str:
    """The line of torch's long message that names what was asked for."""
    lines = [line.strip() for line in str(error).splitlines()]
    naming = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return (naming or lines or [""])[0][:200] or type(error).__name__
