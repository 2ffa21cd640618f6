"""Files in which nothing is wrong, of every format, and their content: they must load."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from runner.core.models.mlp import MLP
from tests.core.security.files.archives import array, saved

KINDS = "float64 float32 float16 bfloat16 uint8 int8 int16 int32 int64 bool complex64 complex128"


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
    """Of every type, and views of one storage."""
    whole, tied = torch.arange(24.0).reshape(4, 6), torch.arange(12.0).reshape(3, 4)
    return {
        **{kind: torch.arange(6).to(getattr(torch, kind)) for kind in KINDS.split()},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "t": whole.t(),
        "strided": whole[:, ::2],
        "expanded": torch.ones(3, 1).expand(3, 8),
        "row": whole[1],
        "last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "embedding": tied,
        "head": tied,
    }


PLAIN = {
    "text": "Ä \u2603 \U0001f600",
    "bytes": b"\x00\xff",
    "array": [bytearray(b"\x00\xff"), bytearray()],
    "numbers": [0, -1, 2**31, -(2**63), 2**200, 0.1, float("inf"), 1 + 2j, True, None],
    "nested": {"a": [{"b": ({"c": [[], {}, ()]},)}]},
    "set": {1, 2, 3},
    "sets": [{"a", "b"}, set()],
    "shared": [bytes(64)] * 100,
    "steps": [{"loss": 0.5, "step": step} for step in range(500)],
    "keys": {1 << 40: (1, 2), (1, ("a", 2.5)): None},
    ("tuple", 1): "key",
    3: "number key",
    "of torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
    "long": list(range(3_000)),
    "counted": Counter("abca"),
    # texts that some programs would call; here they are texts
    "hyper_parameters": {"_target_": "os.system", "cmd": "__import__('os')", "x": "${oc.env:HOME}"},
}


def _trained() -> dict[str, Any]:
    """The state of an optimizer after one step."""
    model = MLP(in_features=8, classes=3, width=6, depth=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def _npz(save: Callable[..., None]) -> tuple[Any, bytes]:
    content = {"x": np.arange(12.0).reshape(3, 4), "y": np.array(["a", "bc"]), "z": np.array(3)}
    out = io.BytesIO()
    save(out, **content)
    return content, out.getvalue()


@cache
def _files() -> dict[str, tuple[str, Any, bytes]]:
    """File name, content and bytes, by the name of the sample."""
    tensors, old = _tensors(), {"_use_new_zipfile_serialization": False}
    own = {k: v.clone() for k, v in tensors.items() if not v.dtype.is_complex}
    own = {k: v.contiguous() for k, v in own.items()}
    trained = _trained()
    arrays = {
        "big": np.arange(5, dtype=">f8"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "text": np.array(["ab", "cdé"]),
    }
    return {
        "adamw": ("state.pt", trained, saved(trained)),
        "tensors": ("model.pt", tensors, saved(tensors)),
        "plain": ("state.pt", PLAIN, saved(PLAIN)),
        "legacy": ("model.pth", tensors, saved(tensors, **old)),
        "safetensors": ("model.safetensors", own, save_tensors(own, {"by": "<b>ä"})),
        "npz": ("data.npz", *_npz(np.savez)),
        "npz_deflated": ("data.npz", *_npz(np.savez_compressed)),
        **{f"npy_{key}": ("data.npy", x, array(x)) for key, x in arrays.items()},
    }


NAMES = (
    "adamw tensors plain legacy safetensors npz npz_deflated npy_big npy_fortran npy_text".split()
)


def write(name: str, folder: Path) -> tuple[Path, Any]:
    """The file of that name, and its content."""
    file, content, data = _files()[name]
    (folder / file).write_bytes(data)
    return folder / file, content
