"""Files of tensors, arrays or a run's state, and `encode`: the plain data that such files hold.

Our own files are loaded by the restricted loaders as well: a manifest that was made by hand fits
its files, whatever is in them.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.errors import CheckpointError, SecurityError
from runner.security.config import SecurityLevel
from runner.security.files.loader import Opened, open_file
from runner.security.files.policy import Policy

STRICT = Policy(SecurityLevel.strict)  # no pickle, whatever a config allows
TIED = "tied"  # in a safetensors file's metadata: names that share another name's tensor, as JSON

_BASES: tuple[Any, ...] = (int, float, complex, str, bytes)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU; tied names get the same tensor.

    Raises SecurityError for a file that is refused though its digest fits, and CheckpointError, in
    one line, for one that is not there or not what it was.
    """
    found = open_file(path, STRICT, sha256)
    tensors: dict[str, Tensor] = found.content
    _expect(found, path, "safetensors")
    try:
        for alias, name in json.loads(found.metadata.get(TIED, "{}")).items():
            if alias in tensors:
                raise ValueError(f"{alias!r} is a tensor, and is said to be another one's name")
            tensors[alias] = tensors[name]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {_line(error)}") from error
    return tensors


def read_state(path: Path, sha256: str) -> Any:
    """What `torch.save` wrote after `encode`, on the CPU.

    Raises SecurityError for a file that wants more than plain data, and CheckpointError for one
    that is not there or not what it was.
    """
    found = open_file(path, STRICT, sha256)
    _expect(found, path, "torch_zip")
    return found.content


def read_arrays(path: Path, policy: Policy) -> Any:
    """A user's `.npy` as one array, or his `.npz` as a dict of them; never a pickle.

    Raises SecurityError for what is refused.
    """
    found = open_file(path, policy, sandboxed=False)
    _expect(found, path, "npy", "npz")
    return found.content


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
    if value.is_quantized or value.is_nested:
        kind = "quantised" if value.is_quantized else "nested"
        raise TypeError(f"{place} is {kind}, which a checkpoint cannot hold; keep a plain tensor")
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


def _expect(found: Opened, path: Path, *kinds: str) -> None:
    kind = found.facts.format
    if kind not in kinds:
        raise SecurityError(f"{path}: refused: it is {kind} and should be {kinds[0]}")


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
