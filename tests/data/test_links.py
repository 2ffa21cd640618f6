"""No data set reads files outside of its folder through a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.data.config import DataConfig, Images, Text, Tokens
from runner.data.dataset import Dataset
from runner.data.open import Opening, open_data
from runner.errors import SecurityError
from runner.security.config import SecurityLevel
from runner.security.files.policy import FilePolicy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")


def opened(config: DataConfig, level: SecurityLevel = SecurityLevel.standard) -> Dataset:
    return open_data(config, lambda name, key: name, Opening(FilePolicy(level)))


def write_text(path: Path, number: int) -> None:
    path.write_text(f"text {number}")


def write_image(path: Path, number: int) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8), (number, 0, 0)).save(path, format="PNG")


def folder_of_classes(root: Path, write: Callable[[Path, int], None]) -> Path:
    for number in range(8):
        folder = root / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{number}.png", number)
    return root


KINDS = {
    "text": (write_text, lambda root: Text(path=str(root), sequence=8)),
    "images": (write_image, lambda root: Images(path=str(root), image_size=8)),
}


def link_a_file(root: Path, outside: Path) -> None:
    (root / "class0/linked.png").symlink_to(outside / "class0/0.png")


def link_through_another_link(root: Path, outside: Path) -> None:
    (root / ".hop").symlink_to(outside)
    (root / "class0/linked.png").symlink_to(root / ".hop/class0/0.png")


def link_a_class(root: Path, outside: Path) -> None:
    (root / "class2").symlink_to(outside / "class0")


LINKS = [link_a_file, link_through_another_link, link_a_class]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_out_of_the_folder_is_refused(
    kind: str, link: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    write, config = KINDS[kind]
    root = folder_of_classes(tmp_path / "data", write)
    link(root, folder_of_classes(tmp_path / "data-of-others", write))
    for level in (SecurityLevel.standard, SecurityLevel.strict):
        with pytest.raises(SecurityError, match=r"data\.path: .* is a link .* outside of"):
            opened(config(root), level)
    assert len(opened(config(root), SecurityLevel.off).train)


@pytest.mark.parametrize("kind", KINDS)
def test_links_within_the_folder_and_to_the_folder_are_followed(kind: str, tmp_path: Path) -> None:
    write, config = KINDS[kind]
    root = folder_of_classes(tmp_path / "data", write)
    (root / "class0/again.png").symlink_to("../class1/1.png")
    (root / "class2").symlink_to("class1")
    (tmp_path / "named").symlink_to(root)
    data = opened(config(tmp_path / "named"))
    assert data.sizes.classes == 3
    assert len(data.train) + len(data.validation) == 8 + 1 + 4


def test_token_files_that_are_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    ids = np.arange(100, dtype=np.uint16)
    (tmp_path / "data").mkdir()
    for name in ("train.bin", "val.bin", "data/train.bin", "data/real.bin"):
        ids.tofile(tmp_path / name)
    config = Tokens(path=str(tmp_path / "data"), vocab=100, sequence=4)
    (tmp_path / "data/val.bin").symlink_to("real.bin")
    assert len(opened(config).train)
    (tmp_path / "data/val.bin").unlink()
    (tmp_path / "data/val.bin").symlink_to("../val.bin")
    with pytest.raises(SecurityError, match=r"val\.bin is refused"):
        opened(config)
