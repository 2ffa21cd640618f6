"""Files come in as what they are: whole, plain and named; and a pickle by its digest alone."""

from __future__ import annotations

import hashlib
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save, save_file

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.checkpointer import Checkpointer
from runner.errors import CheckpointError, SecurityError
from runner.security.config import SecurityLevel
from runner.security.gate.child import Child
from runner.security.gate.door import assess_file, open_file
from runner.security.gate.examine import examine
from runner.security.gate.load import TYPES
from runner.security.gate.policy import Policy, Whose
from runner.security.trust import Severity, Trust

BETA = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
STRICT, OFF = SecurityLevel.strict, SecurityLevel.off


class Marking:
    """Unpickling one makes a folder, and no more."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned(path: Path, level: SecurityLevel = SecurityLevel.standard) -> Policy:
    return Policy(level, pinned=(digest(path),))


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(2), "x": Marking(tmp_path / "marker")}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.parametrize("level", SecurityLevel, ids=lambda level: level.name)
def test_a_pickle_is_refused_at_every_level_and_names_type_place_and_way_out(
    pickled: Path, level: SecurityLevel
) -> None:
    with pytest.raises(SecurityError) as caught:
        open_file(pickled, pinned(pickled, level))
    text = str(caught.value)
    assert "mkdir" in text and "\n" not in text and caught.value.exit_code == 3
    if level is not OFF:
        assert "data.pkl at " in text
        way_out = f"security.allow_pickle=[{digest(pickled)}]"  # which strict does not have
        assert (way_out in text) is (level is not STRICT)
    assert not (pickled.parent / "marker").exists()


def test_a_pickle_runs_only_if_its_own_digest_is_named(pickled: Path) -> None:
    marker = pickled.parent / "marker"
    with pytest.raises(SecurityError):
        open_file(pickled, Policy(pinned=(digest(pickled),), allow_pickle=("0" * 64,)))
    assert not marker.exists()
    found = open_file(pickled, Policy(allow_pickle=(digest(pickled),)))
    assert marker.is_dir() and found.content["w"].tolist() == [1, 1]
    assert [r.code for r in found.assessment.reasons] == ["pickle.allowed"]


def test_sums_of_members_are_compared_where_no_digest_is_known(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(1000.0).numpy().tobytes())
    data[at : at + 4] = np.float32(7.0).tobytes()
    path.write_bytes(data)
    with pytest.raises(SecurityError, match=r"zip\.crc|do not match their checksum"):
        open_file(path, Policy())
    assert "zip.crc" in [r.code for r in assess_file(path, Policy()).reasons]
    known = pinned(path)  # this very file, says the user: it is as it was then
    assert open_file(path, known).content["w"][0] == 7
    assert assess_file(path, known).trust is Trust.PINNED


def test_that_a_file_may_run_code_does_not_make_it_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(3)}, path)
    apart = []
    examine_apart = Child.examine

    def examined(*given: Any) -> Any:
        apart.append(given[2])
        return examine_apart(*given)

    monkeypatch.setattr(Child, "examine", examined)
    found = open_file(path, Policy(allow_pickle=(digest(path),)))
    assert (found.assessment.trust, apart) == (Trust.UNTRUSTED, ["m.pt"])
    assert open_file(path, pinned(path)).assessment.trust is Trust.PINNED and len(apart) == 1


def test_strict_runs_no_pickle_whatever_is_allowed(pickled: Path) -> None:
    with pytest.raises(SecurityError, match="mkdir"):
        open_file(pickled, Policy(STRICT, (digest(pickled),), (digest(pickled),)))
    assert not (pickled.parent / "marker").exists()


def test_looking_at_a_file_never_runs_it_though_its_pickle_is_allowed(pickled: Path) -> None:
    policy = Policy(allow_pickle=(digest(pickled),))
    found = examine(pickled.read_bytes(), pickled.name, policy)
    assert found.pickled and found.content is None
    assess_file(pickled, policy)
    assert not (pickled.parent / "marker").exists()


def test_a_bare_pickle_of_plain_data_needs_its_digest_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.pkl"
    path.write_bytes(pickle.dumps({"a": [1, 2]}))
    with pytest.raises(SecurityError, match=r"rows\.pkl: refused: .*a bare pickle"):
        open_file(path, pinned(path))
    assert open_file(path, Policy(allow_pickle=(digest(path),))).content == {"a": [1, 2]}


def test_another_file_than_the_one_promised_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="do not match the recorded sha256"):
        open_file(path, Policy(), "0" * 64)
    found = open_file(path, Policy(STRICT), digest(path))
    assert found.assessment.trust is Trust.CHECKED
    assert found.content["w"].tolist() == [1, 1]


def test_strict_wants_somebody_to_vouch_for_a_sound_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    path = tmp_path / "x.npy"
    for apart in (True, False):
        with pytest.raises(SecurityError, match="nobody vouches for it"):
            open_file(path, Policy(STRICT), apart=apart)
    found = open_file(path, pinned(path, STRICT))
    assert found.assessment.trust is Trust.PINNED and found.content.tolist() == [1, 1, 1]


def test_a_foreign_file_loads_with_a_warning_and_a_users_arrays_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, x=np.arange(3))
    assert open_file(path, Policy(), apart=False).content["x"].tolist() == [0, 1, 2]
    assert not caplog.records
    found = open_file(path, Policy())
    assert found.content["x"].tolist() == [0, 1, 2] and found.assessment.trust is Trust.UNTRUSTED
    assert "nobody vouches for it" in caplog.text and digest(path) in caplog.text


def test_with_security_off_nothing_is_checked_and_plain_data_load(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(()).expand(1000, 1000, 10)}, path)
    assert examine(path.read_bytes(), path.name, Policy()).refused
    assert open_file(path, Policy(OFF)).content["w"].shape == (1000, 1000, 10)


def everything() -> dict[str, Any]:
    """A state with each kind of value that the runner writes."""
    kinds = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 uint8 uint16 uint32 uint64"
    kinds += " int8 int16 int32 int64 bool complex64 complex128"
    tensors = {kind: torch.zeros(3, 2).to(getattr(torch, kind)) for kind in kinds.split()}
    return {
        **tensors, "strided": torch.arange(12.0).reshape(3, 4).t(), "none": torch.empty(0, 3),
        "scalar": torch.tensor(1.0), "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(), "text": "ä\x1b\ud800", "bytes": b"\x00\xff",
        "empty": b"", "set": {1, "a"}, "complex": 1 + 2j, "large": 2**200, "tuple": (1, (2,)),
        "dtype": torch.float16, "device": torch.device("cuda:0"), "keys": {(1, "a"): 1, 2.5: 2},
        "deep": {"a": [{"b": ({"c": [1]},)}]}, "floats": [float("nan"), float("inf"), -0.0],
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    }  # fmt: skip


@BETA
def test_every_kind_of_value_that_we_write_passes_our_own_strict_gate(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    state = everything()
    model = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    checkpointer.save(1, model, state, False)
    checkpointer.close()
    folder = tmp_path / "checkpoints/step_00000001"
    for name in ("model.safetensors", "state.pt"):
        found = examine((folder / name).read_bytes(), name, Policy(STRICT), whose=Whose.OWN)
        assert found.reasons == []
    restored = checkpoints.load(folder, Policy(STRICT, own=(tmp_path,)))
    assert restored.model.keys() == model.keys()
    assert torch.equal(restored.state["strided"], state["strided"])
    assert (restored.state["empty"], restored.state["keys"]) == (b"", state["keys"])


@BETA
def test_what_is_plain_after_dense_passes_as_a_foreign_file_too(tmp_path: Path) -> None:
    kept = {k: v for k, v in everything().items() if k not in ("sparse", "rows")}
    torch.save(kept, tmp_path / "m.pt")
    found = examine((tmp_path / "m.pt").read_bytes(), "m.pt", Policy(STRICT))
    assert not found.refused and found.content.keys() == kept.keys()


def test_strict_refuses_a_checkpoint_of_another_tree_though_its_manifest_fits(
    tmp_path: Path,
) -> None:
    checkpointer = Checkpointer(tmp_path / "theirs", keep=1)
    checkpointer.save(1, {"w": torch.ones(2)}, {"step": 1}, False)
    checkpointer.close()
    folder = tmp_path / "theirs/checkpoints/step_00000001"
    with pytest.raises(SecurityError, match="nobody vouches for it"):
        Checkpointer(None, 1, policy=Policy(STRICT, own=(tmp_path / "ours",))).restore(folder)
    own = Checkpointer(None, 1, policy=Policy(STRICT, own=(tmp_path / "theirs",)))
    restored = own.restore(folder)
    assert restored is not None and restored.step == 1


def test_a_module_with_its_metadata_and_the_old_format_load(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).state_dict()
    for new in (True, False):
        path = tmp_path / f"m{new}.pth"
        torch.save(state, path, _use_new_zipfile_serialization=new)
        found = examine(path.read_bytes(), path.name, Policy())
        assert found.reasons == [] and type(found.content) is OrderedDict
        assert found.format == ("torch_zip" if new else "torch_legacy")
        assert found.content._metadata == state._metadata
        assert all(torch.equal(found.content[k], state[k]) for k in state)


@pytest.mark.parametrize(
    ("number", "code"),
    [(float("nan"), "weights.not_finite"), (-float("inf"), "weights.not_finite"),
     (1e30, "weights.magnitude"), (-1e30, "weights.magnitude"), (100.0, None)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "complex64"])
def test_odd_values_are_warned_of_and_not_refused(
    number: float, code: str | None, kind: str
) -> None:
    tensor = torch.ones(5000).to(getattr(torch, kind))
    tensor[4321] = number
    found = examine(save({"layer.weight": tensor}), "m.safetensors", Policy())
    assert [(r.code, r.where) for r in found.reasons] == ([(code, "layer.weight")] if code else [])
    assert not found.refused and all(r.severity is Severity.WARNING for r in found.reasons)


@pytest.mark.parametrize("kind", ["<f4", ">f8", "f2", "c8", "g"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e4])
def test_arrays_are_warned_of_as_tensors_are(number: float, kind: str, tmp_path: Path) -> None:
    array = np.ones((30, 7), kind)
    array[12, 3] = number
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", whole=np.arange(3), x=array, none=np.ones((0, 2)))
    for name, where in (("a.npy", ""), ("a.npz", "x")):
        found = examine((tmp_path / name).read_bytes(), name, Policy())
        told = [(r.code, r.where) for r in found.reasons]
        assert told == ([] if number == 1e4 else [("weights.not_finite", where)]), found.reasons


def test_a_bare_tensor_is_warned_of_as_one_in_a_state_dict(tmp_path: Path) -> None:
    torch.save(torch.tensor([1.0, float("nan")]), tmp_path / "a.pt")
    assert [r.code for r in assess_file(tmp_path / "a.pt", Policy()).reasons] == [
        "weights.not_finite"
    ]


def test_whole_numbers_and_strange_shapes_have_no_odd_values() -> None:
    tensors = {"i": torch.tensor([2**62]), "e": torch.empty(0, 3), "b": torch.tensor([True])}
    assert examine(save(tensors), "m.safetensors", Policy()).reasons == []


@pytest.mark.parametrize("name", ["m.npy", "m.safetensors", "m.txt", "m", "m.pt2", "m.npz"])
def test_a_name_that_says_otherwise_than_the_content_is_refused(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    found = examine((tmp_path / "m.pt").read_bytes(), name, Policy())
    assert [r.code for r in found.reasons if r.way_out] in (["format.name"], ["program.export"])
    assert found.content is None


def test_without_depth_nothing_is_loaded(tmp_path: Path) -> None:
    torch.save({"w": torch.full((3,), torch.nan)}, tmp_path / "m.pt")
    found = examine((tmp_path / "m.pt").read_bytes(), "m.pt", Policy(), deep=False)
    assert found.reasons == [] and found.content is None and found.format == "torch_zip"


def test_tensors_are_those_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    known = TYPES.keys() - {"F8_E8M0"}  # which the library writes, and does not read
    tensors = {name: torch.arange(6).reshape(2, 3).to(TYPES[name]) for name in known}
    tensors |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    held = path.read_bytes()
    short = 8 + int.from_bytes(held[:8], "little")
    uneven = (short - 8 + 3).to_bytes(8, "little") + held[8:short] + b"   " + held[short:]
    for data in (held, uneven):  # one with tensors that no processor would put there
        path.write_bytes(data)
        ours, theirs = open_file(path, pinned(path)).content, load(data)
        assert list(ours) == sorted(theirs)
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
            both = (t.reshape(-1).view(torch.uint8).tolist() for t in (ours[name], tensor))
            assert next(both) == next(both)
            ours[name].zero_()  # they are the caller's to write into


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.npy"])
def test_truth_values_that_are_neither_are_refused(name: str, tmp_path: Path) -> None:
    odd = torch.tensor([0, 1, 2], dtype=torch.uint8)
    path = tmp_path / name
    if name == "m.npy":
        np.save(path, odd.numpy().view(bool))
    elif name == "m.pt":
        torch.save({"mask": odd.view(torch.bool)}, path)
    else:
        save_file({"mask": odd.view(torch.bool)}, path)
    (refusal,) = examine(path.read_bytes(), name, Policy()).reasons
    assert refusal.severity is Severity.REFUSAL and "truth values" in refusal.evidence


@pytest.mark.parametrize("level", list(SecurityLevel))
def test_arrays_of_objects_are_unpickled_nowhere(level: SecurityLevel, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.array([1, Marking(tmp_path / "marker")], dtype=object), y=np.arange(3))
    allowed = Policy(level, (digest(path),), (digest(path),))
    for apart in (True, False):
        with pytest.raises(SecurityError) as caught:
            open_file(path, allowed, apart=apart)
        assert "allow_pickle=[" not in str(caught.value)
    assert not assess_file(path, allowed).trust
    assert not (tmp_path / "marker").exists()


def test_a_compressed_torchscript_program_is_called_a_program(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("data.pkl", "code/__torch__.py", "constants.pkl"):
            packed = zipfile.ZIP_DEFLATED if name.startswith("code/") else zipfile.ZIP_STORED
            file.writestr(zipfile.ZipInfo(f"program/{name}"), b"x" * 99, packed)
    with pytest.raises(SecurityError, match="TorchScript program, which is code"):
        open_file(path, pinned(path))
