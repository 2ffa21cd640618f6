"""Whatever happens to the files, a damaged checkpoint is never loaded without a word."""

import hashlib
import json
import os
import random

import pytest
import torch

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.manifest import NAME
from runner.core.errors import CheckpointError, SecurityError
from runner.core.findings import Trust
from runner.core.schemas.security import SecurityLevel
from runner.core.security.checksummed_json import to_checksummed_json
from runner.core.security.files.policy import FilePolicy
from tests.core.security.planted import Mark

FILES = ("model.safetensors", "state.pt", "manifest.json")


@pytest.fixture
def run(tmp_path):
    """A run's folder with checkpoints of the steps 1, 2 and 3."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in (1, 2, 3):
        model = {"weight": torch.full((50,), float(step)), "bias": torch.arange(3) + step}
        checkpointer.save(step, model, {"step": step, "moment": torch.ones(40) * step}, False)
    checkpointer.close()
    return tmp_path


def step_folder(run, step):
    return run / f"checkpoints/step_{step:08d}"


def assert_falls_back(run, name, to=2):
    restored = Checkpointer(None, keep=1).restore(run)
    assert restored.step == to == restored.state["step"]
    assert (restored.model["weight"] == to).all()
    assert len(restored.warnings) == 3 - to
    assert str(step_folder(run, 3)) in restored.warnings[0] and name in restored.warnings[0]
    assert "\n" not in restored.warnings[0]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_noticed(run, name):
    path = step_folder(run, 3) / name
    whole = path.read_bytes()
    rng = random.Random(name)
    for position in rng.sample(range(len(whole)), 20):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        assert_falls_back(run, name)
    path.write_bytes(whole)
    assert Checkpointer(run, keep=3).restore().step == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_too_long_or_missing_and_what_is_no_file_is_noticed(run, name):
    path = step_folder(run, 3) / name
    whole = path.read_bytes()
    hole = bytes(len(whole))  # as some file systems leave after a power cut
    for content in (b"", whole[:7], whole[:-1], whole + b"\0", hole):
        path.write_bytes(content)
        assert_falls_back(run, name)
    path.unlink()
    assert_falls_back(run, name)
    os.mkfifo(path)
    assert_falls_back(run, name)
    path.unlink()
    path.mkdir()
    assert_falls_back(run, name)


def test_two_checkpoints_that_changed_places_are_both_noticed(run):
    step_folder(run, 3).rename(run / "x")
    step_folder(run, 3).symlink_to(step_folder(run, 2).name)
    assert_falls_back(run, "manifest.json: belongs to step 2")
    step_folder(run, 3).unlink()
    step_folder(run, 2).rename(step_folder(run, 3))
    (run / "x").rename(step_folder(run, 2))
    assert_falls_back(run, "manifest.json: belongs to step 2", to=1)


def test_when_all_are_bad_each_is_named_and_nothing_starts_from_scratch(run):
    (step_folder(run, 1) / "state.pt").unlink()
    (step_folder(run, 2) / "manifest.json").unlink()
    (step_folder(run, 3) / "model.safetensors").write_bytes(b"")
    for checkpointer, where in ((Checkpointer(run, keep=3), None), (Checkpointer(None, 1), run)):
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(where)
        for part in ("step_00000001/state.pt", "00002/manifest.json", "00003/model.safetensors"):
            assert part in str(caught.value)


def test_a_step_asked_for_by_its_path_is_that_one_or_an_error(run):
    (step_folder(run, 3) / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000003/state\.pt: missing"):
        Checkpointer(run, keep=3).restore(step_folder(run, 3))
    (step_folder(run, 3) / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        Checkpointer(run, keep=3).restore(step_folder(run, 3))


def forge(folder, change=lambda body: None, **changes):
    """Rewrite a manifest with its digest, as an attacker would."""
    body = json.loads((folder / NAME).read_text()) | changes
    del body["digest"]
    change(body)
    (folder / NAME).write_bytes(to_checksummed_json(body))


def forge_file(folder, name, data):
    """Replace a file and give the manifest its digest."""
    (folder / name).unlink()
    (folder / name).write_bytes(data)
    files = json.loads((folder / NAME).read_text())["files"]
    files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(folder, files=files)


def test_a_pickle_that_runs_code_is_refused_though_its_manifest_fits(run):
    folder, marker = step_folder(run, 3), run / "marker"
    torch.save({"state": Mark(marker), "model": {}}, folder / "state.pt")
    forge_file(folder, "state.pt", (folder / "state.pt").read_bytes())
    with pytest.raises(SecurityError, match=r"step_00000003/state\.pt: refused.*mkdir"):
        Checkpointer(run, keep=3).restore()
    assert not marker.exists()
    torch.load(folder / "state.pt", weights_only=False)  # the bomb is a real one
    assert marker.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "has format 2"),
        ({"files": {"../../x": {"size": 1, "sha256": ""}}}, "lists"),
        ({"files": {"state.pt": 3}}, "not a manifest of the runner"),
        ({"step": "3"}, "not a manifest of the runner"),
    ],
)
def test_a_manifest_of_another_kind_is_passed_over(run, changes, reason):
    forge(step_folder(run, 3), **changes)
    assert_falls_back(run, reason)
    for data in (b"", b"[]", b'{"format": 1}', b"[" * 5000, b"\xff"):
        (step_folder(run, 3) / NAME).write_bytes(data)
        assert_falls_back(run, NAME)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_of_a_foreign_folder_falls_back_and_the_rest_is_sandboxed(
    run, name, caplog
):
    path = step_folder(run, 3) / name
    path.write_bytes(path.read_bytes()[:-9] + b"truncated")
    policy = FilePolicy(SecurityLevel.standard, run_tree=(run / "elsewhere",))
    restored = Checkpointer(None, keep=1, policy=policy).restore(run)
    assert (restored.step, restored.trust) == (2, Trust.UNTRUSTED)
    assert len(restored.warnings) == 1 and str(path) in restored.warnings[0]
    assert "checked in a sandboxed process" in caplog.text
    strict = FilePolicy(SecurityLevel.strict, run_tree=(run / "elsewhere",))
    with pytest.raises(SecurityError, match="strict"):
        Checkpointer(None, keep=1, policy=strict).restore(run)
