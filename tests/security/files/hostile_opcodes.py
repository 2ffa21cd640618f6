"""Hostile files by how the pickle is written: rare opcodes, confusion, and what comes after.

Each makes the marker with `os.mkdir`; what differs is the road there, each of them one that made
a scanner look away.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.files.archives import MAGIC, legacy, tar, torch_zip
from tests.security.files.hostile_calls import mkdir
from tests.security.files.opcodes import (
    build,
    call,
    get,
    listing,
    mapping,
    name,
    new,
    put,
    stack_name,
    together,
    value,
    whole,
)
from tests.security.files.sample import PICKLE, STREAM, TORCH, Sample

Pickled = Callable[[str], bytes]
MKDIR = name("os", "mkdir")
GOOD = mapping(weight=value(1))


def _extension(opcode: bytes, code: int) -> Pickled:
    """The name is registered by the pickle itself, and then asked for by number."""
    packed = code.to_bytes({pickle.EXT1: 1, pickle.EXT2: 2, pickle.EXT4: 4}[opcode], "little")

    def pickled(marker: str) -> bytes:
        known = call(name("copyreg", "add_extension"), value("os"), value("mkdir"), value(code))
        return whole(known, pickle.POP, call(opcode + packed, value(marker)))

    return pickled


def _setstate(marker: str) -> bytes:
    """The first state gives the instance its own __setstate__, and the second is its argument."""
    blank = new(name("argparse", "Namespace"))
    return whole(build(build(blank, mapping(__setstate__=MKDIR)), value(marker)))


def _partial(marker: str) -> bytes:
    """What looks like a partial of `len` is made another by its state."""
    blank = call(name("functools", "partial"), name("builtins", "len"))
    state = together(MKDIR, together(value(marker)), pickle.EMPTY_DICT, pickle.NONE)
    return whole(call(build(blank, state)))


def _memo(marker: str) -> bytes:
    """The memo says `math` where a reader of opcodes looks, and `os` when it comes to be used."""
    first = value("math") + put(0) + pickle.POP
    second = value("os") + put(0) + pickle.POP
    return whole(first, second, call(stack_name(get(0), "mkdir"), value(marker)), protocol=4)


def _spelled(marker: str) -> bytes:
    """The name is worked out."""
    attribute = call(name("codecs", "decode"), value("zxqve"), value("rot13"))
    return whole(call(stack_name("os", attribute), value(marker)), protocol=4)


def _ascii(marker: str) -> bytes:
    """Protocol 0: text alone."""
    return b"cos\nmkdir\n(V" + marker.encode() + b"\ntR."


PICKLES: dict[str, Pickled] = {
    "inst": lambda m: whole(pickle.MARK + value(m) + pickle.INST + b"os\nmkdir\n"),
    "obj": lambda m: whole(pickle.MARK + MKDIR + value(m) + pickle.OBJ),
    "obj_pop": lambda m: whole(pickle.MARK + MKDIR + value(m) + pickle.OBJ, pickle.POP, GOOD),
    "newobj": lambda m: whole(
        new(name("numpy", "memmap"), value(m), value("uint8"), value("w+"), value(0), value((1,)))
    ),
    "build_setstate": _setstate,
    "build_partial": _partial,
    "memo": _memo,
    "spelled": _spelled,
    "ascii": _ascii,
    "no_protocol": lambda m: mkdir(m) + pickle.STOP,
    "protocol_5": lambda m: whole(mkdir(m), pickle.POP, GOOD, protocol=5),
    "ext1": _extension(pickle.EXT1, 201),
    "ext4": _extension(pickle.EXT4, 200_001),
    "dropped": lambda m: whole(mkdir(m), pickle.POP, GOOD),
    "duplicated": lambda m: whole(MKDIR, pickle.DUP, pickle.POP, value(m), b"\x85R"),
    "in_a_key": lambda m: whole(pickle.EMPTY_DICT, mkdir(m), value(1), pickle.SETITEM),
    "in_a_list": lambda m: whole(listing(value(1), listing(mkdir(m)))),
    "in_a_state": lambda m: whole(
        build(call(name("collections", "OrderedDict")), mapping(a=mkdir(m)))
    ),
    "broken_after": lambda m: whole(mkdir(m), b"\xff\xff"),
    "no_stop": lambda m: b"\x80\x02" + mkdir(m),
}

# Each of the five pickles of torch's old format is read, and so is what comes after one of them.
PLACES = ("magic", "version", "system", "content", "keys")


def _old(place: str, folder: Path, marker: Path) -> Path:
    hostile, good = whole(mkdir(str(marker))), whole(GOOD)
    parts = {key: hostile for key in PLACES[:3] + PLACES[4:] if key == place}
    path = folder / "model.pth"
    path.write_bytes(legacy(hostile if place == "content" else good, **parts))
    return path


def _zip(pickled: Pickled, folder: Path, marker: Path) -> Path:
    path = folder / "model.pt"
    path.write_bytes(torch_zip(pickled(str(marker))))
    return path


def _raw(file: str, pickled: Pickled, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(pickled(str(marker)))
    return path


def _tar(folder: Path, marker: Path) -> Path:
    path = folder / "model.tar"
    none = whole(value(0))
    views = whole(value(0)) + whole(value([]))
    path.write_bytes(tar(storages=views, tensors=none, pickle=whole(mkdir(str(marker)))))
    return path


def _streams() -> dict[str, Pickled]:
    good = whole(GOOD)
    return {
        "second": lambda m: good + whole(mkdir(m)),
        "tenth": lambda m: good * 9 + whole(mkdir(m)),
        "torch_magic": lambda m: pickle.dumps(MAGIC, 2) + pickle.dumps(1001, 2) + whole(mkdir(m)),
    }


def samples() -> list[Sample]:
    found = [Sample(key, "opcode", partial(_zip, made), TORCH) for key, made in PICKLES.items()]
    found += [Sample(place, "legacy", partial(_old, place), TORCH) for place in PLACES]
    found += [
        Sample(key, "stream", partial(_raw, "model.pkl", made), STREAM)
        for key, made in _streams().items()
    ]
    names = "model.pkl model.pt model.bin model.safetensors model model.npy model.txt".split()
    plain: Pickled = lambda m: whole(mkdir(m))  # noqa: E731
    found += [Sample(file, "raw", partial(_raw, file, plain), PICKLE) for file in names]
    trailing: Pickled = lambda m: torch_zip(whole(GOOD) + whole(mkdir(m)))  # noqa: E731
    found.append(Sample("trailing", "opcode", partial(_raw, "model.pt", trailing), inert=True))
    found.append(Sample("tar", "legacy", _tar, TORCH))
    return found
