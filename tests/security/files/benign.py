"""Files in which nothing is wrong, of every format, and what they hold: they must load."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from runner.checkpoint.checkpointer import Checkpointer
from runner.models.mlp import MLP
from tests.security.files.archives import array, saved

Made = Callable[[], tuple[Any, bytes]]
KINDS = "float64 float32 float16 bfloat16 uint8 int8 int16 int32 int64 bool complex64 complex128"


@dataclass(frozen=True)
class Benign:
    """One file that must load, and be what was saved."""

    name: str
    make: Callable[[Path], tuple[Path, Any]]

    def __str__(self) -> str:
        return self.name


def same(one: Any, other: Any) -> bool:
    """Whether two contents are equal to the last bit, types included."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and _numbers(one) == _numbers(other)
    if isinstance(one, np.ndarray):
        alike = isinstance(other, np.ndarray) and one.dtype == other.dtype
        return alike and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        alike = isinstance(other, dict) and one.keys() == other.keys()
        if isinstance(one, OrderedDict):  # safetensors sorts; who asks for an order gets it
            alike = alike and list(one) == list(other)
        return alike and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def _numbers(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _tensors() -> dict[str, Tensor]:
    kinds = {kind: torch.arange(6).to(getattr(torch, kind)) for kind in KINDS.split()}
    odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    return {**kinds, **odd, "deep": torch.zeros(1, 1, 1, 2, 1, 1)}


def _views() -> dict[str, Tensor]:
    whole = torch.arange(24.0).reshape(4, 6)
    last = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "t": whole.t(),
        "strided": whole[:, ::2],
        "last": last,
        "row": whole[1],
        "embedding": tied,
        "head": tied,
    }


PLAIN = {
    "text": "Ä \u2603 \U0001f600",
    "bytes": b"\x00\xff",
    "none": None,
    "array": [bytearray(b"\x00\xff"), bytearray()],
    "numbers": [0, -1, 2**31, -(2**63), 2**200, 0.1, float("inf"), 1 + 2j, True],
    "nested": {"a": [{"b": ({"c": [[], {}, ()]},)}]},
    "set": {1, 2, 3},
    ("tuple", 1): "key",
    3: "number key",
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "long": list(range(3_000)),
    "counted": Counter("abca"),
    # texts that some programs would call; here they are texts
    "hyper_parameters": {
        "_target_": "os.system",
        "_args_": ["true"],
        "_instantiator": "os.system",
        "cmd": "__import__('os')",
        "resolver": "${oc.env:HOME}",
    },
}


def _trained() -> tuple[nn.Module, dict[str, Any]]:
    """A model and the state of an optimizer after one step."""
    model = MLP(in_features=8, classes=3, width=6, depth=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer.state_dict()


def _tensors_file() -> tuple[Any, bytes]:
    content = {k: v for k, v in _tensors().items() if not v.dtype.is_complex}
    return content, save_tensors(content, {"format": "pt", "by": "<b>ä"})


def _npz(packed: bool) -> tuple[Any, bytes]:
    content = {"x": np.arange(12.0).reshape(3, 4), "y": np.array(["a", "bc"]), "z": np.int8(3)}
    out = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(out, **content)
    return {name: np.asarray(found) for name, found in content.items()}, out.getvalue()


def _saved(content: Any, **options: Any) -> tuple[Any, bytes]:
    return content, saved(content, **options)


def _array(content: np.ndarray[Any, Any]) -> tuple[Any, bytes]:
    return content, array(content)


FILES: dict[str, tuple[str, Made]] = {
    "adamw": ("state.pt", lambda: _saved(_trained()[1])),
    "kinds": ("model.pt", lambda: _saved(_tensors())),
    "views": ("model.pt", lambda: _saved(_views())),
    "plain": ("state.pt", lambda: _saved(PLAIN)),
    "legacy": ("model.pth", lambda: _saved(_tensors(), _use_new_zipfile_serialization=False)),
    "safetensors": ("model.safetensors", _tensors_file),
    "npy_big": ("data.npy", lambda: _array(np.arange(5, dtype=">f8"))),
    "npy_fortran": ("data.npy", lambda: _array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))),
    "npy_text": ("data.npy", lambda: _array(np.array(["ab", "cdé"]))),
    "npz": ("data.npz", lambda: _npz(False)),
    "npz_deflated": ("data.npz", lambda: _npz(True)),
}


def _write(file: str, made: Made, folder: Path) -> tuple[Path, Any]:
    content, data = made()
    path = folder / file
    path.write_bytes(data)
    return path, content


def _checkpoint(which: str, folder: Path) -> tuple[Path, Any]:
    """What the runner itself writes, with the state of an optimizer."""
    model, optimizer = _trained()
    state = {"optimizer": optimizer, "progress": {"step": 7, "loss": 0.5}}
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(7, model.state_dict(), state, best=True)
    checkpointer.close()
    path = next(folder.rglob(which))
    return path, dict(model.state_dict()) if path.suffix != ".pt" else {"model": {}, "state": state}


def samples() -> list[Benign]:
    own = ("model.safetensors", "state.pt")
    found = [Benign(key, partial(_write, file, made)) for key, (file, made) in FILES.items()]
    return found + [Benign(f"own_{which}", partial(_checkpoint, which)) for which in own]
