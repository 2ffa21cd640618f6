"""`data.bad_samples=drop`: what cannot be used is counted, named and left out before the split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from runner import build, compose
from runner.data.arrays import arrays
from runner.data.config import Arrays, BadSamples, DataConfig, Images, Tabular, Text, Tokens
from runner.data.images import ImageFolder
from runner.data.open import open_data
from runner.data.tabular import tabular
from runner.data.tensors import Tensors
from runner.data.text import text
from runner.data.user_dataset import UserDataset
from runner.errors import ConfigError, DataError
from runner.record.history import History

DROP = {"bad_samples": BadSamples.drop}
HEADER = "age,income,colour,bought"
ROWS = [f"{i},{i * i},{'red' if i % 3 else 'blue'},{'yes' if i % 2 else 'no'}" for i in range(40)]

BAD_ROWS = {
    "a missing number": ("9,,red,yes", "column 'income': the value is missing"),
    "a number written as NaN": ("9,NaN,red,yes", "column 'income': the value is missing"),
    "an infinite number": ("9,inf,red,yes", "column 'income': the value 'inf' is no finite number"),
    "a number too large": ("9,1e999,red,yes", "the value 'inf' is no finite number"),
    "a text among numbers": ("9,12a,red,yes", "column 'income': the value '12a' is no finite"),
    "a missing category": ("9,1,,yes", "column 'colour': the value is missing"),
    "a missing label": ("9,1,red,", "column 'bought': the value is missing"),
    "too few values": ("9,1,red", "has 3 values, and the header names 4 columns"),
    "too many values": ("9,1,red,yes,no", "has 5 values"),
    "bytes that are no text": ("9,1,r\xe9d,yes", "is not UTF-8 text"),
}


def written(folder: Path, rows: list[str]) -> str:
    path = folder / "people.csv"
    path.write_bytes("\n".join([HEADER, *rows, ""]).encode("latin-1"))
    return str(path)


def opened(path: str, **changes: Any) -> Tensors:
    return tabular(Tabular(path=path, target="bought", **{**DROP, **changes}))


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_left_out_and_named_and_the_rest_is_as_without_it(
    kind: str, tmp_path: Path
) -> None:
    row, problem = BAD_ROWS[kind]
    path = written(tmp_path, [*ROWS[:5], row, *ROWS[5:]])
    source = opened(path)
    told = source.choices[0]
    assert (told.key, told.value) == ("data.bad_samples", "1 of 41 left out")
    assert told.reason.startswith("line 7") and problem in told.reason
    clean = opened(written(tmp_path, ROWS))
    assert torch.equal(source.inputs, clean.inputs)
    assert torch.equal(source.target, clean.target)
    assert source.sizes == clean.sizes
    assert source.train.tolist() == clean.train.tolist()
    assert [c.key for c in clean.choices] == ["data.task"]
    assert source.rows(5) == "line 8"  # rows keep the name of their line


def test_several_bad_rows_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    rows = [*ROWS, *ROWS, *["9,NA,red,yes"] * 8]
    told = opened(written(tmp_path, rows)).choices[0]
    assert told.value == "8 of 88 left out"
    assert "line 82, " in told.reason and told.reason.endswith("and 3 more")


def test_more_bad_rows_than_the_stated_share_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, [*ROWS, *["9,1,red"] * 5])
    with pytest.raises(DataError, match=r"5 of 45 samples .* data.most_bad=0.1: line 42 has 3"):
        opened(path)
    assert opened(path, most_bad=0.2).choices[0].value == "5 of 45 left out"
    with pytest.raises(ConfigError, match=r"data.most_bad: 1.0 is not a share"):
        opened(path, most_bad=1.0)


def test_a_column_of_texts_stays_one_and_an_open_quote_is_still_an_error(tmp_path: Path) -> None:
    mixed = [row.replace("red", "7") for row in ROWS]  # a third is blue
    assert opened(written(tmp_path, mixed)).sizes.in_features == 4
    with pytest.raises(DataError, match="line"):  # it would take all rows after it along
        opened(written(tmp_path, [*ROWS[:20], '9,1,"red,yes', *ROWS[20:]]))


def test_bad_cells_of_parquet_are_left_out(tmp_path: Path) -> None:
    ages = pyarrow.array([None, float("nan"), *range(30)], pyarrow.float64())
    table = pyarrow.table({"age": ages, "bought": ["yes", "no"] * 16})
    parquet.write_table(table, tmp_path / "people.parquet")
    source = opened(str(tmp_path / "people.parquet"))
    assert len(source.target) == 30
    assert source.choices[0].reason.startswith("row 1, column 'age': the value is missing; row 2")


def test_a_row_that_cannot_be_used_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.bad_samples=drop"):
        opened(written(tmp_path, [*ROWS, "9,,red,yes"]), bad_samples=BadSamples.stop)


def pictures(folder: Path, broken: dict[str, bytes]) -> Path:
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for number in range(12):
            noise = rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / label / f"{number:02}.jpg")
    for name, content in broken.items():
        path = folder / name
        path.write_bytes(content or path.read_bytes()[:-300])
    return folder


@pytest.mark.parametrize(
    "broken",
    [{"a/03.jpg": b"hello"}, {"b/01.jpg": b""}, {"a/00.jpg": b"\xff\xd8\xff\xe0", "b/11.jpg": b""}],
    ids=["no image", "cut short", "two"],
)
def test_images_that_cannot_be_decoded_are_left_out_before_the_split(
    broken: dict[str, bytes], tmp_path: Path
) -> None:
    root = pictures(tmp_path / "with", broken)
    source = ImageFolder(Images(path=str(root), image_size=8, **DROP))
    told = source.choices[0]
    assert told.value == f"{len(broken)} of 24 left out"
    assert all(str(root / name) in told.reason for name in broken)
    clean = pictures(tmp_path / "without", {})
    for name in broken:
        (clean / name).unlink()
    other = ImageFolder(Images(path=str(clean), image_size=8))
    every = np.arange(24 - len(broken))
    assert source.validation.tolist() == other.validation.tolist()
    for ours, theirs in zip(source.fetch(every, None), other.fetch(every, None), strict=True):
        assert torch.equal(ours, theirs)


def test_a_class_without_an_image_that_can_be_decoded_is_an_error(tmp_path: Path) -> None:
    root = pictures(tmp_path, {})
    for path in (root / "a").iterdir():
        path.write_bytes(b"hello")
    with pytest.raises(DataError, match=r"more than data.most_bad"):
        ImageFolder(Images(path=str(root), **DROP))
    with pytest.raises(DataError, match=r"a: no image of the class can be decoded"):
        ImageFolder(Images(path=str(root), most_bad=0.9, **DROP))


def test_a_picture_too_large_to_decode_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pictures(tmp_path, {})
    Image.new("L", (80, 80)).save(root / "a" / "00.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6_000)
    with pytest.warns(Image.DecompressionBombWarning):
        source = ImageFolder(Images(path=str(root), **DROP))
    assert "DecompressionBomb" in source.choices[0].reason


def test_samples_of_arrays_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 3)), np.arange(40) % 2
    x[4, 1], x[7, 0] = np.nan, np.inf
    y[9] = -1
    path = str(tmp_path / "data.npz")
    np.savez(path, x=x, y=y)
    source = arrays(Arrays(path=path, **DROP))
    assert source.choices[0].value == "3 of 40 left out"
    assert source.choices[0].reason == (
        "sample 4: 'x' has nan, which is not finite; sample 7: 'x' has inf, which is not finite; "
        "sample 9: 'y' has -1, which is negative"
    )
    assert torch.equal(source.inputs, torch.from_numpy(np.delete(x, [4, 7, 9], 0)).float())
    assert (source.rows(4), source.rows(36)) == ("sample 5", "sample 39")
    with pytest.raises(DataError, match=r"'x' at \[4, 1\]: nan"):
        arrays(Arrays(path=path))
    np.savez(path, x=rng.standard_normal((40, 3)), y=-rng.integers(0, 90, 40))
    assert len(arrays(Arrays(path=path, task="regression", **DROP)).target) == 40


def test_texts_without_a_word_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    rows = [f"good {i},up" if i % 2 else f"bad {i},down" for i in range(40)]
    path.write_text("\n".join(["text,label", *rows, ",up", "  ,down", "lost,", "too,many,up", ""]))
    source = text(Text(path=str(path), **DROP))
    assert source.choices[0].value == "4 of 44 left out"
    for line in (42, 43, 44, 45):
        assert f"line {line}" in source.choices[0].reason
    assert len(source.labels) == 40


class Flawed:
    """Samples some of which raise, and some of which are not finite."""

    classes = 2
    note = "mine"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in (0, 9):
            raise OSError(f"no file {index}")
        x = torch.full((3,), float(index))
        if index == 20:
            x[1] = float("nan")
        return x, index % 2


def test_samples_of_a_users_data_set_that_fail_are_left_out() -> None:
    config = DataConfig(kind="any", **DROP)
    source = UserDataset(Flawed(), "my.Flawed", 0.2, 0, config)
    assert source.choices[0].value == "3 of 40 left out"
    assert "sample 9: OSError: no file 9" in source.choices[0].reason
    assert "sample 20: a value is not finite" in source.choices[0].reason
    assert source.dataset.note == "mine"
    first = np.sort(np.concatenate([source.train, source.validation]))
    assert source.fetch(first, None)[0][:, 0].tolist() == [
        i for i in range(40) if i not in (0, 9, 20)
    ]
    with pytest.raises(DataError, match="sample 0: OSError"):
        UserDataset(Flawed(), "my.Flawed", 0.2, 0)


def test_token_files_have_no_samples_to_leave_out(tmp_path: Path) -> None:
    def nothing(name: str, key: str) -> Callable[..., Any]:
        raise AssertionError(name)

    config = Tokens(path=str(tmp_path), vocab=9, **DROP)
    with pytest.raises(ConfigError, match=r"data.bad_samples: windows over token ids move"):
        open_data(config, nothing)


def test_a_run_tells_of_bad_samples_in_its_history_and_summary(tmp_path: Path) -> None:
    path = written(tmp_path, [*ROWS, "9,,red,yes"])
    config = compose([
        "data=tabular", f"data.path={path}", "data.target=bought", "data.bad_samples=drop",
        "model=mlp", "training.steps=1", "optimization=none", "checkpoint=off", "checks=off",
        "monitoring=quiet",
    ])  # fmt: skip
    from runner import train

    with build(config, tmp_path / "run") as run:
        summary = train(run)
    assert summary.faults["bad_samples"] == 1
    assert any(choice.key == "data.bad_samples" for choice in summary.choices)
    (fault,) = [f for f in History.read(tmp_path / "run") if f.kind == "bad_samples"]
    assert fault.category == "data" and "line 42, column 'income'" in fault.message
    assert fault.message.startswith("1 of 41 left out")
