"""Folders of hostile files by the rule that refuses them, and ordinary ones that load.

A hostile one that were read carelessly would make the marker, or use memory or time.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from runner.core.security.checksummed_json import to_checksummed_json
from tests.core.security.files.archives import (
    Member,
    archive,
    array,
    legacy,
    members,
    saved,
    torch_zip,
)
from tests.core.security.files.hostile import GOOD, NUMBERS, SCALARS
from tests.core.security.files.opcodes import (
    build,
    call,
    get,
    mapping,
    name,
    new,
    put,
    storage,
    tensor_arguments,
    together,
    value,
    whole,
)


@dataclass(frozen=True)
class Link:
    """A symbolic link in the folder; the target may name the marker's folder."""

    target: str


@dataclass(frozen=True)
class Variant:
    """Files of one folder, and the rule that refuses it; "" if it loads."""

    family: str
    name: str
    rule: str
    files: dict[str, bytes | Link]

    def write(self, folder: Path) -> None:
        """Write the files to a new folder."""
        folder.mkdir(parents=True)
        for file, content in self.files.items():
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.target)
            else:
                path.write_bytes(content)


WEIGHTS = {"weight": torch.arange(4.0).reshape(2, 2)}
MODEL = save_tensors(WEIGHTS)
TORCH = saved(WEIGHTS)
SHARD = "model-00001-of-00001.safetensors"
Files = dict[str, bytes | Link]

# -- lists of files ------------------------------------------------------------------------------

OUTSIDE = (
    *r"../a.bin sub/../../a.bin .. /etc/passwd //host/a.bin C:\a.bin c:a.bin ..\a.bin".split(),
    *r"\\host\share\a.bin ~/a.bin file:///etc/passwd https://host/a.bin".split(),
    "a\x1b[2J.safetensors",
)
NO_FILES = ("", ".", "sub/x.safetensors", "./x/", 5, None, ["x.safetensors"], "x\0.safetensors")


def _index(weight_map: Any) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def _manifest(listed: str) -> bytes:
    entry = {"sha256": "0" * 64, "size": 1}
    return to_checksummed_json({"format": 1, "files": {listed: entry}})


MALFORMED_INDEXES = {
    "broken": b"[",
    "empty": _index({}),
    "list": _index([SHARD]),
    "absent": b"{}",
    "deep": b'{"weight_map":' + b"[" * 100_000,
}


def _lists() -> list[Variant]:
    made = []
    for listed in (*OUTSIDE, *NO_FILES):
        files: Files = {SHARD: MODEL, "model.safetensors.index.json": _index({"weight": listed})}
        made.append(Variant("index", ascii(listed), "index.path", files))
    for key, data in MALFORMED_INDEXES.items():
        files = {SHARD: MODEL, "model.safetensors.index.json": data}
        made.append(Variant("index", key, "index.malformed", files))
    files = {"pytorch_model-1.bin": TORCH, "pytorch_model.bin.index.json": _index({"w": "/x.bin"})}
    made.append(Variant("index", "torch", "index.path", files))
    files = {"model.safetensors": MODEL, "flax.msgpack.index.json": _index({"w": "../x.msgpack"})}
    made.append(Variant("index", "flax", "index.path", files))
    for listed in OUTSIDE:
        files = {"model.safetensors": MODEL, "manifest.json": _manifest(listed)}
        made.append(Variant("digests", f"manifest {ascii(listed)}", "digests.path", files))
    return made


def _links() -> list[Variant]:
    index = _index({"weight": SHARD})
    outside, loop = Link("../outside/file"), Link("model.safetensors")
    rows: dict[str, Files] = {
        "weights": {"model.safetensors": outside},
        "absolute": {"model.safetensors": Link("/etc/passwd")},
        "loop": {"model.safetensors": loop},
        "shard": {SHARD: outside, "model.safetensors.index.json": index},
        "index": {SHARD: MODEL, "model.safetensors.index.json": outside},
        "config": {"model.safetensors": MODEL, "config.json": outside},
        "manifest": {"model.safetensors": MODEL, "manifest.json": outside},
    }
    return [Variant("link", key, "link.", files) for key, files in rows.items()]


# -- archives ------------------------------------------------------------------------------------


def _tar(**links: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        info = tarfile.TarInfo("model.pt")
        info.size = len(TORCH)
        file.addfile(info, io.BytesIO(TORCH))
        for key, target in links.items():
            link = tarfile.TarInfo(key)
            link.type, link.linkname = tarfile.SYMTYPE, target
            file.addfile(link)
    return out.getvalue()


def _with(file: str, data: bytes, **central: int) -> bytes:
    """torch's archive with a member more."""
    return archive([*members(GOOD, [NUMBERS]), Member(file, data, central=central)])


WRAPPED = {
    "gzip": gzip.compress(TORCH),
    "bzip2": bz2.compress(TORCH),
    "xz": lzma.compress(TORCH),
    "zstd": b"\x28\xb5\x2f\xfd" + TORCH,
    "lz4": b"\x04\x22\x4d\x18" + TORCH,
    "7z": b"7z\xbc\xaf\x27\x1c" + TORCH,
    "rar": b"Rar!\x1a\x07\x01\x00" + TORCH,
    "tar": _tar(),
    "tar with links": _tar(config="/etc/passwd", up="../../secret"),
    "tar.gz": gzip.compress(_tar()),
}
EXTRA = {
    "zip": ("archive/inner.zip", archive(members(GOOD, [NUMBERS]))),
    "torch file": ("archive/inner.pt", TORCH),
    "tar": ("archive/inner.tar", _tar()),
    "gzip": ("archive/inner.gz", gzip.compress(TORCH)),
    "no suffix": ("archive/extra/inner", TORCH),
    "storage folder": ("archive/data/inner.zip", TORCH),
    "hidden": ("archive/.data/inner.zip", TORCH),
    "pickle": ("archive/extra.pkl", GOOD),
    "python": ("archive/code/__torch__.py", b"import os"),
    "second root": ("other/data/1", NUMBERS),
}
LINKS = {"symbolic link": 0o120777, "device": 0o020666, "pipe": 0o010666, "socket": 0o140666}


def _archives() -> list[Variant]:
    rows: dict[str, tuple[str, str, bytes]] = {}
    for key, data in WRAPPED.items():
        rows[key] = ("format.archive", "model.pt", data)
    for key in ("gzip", "tar", "xz"):
        rows[f"{key} bin"] = ("format.archive", "pytorch_model.bin", WRAPPED[key])
        rows[f"{key} safetensors"] = ("format.archive", "model.safetensors", WRAPPED[key])
    for key, (file, data) in EXTRA.items():
        rows[f"member {key}"] = ("zip.members", "model.pt", _with(file, data))
    for key, mode in LINKS.items():
        packed = _with("archive/data/1", b"/etc/passwd", external=mode << 16)
        rows[f"member {key}"] = ("zip.links", "model.pt", packed)
    good = archive(members(GOOD, [NUMBERS]))
    inner = archive([Member("model.pt", TORCH)])
    numbers = Member("x.npy", array(np.ones(2)))
    link = Member("y.npy", b"/etc/passwd", central={"external": 0o120777 << 16})
    rows |= {
        "zip in zip": ("format.unknown", "model.pt", archive([Member("inner.zip", inner)])),
        "zip of a file": ("format.unknown", "model.pt", inner),
        "zip in npz": ("zip.members", "x.npz", archive([numbers, Member("y.zip", inner)])),
        "zip as npy": ("zip.members", "x.npz", archive([numbers, Member("y.npy", inner)])),
        "link in npz": ("zip.links", "x.npz", archive([numbers, link])),
        "after": ("zip.gaps", "model.pt", archive(members(GOOD, [NUMBERS]), after=inner)),
        "before": ("zip.gaps", "model.pt", archive(members(GOOD, [NUMBERS]), before=inner)),
        "twice": ("zip.gaps", "model.pt", good + archive(members(GOOD, [NUMBERS]))),
    }
    return [Variant("archive", key, rule, {file: of}) for key, (rule, file, of) in rows.items()]


# -- configs beside weights ----------------------------------------------------------------------

AUTO_MAP = {"AutoModel": "modeling_own.OwnModel"}
CALL = {"_target_": "os.mkdir", "path": "MARKER"}
CODE: dict[str, tuple[str, Any]] = {  # the file, and its bytes or what is written as JSON
    "target": ("config.json", {"model": CALL}),
    "target in a list": ("config.json", {"layers": [[{"deep": [CALL]}]]}),
    "target in adapter": ("adapter_config.json", {"peft_type": "LORA", "own": CALL}),
    "target elsewhere": ("hparams.json", CALL),
    "auto_map": ("config.json", {"model_type": "own", "auto_map": AUTO_MAP}),
    "auto_map of a hub": ("config.json", {"auto_map": {"AutoModel": "them/code--m.Own"}}),
    "auto_map tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}),
    "auto_map processor": ("preprocessor_config.json", {"auto_map": AUTO_MAP}),
    "auto_map generation": ("generation_config.json", {"auto_map": AUTO_MAP}),
    "auto_map adapter": ("adapter_config.json", {"auto_map": AUTO_MAP}),
    "trust": ("config.json", {"trust_remote_code": True}),
    "trust number": ("config.json", {"trust_remote_code": 1}),
    "trust adapter": ("adapter_config.json", {"trust_remote_code": "true"}),
    "pipelines": ("config.json", {"custom_pipelines": {"own": {"impl": "own.Pipeline"}}}),
    "library": ("adapter_config.json", {"auto_mapping": {"parent_library": "own_package"}}),
    "kernel": ("config.json", {"_attn_implementation": "them/kernel"}),
    "instantiator": ("hparams.json", {"_instantiator": "os.system"}),
    "class_path": ("config.json", {"model": {"class_path": "os.system", "init_args": {}}}),
    "jsonpickle": ("config.json", {"py/object": "os.system"}),
    "jsonpickle call": ("model_config.json", {"x": {"py/reduce": [{"py/function": "os.mkdir"}]}}),
    "escaped": ("config.json", rb'{"\u005ftarget\u005f": "os.mkdir"}'),
    "twice": ("config.json", b'{"_target_": "os.mkdir", "_target_": null}'),
    "utf-16": ("config.json", json.dumps(CALL).encode("utf-16")),
    "yaml target": ("config.yaml", b"model:\n  _target_: os.mkdir\n"),
    "yaml flow": ("config.yml", b"{model: {'_target_': os.mkdir}}"),
    "yaml escaped": ("hparams.yaml", rb'"\x5ftarget\u005f": os.mkdir'),
    "yaml question": ("config.yaml", b"? |-\n  _target_\n: os.mkdir\n"),
    "yaml alias": ("config.yaml", b"a: &a os.mkdir\n_target_: *a\n"),
    "yaml second": ("config.yaml", b"a: 1\n---\nauto_map: {AutoModel: own.M}\n"),
    "yaml class_path": ("config.yaml", b"model:\n  class_path: os.mkdir\n"),
}
TAGS = {
    "apply": b"x: !!python/object/apply:os.mkdir [MARKER]\n",
    "name": b"x: !!python/name:os.mkdir\n",
    "module": b"x: !!python/module:os\n",
    "new": b"!!python/object/new:os.system ['x']\n",
    "verbatim": b"x: !<tag:yaml.org,2002:python/object/apply:os.mkdir> [MARKER]\n",
    "directive": b"%TAG !o! tag:yaml.org,2002:python/object/\n---\nx: !o!apply:os.mkdir [MARKER]\n",
    "percent": b"x: !<tag:yaml.org,2002:pyth%6fn/name:os.mkdir>\n",
    "tuple": b"x: !!python/tuple [1]\n",
    "own": b"x: !Own {a: 1}\n",
    "before an error": b"x: !!python/name:os.mkdir\n---\n}\n",
}
CONFIGS: dict[str, dict[str, tuple[str, Any]]] = {
    "config.code": CODE,
    "config.tag": {f"tag {key}": ("config.yaml", data) for key, data in TAGS.items()},
    "config.malformed": {
        "broken": ("config.json", b"{"),
        "deep": ("adapter_config.json", b"[" * 100_000),
        "not text": ("config.json", b"\xff\xfe\xfd"),
    },
    "config.size": {
        "large config.json": ("config.json", b'{"a": "' + b"x" * (8 << 20) + b'"}'),
        "large config.yaml": ("config.yaml", b"a: '" + b"x" * (1 << 20) + b"'\n"),
    },
}


def _configs() -> list[Variant]:
    made = []
    for rule, rows in CONFIGS.items():
        for key, (file, of) in rows.items():
            data = of if isinstance(of, bytes) else json.dumps(of).encode()
            made.append(Variant("config", key, rule, {"model.safetensors": MODEL, file: data}))
    return made


# -- pickles that grow ---------------------------------------------------------------------------

ENCODE, BYTEARRAY = name("_codecs", "encode"), name("builtins", "bytearray")
TENSOR = name("torch._utils", "_rebuild_tensor_v2")


def _hex(times: int, text: str = "a" * 16) -> bytes:
    piece = call(ENCODE, value(text), value("latin1"))
    for _ in range(times):
        piece = call(ENCODE, piece, value("hex_codec"))
    return piece


def _view(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    parts = [storage("0", 16), *map(value, (offset, size, stride, False)), hooks]
    return call(TENSOR, *parts)


def _claim(key: str, count: int) -> bytes:
    return call(TENSOR, *tensor_arguments(key, count, (1,), (1,)))


def _doubled(levels: int, kind: bytes = pickle.EMPTY_LIST) -> bytes:
    """A container of the same container twice, and so on."""
    body = (kind if kind == pickle.EMPTY_LIST else b"N\x85") + put(0)
    for level in range(levels):
        pair = get(level) + get(level)
        filled = kind + pickle.MARK + pair + pickle.APPENDS
        body += (filled if kind == pickle.EMPTY_LIST else pair + pickle.TUPLE2) + put(level + 1)
    return body


def _last(body: bytes) -> bytes:
    """All that it leaves on the stack, as one list."""
    return pickle.EMPTY_LIST + pickle.MARK + body + pickle.APPENDS


def _from_type(function: bytes, arguments: bytes) -> bytes:
    rebuild = name("torch._tensor", "_rebuild_from_type_v2")
    return call(rebuild, function, name("torch", "Tensor"), arguments, pickle.EMPTY_DICT)


def _quantized(size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    scheme = together(name("torch", "per_tensor_affine"), value(1.0), value(0))
    parts = [storage("0", 16, "QInt8Storage"), *map(value, (0, size, stride))]
    return call(name("torch._utils", "_rebuild_qtensor"), *parts, scheme, value(False), b"}")


def _integers(count: int, after: bytes = b"") -> bytes:
    """Integers that all have one hash, and a piece after each."""
    return b"".join(value(i * (2**61 - 1)) + after for i in range(1, count + 1))


SET, ORDERED = name("builtins", "set"), name("collections", "OrderedDict")
_ORDERED = call(ORDERED, get(0))
MANY_KEYS = mapping(**{f"x{i}": b"N" for i in range(999)})
HUGE = 1 << 40
BIG_LIST = pickle.EMPTY_LIST + value(1 << 33) + pickle.APPEND
SELF_KEYS = pickle.EMPTY_DICT + value(1 << 33) + pickle.NONE + pickle.SETITEM
PICKLES: dict[str, dict[str, bytes]] = {  # by the rule that refuses them
    "pickle.call": {
        "hex": _hex(40),
        "hex once": _hex(1),
        "zlib": call(ENCODE, value("a"), value("zlib_codec")),
        "utf-32": call(ENCODE, value("a" * 99), value("utf-32")),
        "rot13": call(ENCODE, value("a"), value("rot13")),
        "no encoding": call(ENCODE, value("\u2603" * 99)),
        "errors": call(ENCODE, value("\u2603"), value("ascii"), value("namereplace")),
        "list of arguments": BYTEARRAY + BIG_LIST + pickle.REDUCE,
        "keys of arguments": BYTEARRAY + SELF_KEYS + pickle.REDUCE,
        "bytearray": call(BYTEARRAY, value(1 << 33)),
        "small bytearray": call(BYTEARRAY, value(4096)),
        "bytearray of ones": call(BYTEARRAY, pickle.NEWTRUE),
        "new bytearray": new(BYTEARRAY, value(1 << 20)),
        "bytes": call(name("builtins", "bytes"), value(1 << 33)),
        "old bytes": call(name("__builtin__", "bytes"), value(1 << 33)),
        "bytearray of a list": call(BYTEARRAY, BIG_LIST),
        "copies": _last(_hex(0, "a" * 4096) + put(0) + call(BYTEARRAY, get(0)) * 100),
        "nested call": _from_type(BYTEARRAY, together(value(1 << 33))),
        "nested twice": _from_type(
            name("torch._tensor", "_rebuild_from_type_v2"),
            together(BYTEARRAY, name("torch", "Tensor"), together(value(1 << 33)), b"}"),
        ),
        "nested list": _from_type(BYTEARRAY, BIG_LIST),
        "tensor": call(name("torch", "FloatTensor"), value(1 << 33)),
        "tensor of two": call(name("torch", "Tensor"), value(1 << 20), value(1 << 14)),
        "new tensor": new(name("torch", "DoubleTensor"), value(1 << 20)),
        "cuda tensor": new(name("torch.cuda", "FloatTensor"), value(1 << 20)),
        "sparse tensor": new(name("torch.sparse", "FloatTensor"), value(9), value(9)),
        "tensor of a size": call(
            name("torch", "Tensor"), call(name("torch", "Size"), value([1 << 33]))
        ),
        "untyped storage": call(name("torch.storage", "UntypedStorage"), value(HUGE)),
        "typed storage": new(name("torch.storage", "TypedStorage"), value(HUGE)),
        "parameter of a tensor": new(
            name("torch.nn.parameter", "Parameter"), call(name("torch", "Tensor"), value(1 << 33))
        ),
        "sets": _last(_last(b"N" * 4096) + put(0) + call(SET, get(0)) * 50),
        "sets of text": _last(value("a" * 4096) + put(0) + call(SET, get(0)) * 50),
        "ordered": _last(MANY_KEYS + put(0) + _ORDERED * 99),
        "ordered twice": _last(
            call(ORDERED) + put(0) + b"(" + b"K\x01N" * 999 + b"u" + _ORDERED * 99
        ),
        "attributes": _last(MANY_KEYS + put(0) + build(new(ORDERED), get(0)) * 99),
        "a long key": b"}" + together(b"N" * 999) + put(0) + b"Ns(" + (get(0) + b"N") * 99 + b"u",
    },
    "pickle.tensor": {
        "stretched": _view((HUGE,), (0,)),
        "stretched less": _view((1 << 12, 1 << 12), (0, 0)),
        "windows": _view((8, 1 << 20), (1, 0)),
        "many stretched": _last(_view((1 << 18,), (0,)) * 8),
        "past the end": _view((17,), (1,)),
        "long stride": _view((2,), (HUGE,)),
        "offset": _view((1,), (1,), HUGE),
        "negative offset": _view((1,), (1,), -4),
        "negative stride": _view((4,), (-1,), 3),
        "negative size": _view((-4,), (1,)),
        "huge product": _view((HUGE, HUGE), (0, 0)),
        "set_ of a tensor": build(
            new(name("torch", "FloatTensor")),
            together(storage("0", 16), value(0), value((HUGE,)), value((0,))),
        ),
        "set_ in a list": build(new(name("torch", "FloatTensor")), _last(storage("0", 16))),
        "nested rebuild": _from_type(TENSOR, together(*tensor_arguments("0", 16, (HUGE,), (0,)))),
        "quantised": _quantized((1 << 33,), (0,)),
    },
    "pickle.": {"strides missing": _view((2, 2), (1,))},
    "pickle.storage": {
        "storage claim": _claim("0", HUGE),
        "storage claims": _last(b"".join(_claim(f"{i}", 999) for i in range(99))),
        "negative claim": _claim("0", -1),
        "text claim": together(value("storage")) + pickle.BINPERSID,
        "module": together(value("module"), value("x")) + pickle.BINPERSID,
    },
    "pickle.nested": {
        "tuples": _doubled(40, pickle.TUPLE),
        "tuples as a key": b"}" + _doubled(60, pickle.TUPLE) + b"Ns",
    },
    "pickle.keys": {
        "keys of one hash": b"}(" + _integers(20_000, b"N") + b"u",
        "set of one hash": call(SET, _last(_integers(20_000))),
    },
    "content.expanded": {
        "lists": _last(_doubled(40)),
        "short lists": _last(_doubled(20)),
        "wide lists": _last(
            b"]("
            + b"N" * 20
            + b"e"
            + put(0)
            + b"".join(b"](" + get(n) * 20 + b"e" + put(n + 1) for n in range(5))
        ),
    },
    "torch.weights_only": {
        "frames": b"\x95" + struct.pack("<Q", 1 << 40) + value({}),
        "long": b"\x8b" + struct.pack("<i", 1 << 30),
        "negative long": b"\x8b" + struct.pack("<i", -1),
        "extension": b"\x82\x01",
        "extension of 4": b"\x84" + struct.pack("<i", 1 << 30),
        "persistent text": b"Pstorage\n",
        "long text": b"\x8d" + struct.pack("<Q", 1 << 40),
        "long bytes": b"\x8e" + struct.pack("<Q", 1 << 40),
        "bytearray of 8": b"\x96" + struct.pack("<Q", 1 << 40),
        "next buffer": b"\x97",
        "copy of the top": value("a") + pickle.DUP,
    },
    "pickle.malformed": {
        "short stack": pickle.TUPLE3,
        "no mark": pickle.TUPLE,
        "no memo": get(9),
    },
}
LEGACY = ("hex", "bytearray", "tensor", "stretched", "past the end", "storage claim", "tuples")


def _growing() -> list[Variant]:
    made = []
    rows = [(rule, *row) for rule, bodies in PICKLES.items() for row in bodies.items()]
    for rule, key, body in rows:
        stores = [SCALARS] if b"_rebuild_" in body or b"storage" in body else []
        made.append(Variant("pickle", key, rule, {"model.pt": torch_zip(whole(body), stores)}))
        if key in LEGACY:
            made.append(Variant("legacy", key, rule, {"model.pth": legacy(whole(body))}))
            made.append(Variant("bare", key, rule, {"model.pt": whole(body)}))
    return made


def hostile() -> list[Variant]:
    """Each is refused by its rule."""
    return [*_lists(), *_links(), *_archives(), *_configs(), *_growing()]


# -- ordinary files ------------------------------------------------------------------------------

CONFIG = json.dumps({"model_type": "bert", "auto_map": None, "architectures": ["BertModel"]})
ADAPTER = {
    "peft_type": "LORA",
    "auto_mapping": {"parent_library": "transformers.models.llama.modeling_llama"},
    "base_model_name_or_path": "/home/user/llama",
    "trust_remote_code": False,
}


def _ordinary() -> dict[str, Files]:
    tokens = json.dumps({"model": {"vocab": {"_target_": 7, "auto_map": 8}}})
    shards: Files = {
        "model-00001-of-00002.safetensors": save_tensors({"a": torch.ones(2)}),
        "model-00002-of-00002.safetensors": save_tensors({"b": torch.ones(2)}),
    }
    placed = {"a": min(shards), "b": max(shards)}
    weights = {"model.safetensors": save_tensors(WEIGHTS, {"_target_": "os.mkdir"})}
    return {
        "folder": {
            **weights,
            "config.json": CONFIG.encode(),
            "tokenizer.json": tokens.encode(),
            "vocab.json": b'{"_target_": 1, "class_path": 2}',
            "log.json": b'{"loss": 1}\n{"loss": 2}\n',
            "hparams.yaml": b"lr: 1e-3\nauto_map: null\ntrust_remote_code: false\n--- !!set {a}\n",
            "notes.yaml": b"{{ a template }",
            "README.md": b"_target_: no config",
        },
        "shards": {**shards, "model.safetensors.index.json": _index(placed)},
        "shards of torch": {
            "pytorch_model-1.bin": TORCH,
            "pytorch_model.bin.index.json": _index({"weight": "pytorch_model-1.bin"}),
            "search.index.json": b'{"pages": ["../a.html"]}',
        },
        "adapter": {
            "adapter_model.safetensors": MODEL,
            "adapter_config.json": json.dumps(ADAPTER).encode(),
        },
        "link inside": {
            "weights.safetensors": MODEL,
            "model.safetensors": Link("weights.safetensors"),
        },
        "configs alone": {"model.safetensors": MODEL, "conf/model.yaml": b"_target_: own.Model\n"},
    }


def ordinary() -> list[Variant]:
    """Each of them loads, and the scan finds nothing; files of every kind are in `benign`."""
    return [Variant("ordinary", key, "", files) for key, files in _ordinary().items()]
