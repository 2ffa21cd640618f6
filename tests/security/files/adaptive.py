"""Files by somebody who has read the gate: only opcodes and names that plain data need.

What is checked when it is made is changed afterwards, what is counted once is used often, and what
is quick to read is slow to hash, to name or to compare.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tests.security.files.archives import (
    Member,
    archive,
    legacy,
    members,
    safetensors,
    torch_zip,
)
from tests.security.files.opcodes import (
    build,
    call,
    get,
    listing,
    mapping,
    name,
    put,
    storage,
    together,
    value,
    whole,
)
from tests.security.files.sample import Sample

NUMBERS = bytes(16)
MODULUS = 2**61 - 1  # whole numbers that differ by it have one hash
Bytes = Callable[[], bytes]


def _alone(*pieces: bytes) -> Bytes:
    return lambda: torch_zip(whole(*pieces))


def _with_storage(*pieces: bytes) -> Bytes:
    return lambda: torch_zip(whole(*pieces), [NUMBERS])


def _rebuilt(hooks: bytes, key: str = "0") -> bytes:
    return call(
        name("torch._utils", "_rebuild_tensor_v2"), storage(key, 4), value(0), value((4,)),
        value((1,)), value(True), hooks,
    )  # fmt: skip


def _late_hooks(parameter: bool) -> bytes:
    """Hooks that are empty when the tensor is made, filled later, and held by nothing else."""
    hooks = call(name("collections", "OrderedDict")) + put(0)
    filled = get(0) + value(1) + name("builtins", "set") + pickle.SETITEM
    if parameter:
        plain = _rebuilt(call(name("collections", "OrderedDict")))
        made = call(name("torch._utils", "_rebuild_parameter"), plain, value(True), hooks)
    else:
        made = _rebuilt(hooks)
    rows = value("w") + made + value("a") + filled + value("a") + pickle.NONE
    return pickle.EMPTY_DICT + pickle.MARK + rows + pickle.SETITEMS


def _late_state() -> bytes:
    """The state of a dict, which is `_metadata` alone when it is put there."""
    inner = call(name("collections", "OrderedDict")) + put(1)
    built = build(call(name("collections", "OrderedDict")), mapping(_metadata=inner))
    shadow = build(get(1), mapping(_metadata=call(name("collections", "OrderedDict"))))
    return listing(built, shadow, build(get(1), mapping(items=value(1))))


def _tree(levels: int) -> bytes:
    """A tuple of twice the tuple before: few bytes, and each hash takes twice as long."""
    body = value(("a",)) + put(0)
    for level in range(levels):
        body = b"(" + body + get(level) + pickle.TUPLE + put(level + 1)
    return body


def _forest(levels: int, count: int) -> bytes:
    """Many keys, each of which takes a while to hash."""
    rows = b"".join(
        get(levels) + value(i) + pickle.TUPLE2 + pickle.NONE + pickle.SETITEM for i in range(count)
    )
    return pickle.EMPTY_DICT + value("a") + _tree(levels) + pickle.SETITEM + rows


def _pairs(keys: Iterable[int]) -> bytes:
    inner = b"".join(value(key) + pickle.NONE for key in keys)
    return pickle.EMPTY_DICT + pickle.MARK + inner + pickle.SETITEMS


def _collisions(count: int) -> bytes:
    return _pairs(i * MODULUS for i in range(1, count + 1))


def _collisions_in_set(count: int) -> bytes:
    many = b"".join(value(i * MODULUS) for i in range(1, count + 1))
    return call(name("builtins", "set"), b"](" + many + b"e")


def _repeated(function: bytes, argument: bytes, *more: bytes, times: int) -> bytes:
    """The same call again and again: each gives a new copy of one large argument."""
    first = function + put(0) + pickle.MARK + argument + b"".join(more) + pickle.TUPLE + put(1)
    again = (get(0) + get(1) + pickle.REDUCE) * times
    return b"](" + first + pickle.REDUCE + again + b"e"


def _long_place() -> bytes:
    """A name of a megabyte, below which there is much: what says where it lies is long."""
    return mapping(**{"x" * (1 << 20): b"](" + value(1) * 100_000 + b"e"})


def _late_duplicate() -> bytes:
    """One name of many is there twice, and it is the last one."""
    names = [f"archive/data/{i}" for i in range(60_000)]
    more = [Member(name, b"") for name in [*names, names[-1]]]
    return archive([*members(whole(value({}))), *more])


def _late_key() -> bytes:
    rows = ",".join(
        f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        for i in [*range(60_000), 59_999]
    )
    return safetensors(("{" + rows + "}").encode())


def _long_name() -> bytes:
    key = '"' + "x" * (30 << 20) + '"'
    return safetensors(f'{{{key}:{{"dtype":"F33","shape":[0],"data_offsets":[0,0]}}}}'.encode())


def _long_type() -> bytes:
    kind = '"' + "\\u001b" * (4 << 20) + '"'
    return safetensors(f'{{"a":{{"dtype":{kind},"shape":[0],"data_offsets":[0,0]}}}}'.encode())


def _system(key: bytes) -> Bytes:
    """A key in the part of the old format that says of what machine it is."""
    rows = value("little_endian") + value(True) + key + value(1)
    system = whole(pickle.EMPTY_DICT + pickle.MARK + rows + pickle.SETITEMS)
    return lambda: legacy(whole(value({})), system=system)


LIST = b"](" + b"".join(map(value, range(20_000))) + b"e"
SIZES = pickle.MARK + value(1) * 50_000 + pickle.TUPLE
TEXT = value("x" * (4 << 20))
FILES: dict[str, tuple[str, Bytes]] = {
    "hooks": ("model.pt", _with_storage(_late_hooks(False))),
    "parameter_hooks": ("model.pt", _with_storage(_late_hooks(True))),
    "late_state": ("model.pt", _alone(_late_state())),
    "late_loop": (
        "model.pt",
        _alone(pickle.EMPTY_DICT + put(0) + value("a") + together(get(0)) + pickle.SETITEM),
    ),
    "hashed_tree": ("model.pt", _alone(pickle.EMPTY_DICT, _tree(60), value(1), pickle.SETITEM)),
    "hashed_tree_in_set": (
        "model.pt",
        _alone(call(name("builtins", "set"), listing(_tree(60)))),
    ),
    "hashed_tree_in_system": ("model.pth", _system(_tree(60))),
    "named_tree": ("model.pt", _alone(mapping(a=_tree(60), b=name("builtins", "set")))),
    "collisions": ("model.pt", _alone(_collisions(60_000))),
    "collisions_in_set": ("model.pt", _alone(_collisions_in_set(60_000))),
    "bytes_repeated": (
        "model.pt",
        _alone(_repeated(name("_codecs", "encode"), TEXT, value("latin1"), times=2_000)),
    ),
    "set_repeated": ("model.pt", _alone(_repeated(name("builtins", "set"), LIST, times=2_000))),
    "counter_repeated": (
        "model.pt",
        _alone(_repeated(name("collections", "Counter"), _pairs(range(20_000)), times=1_000)),
    ),
    "size_repeated": ("model.pt", _alone(_repeated(name("torch", "Size"), SIZES, times=2_000))),
    "long_place": ("model.pt", _alone(_long_place())),
    "fewer_collisions": ("model.pt", _alone(_collisions(9_000))),
    "hashed_forest": ("model.pt", _alone(_forest(12, 5_000))),
    "many_dicts": ("model.pt", _alone(b"](" + _collisions(900) * 60 + b"e")),
    "late_duplicate": ("model.pt", _late_duplicate),
    "late_key": ("model.safetensors", _late_key),
    "long_name": ("model.safetensors", _long_name),
    "long_type": ("model.safetensors", _long_type),
}

LARGE = ("long_place", "fewer_collisions", "many_dicts", "hashed_forest")  # and yet plain data


def _write(file: str, made: Bytes, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made())
    return path


def samples() -> list[Sample]:
    return [
        Sample(key, "adaptive", partial(_write, file, made), loads=key in LARGE)
        for key, (file, made) in FILES.items()
    ]
