"""Files that are no images are known before training, without decoding a folder for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from runner.data import images
from runner.data.config import Images
from runner.data.images import ImageFolder
from runner.errors import DataError


def folder_of(root: Path) -> Images:
    for label in ("a", "b"):
        (root / label).mkdir()
        for number in range(20):
            Image.new("RGB", (9, 9)).save(root / label / f"{number:02}.png")
    return Images(path=str(root))


def test_a_broken_file_is_named_when_the_folder_is_opened(tmp_path: Path) -> None:
    config = folder_of(tmp_path)
    ImageFolder(config)
    (tmp_path / "b" / "07.png").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"b.07\.png: cannot be decoded .*bad_samples=drop"):
        ImageFolder(config)


def test_of_many_files_some_of_each_part_of_the_folder_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "GLANCED_AT", 5)
    config = folder_of(tmp_path)
    (tmp_path / "a" / "01.png").write_bytes(b"junk")
    ImageFolder(config)  # it lies between those that are opened
    (tmp_path / "b" / "19.png").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"b.19\.png"):
        ImageFolder(config)
