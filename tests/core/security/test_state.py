"""A run's state becomes plain data and back; a file of another kind is an error."""

import dataclasses
import enum
import hashlib
import random
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from runner.core.errors import CheckpointError, SecurityError
from runner.core.security.files.encode import encode
from runner.core.security.files.loader import read_state, read_tensors
from tests.core.security.files.benign import same


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


def test_encode_keeps_the_value_in_plain_types_that_load(tmp_path):
    loaded = round_trip({name: value for name, (value, _) in KEPT.items()}, tmp_path)
    for name, (value, kept) in KEPT.items():
        for plain in (encode(value), loaded[name]):
            assert plain == kept and same(kept, plain), name  # the types too
    shared = [1]  # the same object twice is no loop
    assert encode({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def test_arrays_become_tensors_that_share_nothing_with_them(tmp_path):
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(3, dtype=">i4"),
        np.array(2.5),
        np.zeros((0, 2)),
        np.arange(5, dtype=np.uint32)[::-1],
        np.array([1 + 2j]),
    ]
    encoded, loaded = encode(arrays), round_trip(arrays, tmp_path)
    for array, tensor, read in zip(arrays, encoded, loaded, strict=True):
        before = array.copy()
        assert read.dtype == tensor.dtype and np.array_equal(read.numpy(), before)
        array[...] = 0
        assert np.array_equal(tensor.numpy(), before)


def test_random_states_come_back_and_draw_the_same(tmp_path):
    numpy, legacy, python = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)
    torchs = torch.Generator().manual_seed(1)
    legacy.standard_normal()  # leaves a second one in its cache
    state = round_trip([numpy, legacy, python, torchs], tmp_path)

    def draw():
        noise = torch.rand(3, generator=torchs).tolist()
        return numpy.random(), legacy.standard_normal(3).tolist(), python.random(), noise

    first = draw()
    numpy.bit_generator.state = state[0]
    legacy.set_state(state[1])
    python.setstate(state[2])
    torchs.set_state(state[3])
    assert draw() == first


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
        ({"m": torch.nn.Linear(1, 1)}, r"state\.m is a torch\.nn\.modules\.linear\.Linear"),
        ({"kind": Holder}, r"state\.kind is a builtins\.type"),
        (Progress(1, Holder()), r"state\.best is a"),
        ({"t": np.array([object()])}, r"state\.t is an array of object"),
        ({"l": np.longdouble(1)}, r"state\.l is a numpy\.float128|state\.l is a numpy\.longdouble"),
        ({"g": torch.empty(2, device="meta")}, r"state\.g lies on the meta device"),
        ({"z": torch.nn.UninitializedParameter()}, r"state\.z is a lazy parameter"),
        ({Holder: 1}, r"state has the key <class"),
        ({"x": {Path("3"): 1, "3": 2}}, r"state\.x has two keys"),
        (holding_itself(), r"state\.inner\[0\] contains itself"),
    ],
)
def test_a_value_that_cannot_be_kept_is_refused_by_its_place(value, place):
    with pytest.raises(TypeError, match=place):
        encode(value)


@pytest.mark.parametrize("read", [read_state, read_tensors])
def test_a_file_of_another_kind_is_an_error_in_one_line(tmp_path, read):
    path = tmp_path / "file"
    for content in (b"", b"PK\x03\x04", b"\x80\x02.", bytes(100)):
        path.write_bytes(content)
        with pytest.raises((CheckpointError, SecurityError), match=rf"^{path}: [^\n]*$"):
            read(path, digest(path))
    for place, problem in ((tmp_path / "x", "x: missing"), (tmp_path, "not a file")):
        with pytest.raises(CheckpointError, match=problem):
            read(place, "")


@pytest.mark.parametrize("tied", ["{", "[1]", '{"a": "nowhere"}', '{"a": ["w"]}', '{"w": "v"}'])
def test_tied_names_that_make_no_sense_are_an_error(tmp_path, tied):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(3), "v": torch.zeros(3)}, path, metadata={"tied": tied})
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_tensors(path, digest(path))
