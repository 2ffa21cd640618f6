"""What an unpickler would run is told from numbers without a header, whatever lies around it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runner.security.gate.program import MOST, is_program


class Marking:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("marker",)


OLD = b"cos\nmkdir\n(S'marker'\ntR"
BEFORE = {
    "nothing": b"", "popped": b"N0", "list": b"(lp0\n0", "text": b"S'" + b"a" * 200_000 + b"'\n0",
    "other_end": b"N.", "hexadecimal": b"I0x10\n0", "skipped": b"B\0\0\2\0" + b"a" * 2**17,
}  # fmt: skip
AFTER = {"nothing": b"", "line": b"\n", "zeros": b"\0" * 99, "noise": b"\xff\xfe\xfd"}


@pytest.mark.parametrize("after", AFTER.values(), ids=list(AFTER))
@pytest.mark.parametrize("before", BEFORE.values(), ids=list(BEFORE))
def test_what_imports_is_a_pickle_whatever_is_before_or_after_it(
    before: bytes, after: bytes
) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        live = pickle.dumps({"a": [1, 2.5, "x"], "m": Marking()}, protocol)
        assert is_program(before + live + after), protocol
    assert is_program(before + OLD + b"." + after)
    assert is_program(before + OLD + after)  # it breaks off: the call was made by then


def test_plain_data_are_a_pickle_too() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert is_program(pickle.dumps(list(range(20)), protocol) + b"\n")
    assert is_program(b"N.")  # nothing else is in it


def test_what_is_too_long_to_tell_counts_as_one() -> None:
    assert is_program(b"N0" * MOST + OLD)
    assert is_program(b"V" + b"a" * (1 << 25) + b"\n0" + OLD)


RAW: dict[str, Callable[[np.random.Generator], Any]] = {
    "bytes": lambda draw: draw.integers(0, 256, 300, np.uint8),
    "uint16": lambda draw: draw.integers(0, 50_257, 300, np.uint16),
    "letters": lambda draw: draw.integers(0, 97, 300, np.uint16),
    "common": lambda draw: (draw.zipf(1.3, 300) % 50_257).astype(np.uint16),
    "int32": lambda draw: draw.integers(0, 50_257, 300, np.int32),
    "int64": lambda draw: draw.integers(0, 50_257, 300, np.int64),
    "float32": lambda draw: draw.standard_normal(300).astype(np.float32),
}


@pytest.mark.parametrize("make", RAW.values(), ids=list(RAW))
def test_numbers_without_a_header_are_none(make: Callable[[np.random.Generator], Any]) -> None:
    draw = np.random.default_rng(0)
    assert not [n for n in range(2000) if is_program(make(draw).tobytes())]


@pytest.mark.parametrize(
    "text",
    [b"", b".", b"(.", b"0.", b"N.\xff", b"to be, or not to be.\n", b"c o\nd e\n", b"\x80\x02",
     b"\x80\x09N.", b"\ncos\nmkdir\n(tR.", b"X\xff\xff\xff\x7fab.", b"\x80\x00\x81\x00\x82\x00"],
)  # fmt: skip
def test_what_an_unpickler_gives_up_on_at_once_is_none(text: bytes) -> None:
    assert not is_program(text)
