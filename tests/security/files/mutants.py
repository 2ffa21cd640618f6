"""Files and configs that were changed at random; the same ones for the same seed and number."""

from __future__ import annotations

import io
import random
import re
import struct
import zipfile
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from safetensors.torch import save

from tests.security.files.archives import archive, members, saved

INTERESTING = (0, 1, 0x7F, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


@dataclass(frozen=True)
class Mutant:
    """A changed file, and what it was made from."""

    name: str  # of the file
    data: bytes
    original: bytes


def _state() -> dict[str, object]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {"weight": weight, "bias": torch.zeros(3, dtype=torch.bfloat16), "tied": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "progress": {"step": 7, "text": "Ä", "bytes": b"\x00\xff", "range": (1, 2), "none": None},
    }


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.arange(12.0).reshape(3, 4), y=np.array(["a", "bc"]))
    return out.getvalue()


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(12.0).reshape(3, 4))
    return out.getvalue()


@cache
def originals() -> dict[str, tuple[str, bytes]]:
    """The sound files, by the way in which they are changed."""
    tensors = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.arange(3)}
    zipped, safe = saved(_state()), save(tensors, {"format": "pt"})
    return {
        "zip": ("model.pt", zipped),
        "zip_pickle": ("model.pt", zipped),
        "zip_members": ("model.pt", zipped),
        "safetensors": ("model.safetensors", safe),
        "safetensors_header": ("model.safetensors", safe),
        "legacy": ("model.pth", saved(_state(), _use_new_zipfile_serialization=False)),
        "npz": ("data.npz", _npz()),
        "npy": ("data.npy", _npy()),
    }


def _stretch(draw: random.Random, data: bytearray, *counts: int) -> slice:
    at = draw.randrange(len(data))
    return slice(at, at + draw.choice(counts))


def _flip(draw: random.Random, data: bytearray) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _number(draw: random.Random, data: bytearray) -> None:
    """A number where there may have been one."""
    place = _stretch(draw, data, 1, 2, 4, 8)
    data[place] = struct.pack("<Q", draw.choice(INTERESTING))[: place.stop - place.start]


def _cut(draw: random.Random, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def _remove(draw: random.Random, data: bytearray) -> None:
    del data[_stretch(draw, data, 1, 2, 4, 8, 16, 64)]


def _repeat(draw: random.Random, data: bytearray) -> None:
    place = _stretch(draw, data, 1, 2, 4, 16, 64, 256)
    data[place.start : place.start] = bytes(data[place]) * draw.choice((1, 1, 2, 50))


def _insert(draw: random.Random, data: bytearray) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.randbytes(draw.choice((1, 2, 4, 16)))


def _swap(draw: random.Random, data: bytearray) -> None:
    """Two stretches change places."""
    count = draw.choice((1, 2, 4, 16))
    one, other = _stretch(draw, data, count), _stretch(draw, data, count)
    data[one], data[other] = data[other], data[one]


def _splice(draw: random.Random, data: bytearray) -> None:
    """A stretch of another format's file."""
    _, other = draw.choice(list(originals().values()))
    data[_stretch(draw, data, 4, 16, 64, 512)] = other[draw.randrange(len(other)) :][:512]


CHANGES = (_flip, _number, _cut, _remove, _repeat, _insert, _swap, _splice)


def change(draw: random.Random, data: bytes) -> bytes:
    """The bytes after one to three changes; they may come to nothing."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if changed:
            draw.choice(CHANGES)(draw, changed)
    return bytes(changed)


def _rebuilt(draw: random.Random, data: bytes, pickles: bool) -> bytes:
    """The archive whose sums are right again after its pickle, or any member, was changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        held = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    storages = [held[f"data/{i}"] for i in range(sum(name.startswith("data/") for name in held))]
    pickled = held["data.pkl"]
    chosen = 0 if pickles else draw.randrange(len(storages) + 1)
    if chosen:
        storages[chosen - 1] = change(draw, storages[chosen - 1])
    else:
        pickled = change(draw, pickled)
    return archive(members(pickled, storages))


def _header(draw: random.Random, data: bytes) -> bytes:
    """The safetensors file whose table was changed, and its length is right again."""
    size = int.from_bytes(data[:8], "little")
    text = change(draw, data[8 : 8 + size])
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def mutant(seed: int, number: int) -> Mutant:
    """The changed file of that number."""
    draw = random.Random(f"{seed}:{number}")  # noqa: S311
    kinds = originals()
    kind = list(kinds)[number % len(kinds)]
    name, original = kinds[kind]
    if kind.startswith("zip_"):
        data = _rebuilt(draw, original, kind == "zip_pickle")
    elif kind == "safetensors_header":
        data = _header(draw, original)
    else:
        data = change(draw, original)
    return Mutant(name, data, original)


def mutated_text(draw: random.Random, text: str) -> str:
    """Text after a few changes of its words, which it mostly survives, or of its characters."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        words = list(WORD.finditer(text))
        if words and draw.random() < 0.6:
            word = draw.choice(words)
            other = draw.choice((*WORDS, draw.choice(words)[0]))
            text = text[: word.start()] + other + text[word.end() :]
            continue
        at, count = draw.randrange(len(text) + 1), draw.choice((1, 2, 5, 20))
        odd = chr(draw.choice((0, 9, 10, 27, 34, 127, 233, 0x2028, 0xFFFD)))
        added = draw.choice((draw.choice(TOKENS), "", text[at : at + count], odd))
        text = text[:at] + added + text[at if added else at + count :]
    return text


WORD = re.compile(r"[\w.]+")
WORDS = """
evil_pkg.Payload os.mkdir torch.nn.Linear torch.load builtins.open my_package _target_ _args_
_partial_ hydra model optimizer security strict off null true -1 1e999 nan 99999999999999999999
${name} ${oc.env:HOME} ${oc.env:SECRET,x} outputs .. /ran options arguments _global_ _self_
""".split()
TOKENS = [
    *"${ } ${oc.env:HOME} ${.} ${..x} _target_ _args_ *a [ ] { : , = + ++ ~ @ / ../".split(),
    *"' \" \\ # null ??? hydra hydra/launcher 1e999 -1 choice(a,b) glob(*) security=off".split(),
    *("_target_: evil_pkg.Payload\n", "_partial_: true", "&a ", "<<: ", "- ", "\n", "  ", "\t"),
    *("!!python/object:evil_pkg.Payload ", "defaults:\n  - ", "override "),
]
