from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from runner.errors import SecurityError
from runner.security.config import SecurityLevel
from runner.security.files.policy import Policy
from runner.security.files.provenance import is_own, judge
from runner.security.paths import own_trees
from runner.security.trust import Assessment, FileFacts, Trust, require
from tests.security.planted import checkpoint, facts_of

STRICT, STANDARD = SecurityLevel.strict, SecurityLevel.standard


def judged(folder: Path, **policy) -> Assessment:
    found = facts_of(folder) if folder.is_dir() else one(folder)
    judge(found, folder, Policy(**policy))
    return found


def one(path: Path) -> Assessment:
    whole = facts_of(path.parent)
    return Assessment(str(path), files={path.name: whole.files[path.name]})


def codes(found: Assessment) -> set[str]:
    return {reason.code for reason in found.reasons}


def test_a_checkpoint_within_the_run_tree_is_checked_and_says_who_wrote_it(tmp_path):
    folder = checkpoint(tmp_path / "outputs/runs/digits/one/checkpoints/step_00000007")
    found = judged(folder, own=tuple(own_trees(tmp_path / "outputs/scans/x")))
    assert found.trust is Trust.CHECKED and not found.reasons
    assert found.written_by == "run digits/one config c0ffeec0ffee runner 0.1"
    assert judged(folder / "state.pt", own=(tmp_path / "outputs",)).trust is Trust.CHECKED


def test_the_same_checkpoint_elsewhere_is_untrusted_since_anybody_can_write_a_manifest(tmp_path):
    found = judged(checkpoint(tmp_path / "theirs"), own=(tmp_path / "outputs",))
    assert found.trust is Trust.UNTRUSTED and codes(found) == {"manifest.foreign"}


@pytest.mark.parametrize("own", [True, False])
def test_a_file_that_is_not_what_its_manifest_says_is_refused(tmp_path, own):
    folder = checkpoint(tmp_path / "c")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    pinned = tuple(f.sha256 for f in facts_of(folder).files.values())
    found = judged(folder, own=(tmp_path,) if own else (), pinned=pinned)
    assert found.trust is Trust.REFUSED
    assert "model.safetensors" in found.refusals[0].where
    assert "manifest.digest" in codes(found)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda text: text.replace(b'"step": 7', b'"step": 8'), "manifest.damaged"),
        (lambda text: text[:-20], "manifest.damaged"),
        (lambda text: b"[" * 100_000, "manifest.damaged"),
        (lambda text: b'{"name": "a web page"}', "manifest.damaged"),
    ],
)
def test_a_damaged_manifest_vouches_for_nothing(tmp_path, damage, code):
    folder = checkpoint(tmp_path / "c")
    file = folder / "manifest.json"
    file.write_bytes(damage(file.read_bytes()))
    found = judged(folder, own=(tmp_path,))
    assert found.trust is Trust.UNTRUSTED and codes(found) == {code}


@pytest.mark.parametrize("odd", [{"versions": "2"}, {"files": []}, {"files": {"a": {"size": "1"}}}])
def test_a_manifest_that_somebody_made_by_hand_raises_nothing(tmp_path, odd):
    from runner.security.sealed import sealed

    folder = checkpoint(tmp_path / "c")
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("digest")
    (folder / "manifest.json").write_bytes(sealed({**body, "created_by": "", **odd}))
    assert judged(folder, own=(tmp_path,)).trust is Trust.UNTRUSTED


def test_a_model_that_the_manifest_does_not_name_takes_the_trust_from_the_folder(tmp_path):
    folder = checkpoint(tmp_path / "c")
    (folder / "notes.txt").write_text("nobody loads this")
    assert judged(folder, own=(tmp_path,)).trust is Trust.CHECKED
    (folder / "other.safetensors").write_bytes(b"x")
    found = judged(folder, own=(tmp_path,))
    assert found.trust is Trust.UNTRUSTED and codes(found) == {"manifest.stray"}


def test_a_link_in_the_run_tree_to_elsewhere_is_not_its_own(tmp_path):
    folder = checkpoint(tmp_path / "theirs")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/step_00000007").symlink_to(folder)
    (tmp_path / "outputs/loop").symlink_to("loop")
    policy = Policy(own=(tmp_path / "outputs",))
    assert not is_own(tmp_path / "outputs/step_00000007", policy)
    assert not is_own(tmp_path / "outputs/../theirs", policy)
    assert not is_own(tmp_path / "outputs/loop", policy) or not (tmp_path / "outputs/loop").exists()


def test_a_folder_is_pinned_by_the_digest_of_each_file_that_is_loaded(tmp_path):
    folder = checkpoint(tmp_path / "theirs")
    loaded = judged(folder).digests
    assert len(loaded) == 2
    assert judged(folder, pinned=tuple(loaded)).trust is Trust.PINNED
    assert judged(folder, pinned=(loaded[0],)).trust is Trust.UNTRUSTED


def test_the_digest_to_pin_of_a_single_file_is_its_own(tmp_path):
    path = checkpoint(tmp_path / "theirs") / "model.safetensors"
    found = judged(path)
    assert found.digests == [found.files[path.name].sha256]
    assert judged(path, pinned=tuple(found.digests)).trust is Trust.PINNED


def test_an_assessment_is_plain_json_of_a_numbered_schema(tmp_path):
    found = judged(checkpoint(tmp_path / "c"), own=(tmp_path,))
    read = json.loads(json.dumps(found.as_dict()))
    assert read["schema"] == 1 and read["trust"] == "CHECKED" and len(read["policy"]) == 64
    assert set(read["files"]["state.pt"]) == {"sha256", "size", "format"}
    assert "torch" in read["versions"]


@pytest.mark.parametrize(
    ("level", "trust", "passes"),
    [
        (STANDARD, Trust.REFUSED, False),
        (STANDARD, Trust.UNTRUSTED, True),
        (STRICT, Trust.UNTRUSTED, False),
        (STRICT, Trust.CHECKED, True),
        (STRICT, Trust.PINNED, True),
        (SecurityLevel.off, Trust.UNTRUSTED, True),
    ],
)
def test_what_a_level_lets_in(level, trust, passes):
    found = Assessment("a\x1b[2J", trust, files={"a": FileFacts("0" * 64, 1, "npy")})
    if passes:
        require(found, Policy(level))
        return
    with pytest.raises(SecurityError) as refused:
        require(found, Policy(level))
    assert refused.value.exit_code == 3 and "\x1b" not in str(refused.value)
    if trust is Trust.UNTRUSTED:
        assert f"security.pinned=[{'0' * 64}]" in str(refused.value)


def test_standard_warns_where_nobody_vouches_and_only_there(caplog):
    caplog.set_level(logging.INFO)
    require(Assessment("own", Trust.CHECKED), Policy())
    assert not caplog.records
    require(Assessment("theirs", files={"a": FileFacts("0" * 64, 1, "npy")}), Policy())
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "theirs" in caplog.text
