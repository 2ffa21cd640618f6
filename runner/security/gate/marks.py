"""What stands on the stack of a pickle's machine while it is only read: marks, and no objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.security.gate.policy import Bounds
from runner.security.gate.refused import Refused

ODD = 10_000  # keys that are not found at once: a few are honest
MODULUS = (1 << 61) - 1  # of the hash of numbers


class Name(NamedTuple):
    """Something that would be imported."""

    name: str


class Storage(NamedTuple):
    """Bytes that a tensor lies in."""

    key: str
    size: int  # bytes
    item: int  # bytes of an element; 1 for one without a type


class Bytes(NamedTuple):
    """Bytes that there would be."""

    size: int


class Tensor(NamedTuple):
    """A tensor that would be made."""

    storage: Storage | None


@dataclass(eq=False)
class Box:
    """A container that would be made."""

    kind: str
    count: int = 0
    names: list[Any] = field(default_factory=list)  # its first keys
    values: list[Any] = field(default_factory=list)  # the first of what is in it
    odd: int = 0  # of what is in a list: how many would be slow to find in a set
    fixed: bool = False  # it was looked at, and may not change any more

    def note(self, items: list[Any], pairs: bool) -> None:
        """Remember the first few, which is all that some checks need."""
        if pairs and len(self.names) < 4:
            self.names += items[:8:2]
            self.values += items[1:8:2]
        elif not pairs:
            self.values += [item for item in items if type(item) is str]


@dataclass
class Made:
    """What came of a pickle, all in all."""

    value: Any = None
    storages: dict[str, Storage] = field(default_factory=dict)
    bytes: int = 0  # that all the tensors would take if none shared anything
    views: set[Any] = field(default_factory=set)
    items: int = 0  # of containers that calls fill
    text: int = 0  # characters
    odd: int = 0  # keys that are slow to find
    weights: dict[int, tuple[Any, int]] = field(default_factory=dict)  # by id, which it keeps

    def weigh(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same, once it is known how long it takes to hash."""
        nested = [item for item in row if type(item) is tuple]
        if nested:
            weight = 1 + len(row) + sum(map(self.oddness, nested))
            self.weights[id(row)] = row, min(weight, ODD + 1)
        return row

    def oddness(self, key: Any) -> int:
        """How much work it is to find as a key, where an author chooses it to be: 0 for most.

        Text is safe from that, since Python hashes it with a secret; whole numbers are their own
        hash while they are small. A tuple of tuples of tuples takes few bytes, and ages to hash.
        """
        kind = type(key)
        if kind is str:
            return 0
        if kind is int:
            return int(abs(key) >= MODULUS)
        if kind is tuple:
            return self.weights[id(key)][1] if id(key) in self.weights else 1 + len(key)
        return int(kind is complex or kind is Box)

    def check(self, bounds: Bounds) -> None:
        """Raises Refused, without a place, once it is too much."""
        if self.text > bounds.text:
            raise Refused("pickle.text", "", f"holds more than {bounds.text:,} characters")
        if self.items > bounds.items:
            raise Refused("pickle.items", "", f"holds more than {bounds.items:,} values")
        if self.odd > ODD:
            raise Refused("pickle.keys", "", f"has more than {ODD:,} keys that are slow to find")
