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

from tests.core.security.files.archives import archive, array, members, saved

NUMBERS = (0, 1, 0x7F, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


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


@cache
def originals() -> dict[str, tuple[str, bytes]]:
    """The sound files, by the way in which they are changed."""
    tensors = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.arange(3)}
    zipped, safe, npz = saved(_state()), save(tensors, {"format": "pt"}), io.BytesIO()
    np.savez_compressed(npz, x=np.arange(12.0).reshape(3, 4), y=np.array(["a", "bc"]))
    return {
        "zip": ("model.pt", zipped),
        "zip_pickle": ("model.pt", zipped),
        "zip_members": ("model.pt", zipped),
        "safetensors": ("model.safetensors", safe),
        "safetensors_header": ("model.safetensors", safe),
        "legacy": ("model.pth", saved(_state(), _use_new_zipfile_serialization=False)),
        "npz": ("data.npz", npz.getvalue()),
        "npy": ("data.npy", array(np.arange(12.0).reshape(3, 4))),
    }


def _change_once(draw: random.Random, data: bytearray) -> None:
    at, count = draw.randrange(len(data)), draw.choice((1, 2, 4, 8, 16, 64))
    stretch = slice(at, at + count)
    match draw.randrange(7):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:  # a number where there may have been one
            packed = struct.pack("<Q", draw.choice(NUMBERS))[:count]
            data[at : at + len(packed)] = packed
        case 2:
            del data[at:]
        case 3:
            del data[stretch]
        case 4:
            data[at:at] = bytes(data[stretch]) * draw.choice((1, 1, 2, 50))
        case 5:
            data[at:at] = draw.randbytes(count)
        case _:  # a part of another format's file
            _, other = draw.choice(list(originals().values()))
            data[stretch] = other[draw.randrange(len(other)) :][:512]


def change(draw: random.Random, data: bytes) -> bytes:
    """The bytes after one to three changes; they may come to nothing."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if changed:
            _change_once(draw, changed)
    return bytes(changed)


def _rebuilt(draw: random.Random, data: bytes, pickles: bool) -> bytes:
    """The archive whose sums are right again after its pickle, or any member, was changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        parts = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    storages = [parts[f"data/{i}"] for i in range(sum(name.startswith("data/") for name in parts))]
    pickled = parts["data.pkl"]
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
        character = chr(draw.choice((0, 9, 10, 27, 34, 127, 233, 0x2028, 0xFFFD)))
        added = draw.choice((draw.choice(TOKENS), "", text[at : at + count], character))
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
