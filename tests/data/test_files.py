"""A user's images, texts, token files and arrays, right and wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from runner.data.arrays import arrays
from runner.data.config import Arrays, Images, Text, Tokens
from runner.data.images import ImageFolder
from runner.data.order import sample_seeds
from runner.data.tensors import Tensors
from runner.data.text import text
from runner.data.tokens import tokens
from runner.errors import ConfigError, DataError, SecurityError


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (30, 20)) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def red_and_blue(folder: Path, **changes: object) -> ImageFolder:
    for number in range(4):
        picture(folder / "red" / f"{number}.png", (255, 0, 0))
        picture(folder / "blue" / f"{number}.jpg", (0, 0, 255))
    return ImageFolder(Images(path=str(folder), image_size=16, **changes))  # type: ignore[arg-type]


def test_images_are_scaled_to_a_square_with_the_folder_as_class(tmp_path: Path) -> None:
    source = red_and_blue(tmp_path)
    x, y = source.fetch(np.arange(8), None)
    assert (x.shape, x.dtype) == ((8, 3, 16, 16), torch.float32)
    assert source.sizes.class_names == ("blue", "red")
    assert y.tolist() == [0] * 4 + [1] * 4
    assert torch.equal(x[5], torch.tensor([1.0, 0, 0])[:, None, None].expand(3, 16, 16))
    assert not source.in_memory
    assert len(source.train) + len(source.validation) == 8


def test_the_centre_of_an_image_is_kept(tmp_path: Path) -> None:
    wide = Image.new("RGB", (300, 100), (255, 255, 255))
    wide.paste((0, 0, 0), (100, 0, 200, 100))
    red_and_blue(tmp_path)
    wide.save(tmp_path / "blue" / "0.png")
    x, _ = ImageFolder(Images(path=str(tmp_path), image_size=16)).fetch(np.array([1]), None)
    assert float(x.max()) < 0.2  # only the black square in the middle


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    assert red_and_blue(tmp_path, channels=1).fetch(np.arange(2), None)[0].shape == (2, 1, 16, 16)


def test_augmentation_follows_the_samples_seed_alone(tmp_path: Path) -> None:
    source = red_and_blue(tmp_path, augment=True)
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "blue" / "0.jpg")
    one, both = np.array([0]), np.array([3, 0])
    seeds = sample_seeds(0, 0, both)
    augmented = source.fetch(both, seeds)[0][1]
    assert torch.equal(source.fetch(one, seeds[1:])[0][0], augmented)
    assert not torch.equal(source.fetch(one, None)[0][0], augmented)
    assert not torch.equal(source.fetch(one, sample_seeds(0, 1, one))[0][0], augmented)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"hello"])
def test_a_corrupt_image_is_named(tmp_path: Path, content: bytes) -> None:
    source = red_and_blue(tmp_path)
    (tmp_path / "red" / "2.png").write_bytes(content)
    with pytest.raises(DataError, match=r"red.2.png: cannot be decoded"):
        source.fetch(np.arange(8), None)


def test_postscript_is_no_image_whatever_its_name(tmp_path: Path) -> None:
    source = red_and_blue(tmp_path)
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    (tmp_path / "red" / "2.png").write_bytes(program)
    with pytest.raises(DataError, match="UnidentifiedImageError"):
        source.fetch(np.arange(8), None)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    source = red_and_blue(tmp_path)
    file = tmp_path / "blue" / "1.jpg"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"blue.1.jpg"):
        source.fetch(np.arange(8), None)


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "red" / "0.png", (255, 0, 0))
    with pytest.raises(ConfigError, match=r"data.path: .*1 folders"):
        ImageFolder(Images(path=str(tmp_path)))
    (tmp_path / "blue").mkdir()
    with pytest.raises(DataError, match=r"blue: the class has no images"):
        ImageFolder(Images(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"data.path: .*did you mean 'blue'"):
        ImageFolder(Images(path=str(tmp_path / "bleu")))
    with pytest.raises(ConfigError, match=r"data.channels"):
        ImageFolder(Images(path=str(tmp_path), channels=4))


def test_other_files_among_images_are_left_out_and_counted(tmp_path: Path) -> None:
    red_and_blue(tmp_path)
    (tmp_path / "red" / "notes.txt").write_text("red")
    source = red_and_blue(tmp_path)
    assert len(source.files) == 8
    assert "1 file is no image" in source.choices[0].reason


def test_labelled_text_is_read_from_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text('review,stars\n"good, really",up\nbad,down\nfine é,up\n')
    source = text(Text(path=str(path), text="review", target="stars", sequence=8))
    inputs, labels = source.fetch(np.arange(3), None)
    assert labels.tolist() == [1, 0, 1]
    assert source.sizes.class_names == ("down", "up")
    assert bytes(inputs["input_ids"][0].tolist()) == b"good, re"
    assert inputs["input_ids"][1].tolist() == [*b"bad", 256, 256, 256, 256, 256]
    assert inputs["attention_mask"][2].tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert "1 of 3 texts are longer" in source.choices[0].reason


def test_labelled_text_is_read_from_a_folder_per_class(tmp_path: Path) -> None:
    for label in ("ham", "spam"):
        (tmp_path / label).mkdir()
        for number in range(3):
            (tmp_path / label / f"{number}.txt").write_text(f"{label} {number}")
    source = text(Text(path=str(tmp_path)))
    inputs, labels = source.fetch(np.array([4]), None)
    assert bytes(inputs["input_ids"][0, :6].tolist()) == b"spam 1"
    assert labels.tolist() == [1]
    (tmp_path / "ham" / "3.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"3.txt: the text is empty"):
        text(Text(path=str(tmp_path)))


def test_wrong_columns_and_rows_of_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\ngood,up\n,down\n")
    with pytest.raises(DataError, match="line 3, column 'text'"):
        text(Text(path=str(path)))
    with pytest.raises(ConfigError, match=r"data.text: .*did you mean 'text'"):
        text(Text(path=str(path), text="texts"))
    with pytest.raises(ConfigError, match=r"data.target: .*did you mean 'label'"):
        text(Text(path=str(path), target="labels"))


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
    with pytest.raises(ConfigError, match="no val.bin"):
        tokens(config)
    token_file(tmp_path / "val.bin", [2] * 21, "int32")
    source = tokens(config)
    assert (len(source.train), len(source.validation)) == (4, 2)
    assert source.fetch(source.validation, None)[0].unique().tolist() == [2]


@pytest.mark.parametrize(("position", "part"), [(17, "train"), (93, "validation")])
def test_an_id_out_of_range_is_named_by_its_position(
    tmp_path: Path, position: int, part: str
) -> None:
    ids = [1] * 100
    ids[position] = 77
    path = token_file(tmp_path / "all.bin", ids)
    source = tokens(Tokens(path=path, vocab=50, sequence=5))
    with pytest.raises(
        DataError, match=rf"all.bin: the id at position {position} is 77.*data.vocab=50"
    ):
        source.fetch(getattr(source, part), None)


def test_token_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.bin"
    path.write_bytes(b"\0" * 101)
    with pytest.raises(DataError, match="no whole number of uint16"):
        tokens(Tokens(path=str(path), vocab=5))
    path.write_bytes(b"")
    with pytest.raises(DataError, match="all.bin: the file is empty"):
        tokens(Tokens(path=str(path), vocab=5))
    path.write_bytes(b"\0" * 100)
    with pytest.raises(DataError, match="data.sequence=256"):
        tokens(Tokens(path=str(path), vocab=5))
    for dtype in ("float32", "uint61"):
        with pytest.raises(ConfigError, match="data.dtype"):
            tokens(Tokens(path=str(path), vocab=5, dtype=dtype))


def saved(folder: Path, **content: object) -> Tensors:
    options = {k: str(content.pop(k)) for k in ("task", "inputs") if k in content}
    np.savez(folder / "data.npz", **content)  # type: ignore[arg-type]
    return arrays(Arrays(path=str(folder / "data.npz"), **options))


X = np.random.default_rng(0).standard_normal((12, 5))


def test_arrays_of_floats_become_float32_features(tmp_path: Path) -> None:
    source = saved(tmp_path, x=X, y=np.arange(12) % 3)
    x, y = source.fetch(np.arange(12), None)
    assert torch.equal(x, torch.from_numpy(X).float())
    assert (y.tolist(), y.dtype) == ([0, 1, 2] * 4, torch.int64)
    assert source.sizes.for_constructor() == {"in_features": 5, "classes": 3}
    assert source.choices[0].value == "classification"


def test_arrays_of_bytes_are_images_from_0_to_1(tmp_path: Path) -> None:
    images = np.full((12, 6, 6), 255, np.uint8)
    source = saved(tmp_path, x=images, y=np.arange(12) % 2)
    assert source.fetch(np.arange(2), None)[0].shape == (2, 1, 6, 6)
    assert float(source.inputs.max()) == 1.0
    assert (source.sizes.in_channels, source.sizes.image_size) == (1, 6)


def test_arrays_tell_their_task(tmp_path: Path) -> None:
    ids = np.arange(60).reshape(12, 5)
    assert saved(tmp_path, x=X, y=X[:, 0]).sizes.task == "regression"
    assert saved(tmp_path, x=X, y=X[:, :2]).sizes.classes == 2
    language = saved(tmp_path, x=ids, y=ids + 1)
    assert language.sizes.task == "language_modelling"
    assert (language.sizes.vocab, language.sizes.sequence) == (61, 5)
    assert saved(tmp_path, x=ids, y=np.arange(12) % 2).sizes.vocab == 60
    assert saved(tmp_path, x=X, y=np.arange(12), task="regression").sizes.task == "regression"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"x": X, "y": np.arange(11)}, "'x' has 12 samples and 'y' has 11"),
        ({"x": np.where(X == X[3, 2], np.nan, X), "y": np.arange(12)}, r"'x' at \[3, 2\]: nan"),
        ({"x": X, "y": np.array(["a"] * 12)}, "'y' is of type <U1"),
        ({"x": X[:0], "y": np.arange(0)}, "'x' of shape .* holds no samples"),
        ({"x": X, "y": np.arange(12) % 2 - 1}, r"'y' at \[0\]: the label -1 is negative"),
        ({"x": X, "y": np.zeros(12, int)}, "nothing to tell apart"),
        ({"x": X, "y": X[:, 0], "task": "classification"}, "one whole number"),
        ({"x": X, "y": X[:, 0], "task": "language_modelling"}, "token ids"),
        ({"x": np.zeros((12, 8, 8, 3)), "y": np.arange(12) % 2}, "channels last"),
        ({"x": np.full((12, 5), -1), "y": np.arange(12) % 2}, r"\[0, 0\]: the token id -1"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, content: dict[str, object], problem: str) -> None:
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"x": np.empty((10**10, 0), "f"), "y": np.zeros(3)}, "holds no samples"),
        ({"x": np.zeros((3, 2), "f"), "y": np.array([0, 1, 3 * 10**9])}, "label 3,000,000,000"),
        ({"x": np.full((3, 2), 10**9), "y": np.full((3, 2), 1)}, "token id 1,000,000,000"),
    ],
)
def test_a_tiny_file_cannot_ask_for_a_huge_model(
    content: dict[str, np.ndarray], told: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=told):
        saved(tmp_path, **content)


def test_arrays_of_almost_only_zeros_are_honest(tmp_path: Path) -> None:
    x = np.zeros((100, 20_000), np.float32)
    x[:, :100] = np.random.default_rng(0).random((100, 100))
    np.savez_compressed(tmp_path / "data.npz", x=x, y=np.arange(100) % 2)
    assert x.nbytes > 60 * (tmp_path / "data.npz").stat().st_size
    assert arrays(Arrays(path=str(tmp_path / "data.npz"))).sizes.in_features == 20_000


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.csv")
    with pytest.raises(ConfigError, match="a pipe"):
        text(Text(path=str(tmp_path / "data.csv"), text="review", target="stars", sequence=8))
