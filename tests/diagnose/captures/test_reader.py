"""A capture is read only if every byte is what was written, and runs no code."""

import shutil
from io import BytesIO
from pathlib import Path

import pytest
import torch

from runner.core.captures.manifest import list_captures
from runner.core.errors import CheckpointError, SecurityError
from runner.diagnose.replay.reopen import open_capture
from tests.core.checkpoint.test_checkpoint_damage import forge, forge_file
from tests.core.security.planted import Mark


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(list_captures(made)[1], tmp_path / list_captures(made)[1].name)


FILES = ("state.pt", "manifest.json", "checkpoint/state.pt")


@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_with_its_file(folder: Path, name: str) -> None:
    path = folder / name
    whole = path.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    for data in (whole[:-1], b"", flipped):
        path.unlink()  # a link shares its bytes with the checkpoint
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=name.rpartition("/")[2].replace(".", r"\.")):
            open_capture(folder).checkpoint()
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_capture(folder).checkpoint()


def forge_state(folder: Path, content: object) -> None:
    """Replace state.pt, with a manifest that fits."""
    torch.save(content, file := BytesIO())
    forge_file(folder, "state.pt", file.getvalue())


def test_a_pickle_that_runs_code_is_refused_though_its_manifest_fits(folder: Path) -> None:
    marker = folder / "marker"
    forge_state(folder, {"state": Mark(marker), "model": {}})
    with pytest.raises(SecurityError, match=r"state\.pt: refused.*mkdir"):
        open_capture(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        *({"format": 2}, {"step": 3}, {"weights": "none"}, {"weights": "again"}, {"config": []}),
        *({"threads": "2"}, {"files": {"../../x": {"size": 1, "sha256": ""}}}),
    ],
)
def test_a_manifest_of_another_kind_is_refused(folder: Path, changes: dict[str, object]) -> None:
    forge(folder, **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_capture(folder)


def test_a_state_of_another_shape_is_refused(folder: Path) -> None:
    good = torch.load(folder / "state.pt", weights_only=True)
    text = [{**good, "state": {**good["state"], **c}} for c in ({"grad_norm": "1"}, {"loss": []})]
    odd = ({"state": {"batch": (1, 2)}, "model": {}}, {"state": 3, "model": {}}, [1])
    for state in (*odd, *text):
        forge_state(folder, state)
        with pytest.raises(CheckpointError, match="not written by the runner"):
            open_capture(folder)
