"""Hostile files by how the pickle is written: rare opcodes, confusion, and what comes after.

Each makes the marker with `os.mkdir`; what differs is the road there, each of them one that made
a scanner look away.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.files.archives import MAGIC, legacy, tar, torch_zip
from tests.security.files.hostile_calls import mkdir, script
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


def _new_keywords(marker: str) -> bytes:
    """NEWOBJ_EX of a class that makes a file when it is made."""
    keywords = mapping(mode=value("w+"), shape=value((1,)), dtype=value("uint8"))
    kind = name("numpy", "memmap")
    return whole(kind, together(value(marker)), keywords, pickle.NEWOBJ_EX, protocol=4)


def _memo(marker: str) -> bytes:
    """The memo says `math` where a reader of opcodes looks, and `os` when it comes to be used."""
    first = value("math") + put(0) + pickle.POP
    second = value("os") + put(0) + pickle.POP
    return whole(first, second, call(stack_name(get(0), "mkdir"), value(marker)), protocol=4)


def _spelled(marker: str) -> bytes:
    """The name is worked out."""
    attribute = call(name("codecs", "decode"), value("zxqve"), value("rot13"))
    return whole(call(stack_name("os", attribute), value(marker)), protocol=4)


def _long_way(marker: str) -> bytes:
    """Text in every way that there is: old string opcodes, octal escapes, a memo by text."""
    old = pickle.STRING + repr(marker).encode() + b"\n" + pickle.PUT + b"7\n"
    return whole(old, pickle.POP, MKDIR, pickle.GET, b"7\n", pickle.TUPLE1, pickle.REDUCE)


def _frame(marker: str) -> bytes:
    """A frame that ends later than the pickle."""
    body = mkdir(marker) + pickle.STOP
    return b"\x80\x04" + pickle.FRAME + struct.pack("<Q", len(body)) + body


def _ascii(marker: str) -> bytes:
    """Protocol 0: text alone."""
    return b"cos\nmkdir\n(V" + marker.encode() + b"\ntR."


def _obj(marker: str) -> bytes:
    """OBJ takes the function from below its arguments; POP throws the result away."""
    return whole(pickle.MARK + MKDIR + value(marker) + pickle.OBJ, pickle.POP, GOOD)


def _inst(marker: str) -> bytes:
    return whole(pickle.MARK + value(marker) + pickle.INST + b"os\nmkdir\n")


PICKLES: dict[str, Pickled] = {
    "inst": _inst,
    "inst_pop": lambda m: whole(
        pickle.MARK + value(m) + pickle.INST + b"os\nmkdir\n", pickle.POP, GOOD
    ),
    "obj": lambda m: whole(pickle.MARK + MKDIR + value(m) + pickle.OBJ),
    "obj_pop": _obj,
    "newobj": lambda m: whole(
        new(name("numpy", "memmap"), value(m), value("uint8"), value("w+"), value(0), value((1,)))
    ),
    "newobj_ex": _new_keywords,
    "newobj_map": lambda m: whole(
        call(name("builtins", "bytearray"), new(name("builtins", "map"), MKDIR, value([m])))
    ),
    "build_setstate": _setstate,
    "build_partial": _partial,
    "memo": _memo,
    "memo_function": lambda m: whole(
        MKDIR, put(3), pickle.POP, call(get(3), value(m)), pickle.POP, GOOD
    ),
    "memoize": lambda m: whole(
        MKDIR, pickle.MEMOIZE, pickle.POP, call(get(0), value(m)), protocol=4
    ),
    "spelled": _spelled,
    "old_text": _long_way,
    "frame": _frame,
    "no_frame_end": lambda m: b"\x80\x04" + mkdir(m) + pickle.STOP,
    "ascii": _ascii,
    "no_protocol": lambda m: mkdir(m) + pickle.STOP,
    "protocol_twice": lambda m: pickle.PROTO + b"\x02" + whole(mkdir(m)),
    "protocol_5": lambda m: whole(mkdir(m), pickle.POP, GOOD, protocol=5),
    "bytearray8": lambda m: whole(
        pickle.BYTEARRAY8 + struct.pack("<Q", 2) + b"ab", pickle.POP, mkdir(m), protocol=5
    ),
    "ext1": _extension(pickle.EXT1, 201),
    "ext2": _extension(pickle.EXT2, 2_001),
    "ext4": _extension(pickle.EXT4, 200_001),
    "dropped": lambda m: whole(mkdir(m), pickle.POP, GOOD),
    "dropped_by_mark": lambda m: whole(pickle.MARK, mkdir(m), pickle.POP_MARK, GOOD),
    "duplicated": lambda m: whole(MKDIR, pickle.DUP, pickle.POP, value(m), b"\x85R"),
    "in_a_key": lambda m: whole(pickle.EMPTY_DICT, mkdir(m), value(1), pickle.SETITEM),
    "in_a_set": lambda m: whole(pickle.EMPTY_SET, pickle.MARK, mkdir(m), pickle.ADDITEMS),
    "in_a_list": lambda m: whole(listing(value(1), listing(mkdir(m)))),
    "in_arguments": lambda m: whole(
        call(name("collections", "OrderedDict"), listing(together(value("a"), mkdir(m))))
    ),
    "in_a_state": lambda m: whole(
        build(call(name("collections", "OrderedDict")), mapping(a=mkdir(m)))
    ),
    "dict_of_class": lambda m: whole(
        call(name("collections", "defaultdict"), name("builtins", "dict")), pickle.POP, mkdir(m)
    ),
    "broken_after": lambda m: whole(mkdir(m), b"\xff\xff"),
    "no_stop": lambda m: b"\x80\x02" + mkdir(m),
    "after_persistent": lambda m: whole(mkdir(m), pickle.POP, value(0), pickle.BINPERSID),
    "two_steps": lambda m: whole(
        call(name("builtins", "exec"), value("x = 1")),
        pickle.POP,
        call(name("builtins", "exec"), value(script(m))),
    ),
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
    names = (
        "model.pkl",
        "model.pt",
        "model.bin",
        "model.ckpt",
        "model.safetensors",
        "model",
        "model.npy",
        "model.txt",
    )
    plain: Pickled = lambda m: whole(mkdir(m))  # noqa: E731
    found += [Sample(file, "raw", partial(_raw, file, plain), PICKLE) for file in names]
    trailing: Pickled = lambda m: torch_zip(whole(GOOD) + whole(mkdir(m)))  # noqa: E731
    found.append(Sample("trailing", "opcode", partial(_raw, "model.pt", trailing), inert=True))
    found.append(Sample("tar", "legacy", _tar, TORCH))
    return found
