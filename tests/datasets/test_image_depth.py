"""Images of more than 8 bits, hidden files, twins, and files that are not texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runner.core.data.preprocessing import OpenOptions, Preprocessing, parse_preprocessing
from runner.core.errors import ConfigError, DataError
from runner.core.schemas.data import BadSamples, Images, Text
from runner.datasets.export import RawInputModel, raw_inputs
from runner.datasets.images import ImageFolder
from runner.datasets.text import text
from runner.datasets.tokenizer import Tokenizer


def save_deep(path: Path, value: float, kind: str = "uint16") -> None:
    """A uniform image of 8 by 8 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, kind)).save(path)


def deep_folder(folder: Path, kind: str = "uint16", suffix: str = "png", **changes: Any) -> Images:
    """Two classes of ten images, of values 1000 to 1900 and 3000 to 3900."""
    for number in range(10):
        save_deep(folder / "dim" / f"{number}.{suffix}", 1000 + 100 * number, kind)
        save_deep(folder / "bright" / f"{number}.{suffix}", 3000 + 100 * number, kind)
    return Images(path=str(folder), image_size=8, channels=1, **changes)


def values_by_name(source: ImageFolder, images: torch.Tensor) -> dict[str, float]:
    return {source.rows(i): float(image.mean()) for i, image in enumerate(images)}


@pytest.mark.parametrize("kind", ["uint16", "float32", "int32"])
@pytest.mark.parametrize("changes", [{}, {"channels": 3}, {"augment": True}, {"cache_mb": 0}])
def test_deep_images_are_scaled_by_the_range_of_the_training_images(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    files = deep_folder(tmp_path, kind, "png" if kind == "uint16" else "tif")
    source = ImageFolder(Images(**vars(files) | changes))
    values = {source.rows(i): np.asarray(Image.open(source.sources[i])).max() for i in range(20)}
    trained = [values[source.rows(i)] for i in source.train.tolist()]
    low, high = float(min(trained)), float(max(trained))
    assert source.pixel_range == (low, high)
    for _ in range(2):  # the second time from the cache
        images, _ = source.fetch(np.arange(20), None)
        for name, value in values_by_name(source, images).items():
            assert value == pytest.approx((values[name] - low) / (high - low), abs=1e-6)
    assert any("becomes 0 to 1" in choice.reason for choice in source.choices)


def test_each_file_is_scaled_by_its_depth_and_new_values_are_not_clipped(tmp_path: Path) -> None:
    config = deep_folder(tmp_path / "train", validation=0.1)
    save_deep(tmp_path / "train" / "dim" / "8bit.png", 51, "uint8")
    source = ImageFolder(config)
    low, high = source.pixel_range
    saved = Preprocessing.of(config, source).dump()
    fitted = parse_preprocessing(saved, tmp_path)
    assert fitted.pixel_range == source.pixel_range
    new = tmp_path / "new"
    save_deep(new / "beyond.png", 60_000)
    save_deep(new / "8bit.png", 51, "uint8")
    opening = OpenOptions(fitted=fitted, evaluates=True, labelled=False)
    applied = ImageFolder(Images(path=str(new), image_size=8, channels=1), opening)
    images, _ = applied.fetch(np.arange(2), None)
    values = values_by_name(applied, images)
    assert values["8bit.png"] == pytest.approx(51 / 255)
    assert values["beyond.png"] == pytest.approx((60_000 - low) / (high - low), rel=1e-6)
    (raw,) = raw_inputs(fitted, images)
    pipeline = RawInputModel(torch.nn.Flatten(), fitted)
    assert torch.allclose(pipeline._images(raw), images, atol=1e-5)
    assert torch.equal(pipeline._images(torch.tensor([51], dtype=torch.uint8)), torch.tensor([0.2]))


def test_a_deep_image_for_a_model_of_8_bit_images_is_an_error(tmp_path: Path) -> None:
    for number in range(8):
        save_deep(tmp_path / "ab"[number // 4] / f"{number}.png", number, "uint8")
    source = ImageFolder(Images(path=str(tmp_path), image_size=8, channels=1))
    assert source.pixel_range == ()
    save_deep(tmp_path / "a" / "0.png", 4000)
    with pytest.raises(DataError, match=r"a.0.png: .*mode I;16, those of the training 8 bits"):
        source.fetch(np.arange(8), None)


def test_randaugment_of_deep_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.randaugment: needs images of 8 bits"):
        ImageFolder(deep_folder(tmp_path, randaugment=2))


def test_all_bad_images_are_in_one_message(tmp_path: Path) -> None:
    config = deep_folder(tmp_path)
    for name, size in (("dim/3.png", 3), ("bright/4.png", 0), ("bright/5.png", 50)):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:size])
    with pytest.raises(DataError, match=r"bright.4.png: .*bright.5.png: .*dim.3.png: ") as error:
        ImageFolder(config)
    assert str(error.value).count("data.bad_samples=drop") == 1
    config.bad_samples = BadSamples.drop
    with pytest.raises(DataError, match="3 of 20 samples cannot be used, more than data.most_bad"):
        ImageFolder(config)


def test_an_image_in_two_classes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = deep_folder(tmp_path)
    (tmp_path / "dim" / "99.png").write_bytes((tmp_path / "dim" / "1.png").read_bytes())
    ImageFolder(config)  # twice in one class is no contradiction
    assert "two classes" not in caplog.text
    (tmp_path / "bright" / "99.png").write_bytes((tmp_path / "dim" / "1.png").read_bytes())
    ImageFolder(config)
    assert "1 image is in two classes: bright/99.png and dim/1.png" in caplog.text


@pytest.mark.parametrize("labelled", [True, False])
def test_hidden_folders_at_any_depth_are_left_out_and_named(labelled: bool, tmp_path: Path) -> None:
    root = tmp_path / ".data"  # the user may name a hidden one
    config = deep_folder(root)
    fitted = Preprocessing.of(config, ImageFolder(config))
    for name in ("dim/.ipynb_checkpoints/0.png", "dim/deeper/.trash/old/1.png", "bright/._2.png"):
        save_deep(root / name, 5)
    source = ImageFolder(config, OpenOptions(fitted=fitted, evaluates=True, labelled=labelled))
    assert len(source.sources) == 20
    note = "left out: hidden folders: dim/.ipynb_checkpoints and dim/deeper/.trash"
    assert note in [choice.reason for choice in source.choices] or not labelled
    assert len(ImageFolder(config).sources) == 20


def test_names_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    config = deep_folder(tmp_path)
    for old, new in ((b"/dim", b"/caf\xe9"), (b"/bright/1.png", b"/bright/gr\xfcn.png")):
        os.rename(os.fsencode(tmp_path) + old, os.fsencode(tmp_path) + new)
    source = ImageFolder(config)
    assert source.sizes.class_names == ("bright", r"caf\xe9")
    assert r"bright/gr\xfcn.png" in source.rows.names
    saved = Preprocessing.of(config, source).dump()
    assert parse_preprocessing(saved, tmp_path).sizes.class_names == source.sizes.class_names


TEXTS = {
    "a.txt": b"good", "no suffix": b"plain text", "umlaut.txt": "schön".encode("cp1252"),
    "utf16.txt": "gut".encode("utf-16"), "bom.txt": "gut".encode("utf-8-sig"), "code.py": b"x = 1",
}  # fmt: skip
OTHERS = {
    "photo.jpg": b"\xff\xd8\xff\xe0" * 9, "Thumbs.db": b"text", "desktop.ini": b"[.ShellClassInfo]",
    "data.gz": b"\x1f\x8b\x08abc", "paper.pdf": b"%PDF-1.7\n", "bytes.dat": bytes(range(1, 32)) * 9,
    "nul.bin": b"text\0text",
}  # fmt: skip


def test_files_that_are_not_texts_are_left_out_and_named(tmp_path: Path) -> None:
    for name in ("neg", "pos"):
        (tmp_path / name).mkdir()
        for file, content in (TEXTS | (OTHERS if name == "neg" else {})).items():
            (tmp_path / name / file).write_bytes(content)
    source = text(Text(path=str(tmp_path), validation=0.5))
    assert sorted(source.rows.names) == sorted(f"{n}/{f}" for n in ("neg", "pos") for f in TEXTS)
    (note,) = [c.reason for c in source.choices if c.reason.startswith("left out")]
    assert note.startswith("left out: files that are not texts: 7, neg/")
    utf16, bom = (source.rows.names.index(f"neg/{file}") for file in ("utf16.txt", "bom.txt"))
    ids = source.fetch(np.array([utf16, bom]), None)[0]
    assert [row[:3].tolist() for row in ids["input_ids"]] == [list(b"gut")] * 2
    assert ids["attention_mask"].sum(1).tolist() == [3, 3]


def test_a_tokenizer_that_does_not_know_the_texts_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    from tests.datasets import folders

    folders.bert(tmp_path / "hf")
    tokenizer = Tokenizer(str(tmp_path / "hf"))
    unknown = tokenizer.hf_tokenizer.unk_token_id
    assert tokenizer.name_unknown(np.array([unknown] + [unknown + 1] * 99)) == ()
    (choice,) = tokenizer.name_unknown(np.array([unknown, unknown + 1, unknown, unknown + 1]))
    assert choice.reason.startswith("50% of the tokens are unknown") and "50%" in caplog.text
