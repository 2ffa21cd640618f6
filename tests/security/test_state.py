import dataclasses
import enum
import hashlib
import random
from collections import OrderedDict, deque, namedtuple
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from runner.errors import CheckpointError, SecurityError
from runner.security.files import loader
from runner.security.files.encode import encode
from runner.security.files.loader import read_state, read_tensors
from tests.security.files.benign import same


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Progress:
    step: int
    best: np.float64


Point = namedtuple("Point", "x y")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def round_trip(value, folder):
    torch.save(encode(value), folder / "state.pt")
    return read_state(folder / "state.pt", digest(folder / "state.pt"))


KEPT = {
    "plain": ([None, True, 2**200, 1 + 2j, b"\x00\xff"], [None, True, 2**200, 1 + 2j, b"\x00\xff"]),
    "numpy": ([np.float64(0.1), np.int64(7), np.bool_(True)], [0.1, 7, True]),
    "subclasses": (
        [bytearray(b"ab"), Path("a/b"), Color.RED, Level.HIGH],
        [b"ab", "a/b", "red", 3],
    ),
    "lists": (deque([1, (2, [3])], maxlen=5), [1, (2, [3])]),
    "mappings": (OrderedDict(b=1, a=MappingProxyType({"a": 1})), {"b": 1, "a": {"a": 1}}),
    "omegaconf": (OmegaConf.create({"a": {"b": 1}}), {"a": {"b": 1}}),
    "sets": ([{1, "a"}, frozenset([1])], [{1, "a"}, {1}]),
    "records": ([Point(1, 2), Progress(3, np.float64(0.5))], [(1, 2), {"step": 3, "best": 0.5}]),
    "keys": (
        {Level.HIGH: 1, Path("p"): 2, np.int64(5): 3, (1, Color.RED): 4},
        {3: 1, "p": 2, 5: 3, (1, "red"): 4},
    ),
    "of torch": ([torch.device("cpu"), torch.Size([1, 2])], [torch.device("cpu"), (1, 2)]),
}


@pytest.mark.parametrize(("value", "kept"), KEPT.values(), ids=KEPT)
def test_encode_keeps_the_value_in_plain_types_that_load(value, kept, tmp_path):
    encoded = encode(value)
    assert encoded == kept and same(kept, encoded)  # the types too
    loaded = round_trip(value, tmp_path)
    assert loaded == kept and same(kept, loaded)


def test_arrays_become_tensors_that_share_nothing_with_them(tmp_path):
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(3, dtype=">i4"),
        np.array(2.5),
        np.zeros((0, 2)),
        np.arange(5, dtype=np.uint32)[::-1],
        np.array([True, False]),
        np.array([1 + 2j]),
    ]
    encoded, loaded = encode(arrays), round_trip(arrays, tmp_path)
    for array, tensor, read in zip(arrays, encoded, loaded, strict=True):
        before = array.copy()
        assert read.dtype == tensor.dtype and np.array_equal(read.numpy(), before)
        array[...] = 0
        assert np.array_equal(tensor.numpy(), before)


def test_random_states_come_back_and_draw_the_same(tmp_path):
    def generators(seed):
        return {
            "numpy": np.random.default_rng(seed),
            "legacy": np.random.RandomState(seed),
            "twister": np.random.Generator(np.random.MT19937(seed)),
            "python": random.Random(seed),
            "torch": torch.Generator().manual_seed(seed),
        }

    first, second = generators(1), generators(2)
    first["legacy"].standard_normal()  # leaves a second one in its cache
    state = round_trip(first, tmp_path)
    second["numpy"].bit_generator.state = state["numpy"]
    second["legacy"].set_state(state["legacy"])
    second["twister"].bit_generator.state = state["twister"]
    second["python"].setstate(state["python"])
    second["torch"].set_state(state["torch"])
    for name in ("numpy", "twister", "python"):
        assert first[name].random() == second[name].random()
    normals = [one["legacy"].standard_normal(3).tolist() for one in (first, second)]
    assert normals[0] == normals[1]
    assert torch.equal(*(torch.rand(3, generator=one["torch"]) for one in (first, second)))


class Holder:
    pass


def holding_itself():
    loop = {"inner": []}
    loop["inner"].append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0, {"f b": len}]}, r"state\.a\[1\]\['f b'\] is a builtins\.builtin_function"),
        ((1, Holder()), r"state\[1\] is a .*\.Holder"),
        ({"when": datetime(2020, 1, 1)}, r"state\.when is a datetime\.datetime"),
        ({"m": torch.nn.Linear(1, 1)}, r"state\.m is a torch\.nn\.modules\.linear\.Linear"),
        ({"kind": Holder}, r"state\.kind is a builtins\.type"),
        (Progress(1, Holder()), r"state\.best is a"),
        ({"t": np.array([object()])}, r"state\.t is an array of object"),
        ({"l": np.longdouble(1)}, r"state\.l is a numpy\.float128|state\.l is a numpy\.longdouble"),
        ({"d": np.datetime64("2020-01-01")}, r"state\.d is a datetime\.date"),
        ({"g": torch.empty(2, device="meta")}, r"state\.g lies on the meta device"),
        ({"z": torch.nn.UninitializedParameter()}, r"state\.z is a lazy parameter"),
        ({Holder: 1}, r"state has the key <class"),
        ({"x": {Path("3"): 1, "3": 2}}, r"state\.x has two keys"),
        (holding_itself(), r"state\.inner\[0\] holds itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(value, place):
    with pytest.raises(TypeError, match=place):
        encode(value)


def test_the_same_object_twice_is_no_loop():
    shared = [1]
    assert encode({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def test_each_tensor_goes_through_the_function_given_with_its_place():
    seen = []
    value = {"a": [torch.nn.Parameter(torch.ones(1))], 3: np.ones(2)}
    encode(value, "root", lambda place, tensor: seen.append((place, tensor.requires_grad)))
    assert seen == [("root.a[0]", False), ("root[3]", False)]


@pytest.mark.parametrize("read", [read_state, read_tensors])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02.", bytes(100), b"\xff" * 64])
def test_a_file_of_another_kind_is_an_error_in_one_line(tmp_path, read, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, SecurityError)) as caught:
        read(path, digest(path))
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert len(str(caught.value)) > len(f"{path}: not a state file: ")


def test_a_file_that_is_swapped_after_the_digest_is_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(3)}, path)
    good = digest(path)
    real = loader.examine

    def swap(*given, **named):
        save_file({"w": torch.zeros(3)}, path)
        return real(*given, **named)

    monkeypatch.setattr(loader, "examine", swap)
    assert read_tensors(path, good)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("tied", ["{", "[1]", '{"a": "nowhere"}', '{"a": ["w"]}', "3"])
def test_tied_names_that_make_no_sense_are_an_error(tmp_path, tied):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(3)}, path, metadata={"tied": tied})
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_tensors(path, digest(path))


def test_a_tied_name_takes_no_tensors_place(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"good": torch.ones(2), "evil": torch.zeros(2)}
    save_file(tensors, path, {"tied": '{"good": "evil"}'})
    with pytest.raises(CheckpointError, match="'good' is a tensor"):
        read_tensors(path, digest(path))


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="x: missing"):
        read_state(tmp_path / "x", "")
    with pytest.raises(CheckpointError, match="not a file"):
        read_tensors(tmp_path, "")
