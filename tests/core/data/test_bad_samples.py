"""data.bad_samples=drop: samples that cannot be read are left out and counted, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runner import train
from runner.core import fork_server
from runner.core.data.arrays import arrays
from runner.core.data.loader import BatchLoader
from runner.core.data.order import sample_seeds
from runner.core.data.user_dataset import UserDataset
from runner.core.errors import DataError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.batch import slice_rows
from runner.core.schemas.data import Arrays, BadSamples, DataConfig, Images, Text
from runner.datasets import images
from runner.datasets.images import ImageFolder
from runner.datasets.predict import predict_batches
from runner.datasets.text import text
from tests import runs
from tests.faults import processes
from tests.faults.modes import typed
from tests.runs import OURS, opened

Load = Callable[..., BatchLoader]
DROP = "data.bad_samples=drop"
TORN = (*OURS, "data._target_=my_package.Torn", DROP, "data.most_bad=0.9", "model=mlp")
BAD = {4, 9, 17, 30, 31}


class Noise:
    """Samples that chance is part of; those in `BAD` cannot be read."""

    sizes = {"task": "classification", "in_features": 3, "classes": 2}

    def __init__(self, bad: set[int] | None = None) -> None:
        self.bad = BAD if bad is None else bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            raise ValueError(f"torn {index}")
        return torch.randn(3) + index, index % 2


def drop(**changes: Any) -> DataConfig:
    return DataConfig(kind="any", bad_samples=BadSamples.drop, **changes)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_batch_keeps_its_other_samples_in_order(
    load: Load, same: Callable[[Any, Any], bool], workers: int
) -> None:
    whole = UserDataset(Noise(set()), "Noise", DataConfig(kind="any"))
    source = UserDataset(Noise(), "Noise", drop())
    how: dict[str, Any] = {"batch_size": 5, "indices": np.arange(40)}
    loader = load(source, drop(workers=workers), **how)
    plain, seen, found = load(whole, **how), [], {}
    for step, batch in zip(range(3 * 8), loader.batches(0), strict=False):
        indices = plain.indices(step)
        kept = [place for place, index in enumerate(indices) if index not in BAD]
        seen.append(loader.indices(step))
        assert seen[-1] == [indices[place] for place in kept]
        assert loader.usable is not None
        found |= loader.usable.last.bad
        assert same(batch, slice_rows(plain.at(step), kept))
        assert same(loader.at(step), batch)
    assert found.keys() == BAD and "torn 4" in found[4]


@pytest.mark.usefixtures("my_package")
def test_a_batch_of_which_nothing_is_left_changes_nothing_and_is_skipped(tmp_path: Path) -> None:
    typed = (*TORN, "+data.tenths=6", "training.batch_size=4", "training.steps=14",
             "monitoring.every=1", "data.workers=0")  # fmt: skip
    states: list[dict[str, Any]] = []
    with opened(*typed, folder=tmp_path) as run:
        order = run.train.fetch.order
        empty = [
            step for step in range(1, 15)
            if all(i * 7 % 10 < 6 for i in order.batch(*divmod(step - 1, order.batches))[0])
        ]  # fmt: skip
        assert 0 < len(empty) < 8
        for step in range(1, 15):
            run.total_steps = step
            before = {k: v.clone() for k, v in run.model.state_dict().items()}
            train(run)
            states.append(before)
            after = run.model.state_dict()
            unchanged = all(torch.equal(before[key], after[key]) for key in before)
            assert unchanged == (step in empty)
        assert run.progress.skipped == len(empty) and run.progress.consecutive_skips == 0
        counts = run.history.counts
        assert run.train.usable is not None and run.validation.usable is not None
        bad = len(run.train.usable.bad) + len(run.validation.usable.bad)
        assert counts == {"bad_samples": bad}


@pytest.mark.usefixtures("my_package")
def test_a_validation_is_that_of_the_samples_that_are_left() -> None:
    with opened(*TORN, "+data.tenths=6", "training.batch_size=4", "data.workers=0") as run:
        metrics = evaluate(run).metrics
        held_out = [i for i in run.validation.fetch.order.indices if i * 7 % 10 >= 6]
        x, y = run.validation.fetch.source.fetch(np.array(held_out), None)
        with torch.no_grad():
            run.model.eval()
            loss = float(run.objective(run.forward(x), y))
        assert metrics["val/loss"] == pytest.approx(loss, rel=1e-5)
        named = np.concatenate([columns["sample"] for columns in predict_batches(run)])
        assert named.tolist() == held_out


@pytest.mark.usefixtures("my_package")
def test_too_large_a_share_ends_the_run_and_names_some() -> None:
    typed = (*OURS, "data._target_=my_package.Torn", DROP, "model=mlp", "+data.tenths=2")
    with opened(*typed) as run, pytest.raises(DataError) as caught:
        train(run)
    message = str(caught.value)
    assert "23 of 200 samples cannot be used, more than data.most_bad=0.1" in message
    assert "ValueError: sample" in message and "and 18 more; correct them, or raise" in message


def pictures(root: Path) -> set[str]:
    """Two classes of images, five of them damaged; their names."""
    draw = np.random.default_rng(0)
    for number in range(60):
        pixels = draw.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        path = root / ("even", "odd")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    files = sorted(root.rglob("*.png"))
    damaged = [files[i] for i in (3, 17, 29, 41, 55)]
    damaged[0].write_bytes(b"")
    damaged[1].write_bytes(damaged[1].read_bytes()[:150])
    damaged[2].write_text("no image at all")
    damaged[3].write_bytes(files[0].read_bytes()[:-200])
    damaged[4].unlink()
    damaged[4].symlink_to("nowhere.png")
    return {str(path.relative_to(root)) for path in damaged[:4]}


def test_images_that_cannot_be_decoded_are_left_out_counted_and_named(tmp_path: Path) -> None:
    damaged = pictures(tmp_path / "data")
    data = ("data=images", f"data.path={tmp_path / 'data'}", "data.image_size=8", "model=mlp")
    more = ("training.batch_size=8", "training.epochs=2", "data.workers=2")
    with opened(*data, DROP, *more, folder=tmp_path / "run") as run:
        summary = train(run)
    assert summary.status == "done" and summary.faults["bad_samples"] == 4
    assert summary.faults.keys() <= {"bad_samples", "constant_output"}  # after two epochs
    (fault,) = runs.faults(tmp_path / "run", "bad_samples")
    assert fault["category"] == "data" and fault["message"].startswith("4 of 59 left out")
    (said,) = [c for c in summary.choices if c.key == "data.bad_samples"]
    root, problems = f"{tmp_path / 'data'}/", said.reason.split("; ")
    assert said.value == "4 of 59 left out" and said.is_notice
    assert {problem.removeprefix(root).partition(":")[0] for problem in problems} == damaged
    with pytest.raises(DataError, match=r"png: cannot be decoded .* or use data.bad_samples=drop"):
        with opened(*data, *more) as run:
            train(run)


def save_images(folder: Path, contents: list[bytes], labels: list[int]) -> None:
    """A folder as `datasets` writes it."""
    datasets = pytest.importorskip("datasets")
    classes = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features({"image": datasets.Image(), "label": classes})
    rows = {"image": [{"bytes": b, "path": None} for b in contents], "label": labels}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))


@pytest.mark.parametrize("saved", [False, True])
def test_bad_images_are_left_out_before_the_split_and_the_others_keep_names_and_labels(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class a has images of value 50, class b of 200; three are bad, and the split has the rest."""
    contents = []
    for number in range(40):
        path = tmp_path / "images" / ("a", "b")[number // 20] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), (50, 200)[number // 20], np.uint8)).save(path)
        damaged = {0: b"", 7: b"no image", 25: path.read_bytes()[:45]}
        path.write_bytes(damaged.get(number, path.read_bytes()))
        contents.append(path.read_bytes())
    config = Images(path=str(tmp_path / "images"), image_size=4, bad_samples=BadSamples.drop)
    if saved:
        save_images(tmp_path / "saved", contents, [number // 20 for number in range(40)])
        config.path = str(tmp_path / "saved")
    source = ImageFolder(config)
    good = [number for number in range(40) if number not in (0, 7, 25)]
    assert sorted([*source.train.tolist(), *source.validation.tolist()]) == list(range(37))
    x, y = source.fetch(np.arange(37), None)
    assert torch.equal(x[:, 0, 0, 0] > 0.5, y == 1)
    assert y.tolist() == [number // 20 for number in good]
    (choice,) = [c for c in source.choices if c.key == "data.bad_samples"]
    assert choice.value == "3 of 40 left out" and choice.is_notice
    names = ["row 0:", "row 7:", "row 25:"] if saved else ["a/00.png:", "a/07.png:", "b/25.png:"]
    assert [name in choice.reason for name in names] == [True] * 3
    named = [f"row {n}" if saved else f"{'ab'[n // 20]}/{n:02}.png" for n in good]
    assert [source.rows(i) for i in range(37)] == named
    monkeypatch.setattr(images, "MAX_DECODED", 0)  # what is not decoded is left out when fetched
    assert len(ImageFolder(config).target) == 38


def test_texts_of_a_folder_that_are_empty_or_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / ("a", "b")[number % 2] / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text {number}")
    (tmp_path / "a" / "4.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"a/4.txt: the text is empty; .* data.bad_samples=drop"):
        text(Text(path=str(tmp_path), sequence=8))
    source = text(Text(path=str(tmp_path), sequence=8, bad_samples=BadSamples.drop))
    (choice,) = [c for c in source.choices if c.key == "data.bad_samples"]
    assert choice.value == "1 of 12 left out" and "a/4.txt: the text is empty" in choice.reason
    assert len(source.target) == 11 and "a/4.txt" not in source.rows.names
    label = {source.rows(i): int(source.target[i]) for i in range(11)}
    assert all(label[name] == (name[0] == "b") for name in label)
    (tmp_path / "b" / "5.txt").write_text("")
    with pytest.raises(DataError, match="2 of 12 samples cannot be used, more than data.most_bad"):
        text(Text(path=str(tmp_path), sequence=8, bad_samples=BadSamples.drop))


def test_samples_of_arrays_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20.0) / 3
    x[6, 1], y[11] = np.inf, np.nan
    np.savez(tmp_path / "data.npz", x=x, y=y)
    config = Arrays(path=str(tmp_path / "data.npz"), task="regression")
    with pytest.raises(DataError, match="'x': sample 6 has inf"):
        arrays(config)
    config.bad_samples = BadSamples.drop
    source = arrays(config)
    assert source.inputs[:, 0].tolist() == [2.0 * i for i in range(20) if i not in (6, 11)]
    assert source.rows(17) == "sample 19"
    assert any(c.value == "2 of 20 left out" for c in source.choices)


def test_what_the_machine_lacks_is_no_fault_of_a_sample() -> None:
    class Starved(Noise):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 5:
                raise OSError(24, "Too many open files")
            return super().__getitem__(index)

    config = drop(workers=0)
    source = UserDataset(Starved(), "Starved", config)
    seeds = sample_seeds(0, 0, np.arange(8))
    with pytest.raises(DataError, match="sample 5: OSError"):
        from runner.core.data.usable import fetch_usable

        fetch_usable(source, np.arange(8), seeds, np.arange(40))


@pytest.mark.slow
@pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")
def test_a_killed_run_leaves_out_the_same_samples_with_any_workers(tmp_path: Path) -> None:
    from tests.faults.end_state import end_state

    processes.serve()
    ends = []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        command = [*typed("bad samples", folder / "run"), f"data.workers={workers}"]
        if workers:
            process = processes.start(folder, command)
            while not list((folder / "run").glob("checkpoints/step_0000004*")):
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        assert processes.start(folder, command).wait(120) == 0
        ends.append(end_state(folder / "run"))
        faults = json.loads((folder / "run" / "summary.json").read_text())["faults"]
        assert faults["bad_samples"] == 5
    assert ends[0] == ends[1]
