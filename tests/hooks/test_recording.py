from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import api_pb2, metadata
from torch import nn

from runner.data.batch import Sizes
from runner.errors import Interrupted
from runner.hooks import recording
from runner.hooks.recording import Recording
from runner.record.config import MonitoringConfig
from runner.training.hook import Evaluation, Report
from runner.training.run import Run

from .conftest import MakeRun

DIGITS = Sizes("classification", in_features=64, in_channels=1, image_size=8, classes=10)
SETTINGS = {"optimizer.lr": 0.1, "seed": 0, "data.path": "/somewhere", "optimizer.ema": None}


def classifier(make_run: MakeRun, folder: Path | None) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5))
    batch = (torch.rand(20, 1, 8, 8), torch.randint(10, (20,)))
    return make_run(folder, model, batch, DIGITS)


def report(first: int = 1, loss: list[float] | None = None) -> Report:
    loss = [1.0, 3.0] if loss is None else loss
    return Report(first, loss, [2.0] * len(loss), [False] * len(loss), 0.1, 0.5, 40)


def evaluation(step: int = 2, improved: bool = True) -> Evaluation:
    counts = torch.eye(10, dtype=torch.int64) * 3
    return Evaluation(step, {"val/loss": 0.5, "val/accuracy": 0.9}, counts, improved)


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row.pop("split") == split]


def events(folder: Path) -> list[tuple[int, Any]]:
    loaded = [e for p in sorted(folder.glob("events*")) for e in EventFileLoader(str(p)).Load()]
    return [(event.step, value) for event in loaded for value in event.summary.value]


def hook() -> Recording:
    return Recording(MonitoringConfig(), SETTINGS)


def test_a_train_row_holds_the_stretchs_means_and_no_timings(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = classifier(make_run, tmp_path)
    watcher = hook()
    with watcher.session(run):
        watcher.on_report(run, report(1, [1.0, math.nan, 3.0]))
        watcher.on_report(run, report(4, [math.nan]))
    first, second = rows(tmp_path, "train")
    assert first == {
        "step": 3,
        "loss": 2.0,
        "grad_norm": 2.0,
        "lr": 0.1,
        "epoch": 0.75,
        "skipped": 0,
    }
    assert second["loss"] is None and second["nonfinite"] == {"loss": "nan"}


def test_timings_and_load_are_in_rows_of_their_own(make_run: MakeRun, tmp_path: Path) -> None:
    run = classifier(make_run, tmp_path)
    watcher = hook()
    with watcher.session(run):
        watcher.on_report(run, report(1))
        watcher.on_report(run, report(3))
    (row,) = rows(tmp_path, "system")  # however short the run, there is one
    assert row["step"] == 4
    assert row["samples_per_second"] == pytest.approx(80.0)
    assert row["step_ms"] == pytest.approx(250.0)
    assert row["process_gib"] > 0 and row["epoch_seconds"] > 0  # of four steps
    assert {"cpu_percent", "ram_percent", "disk_free_gib"} <= row.keys()


def test_tokens_per_second_only_where_tokens_are_counted(make_run: MakeRun, tmp_path: Path) -> None:
    ids = torch.randint(256, (4, 16))
    sizes = Sizes("language_modelling", vocab=256, sequence=16)
    run = make_run(tmp_path, nn.Embedding(256, 256), (ids, ids), sizes, unit="tokens")
    watcher = hook()
    with watcher.session(run):
        watcher.on_report(run, report(1))
    (row,) = rows(tmp_path, "system")
    assert row["tokens_per_second"] == pytest.approx(80.0 * 16)


def test_a_validation_row_has_the_bare_names(make_run: MakeRun, tmp_path: Path) -> None:
    run = classifier(make_run, tmp_path)
    hook().on_validation(run, evaluation(improved=False))
    assert rows(tmp_path, "val") == [{"step": 2, "loss": 0.5, "accuracy": 0.9}]


def test_a_run_has_one_row_of_hparams_texts_and_a_picture_of_its_last_best(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("key: ${oc.env:SECRET}\n")
    run = classifier(make_run, tmp_path)
    watcher = hook()
    with watcher.session(run):
        run.progress.step = 2
        watcher.on_validation(run, evaluation(2))  # too early for a look, so it is made up for
    found = events(tmp_path)
    count = Counter(value.tag for _, value in found)
    for tag in (
        "_hparams_/session_start_info",
        "_hparams_/session_end_info",
        "about/config",
        "about/origin",
        "custom_scalars__config__",
        "val/confusion",
        "val/predictions",
    ):
        assert count[tag] == 1, tag
    texts = {
        value.tag: value.tensor.string_val[0].decode()
        for _, value in found
        if "about/" in value.tag
    }
    assert "${oc.env:SECRET}" in texts["about/config"]
    assert "torch" in texts["about/origin"] and "python" in texts["about/origin"]
    start = next(value for _, value in found if value.tag == "_hparams_/session_start_info")
    session = metadata.parse_session_start_info_plugin_data(start.metadata.plugin_data.content)
    assert session.group_name == f"{tmp_path.name} of trial/{tmp_path.parent.name}"
    assert set(session.hparams) == {"optimizer.lr", "seed"}
    assert (tmp_path / "provenance.json").is_file()


def test_a_swept_key_has_a_column_of_its_own_with_all_its_values_and_comes_first(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- optimization=basic\n")
    config = MonitoringConfig(
        domains={"optimizer.momentum": [0.9, 0.5], "optimization": ["none", "basic"]}
    )
    watcher = Recording(config, {**SETTINGS, "optimizer.momentum": 0.5})
    with watcher.session(classifier(make_run, tmp_path)):
        pass
    content = {v.tag: v.metadata.plugin_data.content for _, v in events(tmp_path)}
    start = metadata.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    assert start.hparams["optimizer.momentum"].number_value == 0.5
    assert start.hparams["optimization"].string_value == "basic"
    experiment = metadata.parse_experiment_plugin_data(content["_hparams_/experiment"])
    domains = {
        info.name: [v.string_value or v.number_value for v in info.domain_discrete.values]
        for info in experiment.hparam_infos
        if info.differs
    }
    assert domains == {"optimizer.momentum": [0.5, 0.9], "optimization": ["none", "basic"]}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, api_pb2.STATUS_SUCCESS),
        (ValueError(), api_pb2.STATUS_FAILURE),
        (Interrupted(2), None),
        (KeyboardInterrupt(), api_pb2.STATUS_FAILURE),
    ],
)
def test_the_row_says_how_the_run_ended_unless_it_can_be_resumed(
    make_run: MakeRun, tmp_path: Path, error: BaseException | None, status: int | None
) -> None:
    run = classifier(make_run, tmp_path)
    try:
        with hook().session(run):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    ends = [v for _, v in events(tmp_path) if v.tag == "_hparams_/session_end_info"]
    found = [v.metadata.plugin_data.content for v in ends]
    statuses = [metadata.parse_session_end_info_plugin_data(content).status for content in found]
    assert statuses == ([] if status is None else [status])


def test_looking_changes_neither_random_state_nor_modes_nor_weights(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = classifier(make_run, tmp_path)
    run.model.train()
    run.model[1].eval()  # a part that the user froze
    before = torch.get_rng_state(), [p.clone() for p in run.model.parameters()]
    watcher = hook()
    watcher.on_validation(run, evaluation())
    assert "val/predictions" in {value.tag for _, value in events(tmp_path)}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert [module.training for module in run.model.modules()] == [True, True, False, True]
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), before[1], strict=True))


def test_looks_are_rare_and_only_at_improvements(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    run = classifier(make_run, tmp_path)
    watcher = hook()
    with watcher.session(run):
        for step, (clock, improved) in enumerate(
            [(1.0, True), (6.0, False), (7.0, True), (8.0, True), (20.0, True), (21.0, True)], 1
        ):
            now[0] = clock
            run.progress.step = step
            watcher.on_validation(run, evaluation(step, improved))
        run.progress.step = 7  # the weights have moved on from the last improvement
    found = events(tmp_path)
    assert [s for s, v in found if v.tag == "val/predictions"] == [3, 5]
    assert [s for s, v in found if v.tag == "val/confusion"] == [3, 5, 6]
    assert run.validation.asked == 1  # the same samples, fetched once


def test_a_model_that_takes_only_its_own_batch_size_is_said_once(
    make_run: MakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Rigid(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(20, 64))

    batch = (torch.rand(20, 1, 8, 8), torch.randint(10, (20,)))
    run = make_run(tmp_path, Rigid(64, 10), batch, DIGITS)
    watcher = hook()
    watcher.on_validation(run, evaluation(1))
    watcher.on_validation(run, evaluation(2))
    assert caplog.text.count("no sample predictions") == 1


def shown_text(run: Run, folder: Path, tag: str) -> str:
    watcher = hook()
    watcher.on_validation(run, Evaluation(1, {"val/loss": 1.0}, None, True))
    return next(v for _, v in events(folder) if v.tag == tag).tensor.string_val[0].decode()


def test_a_language_model_goes_on_from_a_prompt(make_run: MakeRun, tmp_path: Path) -> None:
    model = nn.Embedding(256, 256)
    nn.init.eye_(model.weight)
    model.weight.data.mul_(100.0)  # says its own input again, for certain
    ids = torch.full((4, 16), ord("a"))
    run = make_run(tmp_path, model, (ids, ids), Sizes("language_modelling", vocab=256, sequence=16))
    text = shown_text(run, tmp_path, "val/continuation")
    assert "```\naaaaaaaa\n```" in text
    assert "```\n" + "a" * 96 + "\n```" in text


def test_labelled_text_is_a_table_with_the_text(make_run: MakeRun, tmp_path: Path) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return torch.eye(2)[(input_ids[:, 0] == ord("y")).long()] * self.scale * 10

    ids = torch.tensor([[ord("y"), ord("|"), 256], [ord("n"), ord("o"), 256]])
    inputs = {"input_ids": ids, "attention_mask": ids < 256}
    sizes = Sizes("classification", classes=2, vocab=257, sequence=3, class_names=("no", "yes"))
    run = make_run(tmp_path, Reads(), (inputs, torch.tensor([1, 1])), sizes)
    table = shown_text(run, tmp_path, "val/predictions").splitlines()
    assert table[2:] == ["| y\\| | yes | yes | 100% |  |", "| no | yes | no | 100% | wrong |"]


def test_regression_shows_the_errors(make_run: MakeRun, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    run = make_run(
        tmp_path, model, (torch.ones(3, 1), torch.full((3, 1), 0.5)), Sizes("regression")
    )
    assert "| 0.5 | 1 | +0.5 |" in shown_text(run, tmp_path, "val/predictions")


def test_without_a_folder_it_watches_in_silence(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = classifier(make_run, None)
    watcher = hook()
    with watcher.session(run):
        watcher.on_report(run, report())
        watcher.on_validation(run, evaluation())
    assert list(tmp_path.iterdir()) == []
    assert run.validation.asked == 0
