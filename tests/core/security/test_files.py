"""Files come in whole, plain, under any name; a pickle by its digest alone; trust by provenance."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from runner.core.checkpoint import reading as checkpoints
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.device import memory
from runner.core.errors import CheckpointError, OutOfMemory, SecurityError
from runner.core.findings import Severity, Trust
from runner.core.schemas.security import SecurityLevel
from runner.core.security.checksummed_json import to_checksummed_json
from runner.core.security.files import file_bytes, formats
from runner.core.security.files.file_bytes import FileBytes, hash_file
from runner.core.security.files.formats import is_loadable
from runner.core.security.files.loader import LoadedFile, open_file, read_arrays
from runner.core.security.files.policy import FileLimits, FilePolicy
from runner.core.security.files.provenance import (
    Assessment,
    FileFacts,
    check_allowed,
    is_in_run_tree,
    set_trust,
)
from runner.core.security.paths import run_tree_folders
from runner.scan.sandbox import Sandbox
from tests.core.security.files.archives import Member, archive, saved
from tests.core.security.planted import Mark, checkpoint
from tests.runs import differences

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:.*quantize:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)
STRICT, STANDARD, OFF = SecurityLevel.strict, SecurityLevel.standard, SecurityLevel.off


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned(path: Path, level: SecurityLevel = STANDARD) -> FilePolicy:
    return FilePolicy(level, pinned=(digest(path),))


def flip(path: Path, to: Path, at: int = -1) -> None:
    """Write the file with a bit of one byte changed."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    to.write_bytes(data)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch.save({"w": torch.ones(2), "x": Mark(tmp_path / "marker")}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.parametrize("level", SecurityLevel, ids=lambda level: level.name)
def test_a_pickle_is_refused_at_every_level_by_torchs_loader_and_strict_has_no_way_out(
    pickled: Path, level: SecurityLevel
) -> None:
    with pytest.raises(SecurityError, match=r"weights_only loader refuses it: .*mkdir") as caught:
        open_file(pickled, pinned(pickled, level))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3
    way_out = f"security.allow_pickle=[{digest(pickled)}]"
    assert (way_out in str(caught.value)) is (level is not STRICT)
    path = pickled.with_name("data.npz")  # arrays of objects are unpickled nowhere
    np.savez(path, x=np.array([1, Mark(pickled.parent / "marker")], dtype=object), y=np.arange(3))
    with pytest.raises(SecurityError, match="Object arrays cannot be loaded") as caught:
        open_file(path, FilePolicy(level, (digest(path),), (digest(path),)))
    assert "allow_pickle=[" not in str(caught.value)
    assert str(caught.value).endswith("; save it with a numeric dtype")
    assert not (pickled.parent / "marker").exists()


def test_a_pickle_runs_only_if_its_own_digest_is_named(pickled: Path, tmp_path: Path) -> None:
    marker, own = pickled.parent / "marker", digest(pickled)
    for refused in (
        FilePolicy(pinned=(own,), allow_pickle=("0" * 64,)),
        FilePolicy(STRICT, allow_pickle=(own,), pinned=(own,)),
    ):
        with pytest.raises(SecurityError):
            open_file(pickled, refused)
    assert not marker.exists()
    opened = open_file(pickled, FilePolicy(allow_pickle=(own,), pinned=(own,)))
    assert marker.is_dir() and opened.content["w"].tolist() == [1, 1]
    assert codes(opened) == [("pickle.allowed", "")]
    bare = tmp_path / "rows.pkl"
    bare.write_bytes(pickle.dumps({"a": [1, 2]}))
    with pytest.raises(SecurityError, match=r"rows\.pkl: refused: "):
        open_file(bare, pinned(bare))
    assert open_file(bare, FilePolicy(allow_pickle=(digest(bare),))).content == {"a": [1, 2]}


class OldTensor:
    """As torch 0.3 saved one."""

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor, (torch.FloatStorage([1.0, 2.0]), 0, (2,), (1,))


CONTENT: dict[str, Callable[[], Any]] = {
    "m.pt": lambda: {
        "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
        "quantised": torch.quantize_per_tensor(torch.ones(4), 1, 0, torch.qint8),
        "buffer": [nn.Buffer(torch.ones(3)), *[nn.Parameter(torch.ones(2))] * 2],
        "module": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).state_dict(),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "rebuilt": OldTensor(),
    },
    "pytorch_model": lambda: {"a": torch.ones(2)},
    "model.txt": lambda: {"a": torch.ones(2)},
}


@pytest.mark.parametrize("file", CONTENT)
def test_all_of_weights_only_loads_by_any_name(file: str, sandbox: Sandbox, tmp_path: Path) -> None:
    torch.save(CONTENT[file](), tmp_path / file)
    opened = open_file(tmp_path / file, FilePolicy(), sandbox=sandbox)
    theirs = torch.load(tmp_path / file, weights_only=True)  # noqa: TID251
    assert str(opened.content) == str(theirs) and opened.facts.format == "torch_zip"


def test_compressed_masks_of_mostly_zeros_are_loaded(sandbox: Sandbox, tmp_path: Path) -> None:
    path, rows = tmp_path / "mask.npz", np.zeros((10_000, 1_000))
    rows[np.arange(10_000), np.arange(10_000) % 1_000] = 1
    np.savez_compressed(path, x=rows)
    assert path.stat().st_size * 500 < rows.nbytes
    assert open_file(path, FilePolicy(), sandbox=sandbox).content["x"].sum() == 10_000
    assert read_arrays(path, FilePolicy())["x"].shape == (10_000, 1_000)
    with pytest.raises(SecurityError, match=r"expand to 80,"):
        read_arrays(path, FilePolicy(limits=FileLimits(expanded=1 << 20)))


def test_an_attribute_is_loaded_unless_it_takes_the_place_of_a_method(tmp_path: Path) -> None:
    path, weight = tmp_path / "m.pt", torch.ones(2)
    weight.partition_dim = 7
    torch.save({"w": weight}, path)
    assert open_file(path, pinned(path)).content["w"].partition_dim == 7
    weight.isnan = 7
    torch.save({"w": weight}, path)
    with pytest.raises(SecurityError, match="in place of its isnan"):
        open_file(path, pinned(path))


def test_tensors_lie_in_the_mapped_file_and_share_their_storage_as_before(tmp_path: Path) -> None:
    path, weight = tmp_path / "m.pt", torch.arange(12.0)
    torch.save({"a": weight, "b": weight[2:]}, path)
    content = open_file(path, pinned(path)).content
    content["a"][2] = -1
    assert content["b"][0] == -1
    assert open_file(path, pinned(path)).content["a"][2] == 2


def test_with_security_off_no_rule_holds_and_plain_data_load(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(()).expand(1000, 1000, 400)}, path)
    with pytest.raises(SecurityError, match=r"its tensors would take 1,600,000,000 bytes"):
        open_file(path, pinned(path))
    assert open_file(path, FilePolicy(OFF)).content["w"].shape == (1000, 1000, 400)


@pytest.mark.parametrize("name", ["m.npy", "m.safetensors", "m.pt2", "m.distcp"])
def test_a_name_that_promises_another_format_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    torch.save({"w": torch.ones(1)}, path)
    with pytest.raises(SecurityError, match="its extension says|is an exported|distributed check"):
        open_file(path, pinned(path))


def codes(opened: LoadedFile) -> list[tuple[str, str]]:
    return [(r.code, r.where) for r in opened.assessment.reasons]


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (float("nan"), "float32", "weights.not_finite"),
        (float("nan"), "complex64", "weights.not_finite"),
        (-float("inf"), "bfloat16", "weights.not_finite"),
        (-1e30, "float32", "weights.magnitude"),
        (100.0, "complex64", None),
    ],
)
def test_unusual_values_are_a_warning_and_not_refused(
    number: float, kind: str, code: str | None, tmp_path: Path
) -> None:
    path, tensor = tmp_path / "m.safetensors", torch.ones(50).to(getattr(torch, kind))
    tensor[43] = number
    save_file({"layer.weight": tensor, "other": torch.ones(3)}, path)
    opened = open_file(path, pinned(path))
    assert codes(opened) == ([(code, "layer.weight")] if code else [])
    assert all(r.severity is Severity.WARNING for r in opened.assessment.reasons)
    torch.save(tensor, path.with_suffix(".pt"))  # a bare tensor, too
    bare = open_file(path.with_suffix(".pt"), pinned(path.with_suffix(".pt")))
    assert codes(bare) == ([(code, "")] if code else [])


MANY = [Member(f"a/{i:0100}", b"") for i in range(1500)]
ARCHIVES: dict[str, Callable[[], bytes]] = {
    # the table at the end is longer than what one would look at, and the pickle is its first
    "many": lambda: saved({"x": Mark(Path("mark"))} | {str(i): torch.ones(1) for i in range(1500)}),
    "late": lambda: archive([*MANY, Member("a/data.pkl", b".")]),
    # torch's reader looks names up without regard to case, and the directory further from the end
    "capital": lambda: archive([*MANY[:1], Member("a/DATA.PKL", b".")], after=bytes(10**5)),
    "unnamed": lambda: archive([Member("a", b"\x93NUMPY\x01\x00")]),  # an array
    "other": lambda: archive([Member(f"word/{i:0100}.xml", b"data.pk") for i in range(1500)]),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_for_a_loader_is_found_under_any_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.model"
    path.write_bytes(ARCHIVES[name]())
    assert is_loadable(path) is (name != "other")


def test_hashed_bytes_cannot_be_changed_by_anybody(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc" * 1000)
    with FileBytes.open_copy(path) as data:
        path.write_bytes(b"other")
        assert bytes(data.data) == b"abc" * 1000 == Path(data.path).read_bytes()
        assert data.sha256 == hashlib.sha256(b"abc" * 1000).hexdigest()
        if sys.platform == "linux":
            with pytest.raises(OSError):
                os.write(data.descriptor, b"x")
    path.write_bytes(b"")
    with FileBytes.open_copy(path) as data:
        assert data.size == 0 and hash_file(path) == (data.sha256, 0)


def test_a_file_larger_than_free_memory_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "w.pt"
    path.touch()
    os.truncate(path, 64 << 20)
    monkeypatch.setattr(memory, "available_bytes", lambda: (64 << 20) - 1)
    if sys.platform == "linux":
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OutOfMemory, match="w.pt: refused: .* 67,108,864 bytes, but only 67,1"):
            open_file(path, FilePolicy())
        assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20)
    monkeypatch.setattr(file_bytes, "PROGRESS_S", 0.0)
    with caplog.at_level("INFO", "runner"), FileBytes.open_copy(path) as data:
        assert data.size == 64 << 20
    if sys.platform == "linux":
        assert "w.pt: 0.1 of 0.1 GB copied into memory" in caplog.messages[-1]


@pytest.mark.parametrize("key", ["data_offsets", "data\\u005foffsets"])
def test_a_safetensors_header_that_takes_long_to_read_is_refused(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    entries = (f'"{i}":{{"dtype":"F32","shape":[0],"{key}":[0,0]}}' for i in range(101))
    header = f"{{{','.join(entries)}}}".encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(open_file(path, FilePolicy(), sandboxed=False).content) == 101
    monkeypatch.setattr(formats, "MAX_TENSORS", 101)
    with pytest.raises(SecurityError, match="m.safetensors: refused: its header names 102"):
        open_file(path, FilePolicy(), sandboxed=False)
    monkeypatch.setattr(formats, "MAX_HEADER_BYTES", len(header) - 1)
    with pytest.raises(SecurityError, match=r"refused: its header has \d,\d+ bytes, more than"):
        open_file(path, FilePolicy(), sandboxed=False)


def test_a_large_header_is_refused_in_the_sandbox(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = json.dumps({"__metadata__": {"a": "x" * 25_000_000}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SecurityError, match="refused: its header has 25,000,0"):
        open_file(path, FilePolicy())


def test_a_file_not_promised_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, path)
    opened = open_file(path, FilePolicy(STRICT), digest(path))
    assert opened.assessment.trust is Trust.CHECKED and opened.content["w"].tolist() == [1, 1]
    monkeypatch.setattr("runner.core.security.files.parsing.examine", None)
    for at in (0, 9, -1):  # any byte
        flip(path, tmp_path / "changed", at)
        with pytest.raises(CheckpointError, match="do not match the recorded sha256"):
            open_file(tmp_path / "changed", FilePolicy(), digest(path))


def test_sums_of_members_are_compared_without_a_digest(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(1000.0).numpy().tobytes())
    data[at : at + 4] = np.float32(7.0).tobytes()
    path.write_bytes(data)
    with pytest.raises(SecurityError, match="does not match its checksum"):
        open_file(path, FilePolicy(), sandbox=sandbox)
    assert open_file(path, pinned(path)).content["w"][0] == 7  # the user says that it is this file


def test_strict_loads_only_what_is_known_and_standard_warns(
    sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(3))
    for sandboxed in (True, False):
        with pytest.raises(SecurityError, match=rf"security\.pinned=\[{digest(path)}\]"):
            open_file(path, FilePolicy(STRICT), sandboxed=sandboxed, sandbox=sandbox)
    assert open_file(path, pinned(path, STRICT)).assessment.trust is Trust.PINNED
    assert read_arrays(path, FilePolicy()).tolist() == [0, 1, 2] and not caplog.records
    opened = open_file(path, FilePolicy(), sandbox=sandbox)
    assert opened.assessment.trust is Trust.UNTRUSTED
    assert "so checked in a sandboxed process" in caplog.text
    assert digest(path) in caplog.text
    nothing = FilePolicy(limits=FileLimits(memory=1))  # no process can work in so little
    with pytest.raises(SecurityError, match=r"refused: "):
        open_file(path, nothing)  # examined in the sandbox and nowhere else


def test_strict_knows_its_own_checkpoints(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "ours", keep=1)
    state = {"strided": torch.arange(12.0).reshape(3, 4).t(), "text": "ä\x1b\ud800", "empty": b""}
    checkpointer.save(1, {"w": state["strided"]}, state, False)
    checkpointer.close()
    folder = tmp_path / "ours/checkpoints/step_00000001"
    ours, others = (FilePolicy(STRICT, run_tree=(tmp_path / name,)) for name in ("ours", "others"))
    assert not differences(checkpoints.load_checkpoint(folder, ours).state, state)
    with pytest.raises(SecurityError, match="only files of this run tree and pinned ones"):
        checkpoints.load_checkpoint(folder, others)


def judged(path: Path, **policy: Any) -> Assessment:
    """The verdict on a file or folder, as far as provenance goes."""
    assessment = Assessment(str(path))
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        kind = "other" if file.suffix in (".json", ".txt") else "safetensors"
        assessment.files[file.name] = FileFacts(*hash_file(file), kind)
    set_trust(assessment, path, FilePolicy(**policy))
    return assessment


def test_a_checkpoint_in_the_run_tree_is_checked_and_elsewhere_untrusted(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "outputs/runs/digits/one/checkpoints/step_00000007")
    ours = judged(folder, run_tree=tuple(run_tree_folders(tmp_path / "outputs/scans/x")))
    assert ours.trust is Trust.CHECKED and not ours.reasons
    assert judged(folder / "state.pt", run_tree=(tmp_path / "outputs",)).trust is Trust.CHECKED
    read = json.loads(json.dumps(ours.as_dict()))
    assert read["schema"] == 1 and read["trust"] == "CHECKED"
    theirs = judged(checkpoint(tmp_path / "theirs"), run_tree=(tmp_path / "outputs",))
    assert theirs.trust is Trust.UNTRUSTED and not theirs.reasons


@pytest.mark.parametrize("own", [True, False])
def test_a_file_that_is_not_what_its_manifest_says_is_refused(tmp_path: Path, own: bool) -> None:
    folder = checkpoint(tmp_path / "c")
    flip(folder / "model.safetensors", folder / "model.safetensors")
    digests = tuple(digest(path) for path in folder.iterdir())
    verdict = judged(folder, run_tree=(tmp_path,) if own else (), pinned=digests)
    assert verdict.trust is Trust.REFUSED
    assert "model.safetensors" in verdict.refusals[0].where
    assert {reason.code for reason in verdict.reasons} == {"digests.differ"}


def test_a_damaged_or_forged_manifest_gives_no_trust(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    file = folder / "manifest.json"
    text = file.read_bytes()
    body = json.loads(text)
    body.pop("digest")
    for manifest in (
        text.replace(b'"step": 7', b'"step": 8'),
        text[:-20],
        b"[" * 100_000,
        b'{"name": "a web page"}',
        to_checksummed_json({**body, "files": []}),
        to_checksummed_json({**body, "files": {"a": {"sha256": 1}}}),
    ):
        file.write_bytes(manifest)
        assert judged(folder, run_tree=(tmp_path,)).trust is Trust.UNTRUSTED


def test_a_model_that_no_manifest_names_takes_the_trust_from_the_folder(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / "notes.txt").write_text("not loaded")
    assert judged(folder, run_tree=(tmp_path,)).trust is Trust.CHECKED
    (folder / "other.safetensors").write_bytes(b"x")
    assert judged(folder, run_tree=(tmp_path,)).trust is Trust.UNTRUSTED


def test_a_link_in_the_run_tree_to_elsewhere_is_not_its_own(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "theirs")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/step_00000007").symlink_to(folder)
    policy = FilePolicy(run_tree=(tmp_path / "outputs",))
    assert not is_in_run_tree(tmp_path / "outputs/step_00000007", policy)
    assert not is_in_run_tree(tmp_path / "outputs/../theirs", policy)


def test_a_folder_is_pinned_by_the_digest_of_each_file_that_is_loaded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "theirs")
    loaded = judged(folder).digests
    assert len(loaded) == 2
    assert judged(folder, pinned=tuple(loaded)).trust is Trust.PINNED
    assert judged(folder, pinned=(loaded[0],)).trust is Trust.UNTRUSTED
    path = folder / "model.safetensors"
    assert judged(path, pinned=(digest(path),)).trust is Trust.PINNED


@pytest.mark.parametrize(
    ("level", "trust", "passes"),
    [
        (STANDARD, Trust.REFUSED, False),
        (STANDARD, Trust.UNTRUSTED, True),
        (STRICT, Trust.UNTRUSTED, False),
        (STRICT, Trust.CHECKED, True),
        (STRICT, Trust.PINNED, True),
        (OFF, Trust.UNTRUSTED, True),
    ],
)
def test_what_a_level_lets_in(level: SecurityLevel, trust: Trust, passes: bool) -> None:
    assessment = Assessment("a\x1b[2J", trust, files={"a": FileFacts("0" * 64, 1, "npy")})
    if passes:
        check_allowed(assessment, FilePolicy(level))
        return
    with pytest.raises(SecurityError) as refused:
        check_allowed(assessment, FilePolicy(level))
    assert refused.value.exit_code == 3 and "\x1b" not in str(refused.value)
