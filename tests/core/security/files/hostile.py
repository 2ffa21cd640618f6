"""Hostile files, one line each: what they call, how that is written, in which container and format.

None does harm: a live one would make an empty folder or file, the marker, in the test's own folder.
Sources: the advisories of picklescan and fickling, the CVEs of torch and Hydra, arXiv 2508.19774.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.core.security.files.archives import (
    MAGIC,
    Member,
    archive,
    array,
    arrays,
    legacy,
    members,
    npy,
    safetensors,
    tar,
    torch_zip,
)
from tests.core.security.files.opcodes import (
    build,
    call,
    get,
    mapping,
    name,
    new,
    put,
    stack_name,
    tensor,
    tensor_arguments,
    together,
    value,
    whole,
)

Made = Callable[[str], bytes]  # from the marker's path


@dataclass(frozen=True)
class Sample:
    """One file that must be refused, unless it is `inert`: torch reads past what is hostile."""

    family: str
    name: str
    file: str
    make: Made
    live: bool = False  # an unrestricted reader makes the marker
    inert: bool = False
    says: str = ""  # part of the refusal

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def mkdir(marker: str) -> bytes:
    return call(name("os", "mkdir"), value(marker))


def hostile(marker: str) -> bytes:
    return whole(mkdir(marker))


def script(marker: str) -> str:
    return f"import os; os.mkdir({marker!r})"


NUMBERS = struct.pack("<4f", 1, 2, 3, float("nan"))
WEIGHT = tensor("0", 4, (2, 2), (2, 1))
GOOD = whole(mapping(weight=WEIGHT))

# -- what is called ----------------------------------------------------------------------------

# whether it is live, `module:attribute`, and the arguments that it is given
CALLS: tuple[tuple[bool, str, Callable[[str], list[Any]]], ...] = (
    (True, "os:mkdir posix:mkdir random:_os.mkdir torch:os.mkdir", lambda m: [m]),
    (True, "builtins:open io:FileIO zipfile:ZipFile codecs:open", lambda m: [m, "w"]),
    (True, "builtins:exec cProfile:run", lambda m: [script(m)]),
    (True, "torch.jit.unsupported_tensor_ops:execWrapper", lambda m: [script(m), {}, {}]),
    (True, "os:system torch.utils.collect_env:run", lambda m: [f"mkdir '{m}'"]),
    (True, "subprocess:check_output pty:spawn", lambda m: [["mkdir", m]]),
    (True, "pickle:loads _pickle:loads", lambda m: [hostile(m)]),
    (True, "torch.storage:_load_from_bytes", lambda m: [legacy(hostile(m))]),
    (True, "torch:save", lambda m: [{}, m]),
    (True, "hydra.utils:instantiate", lambda m: [{"_target_": "os.mkdir", "path": m}]),
    (False, "joblib:numpy_pickle.load dill:loads keras:Lambda no_such:f", lambda m: [m]),
)


def _one_call(target: str, arguments: Callable[[str], list[Any]], marker: str) -> bytes:
    module, _, attribute = target.partition(":")
    piece = call(stack_name(module, attribute), *map(value, arguments(marker)))
    return torch_zip(whole(piece, protocol=4))


def _calls() -> list[Sample]:
    return [
        Sample("call", target, "model.pt", partial(_one_call, target, arguments), live=live)
        for live, targets, arguments in CALLS
        for target in targets.split()
    ]


# -- how the pickle is written -----------------------------------------------------------------

MKDIR = name("os", "mkdir")


def _setstate(marker: str) -> bytes:
    """The first state gives the instance its own __setstate__, and the second is its argument."""
    blank = new(name("argparse", "Namespace"))
    return whole(build(build(blank, mapping(__setstate__=MKDIR)), value(marker)))


def _memo(marker: str) -> bytes:
    """The memo says `math` where a reader of opcodes looks, and `os` when it comes to be used."""
    first = value("math") + put(0) + pickle.POP
    second = value("os") + put(0) + pickle.POP
    return whole(first, second, call(stack_name(get(0), "mkdir"), value(marker)), protocol=4)


def _extension(marker: str) -> bytes:
    """The name is registered by the pickle itself, and then asked for by number."""
    known = call(name("copyreg", "add_extension"), *map(value, ("os", "mkdir", 201)))
    return whole(known, pickle.POP, call(pickle.EXT1 + bytes([201]), value(marker)))


PICKLES: dict[str, Made] = {
    "inst": lambda m: whole(pickle.MARK + value(m) + pickle.INST + b"os\nmkdir\n"),
    "obj": lambda m: whole(pickle.MARK + MKDIR + value(m) + pickle.OBJ),
    "newobj": lambda m: whole(
        new(name("numpy", "memmap"), *map(value, (m, "uint8", "w+", 0, (1,))))
    ),
    "build_setstate": _setstate,
    "memo": _memo,
    "extension": _extension,
    "protocol_0": lambda m: b"cos\nmkdir\n(V" + m.encode() + b"\ntR.",
    "in_a_key": lambda m: whole(pickle.EMPTY_DICT, mkdir(m), value(1), pickle.SETITEM),
    "broken_after": lambda m: whole(mkdir(m), b"\xff\xff"),
}


def _zipped(pickled: Made, marker: str) -> bytes:
    return torch_zip(pickled(marker))


def _pickles() -> list[Sample]:
    made = [
        Sample("opcode", key, "model.pt", partial(_zipped, of), live=True)
        for key, of in PICKLES.items()
    ]
    made += [  # each of the five pickles of torch's old format
        Sample("legacy", part, "model.pth", partial(_old, part), live=True)
        for part in ("magic", "version", "system", "content", "keys")
    ]
    made += [
        Sample("raw", file, file, hostile, live=True)
        for file in "model.pkl model.pt model.bin model.safetensors model model.npy".split()
    ]
    views = whole(value(0)) + whole(value([]))
    old_tar = lambda m: tar(storages=views, tensors=whole(value(0)), pickle=hostile(m))  # noqa: E731
    trailing = lambda m: torch_zip(GOOD + hostile(m), [NUMBERS])  # noqa: E731
    magic = pickle.dumps(MAGIC, 2) + pickle.dumps(1001, 2)
    return [
        *made,
        Sample("legacy", "tar", "model.tar", old_tar, live=True),
        Sample("opcode", "trailing", "model.pt", trailing, inert=True),
        Sample("stream", "second", "model.pkl", lambda m: whole(value({})) + hostile(m)),
        Sample("stream", "torch_magic", "model.pkl", lambda m: magic + hostile(m)),
    ]


def _old(part: str, marker: str) -> bytes:
    return legacy(**{"content": GOOD, part: hostile(marker)})


# -- in which container ------------------------------------------------------------------------


def good() -> list[Member]:
    """The members of an archive in which nothing is wrong."""
    return members(GOOD, [NUMBERS])


def _lying(**lies: int) -> Made:
    """The good archive, whose directory lies about data.pkl."""
    first, *rest = good()
    return lambda _: archive([Member(first.name, first.data, central=lies), *rest])


def _named(file: str) -> Made:
    """The hostile pickle is there under another name, beside a good one."""
    return lambda m: archive([*good(), Member(file, hostile(m))])


def _safetensors_first(marker: str) -> bytes:
    """Both a safetensors file and a zip."""
    zipped = archive(members(hostile(marker)))
    header = {"a": {"dtype": "U8", "shape": [len(zipped)], "data_offsets": [0, len(zipped)]}}
    return safetensors(header, zipped)


LIVE_ZIPS: dict[str, Made] = {
    "plain": lambda m: archive(members(hostile(m))),
    "deflated": lambda m: archive([Member("a/data.pkl", hostile(m), 8), Member("a/version", b"3")]),
    "duplicate_first": lambda m: archive([Member("archive/data.pkl", hostile(m)), *good()]),
    "local_crc": lambda m: archive(
        [Member("a/data.pkl", hostile(m), local={"crc": 0}), Member("a/version", b"3")]
    ),
    "legacy_first": lambda m: legacy(hostile(m)) + archive(good()),
}
DEAD_ZIPS: dict[str, Made] = {  # two programs would read two different files
    "duplicate_last": lambda m: archive([*good(), Member("archive/data.pkl", hostile(m))]),
    "duplicate_case": _named("archive/DATA.PKL"),
    "duplicate_storage": lambda _: archive([*good(), good()[2]]),
    "backslash": _named("archive\\data.pkl"),
    "parent": _named("archive/../../data.pkl"),
    "absolute": _named("/tmp/data.pkl"),  # noqa: S108
    "drive": _named("C:/data.pkl"),
    "nul_in_name": _named("archive/data.pkl\0.txt"),
    "escape_in_name": _named("archive/\x1b[2Jdata.pkl"),
    "empty_name": _named(""),
    "folder_with_data": _named("archive/data/"),
    "crc": _lying(crc=1),
    "size": _lying(size=7, packed=7),
    "method": _lying(method=8),
    "bzip2": _lying(method=12),
    "unknown_method": _lying(method=99),
    "offset": _lying(offset=3),
    "end_count": lambda _: archive(good(), end={"here": 2, "count": 2}),
    "end_offset": lambda _: archive(good(), end={"offset": 4}),
}
INERT_ZIPS: dict[str, Made] = {
    "hidden": lambda m: archive([*good(), Member("archive/data.pkl", hostile(m), hidden=True)]),
    "safetensors_first": _safetensors_first,
}


def _zips() -> list[Sample]:
    made = [Sample("zip", key, "model.pt", of, live=True) for key, of in LIVE_ZIPS.items()]
    made += [Sample("zip", key, "model.pt", of) for key, of in DEAD_ZIPS.items()]
    made += [Sample("zip", key, "model.pt", of, inert=True) for key, of in INERT_ZIPS.items()]
    made += [
        Sample("named", file, file, lambda m: torch_zip(hostile(m)), live=True)
        for file in "model.pkl model.bin model model.npz model.safetensors".split()
    ]
    raw = lambda m: hostile(m) + archive(good())  # noqa: E731
    return [*made, Sample("zip", "pickle_first", "model.pkl", raw, live=True)]


# -- formats that hold code or pickles, and attributes that lie --------------------------------

OBJECTS = {"descr": "|O", "fortran_order": False, "shape": (1,)}
ORDERED = call(name("collections", "OrderedDict"), value([]))


def _torchscript(marker: str) -> bytes:
    more = {"code/__torch__.py": b"", "constants.pkl": whole(value(()))}
    parts = [Member(f"archive/{key}", data) for key, data in more.items()]
    return archive([*members(hostile(marker)), *parts])


def _objects(marker: str) -> bytes:
    """An npy whose numbers are a pickle."""
    return npy(OBJECTS, hostile(marker))


FORMATS: dict[str, tuple[str, Made]] = {
    "torchscript": ("model.pt", _torchscript),
    "object_array": ("data.npy", _objects),
    "object_npz": ("data.npz", lambda m: arrays(x=array(np.ones(2)), y=_objects(m))),
    "pickle_in_npz": ("data.npz", lambda m: archive([Member("x.pkl", hostile(m))])),
    "expression_in_npy": (
        "data.npy",
        lambda m: npy(f"{{'descr': __import__('os').mkdir({m!r}), 'shape': (1,)}}", bytes(8)),
    ),
    "joblib": ("model.joblib", hostile),
}
# a value that hides another from a check
SHADOWS = {
    "ordered_items": build(ORDERED, mapping(items=name("builtins", "set"))),
    "tensor_numel": mapping(
        w=call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            name("torch._utils", "_rebuild_tensor_v2"),
            name("torch", "Tensor"),
            together(*tensor_arguments("0", 4, (2, 2), (2, 1))),
            mapping(numel=value(7), isnan=name("builtins", "set")),
        )
    ),
    "class_as_value": mapping(w=WEIGHT, kind=name("builtins", "set")),
}
# written by honest programs, and still not data: the refusal has to name the type
HONEST = {
    "torch.nn.modules.linear.Linear": new(name("torch.nn.modules.linear", "Linear")),
    "numpy._core.multiarray.scalar": call(name("numpy._core.multiarray", "scalar"), value(1)),
    "collections.defaultdict": call(name("collections", "defaultdict")),
    "my_package.MyModel": new(name("my_package", "MyModel")),
}


def _formats() -> list[Sample]:
    made = [Sample("format", key, file, of) for key, (file, of) in FORMATS.items()]
    made += [Sample("shadow", key, "model.pt", _fixed(body)) for key, body in SHADOWS.items()]
    return made + [
        Sample("honest", key, "model.pt", _fixed(mapping(x=body)), says=key)
        for key, body in HONEST.items()
    ]


def _fixed(body: bytes) -> Made:
    return lambda _: torch_zip(whole(body), [NUMBERS])


def samples() -> list[Sample]:
    """All of them; what asks for too much memory or time is in `bombs`."""
    return [*_calls(), *_pickles(), *_zips(), *_formats()]


# -- small files that ask for much; pickles that grow are in `variants` --------------------------

MEGABYTE = 1 << 20
SCALARS = struct.pack("<16f", *range(16))


def _sparse(index: int) -> Made:
    """A sparse tensor one of whose places is outside of it."""
    layout = call(name("torch.serialization", "_get_layout"), value("torch.sparse_coo"))
    parts = tensor("0", 1, (1, 1), (1, 1), kind="LongStorage") + tensor("1", 1, (1,), (1,))
    rebuild = name("torch._utils", "_rebuild_sparse_tensor")
    body = call(rebuild, layout, b"(" + parts + value((2,)) + value(False) + b"t")
    numbers = [struct.pack("<q", index), struct.pack("<f", 1.0)]
    return lambda _: torch_zip(whole(mapping(w=body)), numbers)


def _deflated(size: int) -> Made:
    """Zeros; it says that it has `size` of them."""
    inner = members(whole(mapping(w=tensor("0", size // 4, (size // 4,), (1,)))))
    lies = {"size": size}
    return lambda _: archive([*inner, Member("archive/data/0", bytes(MEGABYTE), 8, lies, lies)])


def _claim(descr: str, *shape: int) -> bytes:
    return npy({"descr": descr, "fortran_order": False, "shape": shape}, bytes(64))


BOMBS: dict[str, tuple[str, Made]] = {
    "deflated": ("model.pt", _deflated(2 << 30)),
    "deflated_less": ("model.pt", _deflated(64 * MEGABYTE)),
    "lists": ("model.pt", lambda _: torch_zip(whole(b"]" * 100_000 + b"a" * 99_999))),
    "itself": ("model.pt", lambda _: torch_zip(whole(b"]" + put(0) + get(0) + b"a"))),
    "sparse_far": ("model.pt", _sparse(2**40)),
    "sparse_negative": ("model.pt", _sparse(-5)),
    "header_deep": ("model.safetensors", lambda _: safetensors(b'{"a":' + b"[" * 200_000)),
    "header_size": ("model.safetensors", lambda _: safetensors({"a": 1}, size=2**62)),
    "npy_claims": ("data.npy", lambda _: _claim("<f8", 1 << 40)),
    "npz_claims": ("data.npz", lambda _: arrays(x=_claim("|u1", 1 << 40))),
}


def bombs() -> list[Sample]:
    return [Sample("bomb", key, file, make) for key, (file, make) in BOMBS.items()]
