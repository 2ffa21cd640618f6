"""Hostile files by their kind: other formats that hold code or pickles, and attributes that lie."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tests.security.files.archives import (
    Member,
    archive,
    array,
    arrays,
    members,
    npy,
    torch_zip,
)
from tests.security.files.hostile_calls import mkdir
from tests.security.files.opcodes import (
    build,
    call,
    listing,
    mapping,
    name,
    new,
    storage,
    tensor,
    together,
    value,
    whole,
)
from tests.security.files.sample import METADATA, NUMPY, PICKLE, TORCH, Sample

NUMBERS = struct.pack("<4f", 1, 2, 3, float("nan"))
WEIGHT = tensor("0", 4, (2, 2), (2, 1))
OBJECTS = {"descr": "|O", "fortran_order": False, "shape": (1,)}
ORDERED = call(name("collections", "OrderedDict"), listing(together(value("w"), WEIGHT)))
Bytes = Callable[[str], bytes]  # from the marker's path


def _hostile(marker: str) -> bytes:
    return whole(mkdir(marker))


def _torchscript(marker: str) -> bytes:
    code = b"def forward(self, x):\n    return x\n"
    found = members(_hostile(marker), root="model")
    more = {"code/__torch__.py": code, "constants.pkl": whole(value(())), "code/x.debug_pkl": b""}
    return archive([*found, *(Member(f"model/{key}", data) for key, data in more.items())])


def _objects(marker: str) -> bytes:
    """An npy whose numbers are a pickle."""
    return npy(OBJECTS, _hostile(marker))


def _shadow(body: bytes) -> Bytes:
    """A checkpoint that holds a NaN and an attribute that would hide it from who looks."""
    return lambda _: torch_zip(whole(body), [NUMBERS])


def _attributes(**state: bytes) -> bytes:
    return build(ORDERED, mapping(**state))


def _stateful(rebuilt: str = "_rebuild_from_type_v2") -> bytes:
    """A tensor with attributes of its own, as torch saves one."""
    weight = together(
        storage("0", 4),
        value(0),
        value((2, 2)),
        value((2, 1)),
        value(False),
        call(name("collections", "OrderedDict")),
    )
    state = mapping(numel=value(7), isnan=name("builtins", "set"))
    return mapping(
        w=call(
            name("torch._tensor", rebuilt),
            name("torch._utils", "_rebuild_tensor_v2"),
            name("torch", "Tensor"),
            weight,
            state,
        )
    )


SHADOWS: dict[str, bytes] = {
    "ordered_items": _attributes(items=name("builtins", "set")),
    "tensor_numel": _stateful(),
    "class_as_value": mapping(w=WEIGHT, kind=name("builtins", "set")),
    "class_as_key": b"}" + name("builtins", "set") + value(1) + b"s",
}


# Written by honest programs, and still not data: the refusal has to name the type.
HONEST: dict[str, tuple[bytes, str]] = {
    "module": (new(name("torch.nn.modules.linear", "Linear")), "torch.nn.modules.linear.Linear"),
    "numpy_scalar": (
        call(name("numpy._core.multiarray", "scalar"), value(1), value(b"12345678")),
        "numpy._core.multiarray.scalar",
    ),
    "defaultdict": (call(name("collections", "defaultdict")), "collections.defaultdict"),
    "own_class": (new(name("my_package", "MyModel")), "my_package.MyModel"),
}

FILES: dict[str, tuple[str, Bytes, str]] = {  # file, content, the careless reader it fires in
    "torchscript": ("model.pt", _torchscript, ""),
    "object_array": ("data.npy", _objects, NUMPY),
    "object_record": (
        "data.npy",
        lambda m: npy({**OBJECTS, "descr": [("a", "|O"), ("b", "<f4")]}, _hostile(m)),
        NUMPY,
    ),
    "object_npz": ("data.npz", lambda m: arrays(x=array(np.ones(2)), y=_objects(m)), NUMPY),
    "pickle_in_npz": ("data.npz", lambda m: archive([Member("x.pkl", _hostile(m))]), ""),
    "pickle_npy": ("data.npy", _hostile, NUMPY),
    "expression_in_npy": (
        "data.npy",
        lambda m: npy(f"{{'descr': __import__('os').mkdir({m!r}), 'shape': (1,)}}", b"\0" * 8),
        "",
    ),
    "zip_as_safetensors": ("model.safetensors", lambda m: torch_zip(_hostile(m)), ""),
    "gzip": ("model.pt", lambda m: gzip.compress(_hostile(m)), ""),
    "joblib": ("model.joblib", lambda m: b"\x80\x04" + _hostile(m)[2:], PICKLE),
}


def _file(file: str, made: Bytes, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made(str(marker)))
    return path


def _distributed(folder: Path, marker: Path) -> Path:
    """A checkpoint of torch.distributed: its `.metadata` is a pickle, and read as one."""
    path = folder / "checkpoint"
    path.mkdir()
    (path / ".metadata").write_bytes(_hostile(str(marker)))
    (path / "__0_0.distcp").write_bytes(torch_zip(_hostile(str(marker))))
    return path


def _fifo(folder: Path, marker: Path) -> Path:
    os.mkfifo(folder / "model.pt")
    return folder / "model.pt"


def _link(target: str, folder: Path, marker: Path) -> Path:
    (folder / "hostile.pt").write_bytes(torch_zip(_hostile(str(marker))))
    (folder / "model.pt").symlink_to(target)
    return folder / "model.pt"


def _folder(folder: Path, marker: Path) -> Path:
    (folder / "model.pt").mkdir()
    return folder / "model.pt"


def samples() -> list[Sample]:
    found = [
        Sample(key, "kind", partial(_file, file, made), fires)
        for key, (file, made, fires) in FILES.items()
    ]
    found += [
        Sample(key, "shadow", partial(_file, "model.pt", _shadow(body)))
        for key, body in SHADOWS.items()
    ]
    found += [
        Sample(key, "honest", partial(_file, "model.pt", _shadow(mapping(x=body))), says=says)
        for key, (body, says) in HONEST.items()
    ]
    found.append(Sample("metadata", "distributed", _distributed, METADATA))
    found.append(Sample("fifo", "special", _fifo))
    found.append(Sample("folder", "special", _folder))
    found.append(Sample("link_to_hostile", "special", partial(_link, "hostile.pt"), TORCH))
    for target in ("/dev/zero", "/proc/self/mem", "absent.pt", "model.pt"):
        found.append(Sample(f"link_to_{Path(target).name}", "special", partial(_link, target)))
    return found
