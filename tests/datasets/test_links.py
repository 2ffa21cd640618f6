"""No data set reads files outside of its folder through a link."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runner.core.data.dataset import Dataset
from runner.core.data.labels import labelled_files
from runner.core.data.open import open_data
from runner.core.data.preprocessing import OpenOptions
from runner.core.errors import SecurityError
from runner.core.schemas.data import DataConfig, Images, Text, Tokens
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.policy import FilePolicy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")


def opened(config: DataConfig, level: SecurityLevel = SecurityLevel.standard) -> Dataset:
    return open_data(config, lambda name, key: name, OpenOptions(FilePolicy(level)))


def write(root: Path, kind: str) -> Path:
    """Two classes of small images, or of texts under the same names."""
    for number in range(8):
        folder = root / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "text":
            (folder / f"{number}.png").write_text(f"text {number}")
        else:
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    return root


def config_of(kind: str, root: Path) -> DataConfig:
    return Text(path=str(root), sequence=8) if kind == "text" else Images(path=str(root))


LINKS = {  # by place in the folder: where it leads
    "a file": {"class0/linked.png": "../data-of-others/class0/0.png"},
    "through another link": {".hop": "../data-of-others", "class0/x.png": ".hop/class0/0.png"},
    "a class": {"class2": "../data-of-others/class0"},
}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_link_out_of_the_folder_is_refused(kind: str, links: str, tmp_path: Path) -> None:
    root = write(tmp_path / "data", kind)
    write(tmp_path / "data-of-others", kind)
    for place, target in LINKS[links].items():
        (root / place).symlink_to((root / target).absolute())
    config = config_of(kind, root)
    for level in (SecurityLevel.standard, SecurityLevel.strict):
        with pytest.raises(SecurityError, match=r"data\.path: .* symlink .* outside"):
            opened(config, level)
    assert len(opened(config, SecurityLevel.off).train)


@pytest.mark.parametrize("kind", ["text", "images"])
def test_links_within_the_folder_and_to_the_folder_are_followed(kind: str, tmp_path: Path) -> None:
    root = write(tmp_path / "data", kind)
    (root / "class0/again.png").symlink_to("../class1/1.png")
    (root / "class2").symlink_to("class1")
    (tmp_path / "named").symlink_to(root)
    data = opened(config_of(kind, tmp_path / "named"))
    assert data.sizes.classes == 3
    assert len(data.train) + len(data.validation) == 8 + 1 + 4


def test_token_files_that_are_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("val.bin", "data/train.bin", "data/real.bin"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name)
    config = Tokens(path=str(tmp_path / "data"), vocab=100, sequence=4)
    (tmp_path / "data/val.bin").symlink_to("real.bin")
    assert len(opened(config).train)
    (tmp_path / "data/val.bin").unlink()
    (tmp_path / "data/val.bin").symlink_to("../val.bin")
    with pytest.raises(SecurityError, match=r"val\.bin is refused"):
        opened(config)


@pytest.mark.parametrize("labelled", [True, False])
def test_special_files_are_skipped_with_one_line(
    labelled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write(tmp_path / "data", "images")
    os.mkfifo(root / "class0" / "pipe.png")
    (root / "class0" / "circle.png").symlink_to("circle.png")
    (root / "class1" / "up").symlink_to("..")
    (root / "circle").symlink_to("circle")
    options = OpenOptions(FilePolicy(SecurityLevel.standard), labelled=labelled)
    files, *_ = labelled_files(root, options, lambda path: path.suffix == ".png", "images")
    assert len(files) == 8
    (line,) = [record.getMessage() for record in caplog.records]
    assert "left out: circle (a broken link), class0/circle.png (a broken link)" in line
    assert "class0/pipe.png (no file)" in line and "class1/up (a link to a folder)" in line


def test_plain_files_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write(tmp_path / "data", "images")
    (root / "README").write_text("a file beside the classes")
    (root / "class0" / "more").mkdir()
    opened(config_of("images", root))
    assert not caplog.records
