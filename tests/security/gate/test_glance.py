"""What can be refused by a file's ends is refused before it is read; what is loaded is found."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.errors import SecurityError
from runner.security.gate.assessing import Assessor
from runner.security.gate.door import open_file
from runner.security.gate.folder import is_loadable, thing_of
from runner.security.gate.policy import Policy
from runner.security.trust import Trust
from tests.security.files.archives import Member, archive, entry, npy, safetensors, saved
from tests.security.planted import Mark, checkpoint

LARGE = 1 << 40  # bytes: nobody could read them within a test
NPY = npy({"descr": "<f4", "fortran_order": False, "shape": (9,)})
SAFE = safetensors({"a": entry([2], 0, 8)})


@pytest.mark.parametrize(
    ("name", "head", "why"),
    [
        ("zeros.pt", b"", "no format known"),
        ("cut.npz", b"PK\x03\x04", "does not end with its table"),
        ("cut.pt", b"PK\x03\x04", "does not end with its table"),
        ("long.npy", NPY, "takes 36 bytes"),
        ("long.safetensors", SAFE, "the tensors take 8 bytes"),
    ],
)
def test_a_huge_file_is_refused_by_its_ends_at_the_door_and_in_a_scan(
    name: str, head: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(head)
    os.truncate(path, LARGE)
    with pytest.raises(SecurityError, match=why):
        open_file(path, Policy(), apart=False)
    with Assessor(Policy()) as assessor:
        found = assessor.assess(thing_of(path))
        assert assessor.child.started == 0
    assert found.trust is Trust.REFUSED and why in str(found.refusals[0])
    assert (found.files[name].sha256, found.digest) == ("", "")  # it was not read


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


def followed(folder: Path) -> bytes:
    """torch's reader finds the end record before more bytes than a comment may have."""
    return archive([Member("a/0", b""), Member("a/data.pkl", b".")]) + bytes(69_500)


def payload(folder: Path, **how: int) -> bytes:
    """numpy goes by how a member begins, whatever its name is."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **how) as packed:  # type: ignore[call-overload]
        packed.writestr("a/readme", b"nothing")
        packed.writestr("payload", NPY + bytes(36))
    return file.getvalue()


def deflated(folder: Path) -> bytes:
    """As that, compressed."""
    return payload(folder, compression=zipfile.ZIP_DEFLATED)


def prepended(folder: Path) -> bytes:
    """As that, with places that are counted from where it began before."""
    return b"PK\x03\x04" + payload(folder, compression=zipfile.ZIP_LZMA)


def reversed_(folder: Path) -> bytes:
    """numpy takes for an archive what begins as the end of one."""
    return b"PK\x05\x06" + bytes(40) + payload(folder)


def elsewhere(folder: Path) -> bytes:
    """The table is long, and its place is in a record that nothing points to: Python looks for it
    right before its pointer.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for i in range(20):
            entry = zipfile.ZipInfo(f"{i}.txt")
            entry.comment = b"c" * 65_000
            packed.writestr(entry, b"x")
        packed.writestr("payload.npy", NPY + bytes(36))
    data = file.getvalue()
    end = data.rindex(b"PK\x05\x06")
    *_, size, offset, _ = struct.unpack("<4s4H2LH", data[end:])
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 21, 21, size, offset)
    pointer = struct.pack("<4sLQL", b"PK\x06\x07", 0, 4, 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 21, 21, 0, end + 76, 0)
    return data[:end] + record + pointer + last


def other(folder: Path) -> bytes:
    """An archive of other things."""
    return archive([Member(f"word/{i:0100}.xml", b"data.pk") for i in range(1500)])


def damaged(folder: Path) -> bytes:
    """An archive of other things, of which one cannot be read."""
    return archive([Member("a.jar", b"PK"), Member("b.png", b"\x89PNG", method=99)])


@pytest.mark.parametrize(
    ("make", "loads"),
    [
        *((make, True) for make in (many, late, commented, capital, followed)),
        *((make, True) for make in (payload, deflated, prepended, reversed_, elsewhere)),
        *((make, False) for make in (other, damaged)),
    ],
)
def test_an_archive_that_a_loader_would_take_is_found_under_any_name(
    make: Callable[[Path], bytes], loads: bool, tmp_path: Path
) -> None:
    path = tmp_path / "weights.model"
    path.write_bytes(make(tmp_path))
    assert is_loadable(path) is loads


def test_numbers_that_begin_as_pickles_do_are_no_pickle(tmp_path: Path) -> None:
    for name in ("train.bin", "train.dat"):
        np.array([640, 1000, 7, 46], np.uint16).tofile(tmp_path / name)  # 80 02 is protocol 2
        assert not is_loadable(tmp_path / name)
        (tmp_path / name).write_bytes(b"\x80\x02cos\nmkdir\n")
        assert is_loadable(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "trust"),
    [
        ("notes.txt", b"nobody loads this", Trust.CHECKED),
        ("tokens.bin", b"\x01\x02\x03\x04", Trust.UNTRUSTED),  # named as a model is
        ("pytorch_model.bin", b"cos\nmkdir\n(S'mark'\ntR.\n", Trust.REFUSED),
        ("below/pytorch_model.bin", b"cos\nmkdir\n(S'mark'\ntR.\n", Trust.REFUSED),
        ("below/weights.model", None, Trust.REFUSED),
    ],
)
def test_what_a_checkpoints_manifest_does_not_name_is_a_finding_and_takes_its_trust(
    name: str, content: bytes | None, trust: Trust, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "outputs/checkpoints/step_00000007")
    (folder / "below").mkdir()
    (folder / name).write_bytes(many(tmp_path) if content is None else content)
    with Assessor(Policy(own=(tmp_path / "outputs",))) as assessor:
        found = assessor.assess(thing_of(folder))
    strays = [reason.where for reason in found.reasons if reason.code == "manifest.stray"]
    assert (found.trust, strays) == (trust, [name])
    assert not (tmp_path / "mark").exists()


def test_an_own_checkpoint_with_a_signature_and_a_report_beside_it_has_no_finding(
    tmp_path: Path,
) -> None:
    folder = checkpoint(tmp_path / "outputs/debug/captures/step_00000007")
    checkpoint(folder / "checkpoint")
    (folder / "replay.md").write_text("what was found")
    with Assessor(Policy(own=(tmp_path / "outputs",))) as assessor:
        found = assessor.assess(thing_of(folder))
    assert (found.trust, found.reasons) == (Trust.CHECKED, [])
