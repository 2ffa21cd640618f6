"""A pickle read as text, an opcode at a time: what it would make, without making any of it.

A pickle is a program for a small machine with a stack. Here that stack holds marks for what there
would be: numbers, text and tuples as they are, a `Box` for a container, `Name` for something to be
imported, and what `meanings` says that a call of it gives. Nothing is imported or called. Only the
opcodes and the names that torch.save needs for plain data are known; whatever else there is ends
the reading with its name and place.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from runner.security.gate.format import Buffer
from runner.security.gate.marks import Box, Made, Name, Storage
from runner.security.gate.meanings import NAMES, build, call, storage
from runner.security.gate.policy import Bounds, Whose
from runner.security.gate.refused import Refused, shown
from runner.security.gate.wanted import WAY_OUT, NeedsPickle, dotted, named, wanted

_MARK = object()
_SIMPLE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": lambda: Box("list"),
    "EMPTY_DICT": lambda: Box("dict"),
    "EMPTY_SET": lambda: Box("set"),
}
_VALUES = {"BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(
    data: Buffer,
    where: str,
    bounds: Bounds,
    storages: Mapping[str, int] | None,
    whose: Whose = Whose.FOREIGN,
) -> Made:
    """What the one pickle in `data` would make.

    `storages` are the bytes of each storage by its key; None where the pickle itself says how
    many there are. Raises Refused, and NeedsPickle for names and opcodes of other objects.
    """
    reader = _Reader(where, bounds, storages, whose)
    end = _read(io.BytesIO(data), reader)
    if end != len(data):
        raise Refused(
            "pickle.trailing", f"{where} at {end}", f"{len(data) - end:,} bytes after its end"
        )
    return reader.made


def read_next(stream: io.BytesIO, where: str, bounds: Bounds) -> Made:
    """The same for one of several in a row, of which `stream` stands at the first byte."""
    reader = _Reader(where, bounds, None, Whose.FOREIGN)
    stream.seek(_read(stream, reader))
    return reader.made


def _read(stream: io.BytesIO, reader: _Reader) -> int:
    """Where the pickle that the stream stands at ends."""
    start = end = stream.tell()
    try:
        for opcode, argument, position in pickletools.genops(stream):
            reader.step(opcode.name, argument, int(position or 0))
            end = int(position or 0) + 1
    except NeedsPickle as needs:
        stream.seek(start)
        raise named(stream, reader.where, needs) from None
    except (ValueError, IndexError, UnicodeError) as error:
        raise Refused(
            "pickle.malformed", f"{reader.where} at {end}", f"no pickle: {error}"
        ) from None
    return end


def check_raw(data: Buffer, bounds: Bounds, whose: Whose) -> None:
    """A bare pickle: nothing reads it but an unpickler. Always raises NeedsPickle or Refused."""
    names = wanted(io.BytesIO(data))
    asks = (
        f"asks for {shown(names[0][0])}" if names else "asks for no name, yet nothing else reads it"
    )
    raise NeedsPickle(
        "pickle.global" if names else "pickle.raw", f"at {names[0][1]}" if names else "at 0",
        f"a bare pickle, which can run anything: {asks}", WAY_OUT,
    )  # fmt: skip


class _Reader:
    """The machine's stack and memory, with marks on it in place of objects."""

    def __init__(
        self, where: str, bounds: Bounds, storages: Mapping[str, int] | None, whose: Whose
    ) -> None:
        self.where, self.bounds, self.known, self.whose = where, bounds, storages, whose
        self.made = Made()
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._steps = 0
        self._begun = False

    def step(self, name: str, argument: Any, at: int) -> None:
        """Take note of one opcode."""
        self._steps += 1
        if self._steps > 2 * self.bounds.items:
            self._refuse("pickle.items", at, f"has more than {self._steps - 1:,} opcodes")
        if not self._begun:
            self._begin(name, argument, at)
        elif name in _VALUES:
            if name == "BINUNICODE":
                self._count_text(argument, at)
            self._stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            if argument > self._steps:
                self._refuse("pickle.memo", at, f"keeps something as number {argument:,}")
            self._memo[argument] = self._top(at)
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                self._refuse("pickle.malformed", at, f"recalls {argument}, which was never kept")
            self._stack.append(self._memo[argument])
        elif name in _SIMPLE:
            self._stack.append(_SIMPLE[name]())
        elif name == "MARK":
            self._stack.append(_MARK)
        elif name == "TUPLE":
            self._stack.append(self.made.weigh(tuple(self._pop_mark(at))))
        elif name in _TUPLES:
            self._stack.append(self.made.weigh(tuple(self._pop(_TUPLES[name], at))))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            self._fill(name, at)
        elif name == "GLOBAL":
            self._stack.append(self._import(argument, at))
        elif name == "REDUCE":
            function, arguments = self._pop(2, at)
            self._stack.append(self._call(function, arguments, at))
        elif name == "BUILD":
            target, state = self._pop(2, at)
            if problem := build(target, state):
                raise NeedsPickle("pickle.attributes", self._at(at), problem, WAY_OUT)
            self._stack.append(target)
        elif name == "BINPERSID":
            (identity,) = self._pop(1, at)
            self._stack.append(self._storage(identity, at))
        elif name == "SHORT_BINSTRING" and argument.isascii():  # by Python 2
            self._count_text(argument, at)
            self._stack.append(argument)
        elif name == "STOP":
            (self.made.value,) = self._pop(1, at)
            if self._stack:
                self._refuse("pickle.malformed", at, "leaves something behind on its stack")
        else:
            raise NeedsPickle(
                "pickle.opcode", self._at(at), f"the opcode {name} makes other than plain data",
                WAY_OUT,
            )  # fmt: skip

    def _begin(self, name: str, argument: Any, at: int) -> None:
        if name != "PROTO" or argument != 2:
            protocol = argument if name == "PROTO" else "0 or 1"
            raise NeedsPickle(
                "pickle.protocol", self._at(at),
                f"is of protocol {protocol}, and torch's safe reader knows 2",
                "save it again with torch.save and its own pickle_protocol, or as safetensors",
            )  # fmt: skip
        self._begun = True

    def _import(self, argument: str, at: int) -> Any:
        name = dotted(argument)
        if name not in NAMES:
            raise NeedsPickle(
                "pickle.global", self._at(at), f"asks for {shown(name)}, which is no plain data",
                WAY_OUT,
            )  # fmt: skip
        return Name(name)

    def _call(self, function: Any, arguments: Any, at: int) -> Any:
        if type(function) is not Name or type(arguments) is not tuple:
            self._refuse("pickle.call", at, "calls what is no name, or with no tuple")
        try:
            found = call(function.name, arguments, self.made, self.whose)
            self.made.check(self.bounds)
            return found
        except Refused as refused:
            raise self._placed(refused, at) from None

    def _storage(self, identity: Any, at: int) -> Storage:
        try:
            found = storage(identity, self.known)
        except Refused as refused:
            raise self._placed(refused, at) from None
        before = self.made.storages.setdefault(found.key, found)
        if before != found:
            self._refuse("torch.storage", at, f"storage {found.key} has two types or sizes")
        return found

    def _fill(self, name: str, at: int) -> None:
        pairs = name.startswith("SET")
        many = name.endswith("S")
        items = self._pop_mark(at) if many else self._pop(2 if pairs else 1, at)
        target = self._top(at)
        kinds = ("dict", "OrderedDict", "Counter") if pairs else ("list",)
        if type(target) is not Box or target.kind not in kinds or (pairs and len(items) % 2):
            self._refuse("pickle.fill", at, f"{name} on what is no {kinds[0]}")
        if target.fixed:
            self._refuse("pickle.fill", at, f"{name} on what was given away as it was")
        target.count += len(items) // (2 if pairs else 1)
        target.note(items, pairs)
        if pairs:
            self.made.odd += sum(map(self.made.oddness, items[::2]))
            self._check(at)
        else:
            target.odd += sum(map(self.made.oddness, items))

    def _pop(self, count: int, at: int) -> list[Any]:
        found = self._stack[-count:]
        if len(found) < count or any(value is _MARK for value in found):
            self._refuse("pickle.malformed", at, "takes more from its stack than is on it")
        del self._stack[-count:]
        return found

    def _pop_mark(self, at: int) -> list[Any]:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i] is _MARK:
                found = self._stack[i + 1 :]
                del self._stack[i:]
                return found
        self._refuse("pickle.malformed", at, "ends a list that it did not begin")

    def _top(self, at: int) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            self._refuse("pickle.malformed", at, "its stack is empty")
        return self._stack[-1]

    def _count_text(self, text: str, at: int) -> None:
        self.made.text += len(text)
        self._check(at)

    def _check(self, at: int) -> None:
        try:
            self.made.check(self.bounds)
        except Refused as refused:
            raise self._placed(refused, at) from None

    def _at(self, at: int) -> str:
        return f"{self.where} at {at}"

    def _refuse(self, code: str, at: int, evidence: str) -> NoReturn:
        raise Refused(code, self._at(at), evidence)

    def _placed(self, refused: Refused, at: int) -> Refused:
        found = refused.reason
        kind = NeedsPickle if found.code in ("pickle.call", "pickle.arguments") else Refused
        return kind(found.code, self._at(at), found.evidence, found.way_out or WAY_OUT)
