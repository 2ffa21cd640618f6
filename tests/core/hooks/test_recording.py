"""What a run writes down: rows, hyper-parameters, texts and tables."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from runner.core.errors import Interrupted
from runner.core.hooks.recording import Recording
from runner.core.interfaces.hook import Evaluation, Report
from runner.core.interfaces.run import Run
from runner.core.schemas.monitoring import MonitoringConfig
from tests import runs

SETTINGS = {"optimizer.lr": 0.1, "seed": 0, "data.path": "/x", "optimizer.momentum": 0.5}
SESSION = "_hparams_/session_start_info"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs.opened("data=digits", "model=mlp", "optimization=none", folder=tmp_path) as run:
        run.recorder.open()
        yield run


def report(first: int = 1, loss: tuple[float, ...] = (1.0, 3.0)) -> Report:
    return Report(first, [*loss], [2.0] * len(loss), [False] * len(loss), 0.1, 0.5, 40)


def evaluation(step: int = 2, improved: bool = True) -> Evaluation:
    counts = torch.eye(10, dtype=torch.int64) * 3
    return Evaluation(step, {"val/loss": 0.5, "val/accuracy": 0.9}, counts, improved)


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "split"} for row in runs.rows(folder, split)]


def events(folder: Path) -> list[tuple[int, Any]]:
    loaded = [e for p in sorted(folder.glob("events*")) for e in EventFileLoader(str(p)).Load()]
    return [(event.step, value) for event in loaded for value in event.summary.value]


def hook() -> Recording:
    return Recording(MonitoringConfig(), SETTINGS)


def test_rows_hold_the_means_of_a_stretch_timings_and_the_bare_names_of_a_validation(
    run: Run, tmp_path: Path
) -> None:
    watcher = hook()
    with watcher.session(run):
        watcher.on_report(run, report(1, (1.0, math.nan, 3.0)))
        watcher.on_report(run, report(4, (math.nan,)))
        watcher.on_validation(run, evaluation(improved=False))
    first, second = rows(tmp_path, "train")
    epoch = 3 / run.train.steps_per_epoch
    means = {"loss": 2.0, "grad_norm": 2.0, "lr": 0.1, "epoch": epoch, "skipped": 0}
    assert first == {"step": 3, **means}
    assert second["loss"] is None and second["nonfinite"] == {"loss": "nan"}
    assert rows(tmp_path, "val") == [{"step": 2, "loss": 0.5, "accuracy": 0.9}]
    (row,) = rows(tmp_path, "system")  # however short the run, there is one
    assert (row["step"], row["samples_per_second"], row["step_ms"]) == (4, 80.0, 250.0)
    assert {"process_gib", "cpu_percent", "ram_percent", "disk_free_gib"} <= row.keys()
    assert "tokens_per_second" not in row
    run.objective.unit, run.sizes = "tokens", replace(run.sizes, sequence=16)
    with watcher.session(run):
        watcher.on_report(run, report(5))
    assert rows(tmp_path, "system")[-1]["tokens_per_second"] == pytest.approx(80.0 * 16)


def test_a_run_has_one_row_of_hparams_texts_and_tables_of_its_last_best(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / ".hydra").mkdir(exist_ok=True)
    (tmp_path / ".hydra" / "config.yaml").write_text("key: ${oc.env:SECRET}\n")
    typed = "- optimization=basic\n- optimizer.momentum=0.5\n"
    (tmp_path / ".hydra" / "overrides.yaml").write_text(typed)
    watcher = hook()
    with watcher.session(run):
        run.progress.step = 2
        watcher.on_validation(run, evaluation(2))
    found = events(tmp_path)
    assert set(Counter(value.tag for _, value in found).values()) == {1}
    values = {value.tag: value for _, value in found}
    plain = {tag: value.tensor.string_val for tag, value in values.items()}
    texts = {tag: strings[0].decode() for tag, strings in plain.items() if strings}
    assert "${oc.env:SECRET}" in texts["about/config"]
    assert "| 0 | 3 | 0 |" in texts["val/confusion"]
    content = {tag: value.metadata.plugin_data.content for tag, value in values.items()}
    session = metadata.parse_session_start_info_plugin_data(content[SESSION])
    assert session.group_name == f"{tmp_path.name} of {run.name}/{tmp_path.parent.name}"
    assert set(session.hparams) == {"optimizer.lr", "seed", "optimization", "optimizer.momentum"}
    assert session.hparams["optimizer.momentum"].number_value == 0.5
    experiment = metadata.parse_experiment_plugin_data(content["_hparams_/experiment"])
    first = {info.name for info in experiment.hparam_infos if info.differs}
    assert first == {"optimizer.momentum", "optimization"}
    assert (tmp_path / "provenance.json").is_file()


@pytest.mark.parametrize("error", [None, ValueError(), Interrupted(2)])
def test_the_row_ends_with_the_run_unless_that_may_be_resumed(
    run: Run, tmp_path: Path, error: BaseException | None
) -> None:
    with suppress(ValueError, Interrupted), hook().session(run):
        if error is not None:
            raise error
    tags = [value.tag for _, value in events(tmp_path)]
    assert SESSION in tags
    assert ("_hparams_/session_end_info" in tags) == (error is None)


def test_a_table_is_written_at_each_improvement_before_a_checkpoint_of_it(
    run: Run, tmp_path: Path
) -> None:
    watcher, expected = hook(), [[1], [1], [1, 3]]
    with watcher.session(run):
        for step, improved in enumerate((True, False, True), 1):
            watcher.on_validation(run, evaluation(step, improved))
            written = [s for s, v in events(tmp_path) if v.tag == "val/confusion"]
            assert written == expected[step - 1]
