"""The exported program from raw inputs is the preprocessing and the model, for any batch size."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import runner
from runner.core.data.preprocessing import OpenOptions, Preprocessing, parse_preprocessing
from runner.core.interfaces.batch import Column, Sizes
from runner.core.jobs import evaluate
from runner.core.schemas.jobs import ExportKind
from runner.datasets.export import RawInputModel, _trace_program, raw_inputs
from runner.datasets.images import ImageFolder
from runner.datasets.tabular import tabular
from tests import runs
from tests.core.data.foreign_files import STRANGERS, known, probabilities


def test_gaps_and_unknown_categories_in_the_targets_unit() -> None:
    columns = (
        Column("b", values=("x", "y")),
        Column("a", 5.0, 2.0, fill=7.0),
        Column("a", part="missing"),
    )
    sizes = Sizes("regression", 5, classes=1, target_mean=100.0, target_deviation=10.0)
    preprocessing, model = Preprocessing("tabular", "", sizes, columns), nn.Linear(5, 1)
    pipeline = RawInputModel(model, preprocessing).eval()
    numbers = torch.tensor([[1.0], [float("nan")], [9.0], [5.0]])
    categories = torch.tensor([[0], [1], [-1], [2]])
    inputs = np.array(
        [[1, 0, 0, -2, 0], [0, 1, 0, 1, 1], [0, 0, 1, 2, 0], [0, 0, 1, 0, 0]], np.float32
    )
    expected = (inputs @ model.weight.detach().numpy().T + model.bias.detach().numpy()) * 10 + 100
    program = _trace_program(pipeline, (numbers[:2], categories[:2])).module()
    for call in (pipeline, program):
        np.testing.assert_allclose(call(numbers, categories).detach(), expected, rtol=1e-5)
    raw = raw_inputs(preprocessing, torch.from_numpy(inputs[:1]))
    assert torch.equal(raw[0], numbers[:1]) and torch.equal(raw[1], categories[:1])


def test_pixels_become_probabilities() -> None:
    sizes = Sizes("classification", 12, in_channels=3, image_size=2, classes=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    preprocessing = Preprocessing("images", "", sizes)
    pixels = torch.arange(36, dtype=torch.uint8).reshape(3, 3, 2, 2) * 7
    expected = model(pixels.float() / 255).softmax(1)
    program = _trace_program(RawInputModel(model, preprocessing).eval(), pixels[:2]).module()
    torch.testing.assert_close(program(pixels), expected)
    torch.testing.assert_close(raw_inputs(preprocessing, pixels.float() / 255)[0], pixels)


def test_large_numbers_keep_their_digits_and_gaps_are_raw_inputs() -> None:
    columns = (Column("a", 1.7e9, 25.0, fill=1.7e9), Column("a", part="missing"))
    sizes = Sizes("regression", 2, classes=1, target_deviation=1.0)
    preprocessing, model = Preprocessing("tabular", "", sizes, columns), nn.Linear(2, 1)
    inputs = torch.tensor([[1.5, 0.0], [-2.0, 0.0], [0.0, 1.0]])
    raw = raw_inputs(preprocessing, inputs)
    assert raw[0].flatten().isnan().tolist() == [False, False, True]
    pipeline = RawInputModel(model, preprocessing).eval()
    torch.testing.assert_close(pipeline(*raw), model(inputs))


USUAL = (
    "optimization=none", "training.batch_size=16", "training.steps=8", "checkpoint.every=8",
    "data.workers=0", "optimizer.lr=1e-2",
)  # fmt: skip
ORDERS = (
    "data=tabular", "data.target='zurück'", "data.encoding=cp1252", "data.thousands=point",
    "model=mlp", "model.width=8", "checks.table.constant=drop", *USUAL,
)  # fmt: skip
needs_onnx = pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs the extra onnx")


def write_orders(path: Path, encoding: str, cities: str, size: int) -> Path:
    """Numbers as in 1.234,5, words for missing ones, dates with gaps, constants with gaps."""
    rng, lines = np.random.default_rng(size), ["preis;wann;stadt;fest;tag;zurück"]
    for place in range(size):
        price = f"{rng.normal(3000, 900):,.2f}".translate(str.maketrans(",.", ".,"))
        price = ("NA", "NA", "")[place % 3] if place % 11 == 3 else price
        day = "" if place % 7 == 2 else f"2024-{rng.integers(1, 13):02}-{rng.integers(1, 29):02}"
        fixed, back = ("", "5")[place % 5 > 0], ("ja", "nein")[rng.integers(2)]
        start = "2024-05-01" if place % 4 else ""
        lines.append(f"{price};{day};{cities[place % 3]};{fixed};{start};{back}")
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def exported(
    run: Path, overrides: tuple[str, ...], kind: ExportKind, folder: Path
) -> tuple[Path, dict[str, Any]]:
    """The folder of the exported files, and what the summary says of them."""
    asked = (*overrides, "job=evaluate", f"evaluate.export={kind.name}", f"checkpoint.resume={run}")
    return folder / "exports", evaluate.main(runs.config(*asked), folder).export


def run_example(exports: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run pipeline_example.py in a process in which the runner cannot be imported."""
    script = str(exports / "pipeline_example.py")
    code = f"import runpy, sys; sys.modules['runner'] = None; runpy.run_path({script!r}, None"
    return runs.python("-c", f"{code}, '__main__')", *map(str, arguments))


def fitted(run: Path) -> Preprocessing:
    return parse_preprocessing((run / "checkpoints/best/preprocessing.json").read_bytes(), run)


def answers_of_onnx(file: Path, *inputs: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    names = [node.name for node in session.get_inputs()]
    answers: np.ndarray = session.run(None, dict(zip(names, inputs, strict=True)))[0]
    return answers


def shares(run: Path, overrides: tuple[str, ...], data: Path) -> np.ndarray:
    """What the trained run says of the probabilities."""
    with runner.load(run, overrides=[*runs.QUICK, *overrides]) as trained:
        columns = trained.predict(data)
    return np.stack([v for name, v in columns.items() if name.startswith("probability ")], 1)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orders")
    path = write_orders(folder / "train.csv", "cp1252", "BOR", 400)
    runs.trained(*ORDERS, f"data.path={path}", folder=folder / "run")
    return folder


def test_the_example_answers_a_table_as_the_run_does(orders: Path, tmp_path: Path) -> None:
    overrides = (*ORDERS, f"data.path={orders / 'train.csv'}")
    exports, summary = exported(orders / "run", overrides, ExportKind.export, tmp_path)
    assert summary["pipeline"] == "exports/pipeline.pt2"
    read = json.loads((exports / "preprocessing.json").read_text(encoding="utf-8"))
    parts = [(c["name"], c["part"]) for c in read["columns"] if c["name"] in ("fest", "tag")]
    assert parts == [("fest", "missing"), ("tag", "missing")]
    assert (read["decimal"], read["thousands"]) == ("comma", "point")
    assert summary["files"] == sorted(path.name for path in exports.iterdir())
    utf8 = write_orders(tmp_path / "utf8.csv", "utf-8", "OXB", 50)
    new = write_orders(tmp_path / "new.csv", "cp1252", "OXB", 50)
    printed = np.loadtxt(run_example(exports, utf8, 50).stdout.splitlines(), delimiter=",")
    np.testing.assert_allclose(printed, shares(orders / "run", overrides, new), atol=1e-5)
    utf8.write_text(utf8.read_text().replace(",", "."))
    assert "is no number as the training file writes them" in run_example(exports, utf8, 50).stderr


def test_the_example_reads_units_dates_and_decimal_commas_of_each_column(tmp_path: Path) -> None:
    days = [f"{1 + i % 28:02}.{1 + i % 12:02}.2024" for i in range(60)]
    lines = [f"{i % 9},5 kg;{day};{i % 7},25;{'ab'[i % 9 > 4]}" for i, day in enumerate(days)]
    path, run = tmp_path / "t.csv", tmp_path / "run"
    path.write_text("\n".join(["weight;when;size;y", *lines, ""]))
    table = ("data=tabular", f"data.path={path}", "data.target=y", "+data.types={weight: number}")
    runs.trained(*table, *USUAL, folder=run)
    exports, _ = exported(run, (*table, *USUAL), ExportKind.export, tmp_path / "job")
    printed = np.loadtxt(run_example(exports, path, 60).stdout.splitlines(), delimiter=",")
    np.testing.assert_allclose(printed, shares(run, (*table, *USUAL), path), atol=1e-5)


@needs_onnx
def test_a_table_in_onnx_is_answered_as_the_run_does(orders: Path, tmp_path: Path) -> None:
    overrides = (*ORDERS, f"data.path={orders / 'train.csv'}")
    exports, summary = exported(orders / "run", overrides, ExportKind.onnx, tmp_path)
    assert summary["pipeline"] == "exports/pipeline.onnx"
    config: Any = runs.config(*overrides).data
    preprocessing = fitted(orders / "run")
    source = tabular(config, OpenOptions(fitted=preprocessing, evaluates=True))
    raw = raw_inputs(preprocessing, source.inputs)
    answers = answers_of_onnx(exports / "pipeline.onnx", *(x.numpy() for x in raw))
    expected = shares(orders / "run", overrides, orders / "train.csv")
    np.testing.assert_allclose(answers, expected, atol=1e-5)


@pytest.mark.slow
@needs_onnx
def test_images_are_answered_as_the_run_does(tmp_path: Path) -> None:
    rng, new = np.random.default_rng(0), tmp_path / "new"
    for number in range(24):
        path = tmp_path / "train" / ("dark", "light")[number % 2] / f"{number:02}.png"
        path = new / path.name if number > 17 else path
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = rng.integers(0, 100, (11, 17, 3)) + 150 * (number % 2)
        exif = Image.Exif()
        exif[274] = number % 8 + 1  # how the camera was turned
        Image.fromarray(cells.astype(np.uint8)).save(path, exif=exif)
    overrides = (
        "data=images", f"data.path={tmp_path / 'train'}", "data.image_size=8", "model=cnn",
        "model.width=8", *USUAL,
    )  # fmt: skip
    run = tmp_path / "run"
    runs.trained(*overrides, folder=run)
    exports, _ = exported(run, overrides, ExportKind.onnx, tmp_path / "job")
    config: Any = runs.config(*overrides, f"data.path={new}").data
    images = ImageFolder(config, OpenOptions(fitted=fitted(run), evaluates=True, labelled=False))
    pixels = images.fetch(np.arange(6), None)[0].mul(255).round().to(torch.uint8)
    answers = answers_of_onnx(exports / "pipeline.onnx", pixels.numpy())
    np.testing.assert_allclose(answers, shares(run, overrides, new), atol=1e-5)


@needs_onnx
def test_an_onnx_file_of_a_text_model_answers_bytes_as_the_run_does(tmp_path: Path) -> None:
    stranger = next(stranger for stranger in STRANGERS if stranger.name == "reviews")
    run, path = tmp_path / "run", stranger.write(tmp_path, "train")
    overrides = (*stranger.overrides, f"data.path={path}", *USUAL)
    runs.trained(*overrides, folder=run)
    exports, summary = exported(run, overrides, ExportKind.onnx, tmp_path / "job")
    assert summary["file"] == "exports/model.onnx" and summary["largest_difference"] < 1e-4
    ids = stranger.inputs(known(run), stranger.rows("new"))
    logits = answers_of_onnx(exports / "model.onnx", ids, (ids < 256).astype(np.int64))
    answered = probabilities(logits.astype(float))
    expected = shares(run, overrides, stranger.write(tmp_path, "new"))
    np.testing.assert_allclose(answered, expected, atol=1e-4)
