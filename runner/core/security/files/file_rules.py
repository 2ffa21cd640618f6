"""Rules for zip archives and pickles, which a foreign file must keep before it is loaded.

A rule of `ZIP_RULES` takes an open archive and the limit of its content in bytes; it returns the
problem, or "". Checks that the formats' own libraries do (safetensors offsets, npy shapes and
types) are not repeated.

torch's `weights_only` loader calls functions that can make more than the file holds. `PickleRules`
follows its opcodes with placeholders, so that nothing is allocated or called. It ends at the first
opcode that the loader does not know, where the loader refuses the file too.
"""

from __future__ import annotations

import io
import mmap
import os
import pickletools
import re
import stat
import struct
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from runner.core.security.files.formats import NPY_MAGIC, SAVE_AGAIN, Data, FileRefusal, open_zip
from runner.core.security.files.policy import FileLimits

BLOCK = 1 << 20  # bytes inflated at a time
# other methods are inflated without a bound
COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
LOCAL_HEADER_BYTES, DESCRIPTOR_BYTES, END_RECORD_BYTES = 30, 24, 22
END_MAGIC = b"PK\x05\x06"
TORCH_MEMBER = re.compile(
    r"[^/]+/(data\.pkl|data/\d+|byteorder|version|\.format_version|\.storage_alignment"
    r"|\.data/serialization_id)",
    re.ASCII,
)


def check_unique(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that names are unique ignoring case (as torch compares), since readers differ."""
    names = [member.orig_filename.lower() for member in archive.infolist()]
    return "" if len(set(names)) == len(names) else "two members have one name"


def check_paths(archive: zipfile.ZipFile, limit: int) -> str:
    """Check for relative, printable names within the archive."""
    for member in archive.infolist():
        name = member.orig_filename
        is_plain = name.isprintable() and not set(name) & set("\\:")
        if not is_plain or any(part in ("", ".", "..") for part in name.split("/")):
            return f"{name!r} is not a plain name within the archive"
    return ""


def check_total_size(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that the declared total size is at most `limit`."""
    total = sum(member.file_size for member in archive.infolist())
    return "" if total <= limit else f"its members expand to {total:,} bytes, more than {limit:,}"


def check_crc(archive: zipfile.ZipFile, limit: int) -> str:
    """Check each member's CRC and size; nothing is inflated beyond its declared size."""
    for member in archive.infolist():
        sizes = {member.file_size, _content_size(archive, member)}
        if member.compress_type == zipfile.ZIP_STORED:
            sizes.add(member.compress_size)
        if len(sizes) > 1:
            return f"{member.orig_filename} does not match its checksum"
    return ""


def check_gaps(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that the members fill the file up to the directory, which ends it."""
    file: IO[bytes] = archive.fp  # type: ignore[assignment]
    end = 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        if not 0 <= member.header_offset - end <= DESCRIPTOR_BYTES:
            return f"has bytes outside its members, before {member.orig_filename}"
        file.seek(member.header_offset + LOCAL_HEADER_BYTES - 4)
        name_and_extra = sum(struct.unpack("<2H", file.read(4)))
        end = member.header_offset + LOCAL_HEADER_BYTES + name_and_extra + member.compress_size
    file.seek(-END_RECORD_BYTES, os.SEEK_END)
    if not 0 <= archive.start_dir - end <= DESCRIPTOR_BYTES or file.read(4) != END_MAGIC:
        return "has bytes outside its members, at the end"
    return ""


def check_links(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that each member is an ordinary file."""
    for member in archive.infolist():
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            return f"{member.orig_filename} is a link or a special file"
    return ""


def check_members(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that torch or numpy writes each member: no other archive, pickle or program."""
    names = [member.orig_filename for member in archive.infolist()]
    if any(name.lower().endswith("data.pkl") for name in names):
        odd = [name for name in names if TORCH_MEMBER.fullmatch(name) is None]
        odd += [name for name in names if name.split("/")[0] != names[0].split("/")[0]]
        return f"{odd[0]} is not a member that torch.save writes" if odd else ""
    for name in names:
        with archive.open(name) as file:
            if not name.endswith(".npy") or file.read(len(NPY_MAGIC)) != NPY_MAGIC:
                return f"{name} is not an array in numpy's format"
    return ""


def _content_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Return a member's actual size; -1 if its header, method or checksum is invalid."""
    if member.compress_type not in COMPRESSION_METHODS:
        return -1
    try:
        with archive.open(member) as file:
            return sum(map(len, iter(partial(file.read, BLOCK), b"")))
    except Exception:  # zipfile, zlib or the buffer raise these for forged headers
        return -1


ZIP_RULES = {
    "zip.unique": check_unique,
    "zip.paths": check_paths,
    "zip.ratio": check_total_size,
    "zip.crc": check_crc,
    "zip.gaps": check_gaps,
    "zip.links": check_links,
    "zip.members": check_members,
}


def check_zip(data: Data, limits: FileLimits) -> None:
    """Check an archive. Raises FileRefusal for the first rule that it breaks."""
    with open_zip(data) as archive:
        for code, rule in ZIP_RULES.items():
            if problem := rule(archive, limits.may_expand(len(data))):
                raise FileRefusal(code, "", problem)


# -- pickles ---------------------------------------------------------------------------------------

LEGACY_PICKLES = 5  # at the start of a file of torch before 1.6
EXPANSION = 4  # elements of all views per byte of the file, above VIEW_ELEMENTS
VIEW_ELEMENTS = 1 << 20
TUPLE_NODES = 10_000  # nodes of a nested tuple, plus TUPLE_RATIO per byte of the pickle so far
TUPLE_RATIO = 8
MIN_COPIES = 10_000  # values that all calls may copy, plus COPY_RATIO per byte of the file
COPY_RATIO = 2
MAX_LARGE_INTEGERS = 10_000  # as keys they could all have one hash, which takes quadratic time
COPY_FUNCTIONS = ("encode", "bytearray", "bytes")
LATIN1 = ("latin1", "latin-1")  # pickle writes bytes as text in this encoding
LITERALS = frozenset(
    "NONE NEWFALSE NEWTRUE BININT BININT1 BININT2 BINFLOAT BINUNICODE SHORT_BINSTRING LONG1".split()
)
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
POPS = {"APPEND": 1, "SETITEM": 2, "APPENDS": -1, "SETITEMS": -1}  # -1: back to the mark
TENSOR = object()


@dataclass(frozen=True)
class _Name:
    path: str


@dataclass(eq=False)
class _Container:
    length: int = 0  # bytes, or values with those of nested tuples


class _Bytes(_Container):
    pass


@dataclass(frozen=True)
class _Storage:
    elements: int


@dataclass(frozen=True, eq=False)
class _Tuple:
    items: tuple[Any, ...]
    nodes: int  # of the nested tuple, shared ones counted each time, as in its hash


def check_pickles(data: Data, kind: str) -> None:
    """Check the pickles of a torch zip or legacy file. Raises FileRefusal."""
    if kind == "torch_zip":
        with open_zip(data) as archive:
            members = archive.infolist()
            rules = PickleRules(sum(member.file_size for member in members))
            pickled = next(m for m in members if m.filename.lower().endswith("data.pkl"))
            with archive.open(pickled) as member:
                rules.check(member)
        return
    file: Any = data if isinstance(data, mmap.mmap) else io.BytesIO(data)
    file.seek(0)
    rules = PickleRules(len(data))
    all(rules.check(file) for _ in range(LEGACY_PICKLES))


class PickleRules:
    """Follow pickles of a file whose members have `size` bytes together."""

    def __init__(self, size: int) -> None:
        self.size, self.copied, self.viewed, self.large_integers = size, 0, 0, 0  # so far
        self.claims: dict[Any, int] = {}  # elements by storage

    def check(self, file: IO[bytes]) -> bool:
        """Check one pickle; return whether the loader gets to its end. Raises FileRefusal."""
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        opcodes = pickletools.genops(file)
        while True:
            try:
                opcode, argument, position = next(opcodes)
            except (StopIteration, ValueError):  # the loader fails there too
                return False
            if opcode.name == "STOP":
                return True
            try:
                if not self._follow(opcode.name, argument, position or 0):
                    return False
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise _refusal("malformed", f"{opcode.name}: {error!r}") from None

    def _follow(self, opcode: str, argument: Any, position: int) -> bool:
        """Follow one opcode; False if the loader does not know it."""
        stack = self.stack
        if opcode in LITERALS:
            self.large_integers += opcode == "LONG1" and abs(argument) >= sys.hash_info.modulus
            if self.large_integers > MAX_LARGE_INTEGERS:
                raise _refusal("keys", "has many integers that may share one hash")
            stack.append(argument)
        elif opcode == "GLOBAL":
            stack.append(_Name(argument))
        elif opcode == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif opcode in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
            stack.append(_Container())
        elif opcode == "TUPLE" or opcode in TUPLES:
            count = TUPLES.get(opcode)
            items = self._pop_mark() if count is None else self._pop(count)
            nodes = 1 + _nodes(items)
            if nodes > TUPLE_NODES + TUPLE_RATIO * position:
                raise _refusal("nested", f"a tuple repeats its parts to {nodes:,} values")
            self.stack.append(_Tuple(tuple(items), nodes))
        elif opcode in POPS:
            items = self._pop_mark() if POPS[opcode] < 0 else self._pop(POPS[opcode])
            if type(self.stack[-1]) is _Container:
                self.stack[-1].length += _nodes(items)
            if opcode.startswith("SET"):
                self._count_copies("a dict", _nodes(items[::2]) - len(items[::2]))
        elif opcode == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif opcode in ("REDUCE", "NEWOBJ"):
            function, arguments = self._pop(2)
            self.stack.append(self._call(function, arguments))
        elif opcode == "BUILD":
            instance, state = stack[-2], stack.pop()
            self._count_copies("an object", _length(state))
            if instance is TENSOR:
                self._check_view("set_", state)
        else:
            return opcode == "PROTO"
        return True

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("the stack is too short")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def _pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _storage(self, identifier: Any) -> Any:
        """Return the storage of a persistent id, which must fit in the file."""
        if type(identifier) is int:  # of a tar of old torch, which is not loaded
            return _Container()
        items = identifier.items if type(identifier) is _Tuple else ()
        if len(items) < 5 or type(items[4]) is not int or type(items[2]) not in (str, bytes, int):
            raise _refusal("storage", "a persistent id is not a storage of torch")
        self.claims[items[2]] = max(items[4], self.claims.get(items[2], 0))
        if items[4] < 0 or sum(self.claims.values()) > self.size:
            evidence = f"claims storages of {sum(self.claims.values()):,} elements"
            raise _refusal("storage", f"{evidence}, and the file holds {self.size:,} bytes")
        # several numbers per byte
        packed = type(items[1]) is _Name and "x" in items[1].path.rpartition(" ")[2]
        return _Storage(items[4] * (4 if packed else 1))

    def _call(self, function: Any, arguments: Any) -> Any:
        """Return a placeholder of the result. Raises FileRefusal if it could be large."""
        if type(function) is not _Name:
            return _Container()  # the loader does not call it
        name = function.path.rpartition(" ")[2]
        if name.startswith(("_rebuild_tensor", "_rebuild_qtensor")):
            self._check_view(name, arguments)
        elif type(arguments) is not _Tuple:
            raise _refusal("call", f"calls {name} with arguments that are no tuple")
        elif name == "_rebuild_from_type_v2":
            self._call(arguments.items[0], arguments.items[2])
        elif name in COPY_FUNCTIONS and not _is_copy(name, arguments.items):
            problem = "which can make more than it is given"
            raise _refusal("call", f"calls {name} with unusual arguments, {problem}")
        elif name.endswith(("Tensor", "edStorage")) and function.path.startswith("torch"):
            if arguments.items:
                raise _refusal("call", f"constructs a {name} by its size or from a list")
        elif not name.startswith(("_rebuild", "Parameter")):
            length = sum(map(_length, arguments.items))
            self._count_copies(name, length)
            return _Bytes(length) if name in COPY_FUNCTIONS else _Container(length)
        return TENSOR

    def _count_copies(self, name: str, length: int) -> None:
        """Bound what all calls copy together, since a value can be copied many times."""
        self.copied += length
        if self.copied > MIN_COPIES + COPY_RATIO * self.size:
            evidence = f"it copies {self.copied:,} values, and the file holds {self.size:,} bytes"
            raise _refusal("call", f"{evidence}; the last into {name}")

    def _check_view(self, name: str, arguments: Any) -> None:
        """Check a tensor's storage, offset, size and stride, before torch resizes the storage."""
        items = arguments.items if type(arguments) is _Tuple else ()
        if len(items) < 4 or type(items[0]) is not _Storage:
            raise _refusal("tensor", f"{name} is not given a storage, offset, size and stride")
        storage, offset, sizes, strides = *items[:2], items[2].items, items[3].items
        elements, last = 1, offset
        for size, stride in zip(sizes, strides, strict=True):
            if min(size, stride) < 0:
                raise _refusal("tensor", f"{name} is given a negative size or stride")
            elements, last = elements * size, last + (size - 1) * stride
        self.viewed += elements
        if elements and not 0 <= offset <= last < storage.elements:
            evidence = f"reaches element {last:,} of a storage of {storage.elements:,}"
            raise _refusal("tensor", f"a tensor {evidence}")
        if self.viewed > VIEW_ELEMENTS + EXPANSION * self.size:
            evidence = f"its tensors have {self.viewed:,} elements"
            raise _refusal("tensor", f"{evidence}, and it holds {self.size:,} bytes")


def _nodes(items: Iterable[Any]) -> int:
    """Count values; those of nested tuples are hashed with them."""
    return sum(item.nodes if type(item) is _Tuple else 1 for item in items)


def _length(value: Any) -> int:
    if type(value) in (str, bytes):
        return len(value)
    return value.length if isinstance(value, _Container) else _nodes([value])


def _is_copy(name: str, items: tuple[Any, ...]) -> bool:
    """Whether it is what pickle writes for bytes: text in latin-1, nothing, or other bytes."""
    if len(items) == 2:
        return type(items[0]) is str and items[1] in LATIN1
    return name != "encode" and (not items or type(items[0]) in (bytes, _Bytes))


def _refusal(rule: str, evidence: str) -> FileRefusal:
    return FileRefusal(f"pickle.{rule}", "", evidence, SAVE_AGAIN)
