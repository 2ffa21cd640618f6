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
from runner.models.cnn import CNN
from runner.models.gpt import GPT
from runner.models.mlp import MLP
from tests.security.files.archives import archive, array, arrays, members, saved
from tests.security.files.hostile_archives import good
from tests.security.files.opcodes import value, whole

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


def _saved(content: Any, **options: Any) -> tuple[Any, bytes]:
    return content, saved(content, **options)


def _tensors() -> dict[str, Tensor]:
    kinds = {kind: torch.arange(6).to(getattr(torch, kind)) for kind in KINDS.split()}
    return {
        **kinds,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "deep": torch.zeros(1, 1, 1, 2, 1, 1),
    }


def _views() -> dict[str, Tensor]:
    whole_one = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": whole_one.t(),
        "strided": whole_one[:, ::2],
        "last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "row": whole_one[1],
    }


def _tied() -> dict[str, Tensor]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {"embedding.weight": weight, "head.weight": weight}


def _plain() -> dict[str, Any]:
    return {
        "text": "Ä \u2603 \U0001f600",
        "bytes": b"\x00\xff",
        "array": [bytearray(b"\x00\xff"), bytearray()],
        "none": None,
        "numbers": [0, -1, 2**31, -(2**63), 2**200, 0.1, float("inf"), 1 + 2j, True],
        "nested": {"a": [{"b": ({"c": [[], {}, ()]},)}]},
        "set": {1, 2, 3},
        ("tuple", 1): "key",
        3: "number key",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "long": list(range(3_000)),
    }


def _hyper() -> dict[str, Any]:
    """Texts that some programs would call; here they are texts."""
    return {
        "state_dict": {"w": torch.ones(2)},
        "hyper_parameters": {
            "_target_": "os.system",
            "_args_": ["true"],
            "_instantiator": "os.system",
            "class_path": "subprocess.Popen",
            "cmd": "__import__('os')",
            "resolver": "${oc.env:HOME}",
        },
    }


def _small(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return MLP(in_features=8, classes=3, width=6, depth=2, dropout=0.0)
    if kind == "cnn":
        return CNN(in_channels=1, image_size=8, classes=3, width=4, stages=2, blocks=1)
    return GPT(vocab=11, sequence=8, width=8, depth=2, heads=2, dropout=0.0)


def _trained(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model and the state of an optimizer after one step."""
    model = _small("mlp")
    optimizer = {
        "adamw": partial(torch.optim.AdamW, amsgrad=True),
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }[kind](model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer.state_dict()


def _scheduled() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return {"schedule": schedule.state_dict(), "counted": Counter("abca")}


def _ordered() -> OrderedDict[str, Tensor]:
    return OrderedDict((name, torch.full((2,), float(i))) for i, name in enumerate("zyx"))


def _tensors_file(metadata: dict[str, str] | None = None) -> tuple[Any, bytes]:
    content = {k: v for k, v in _tensors().items() if not v.dtype.is_complex}
    return content, save_tensors(content, metadata)


def _array(content: np.ndarray[Any, Any]) -> tuple[Any, bytes]:
    return content, array(content)


def _npz(packed: bool) -> tuple[Any, bytes]:
    content = {"x": np.arange(12.0).reshape(3, 4), "y": np.array(["a", "bc"]), "z": np.int8(3)}
    out = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(out, **content)
    return {name: np.asarray(found) for name, found in content.items()}, out.getvalue()


def _by_hand() -> tuple[Any, bytes]:
    return {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, archive(good())


FILES: dict[str, tuple[str, Made]] = {
    "mlp": ("model.pt", lambda: _saved(_small("mlp").state_dict())),
    "cnn": ("model.pt", lambda: _saved(_small("cnn").state_dict())),
    "gpt": ("model.bin", lambda: _saved(_small("gpt").state_dict())),
    "parameters": ("model.pt", lambda: _saved(dict(_small("mlp").named_parameters()))),
    "adamw": ("state.pt", lambda: _saved(_trained("adamw")[1])),
    "sgd": ("state.pt", lambda: _saved(_trained("sgd")[1])),
    "adagrad": ("state.pt", lambda: _saved(_trained("adagrad")[1])),
    "rmsprop": ("state.ckpt", lambda: _saved(_trained("rmsprop")[1])),
    "schedule": ("state.pt", lambda: _saved(_scheduled())),
    "kinds": ("model.pt", lambda: _saved(_tensors())),
    "views": ("model.pt", lambda: _saved(_views())),
    "tied": ("model.pt", lambda: _saved(_tied())),
    "plain": ("state.pt", lambda: _saved(_plain())),
    "hyper_parameters": ("model.ckpt", lambda: _saved(_hyper())),
    "ordered": ("model.pth", lambda: _saved(_ordered())),
    "one_tensor": ("weight.pt", lambda: _saved(torch.arange(5))),
    "no_tensor": ("state.pt", lambda: _saved({"epoch": 3, "seed": None})),
    "empty_dict": ("state.pt", lambda: _saved({})),
    "random_state": ("state.pt", lambda: _saved({"rng": torch.get_rng_state()})),
    "large_list": ("state.pt", lambda: _saved([torch.ones(1)] * 500)),
    "by_hand": ("model.pt", _by_hand),
    "legacy": ("model.pth", lambda: _saved(_tensors(), _use_new_zipfile_serialization=False)),
    "legacy_tied": ("model.pth", lambda: _saved(_tied(), _use_new_zipfile_serialization=False)),
    "legacy_plain": (
        "model.pth",
        lambda: _saved({"a": [1, {"b": "c"}]}, _use_new_zipfile_serialization=False),
    ),
    "safetensors": ("model.safetensors", _tensors_file),
    "metadata": ("model.safetensors", lambda: _tensors_file({"format": "pt", "by": "<b>ä"})),
    "gpt_safetensors": (
        "model.safetensors",
        lambda: (
            content := {k: v.clone() for k, v in _small("gpt").state_dict().items()},
            save_tensors(content),
        ),
    ),
    "no_tensors": ("model.safetensors", lambda: ({}, save_tensors({}))),
    "npy": ("data.npy", lambda: _array(np.arange(12, dtype="<i2").reshape(3, 4))),
    "npy_big": ("data.npy", lambda: _array(np.arange(5, dtype=">f8"))),
    "npy_fortran": ("data.npy", lambda: _array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))),
    "npy_text": ("data.npy", lambda: _array(np.array(["ab", "cdé"]))),
    "npy_empty": ("data.npy", lambda: _array(np.empty((0, 4), "f4"))),
    "npy_scalar": ("data.npy", lambda: _array(np.array(3.5))),
    "npy_bool": ("data.npy", lambda: _array(np.array([True, False]))),
    "npz": ("data.npz", lambda: _npz(False)),
    "npz_deflated": ("data.npz", lambda: _npz(True)),
    "npz_by_hand": ("data.npz", lambda: ({"a": np.ones(2)}, arrays(a=array(np.ones(2))))),
    "numbers_alone": ("state.pt", lambda: ({"a": 1}, archive(members(whole(value({"a": 1})))))),
}


def _write(file: str, made: Made, folder: Path) -> tuple[Path, Any]:
    content, data = made()
    path = folder / file
    path.write_bytes(data)
    return path, content


def _checkpoint(which: str, folder: Path) -> tuple[Path, Any]:
    """What the runner itself writes, with the tied weights and the state of an optimizer."""
    model, optimizer = _trained("adamw")
    state = {"optimizer": optimizer, "progress": {"step": 7, "loss": 0.5}}
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(7, model.state_dict(), state, best=True)
    checkpointer.close()
    path = next(folder.rglob(which))
    if which == "model.safetensors":
        return path, dict(model.state_dict())
    return path, {"model": {}, "state": state}


def samples() -> list[Benign]:
    found = [Benign(key, partial(_write, file, made)) for key, (file, made) in FILES.items()]
    found += [
        Benign(f"own_{which}", partial(_checkpoint, which))
        for which in ("model.safetensors", "state.pt")
    ]
    return found
