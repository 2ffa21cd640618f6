"""The best run of a sweep is first, and its commands work as they are printed."""

import json
import shlex
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import backend_context

from runner.measure.comparison import relocate_folders
from runner.measure.discover import compare
from runner.measure.table import winner_commands
from tests import runs
from tests.measure.planted import run, sweep

RATES = ("1e-5", "1e-2", "1e-3")
SHORT = ("training.steps=30", "device=cpu", "monitoring.progress=false")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a sweep over three learning rates was started."""
    folder = tmp_path_factory.mktemp("sweep")
    typed = (f"optimizer.lr={','.join(RATES)}", "hydra.sweep.dir=outputs/sweeps/one")
    made = runs.command(folder, "-m", *typed, *SHORT)
    assert made.returncode == 0, made.stderr
    assert max(map(len, made.stderr.splitlines())) <= 160
    (folder / "printed").write_text(made.stdout)
    return folder


def test_rows_are_ordered_by_the_monitored_metric_and_the_best_one_ends_the_screen(
    swept: Path,
) -> None:
    values = {
        rate: json.loads((swept / f"outputs/sweeps/one/{n}/summary.json").read_text())["best"]
        for n, rate in enumerate(RATES)
    }
    expected = sorted(RATES, key=lambda rate: -values[rate])
    rows = compare(swept / "outputs/sweeps/one").rows
    assert [row.name for row in rows] == [f"lr={float(rate):g}" for rate in expected]
    lines = (swept / "printed").read_text().splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("the winner:"))
    assert f"in outputs/sweeps/one/{RATES.index(expected[0])}" in lines[at]
    labels = [line.split(":")[0].strip() for line in lines[at + 1 : at + 5]]
    assert labels == ["predict", "evaluate", "resume", "train on"]


def test_hparams_checks_what_differs_and_names_the_checkpoint_of_each_metric(swept: Path) -> None:
    folder = str(swept / "outputs/sweeps/one")
    runs_of_it = EventMultiplexer().AddRunsFromDirectory(folder)
    runs_of_it.Reload()
    provider = MultiplexerDataProvider(runs_of_it, folder)
    hparams, context = backend_context.Context(TBContext(data_provider=provider)), RequestContext()
    experiment = hparams.experiment_from_metadata(
        context, "", True, hparams.hparams_metadata(context, ""), None
    )
    differing = [info.name for info in experiment.hparam_infos if info.differs]
    assert differing == ["optimizer.lr"] == [experiment.hparam_infos[0].name]
    assert "training.steps" in {info.name for info in experiment.hparam_infos}  # typed, too
    titles = [info.display_name for info in experiment.metric_infos]
    assert titles[:2] == ["val/accuracy (best)", "val/accuracy (last)"]
    events = EventAccumulator(f"{folder}/1").Reload()
    values = {
        tag: [point.value for point in events.Scalars(info.name.tag)]
        for info, tag in zip(experiment.metric_infos, titles, strict=True)
    }
    summary = json.loads((swept / "outputs/sweeps/one/1/summary.json").read_text())
    assert values["val/accuracy (best)"] == [pytest.approx(summary["best"])]
    for name in ("val/accuracy", "val/loss"):
        assert values[f"{name} (last)"][-1] == pytest.approx(summary["metrics"][name])


def test_tensorboard_opens_on_the_metrics_of_validation(swept: Path) -> None:
    job = swept / "outputs/sweeps/one/1"
    tags = EventAccumulator(str(job)).Reload().Tags()["scalars"]
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(tags)))
    assert groups[0] == "val" and {"watch_train", "watch_usage"} <= {*groups}
    assert not [tag for tag in tags if tag.endswith("/epoch")]
    rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert all("epoch" in row for row in rows if row["split"] == "train")


def test_the_commands_of_the_winner_run(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swept)
    commands = dict(winner_commands(compare("outputs/sweeps/one")))
    done = {}
    for label, command in list(commands.items())[1:]:
        words = shlex.split(command)
        made = runs.command(swept, *words[words.index("runner") + 1 :], "device=cpu")
        assert made.returncode == 0, (label, made.stderr)
        done[label.strip()] = made
    assert "step 30" in done["resume:"].stderr
    longer = json.loads((swept / "outputs/sweeps/one-1-longer/summary.json").read_text())
    assert longer["steps"] == 60
    assert compare("outputs/sweeps/one").rows[0].summary["steps"] == 30  # as it was compared
    assert "model.weights" in done["train on:"].stderr


def test_a_winner_that_was_continued_is_trained_on_from_its_own_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resumed = [f"checkpoint.resume={tmp_path}/one/1", "optimizer.lr=1e-2"]
    for name, overrides, best in (("one/1", ["seed=1"], 0.5), ("one-1-longer", resumed, 0.9)):
        run(tmp_path / "outputs" / name, overrides, best=best, metrics={"val/accuracy": best})
        (tmp_path / "outputs" / name / "checkpoints").mkdir()
    comparison = relocate_folders(compare("outputs"), tmp_path / "outputs/comparisons/new")
    commands = {label.strip(): text for label, text in winner_commands(comparison)}
    words = shlex.split(commands["train on:"])
    assert words[words.index("runner") + 1 :] == [
        "optimizer.lr=1e-2",
        "model.weights=outputs/one-1-longer",
    ]
    assert all(".." not in text for text in commands.values())


def test_a_run_without_a_record_does_not_keep_the_others_from_being_ranked(tmp_path: Path) -> None:
    jobs = [{"overrides": [f"seed={n}"], "folder": str(n), "status": "done"} for n in range(3)]
    folder = sweep(tmp_path / "one", jobs)
    for number, best in enumerate((0.5, 0.9)):  # the folder of the third was removed
        run(folder / str(number), [f"seed={number}"], best=best)
    assert [row.name for row in compare(folder).rows] == ["seed=1", "seed=0", "seed=2"]


def test_commands_have_the_folders_of_options_and_the_trust_that_were_typed(tmp_path: Path) -> None:
    typed = ["security.trusted=[mine]", "model._target_=mine.Net"]
    command = "python -P -m runner '--config-dir=/my confs' --config-name=top"
    for number, best in enumerate((0.5, 0.9)):
        folder = run(tmp_path / str(number), [*typed, f"seed={number}"], best=best, command=command)
        (folder / "checkpoints").mkdir()
    commands = [shlex.split(text) for _, text in [*winner_commands(compare(tmp_path))][1:]]
    assert len(commands) == 4
    for words in commands:
        assert words[words.index("runner") + 1 :][:2] == [
            "--config-dir=/my confs",
            "--config-name=top",
        ]
        assert words.count("security.trusted=[mine]") == 1


def test_a_run_of_a_file_predicts_one_that_is_still_to_be_typed(tmp_path: Path) -> None:
    for number, best in enumerate((0.5, 0.9)):
        folder = run(tmp_path / str(number), [f"optimizer.lr={number}"], best=best)
        (folder / "checkpoints").mkdir()
        (folder / ".hydra/config.yaml").write_text("data: {path: deals.csv}")
    commands = dict(winner_commands(compare(tmp_path)))
    assert "job=predict data.path=… checkpoint.resume=" in commands["  predict:   "]
    assert not [text for text in commands.values() if "deals.csv" in text]


@pytest.mark.parametrize(
    ("worse", "label"), [((0.4, 0.6), "best run:"), ((0.1, 0.101), "the winner:")]
)
def test_the_best_of_runs_whose_intervals_overlap_is_no_winner(
    tmp_path: Path, worse: tuple[float, float], label: str
) -> None:
    for lr, values in enumerate((worse, (0.7, 0.701))):
        for seed, best in enumerate(values):
            run(tmp_path / f"{lr}{seed}", [f"optimizer.lr={lr}", f"seed={seed}"], best=best)
    ((found, text),) = winner_commands(compare(tmp_path))
    assert found.strip() == label and text.startswith("lr=1 seed=1, in ")
    assert ("the intervals overlap" in text) is (label == "best run:")


def test_without_a_known_direction_nothing_wins(swept: Path) -> None:
    comparison = compare(swept / "outputs/sweeps/one")
    for row in comparison.rows:
        row.summary["monitor"] = "val/mine"
    assert [*winner_commands(comparison)] == []
