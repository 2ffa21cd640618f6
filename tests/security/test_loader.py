"""Files come in whole, plain, under any name; and a pickle by its digest alone."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.checkpointer import Checkpointer
from runner.errors import CheckpointError, SecurityError
from runner.security.config import SecurityLevel
from runner.security.files.file_bytes import FileBytes, hash_file
from runner.security.files.formats import is_loadable
from runner.security.files.loader import Opened, open_file
from runner.security.files.policy import FileLimits, Policy
from runner.security.files.sandbox import Sandbox
from runner.security.files.state import read_arrays
from runner.security.trust import Severity, Trust
from tests.security.files.archives import Member, archive, saved
from tests.security.files.benign import same
from tests.security.planted import Mark

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:.*quantize:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
    "ignore:The PyTorch API of nested:UserWarning",
)
STRICT, OFF = SecurityLevel.strict, SecurityLevel.off


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as opened:
        yield opened


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned(path: Path, level: SecurityLevel = SecurityLevel.standard) -> Policy:
    return Policy(level, pinned=(digest(path),))


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(2), "x": Mark(tmp_path / "marker")}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


# -- pickles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", SecurityLevel, ids=lambda level: level.name)
def test_a_pickle_is_refused_at_every_level_by_torchs_loader_and_strict_has_no_way_out(
    pickled: Path, level: SecurityLevel
) -> None:
    with pytest.raises(SecurityError, match=r"weights_only loader refuses it: .*mkdir") as caught:
        open_file(pickled, pinned(pickled, level))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3
    way_out = f"security.allow_pickle=[{digest(pickled)}]"
    assert (way_out in str(caught.value)) is (level is not STRICT)
    assert not (pickled.parent / "marker").exists()


def test_a_pickle_runs_only_if_its_own_digest_is_named(pickled: Path) -> None:
    marker, own = pickled.parent / "marker", digest(pickled)
    for refused in (
        Policy(pinned=(own,), allow_pickle=("0" * 64,)),
        Policy(STRICT, allow_pickle=(own,), pinned=(own,)),
    ):
        with pytest.raises(SecurityError):
            open_file(pickled, refused)
    assert not marker.exists()
    found = open_file(pickled, Policy(allow_pickle=(own,), pinned=(own,)))
    assert marker.is_dir() and found.content["w"].tolist() == [1, 1]
    assert [r.code for r in found.assessment.reasons] == ["pickle.allowed"]


def test_a_bare_pickle_of_plain_data_needs_its_digest_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.pkl"
    path.write_bytes(pickle.dumps({"a": [1, 2]}))
    with pytest.raises(SecurityError, match=r"rows\.pkl: refused: "):
        open_file(path, pinned(path))
    allowed = Policy(allow_pickle=(digest(path),), pinned=(digest(path),))
    assert open_file(path, allowed).content == {"a": [1, 2]}


@pytest.mark.parametrize("level", list(SecurityLevel))
def test_arrays_of_objects_are_unpickled_nowhere(level: SecurityLevel, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.array([1, Mark(tmp_path / "marker")], dtype=object), y=np.arange(3))
    allowed = Policy(level, (digest(path),), (digest(path),))
    with pytest.raises(SecurityError, match="Object arrays cannot be loaded") as caught:
        open_file(path, allowed)
    assert "allow_pickle=[" not in str(caught.value)
    assert not (tmp_path / "marker").exists()


# -- what honest people have -------------------------------------------------------------------


def onehot() -> np.ndarray:
    rows = np.zeros((10_000, 1_000))
    rows[np.arange(10_000), np.arange(10_000) % 1_000] = 1
    return rows


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 1, 0, torch.qint8)


class OldTensor:
    """As torch 0.3 saved one."""

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor, (torch.FloatStorage([1.0, 2.0]), 0, (2,), (1,))


CONTENT: dict[str, tuple[str, Callable[[], Any]]] = {
    "sparse": ("m.pt", lambda: {"a": torch.eye(3).to_sparse(), "b": torch.eye(3).to_sparse_csr()}),
    "quantised": ("m.pt", lambda: {"q": quantised()}),
    "buffer": ("m.pt", lambda: {"b": nn.Buffer(torch.ones(3)), "p": nn.Parameter(torch.ones(2))}),
    "module": ("m.pt", lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).state_dict()),
    "float8": ("m.pt", lambda: {"a": torch.ones(3).to(torch.float8_e4m3fn)}),
    "unsigned": ("m.pt", lambda: {"a": torch.ones(3).to(torch.uint64)}),
    "rebuilt": ("m.pt", lambda: {"a": OldTensor()}),
    "no suffix": ("pytorch_model", lambda: {"a": torch.ones(2)}),
    "odd suffix": ("weights.model", lambda: {"a": torch.ones(2)}),
    "text": ("model.txt", lambda: {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("name", CONTENT)
def test_whatever_weights_only_opens_is_loaded_under_any_name(
    name: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    file, make = CONTENT[name]
    path = tmp_path / file
    torch.save(make(), path)
    found = open_file(path, Policy(), sandbox=sandbox)
    theirs = torch.load(path, weights_only=True)  # noqa: TID251
    assert str(found.content) == str(theirs) and found.facts.format == "torch_zip"


KINDS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz"
KINDS += " uint8 uint16 uint32 uint64 int8 int16 int32 int64 bool complex64"


def test_safetensors_of_every_type_are_loaded(sandbox: Sandbox, tmp_path: Path) -> None:
    tensors = {kind: torch.ones(3, 2).to(getattr(torch, kind)) for kind in KINDS.split()}
    save_file(tensors, tmp_path / "m.safetensors")
    found = open_file(tmp_path / "m.safetensors", Policy(), sandbox=sandbox)
    assert same(tensors, found.content)
    found.content["float32"].zero_()  # they are the caller's to write into
    assert open_file(tmp_path / "m.safetensors", Policy(), sandbox=sandbox).content["float32"].all()


def test_compressed_masks_that_are_mostly_zeros_are_loaded(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    path = tmp_path / "mask.npz"
    np.savez_compressed(path, x=onehot())
    assert path.stat().st_size * 500 < onehot().nbytes
    assert open_file(path, Policy(), sandbox=sandbox).content["x"].sum() == 10_000
    assert read_arrays(path, Policy())["x"].shape == (10_000, 1_000)
    with pytest.raises(SecurityError, match=r"bytes expand to 80,"):
        read_arrays(path, Policy(limits=FileLimits(expanded=1 << 20)))


def test_an_attribute_is_loaded_unless_it_takes_the_place_of_a_method(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    for name, refused in (("partition_dim", False), ("isnan", True)):
        weight = torch.ones(2)
        setattr(weight, name, 7)
        torch.save({"w": weight}, tmp_path / "m.pt")
        if refused:
            with pytest.raises(SecurityError, match="in place of its isnan"):
                open_file(tmp_path / "m.pt", Policy(), sandbox=sandbox)
        else:
            content = open_file(tmp_path / "m.pt", Policy(), sandbox=sandbox).content
            assert content["w"].partition_dim == 7


# -- digests and trust -------------------------------------------------------------------------


def test_another_file_than_the_one_promised_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, path)
    found = open_file(path, Policy(STRICT), digest(path))
    assert found.assessment.trust is Trust.CHECKED and found.content["w"].tolist() == [1, 1]
    monkeypatch.setattr("runner.security.files.loader.examine", None)
    for at in (0, 9, path.stat().st_size - 1):  # any byte
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        (tmp_path / "changed").write_bytes(data)
        with pytest.raises(CheckpointError, match="do not match the recorded sha256"):
            open_file(tmp_path / "changed", Policy(), digest(path))


def test_sums_of_members_are_compared_where_no_digest_is_known(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(1000.0).numpy().tobytes())
    data[at : at + 4] = np.float32(7.0).tobytes()
    path.write_bytes(data)
    with pytest.raises(SecurityError, match="does not match its checksum"):
        open_file(path, Policy(), sandbox=sandbox)
    assert open_file(path, pinned(path)).content["w"][0] == 7  # the user says that it is this file


def test_strict_loads_only_what_is_known(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones(3))
    for sandboxed in (True, False):
        with pytest.raises(SecurityError, match=rf"security\.pinned=\[{digest(path)}\]"):
            open_file(path, Policy(STRICT), sandboxed=sandboxed, sandbox=sandbox)
    found = open_file(path, pinned(path, STRICT))
    assert found.assessment.trust is Trust.PINNED and found.content.tolist() == [1, 1, 1]


def test_a_foreign_file_loads_with_a_warning_and_a_users_arrays_without(
    sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, x=np.arange(3))
    assert read_arrays(path, Policy())["x"].tolist() == [0, 1, 2]
    assert not caplog.records
    found = open_file(path, Policy(), sandbox=sandbox)
    assert found.content["x"].tolist() == [0, 1, 2] and found.assessment.trust is Trust.UNTRUSTED
    assert "unknown file, checked in a sandboxed process" in caplog.text
    assert digest(path) in caplog.text


def test_with_security_off_no_rule_holds_and_plain_data_load(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(()).expand(1000, 1000, 400)}, path)
    with pytest.raises(SecurityError, match=r"w: its tensors would take 1,600,000,000 bytes"):
        open_file(path, Policy(), sandbox=sandbox)
    assert open_file(path, Policy(OFF)).content["w"].shape == (1000, 1000, 400)


def everything() -> dict[str, Any]:
    """A state with each kind of value that the runner writes."""
    tensors = {kind: torch.zeros(3, 2).to(getattr(torch, kind)) for kind in KINDS.split()}
    return {
        **tensors,
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(1.0),
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "text": "ä\x1b\ud800",
        "bytes": b"\x00\xff",
        "empty": b"",
        "set": {1, "a"},
        "complex": 1 + 2j,
        "large": 2**200,
        "tuple": (1, (2,)),
        "dtype": torch.float16,
        "device": torch.device("cuda:0"),
        "keys": {(1, "a"): 1, 2.5: 2},
        "deep": {"a": [{"b": ({"c": [1]},)}]},
        "floats": [float("nan"), float("inf"), -0.0],
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    }


def test_every_kind_of_value_that_we_write_is_read_again_and_strict_knows_its_own(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path / "ours", keep=1)
    state = everything()
    model = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    checkpointer.save(1, model, state, False)
    checkpointer.close()
    folder = tmp_path / "ours/checkpoints/step_00000001"
    restored = checkpoints.load(folder, Policy(STRICT, own=(tmp_path / "ours",)))
    assert restored.model.keys() == model.keys()
    assert torch.equal(restored.state["strided"], state["strided"])
    assert (restored.state["empty"], restored.state["keys"]) == (b"", state["keys"])
    with pytest.raises(SecurityError, match="only files of this run tree and pinned ones"):
        checkpoints.load(folder, Policy(STRICT, own=(tmp_path / "others",)))


# -- values ------------------------------------------------------------------------------------


def codes(found: Opened) -> list[tuple[str, str]]:
    return [(r.code, r.where) for r in found.assessment.reasons]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (float("nan"), "weights.not_finite"),
        (-float("inf"), "weights.not_finite"),
        (1e30, "weights.magnitude"),
        (-1e30, "weights.magnitude"),
        (100.0, None),
    ],
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("size", [50, 50_000])
def test_odd_values_are_warned_of_and_not_refused(
    number: float, code: str | None, kind: str, size: int, tmp_path: Path
) -> None:
    path, tensor = tmp_path / "m.safetensors", torch.ones(size).to(getattr(torch, kind))
    tensor[43] = number
    save_file({"layer.weight": tensor, "other": torch.ones(3)}, path)
    found = open_file(path, pinned(path))
    assert codes(found) == ([(code, "layer.weight")] if code else [])
    assert all(r.severity is Severity.WARNING for r in found.assessment.reasons)


@pytest.mark.parametrize("kind", ["<f4", ">f8", "f2", "c8", "g"])
@pytest.mark.parametrize("number", [float("nan"), 1e4])
def test_arrays_are_warned_of_as_tensors_are(number: float, kind: str, tmp_path: Path) -> None:
    array = np.ones((30, 7), kind)
    array[12, 3] = number
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", whole=np.arange(3), x=array, none=np.ones((0, 2)))
    for name, where in (("a.npy", ""), ("a.npz", "x")):
        wanted = [] if number == 1e4 else [("weights.not_finite", where)]
        assert codes(open_file(tmp_path / name, pinned(tmp_path / name))) == wanted


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.npy"])
def test_truth_values_that_are_neither_are_refused(name: str, tmp_path: Path) -> None:
    path, odd = tmp_path / name, torch.tensor([0, 1, 2], dtype=torch.uint8)
    if name == "m.npy":
        np.save(path, odd.numpy().view(bool))
    elif name == "m.pt":
        torch.save({"mask": odd.view(torch.bool)}, path)
    else:
        save_file({"mask": odd.view(torch.bool)}, path)
    with pytest.raises(SecurityError, match="truth values"):
        open_file(path, pinned(path))


@pytest.mark.parametrize("name", ["m.npy", "m.safetensors", "m.npz", "m.pt2", "m.distcp"])
def test_a_name_that_promises_another_format_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    torch.save({"w": torch.ones(1)}, path)
    with pytest.raises(SecurityError, match="its name says|is an exported|distributed checkpoint"):
        open_file(path, pinned(path))


# -- bytes -------------------------------------------------------------------------------------


def test_what_was_hashed_cannot_be_changed_by_anybody(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc" * 1000)
    with FileBytes.copy(path) as data:
        path.write_bytes(b"other")
        assert bytes(data.data) == b"abc" * 1000 == Path(data.place).read_bytes()
        assert data.sha256 == hashlib.sha256(b"abc" * 1000).hexdigest()
        if sys.platform == "linux":
            with pytest.raises(OSError):
                os.write(data.descriptor, b"x")
            with pytest.raises(OSError):
                os.ftruncate(data.descriptor, 0)
    path.write_bytes(b"")
    with FileBytes.copy(path) as data:
        assert data.size == 0 and hash_file(path) == (data.sha256, 0)


def test_a_pipe_is_not_waited_for_and_a_missing_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="not a file"):
        FileBytes.copy(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="missing"):
        FileBytes.copy(tmp_path / "b.pt")


def test_tensors_lie_in_the_mapped_file_and_share_their_storage_as_before(tmp_path: Path) -> None:
    weight = torch.arange(12.0)
    torch.save({"a": weight, "b": weight[2:]}, tmp_path / "m.pt")
    content = open_file(tmp_path / "m.pt", pinned(tmp_path / "m.pt")).content
    content["a"][2] = -1
    assert content["b"][0] == -1
    again = open_file(tmp_path / "m.pt", pinned(tmp_path / "m.pt")).content
    assert again["a"][2] == 2


def test_a_foreign_file_is_examined_in_the_sandbox_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones(3))
    nothing = Policy(limits=FileLimits(memory=1))  # no process can start in so little
    with pytest.raises(SecurityError, match=r"refused: x\.npy: "):
        open_file(path, nothing)


def many(folder: Path) -> bytes:
    """The table at the end is longer than what one would look at, and the pickle is its first."""
    return saved({"x": Mark(folder / "mark"), **{f"{i}": torch.ones(1) for i in range(1500)}})


def late(folder: Path) -> bytes:
    """The pickle is the last of many members."""
    return archive([*(Member(f"a/{i:0100}", b"") for i in range(1500)), Member("a/data.pkl", b".")])


def commented(folder: Path) -> bytes:
    """As late, and its end is as far from the end of the file as it may be."""
    members = [*(Member(f"a/{i}", b"") for i in range(9)), Member("a/data.pkl", b".")]
    return archive(members, comment=b"c" * 65535)


def capital(folder: Path) -> bytes:
    """torch's reader looks names up without regard to case."""
    return archive([Member("a/0", b""), Member("a/DATA.PKL", b".")])


def other(folder: Path) -> bytes:
    """An archive of other things."""
    return archive([Member(f"word/{i:0100}.xml", b"data.pk") for i in range(1500)])


def damaged(folder: Path) -> bytes:
    """An archive of other things, of which one cannot be read."""
    return archive([Member("a.jar", b"PK"), Member("b.png", b"\x89PNG", method=99)])


def unnamed(folder: Path) -> bytes:
    """numpy reads a member that begins as an array, by whatever name."""
    return archive([Member("a/0", b"text"), Member("a/1", b"\x93NUMPY\x01\x00")])


def followed(folder: Path) -> bytes:
    """torch's reader finds the directory further from the end than Python's looks for it."""
    members = [Member("a/0", b""), Member("a/DATA.PKL", b".")]
    return archive(members) + b"\0" * 100_000


@pytest.mark.parametrize(
    ("make", "loads"),
    [(make, True) for make in (many, late, commented, capital, unnamed, followed)]
    + [(other, False), (damaged, False)],
)
def test_an_archive_that_a_loader_would_take_is_found_under_any_name(
    make: Callable[[Path], bytes], loads: bool, tmp_path: Path
) -> None:
    path = tmp_path / "weights.model"
    path.write_bytes(make(tmp_path))
    assert is_loadable(path) is loads
