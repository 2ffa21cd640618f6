"""A user's images, texts, token files and arrays, right and wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runner import build, compose, rooms
from runner.core.data.arrays import arrays
from runner.core.data.dataset import TensorsDataset
from runner.core.data.open import open_data
from runner.core.errors import ConfigError, DataError, SecurityError
from runner.core.schemas.data import (
    OPTIONS,
    Arrays,
    BadSamples,
    DataConfig,
    Images,
    Tabular,
    Text,
    Tokens,
)
from runner.datasets import images
from runner.datasets.images import ImageFolder
from runner.datasets.text import text
from runner.datasets.tokens import tokens

DROP: dict[str, Any] = {"bad_samples": BadSamples.drop}


def nothing(target: str, key: str) -> Any:
    raise LookupError(target)


def test_a_field_without_a_value_is_asked_for_and_an_unknown_kind_refused() -> None:
    assert set(rooms.NAMES["data"]) == set(OPTIONS)
    with pytest.raises(ConfigError, match="data.path: is required by data=arrays"):
        open_data(Arrays(), nothing)
    with pytest.raises(ConfigError, match="data.target"):
        open_data(Tabular(path="people.csv"), nothing)
    with pytest.raises(ConfigError, match="unknown data 'digit'"):
        open_data(DataConfig(kind="digit"), nothing)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (30, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def red_and_blue(folder: Path, **changes: Any) -> ImageFolder:
    for number in range(4):
        picture(folder / "red" / f"{number}.png", (255, 0, 0))
        picture(folder / "blue" / f"{number}.jpg", (0, 0, 255))
    return ImageFolder(Images(path=str(folder), image_size=16, **changes))


def test_images_are_scaled_to_a_square_with_the_folder_as_class(tmp_path: Path) -> None:
    source = red_and_blue(tmp_path)
    x, y = source.fetch(np.arange(8), None)
    assert (x.shape, x.dtype) == ((8, 3, 16, 16), torch.float32)
    assert source.sizes.class_names == ("blue", "red")
    assert y.tolist() == [0] * 4 + [1] * 4
    assert torch.equal(x[5], torch.tensor([1.0, 0, 0])[:, None, None].expand(3, 16, 16))
    assert not source.in_memory
    assert len(source.train) + len(source.validation) == 8
    assert red_and_blue(tmp_path, channels=1).fetch(np.arange(2), None)[0].shape[1] == 1


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", POSTSCRIPT])
def test_a_file_that_is_no_image_is_named_at_opening_and_when_it_is_fetched(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = red_and_blue(tmp_path)
    (tmp_path / "red" / "2.png").write_bytes(content)
    with pytest.raises(DataError, match=r"red.2.png: cannot be decoded .*remove the file"):
        ImageFolder(Images(path=str(tmp_path)))
    with pytest.raises(DataError, match=r"red.2.png: cannot be decoded"):
        source.fetch(np.arange(8), None)
    monkeypatch.setattr(images, "MAX_HEADERS", 2)
    ImageFolder(Images(path=str(tmp_path)))  # it lies between those that are opened


def test_a_too_large_image_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    red_and_blue(tmp_path)
    Image.new("L", (90, 90)).save(tmp_path / "red" / "2.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7_000)
    problem = r"red.2.png: cannot be decoded .*90 by 90 pixels"
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(DataError, match=problem):
        ImageFolder(Images(path=str(tmp_path)))


def test_folders_that_are_not_classes_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "red" / "0.png", (255, 0, 0))
    (tmp_path / "blue").mkdir()
    with pytest.raises(ConfigError, match="data.path: .*1 folders .*not classes: blue .has no im"):
        ImageFolder(Images(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"data.path: .*did you mean 'blue'"):
        ImageFolder(Images(path=str(tmp_path / "bleu")))
    with pytest.raises(ConfigError, match=r"data.channels: must be 1"):
        Images(path=str(tmp_path), channels=4)


def test_other_files_among_images_are_left_out_and_counted(tmp_path: Path) -> None:
    red_and_blue(tmp_path)
    (tmp_path / "red" / "notes.txt").write_text("red")
    source = red_and_blue(tmp_path)
    assert len(source.sources) == 8 and "that are not images: 1" in source.choices[0].reason


def test_labelled_text_is_read_from_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_bytes('review,id,stars\n"good, really",1,up\nbad,2,down\nfine é,3,up\n'.encode())
    source = text(Text(path=str(path), text="review", target="stars", sequence=8))
    inputs, labels = source.fetch(np.arange(3), None)
    assert labels.tolist() == [1, 0, 1]
    assert source.sizes.class_names == ("down", "up")
    assert bytes(inputs["input_ids"][0].tolist()) == b"good, re"
    assert inputs["input_ids"][1].tolist() == [*b"bad", 256, 256, 256, 256, 256]
    assert inputs["attention_mask"][2].tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    reasons = {choice.key: choice.reason for choice in source.choices}
    assert "1 of 3 texts reach it" in reasons["data.sequence"]
    numbers = text(Text(path=str(path), text="review", target="id"))
    assert numbers.sizes.class_names == ("1", "2", "3")


def test_wrong_columns_and_rows_of_text_are_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    rows = [f"good {i},up" if i % 2 else f"bad {i},down" for i in range(40)]
    path.write_text("\n".join(["text,label", *rows, ",up", "  ,down", "lost,", "too,many,up", ""]))
    with pytest.raises(DataError, match="line 42, column 'text': the value is missing"):
        text(Text(path=str(path)))
    source = text(Text(path=str(path), **DROP))
    assert source.choices[0].value == "4 of 44 left out"
    assert all(f"line {line}" in source.choices[0].reason for line in (42, 43, 44, 45))
    assert len(source.target) == 40
    for key, name in (("text", "texts"), ("target", "labels")):
        with pytest.raises(ConfigError, match=f"data.{key}: .*did you mean '{name[:-1]}'"):
            text(Text(path=str(path), **{key: name}))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.csv")
    with pytest.raises(ConfigError, match="a pipe"):
        text(Text(path=str(tmp_path / "data.csv")))


def token_file(path: Path, ids: list[int], dtype: str = "uint16") -> str:
    np.array(ids, dtype).tofile(path)
    return str(path)


def test_one_token_file_is_split_at_its_tail(tmp_path: Path) -> None:
    path = token_file(tmp_path / "all.bin", list(range(100)))
    source = tokens(Tokens(path=path, vocab=100, sequence=10))
    ids, following = source.fetch(source.validation, None)
    assert ids.tolist() == [list(range(80, 90))]
    assert following.tolist() == [list(range(81, 91))]
    assert int(source.fetch(source.train, None)[1].max()) < 80
    assert source.sizes.for_constructor() == {"classes": 100, "vocab": 100, "sequence": 10}


def test_a_folder_of_token_files_is_split_already(tmp_path: Path) -> None:
    token_file(tmp_path / "train.bin", [1] * 50, "int32")
    config = Tokens(path=str(tmp_path), vocab=3, sequence=10, dtype="int32")
    with pytest.raises(ConfigError, match="val.bin does not exist"):
        tokens(config)
    token_file(tmp_path / "val.bin", [2] * 21, "int32")
    source = tokens(config)
    assert (len(source.train), len(source.validation)) == (4, 2)
    assert source.fetch(source.validation, None)[0].unique().tolist() == [2]


@pytest.mark.parametrize(("position", "part"), [(17, "train"), (93, "validation")])
def test_an_id_out_of_range_is_named_by_position(tmp_path: Path, position: int, part: str) -> None:
    path = token_file(tmp_path / "all.bin", [77 if i == position else 1 for i in range(100)])
    source = tokens(Tokens(path=path, vocab=50, sequence=5))
    with pytest.raises(DataError, match=f"id at position {position} is 77.*data.vocab=50"):
        source.fetch(getattr(source, part), None)


def test_token_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.bin"
    for content, problem in (
        (b"\0" * 101, "not a multiple of the uint16 size"),
        (b"", "all.bin: is empty"),
        (b"\0" * 100, "data.sequence=256"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=problem):
            tokens(Tokens(path=str(path), vocab=5))
    with pytest.raises(ConfigError, match="data.dtype"):
        tokens(Tokens(path=str(path), vocab=5, dtype="float32"))


X = np.random.default_rng(0).standard_normal((12, 5))


def saved(folder: Path, **content: Any) -> TensorsDataset:
    options = {k: content.pop(k) for k in ("task", "inputs") if k in content}
    np.savez(folder / "data.npz", **content)
    return arrays(Arrays(path=str(folder / "data.npz"), **options))


def test_arrays_of_floats_become_float32_features(tmp_path: Path) -> None:
    source = saved(tmp_path, x=X, y=np.arange(12) % 3)
    x, y = source.fetch(np.arange(12), None)
    assert torch.equal(x, torch.from_numpy(X).float())
    assert (y.tolist(), y.dtype) == ([0, 1, 2] * 4, torch.int64)
    assert source.sizes.for_constructor() == {"in_features": 5, "classes": 3}
    assert source.choices[0].value == "classification"


def test_arrays_tell_their_task(tmp_path: Path) -> None:
    ids = np.arange(60).reshape(12, 5)
    assert saved(tmp_path, x=X, y=X[:, :2]).sizes.classes == 2
    language = saved(tmp_path, x=ids, y=ids + 1)
    assert language.sizes.task == "language_modelling"
    assert (language.sizes.vocab, language.sizes.sequence) == (61, 5)
    assert saved(tmp_path, x=ids, y=np.arange(12) % 2).sizes.vocab == 60
    pictures = saved(tmp_path, x=np.full((12, 6, 6), 255, np.uint8), y=np.arange(12) % 2)
    assert pictures.inputs.shape == (12, 1, 6, 6) and float(pictures.inputs.max()) == 1.0
    assert saved(tmp_path, x=X, y=-np.arange(12), task="regression").sizes.task == "regression"


def test_floats_are_quantities_and_what_makes_classes_of_them_is_said(tmp_path: Path) -> None:
    labels = (X[:, 0] > 0).astype(np.float32)
    source = saved(tmp_path, x=X, y=labels)
    assert source.sizes.task == "regression"
    assert "for classes use data.task=classification" in source.choices[0].reason
    asked = ["data=arrays", f"data.path={tmp_path / 'data.npz'}", "objective=classification"]
    with pytest.raises(ConfigError, match=r"are classes, .*data.task=classification"):
        build(compose(asked)).close()
    assert saved(tmp_path, x=X, y=labels, task="classification").sizes.classes == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"x": X, "y": np.arange(11)}, "'x' has 12 samples and 'y' 11"),
        ({"x": X, "y": np.array(["a"] * 12)}, r"'y' has dtype <U1.*np.unique"),
        ({"x": X[:0], "y": np.arange(0)}, "'x' of shape .* holds no samples"),
        ({"x": X, "y": np.zeros(12, int)}, "use two or more classes"),
        ({"x": X, "y": np.full(12, np.inf)}, "'y': sample 0 has inf, which is not finite"),
        ({"x": np.where(X == X[4, 1], np.nan, X), "y": X}, "'x': sample 4 has nan"),
        ({"x": X, "y": X[:, 0], "task": "classification"}, "one whole number"),
        ({"x": X, "y": X[:, 0], "task": "language_modelling"}, "token ids"),
        ({"x": np.zeros((12, 8, 8, 3)), "y": np.arange(12) % 2}, "channels-last"),
        ({"x": np.full((12, 5), -1), "y": np.arange(12) % 2}, "'x': sample 0 has -1, which is o"),
        ({"x": X[:3], "y": np.array([0, 1, 3 * 10**9])}, "'y': sample 2 has 3000000000"),
        ({"x": np.full((3, 2), 10**9), "y": np.full((3, 2), 1)}, "'x': sample 0 has 1000000000"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, content: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        saved(tmp_path, **content)


def test_a_missing_array_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.inputs: .*no array 'xs'; did you mean 'x'"):
        saved(tmp_path, x=X, y=X[:, 0], inputs="xs")
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(SecurityError, match="data.npz: refused: "):
        arrays(Arrays(path=str(tmp_path / "data.npz")))
    with pytest.raises(SecurityError, match="data.npz: refused: .*[Oo]bject"):
        saved(tmp_path, x=X, y=np.array([None] * 12))
    np.save(tmp_path / "data.npy", X)
    with pytest.raises(DataError, match="a single array"):
        arrays(Arrays(path=str(tmp_path / "data.npy")))
