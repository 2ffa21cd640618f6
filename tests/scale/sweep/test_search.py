"""A search of hyper-parameters: the study that processes share, and searches as people start."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.core.checkpoint.lock import lock
from runner.core.config.composing import compose
from runner.core.config.groups import CONF
from runner.core.errors import ConfigError, UsageError
from runner.core.schemas.data import DataChanged, Tabular
from runner.core.schemas.sweep import Pruner, Sampler, SearchConfig
from tests.runs import checked, wait_until

from .conftest import SHORT, only, own_folder, read, start_sweep, statuses, sweep

pytest.importorskip("optuna")

from runner.scale.sweep.search_space import SearchPlan, parameter_text, read_space, resolve_metric
from runner.scale.sweep.study import StudyFile  # noqa: E402

INTERVAL = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
SPACE = [INTERVAL, "model.width=choice(32,64)", "model.depth=range(1,5)", "name=x"]
PLANTED = (
    "experiment=search model._target_=sweep_package.Planted search.metric=val/loss "
    "objective._target_=sweep_package.mean_output security.trusted=[sweep_package] "
    "search.direction=minimize stability=off"
).split()
KINDS = ["+model.how=choice(good,lost,fail)", "+model.x=choice(0.3,1.3)", "search=grid"]


def plan(*overrides: str, **settings: Any) -> SearchPlan:
    search = SearchConfig(**settings)
    return SearchPlan(read_space(overrides, search), search, "val/loss", False, "planted")


def test_a_study_does_not_go_on_with_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,2\n")
    planned = plan(*SPACE, metric="val/loss")
    tables = [Tabular(path=str(path), target="y", changed=x) for x in DataChanged]
    first, accepting = (replace(planned, data=table) for table in tables)
    assert StudyFile(first, tmp_path).ask() is not None
    StudyFile(first, tmp_path)
    path.write_text("x,y\n1,3\n")
    with pytest.raises(ConfigError, match=r"t\.csv has changed since the study's 1 trial: sha256"):
        StudyFile(first, tmp_path)
    StudyFile(accepting, tmp_path)
    StudyFile(first, tmp_path)  # the file that was accepted


def test_a_space_is_read_in_hydras_sweep_syntax() -> None:
    mine = ["experiment=search", "search.trials=3", "hydra.mode=MULTIRUN", "sweep.resume=none"]
    space = read_space([*mine, *SPACE], SearchConfig(metric="val/f1"))
    texts = [parameter_text(one) for one in space.parameters.values()]
    assert texts == ["0.0001 to 0.1, by its logarithm", "32, 64", "1 to 4"]
    assert space.shared == ("name=x", "training.monitor=val/f1") and space.points is None
    assert read_space(SPACE[1:], SearchConfig()).points == 8
    values = {"optimizer.lr": 0.01, "model.width": "32", "model.depth": 2}
    assert space.overrides(values)[-3:] == [f"{key}={value}" for key, value in values.items()]


@pytest.mark.parametrize(
    ("overrides", "sampler", "says"),
    [
        (["name=x"], "tpe", "search: there is nothing to vary"),
        (["seed=0,1,2"], "tpe", "seed: is not a hyperparameter.*over seed=0,1,2"),
        ([INTERVAL], "grid", "optimizer.lr: search=grid has no intervals.*choice"),
        (["a=interval(3,1)"], "tpe", "a: an interval from 3 to 1; give the lower end first"),
        (["a=tag(log,interval(0,1))"], "tpe", "a: an interval from 0 to 1.*above 0"),
        (["a=choice(1)"], "tpe", "a: has fewer than two values"),
        (["a=range(0,200)", "b=range(0,200)"], "grid", "a grid of 40,000 combinations"),
    ],
)
def test_a_mistake_in_the_space_is_one_line(overrides: list[str], sampler: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read_space(overrides, SearchConfig(sampler=Sampler[sampler]))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("val/accuracy", True)),
        (["data=stdlib_text", "model=gpt"], ("val/loss", False)),
        (["training.monitor=val/loss"], ("val/loss", False)),
        (["search.metric=val/f1"], ("val/f1", True)),
        (["search.metric=val/f1", "search.direction=minimize"], "contradicts val/f1"),
        (["data=tabular", "data.path=x.csv", "data.target=y"], "metric: depends on the data"),
        (["objective.metrics=[AUROC]", "search.metric=val/AUROC"], "direction: cannot be inferred"),
    ],
)
def test_the_metric_is_that_of_the_runs_and_its_direction_follows(
    overrides: list[str], expected: tuple[str, bool] | str
) -> None:
    config = compose(overrides)
    if isinstance(expected, tuple):
        assert resolve_metric(config) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            resolve_metric(config)


def ask_all(folder: Path, given: SearchPlan) -> list[tuple[int, float]]:
    """Trials until there are none, each told a planted value; what each was."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with lock(folder):
        study = StudyFile(given, folder)
        while (trial := study.ask()) is not None:
            x = trial.params["x"]
            study.record_end(trial, "done", (float(x) - 0.3) ** 2, "")
            made.append((trial.number, float(x)))
    return made


@pytest.mark.slow
def test_tpe_finds_a_planted_optimum_and_repeats_itself(tmp_path: Path) -> None:
    given = plan("x=interval(-5,5)", trials=40)
    found = ask_all(tmp_path / "a", given)
    assert len(found) == 40 and min(abs(x - 0.3) for _, x in found) < 0.05
    late = [abs(x - 0.3) for _, x in found[25:]]
    assert sorted(late)[len(late) // 2] < 1.0  # random ones would be 2.5 off
    assert ask_all(tmp_path / "b", given) == found


def test_a_grid_is_every_combination_once_and_then_ends(tmp_path: Path) -> None:
    found = ask_all(tmp_path / "a", plan("x=range(0,7)", sampler=Sampler.grid, trials=100))
    assert sorted(x for _, x in found) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["db", "journal"])
def test_processes_that_share_a_study_make_all_trials_together_and_none_twice(
    tmp_path: Path, suffix: str
) -> None:
    program = """
import sys
from pathlib import Path
from tests.scale.sweep.test_search import ask_all, plan
given = plan("x=range(0,40)", trials=24, storage=sys.argv[2])
print(ask_all(Path(sys.argv[1]), given))
"""
    storage = str(tmp_path / f"shared.{suffix}")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / name), storage],
            stdout=subprocess.PIPE, text=True, cwd=CONF.parent,
        )
        for name in "ab"
    ]  # fmt: skip
    parts = [ast.literal_eval(process.communicate(timeout=300)[0]) for process in both]
    made = sorted([*parts[0], *parts[1]])
    assert [number for number, _ in made] == list(range(24))
    assert len({x for _, x in made}) == 24


def test_a_trial_of_a_process_that_is_gone_is_taken_up_by_it_or_failed_by_others(
    tmp_path: Path,
) -> None:
    given = plan("x=interval(-5,5)", trials=3, storage=str(tmp_path / "shared.db"))
    (tmp_path / "gone").mkdir()
    cut_off = StudyFile(given, tmp_path / "gone").ask()
    assert cut_off is not None
    (same,) = StudyFile(given, tmp_path / "gone").unfinished_trials()
    assert (same.number, same.params) == (cut_off.number, cut_off.params)
    ask_all(tmp_path / "other", given)
    first, *others = StudyFile(given, tmp_path / "gone").as_record()["trials"]
    assert (first["status"], first["reason"]) == ("failed", "its process ended")
    assert [trial["status"] for trial in others] == ["done", "done"]


@pytest.mark.parametrize("pruner", [Pruner.median, Pruner.halving, Pruner.none])
def test_a_trial_that_is_behind_is_pruned_after_its_warm_up(tmp_path: Path, pruner: Pruner) -> None:
    given = plan("x=interval(-5,5)", trials=9, pruner=pruner, startup=2, warmup=1)
    study = StudyFile(given, tmp_path)
    reasons = []
    for value in (1.0, 1.0, 1.0, 1.0, 9.0):
        trial = study.ask()
        assert trial is not None
        reasons = [study.report(trial, at, value) for at in (1, 2, 3, 4)]
        study.record_end(trial, "done", value, "")
    pruned = [bool(reason) for reason in reasons]
    assert pruned[0] is False and any(pruned) is (pruner is not Pruner.none)
    if pruner is Pruner.median:
        assert reasons[1] == "pruned at validation 2: val/loss 9 (median)"


def test_without_optuna_a_search_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"optuna.* not installed: pip install '.*\[search\]'"):
        checked("experiment=search", INTERVAL)  # a sweep without -m
    assert checked("experiment=search", "hydra.mode=RUN").config is not None
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = own_folder(tmp_path_factory.mktemp("mixed"))
    return folder, sweep(folder, *PLANTED, *KINDS, "search.parallel=2")


def test_every_trial_is_a_row_and_the_best_one_is_found(mixed: tuple[Path, Any]) -> None:
    folder, done = mixed
    place = only(folder)
    record, compared = read(place, "search.json"), read(place, "comparison.json")
    trials = record["trials"]
    assert len(trials) == len(compared["rows"]) == 6
    states = {(t["values"]["+model.arguments.how"], t["status"]) for t in trials}
    assert states == {("good", "done"), ("lost", "failed"), ("fail", "failed")}
    reasons = {t["values"]["+model.arguments.how"]: t["reason"] for t in trials}
    assert "told to fail" in reasons["fail"] and "val/loss is nan" in reasons["lost"]
    assert done.returncode == 7 and "4 of 6 jobs failed" in done.stderr  # as of every sweep
    assert len(re.findall(r" #\d \+model\.how=\S+ .*: started\n", done.stderr)) == 6
    best = next(t for t in trials if t["number"] == record["best"])
    assert best["value"] == pytest.approx(0, abs=1e-6)
    assert "Best val/loss: " in done.stdout and "+model.x=0.3" in best["command"]
    line = next(line for line in done.stdout.splitlines() if line.startswith("the best:"))
    assert line.partition(":")[2].strip() == best["command"]
    assert "experiment=search" not in best["command"] and "search." not in best["command"]


def test_the_page_of_a_search_shows_best_command_and_trials(
    mixed: tuple[Path, Any],
) -> None:
    place = only(mixed[0])
    headings = re.findall(r"<h2>(.*?)</h2>", (place / "comparison.html").read_text())
    wanted = ["The best trial", "What failed", "Trials"]
    assert [heading for heading in headings if heading in wanted] == wanted
    assert "Speed" not in headings and "Memory against speed" not in headings
    document = (place / "comparison.md").read_text()
    assert "To repeat the best trial:" in document and "| trial | status |" in document


@pytest.mark.slow
def test_the_same_command_again_keeps_what_is_done_and_more_trials_go_on(
    mixed: tuple[Path, Any],
) -> None:
    folder, _ = mixed
    before = read(only(folder), "search.json")["trials"]
    again = sweep(folder, *PLANTED, *KINDS, "search.trials=50", "checkpoint.resume=auto")
    assert "6 of 50 trials are done" in again.stderr and " started" not in again.stderr
    assert read(only(folder), "search.json")["trials"] == before


@pytest.mark.slow
def test_a_trial_that_is_behind_stops_early_and_cleanly(folder: Path) -> None:
    typed = ["+model.x=choice(0.3,3)", "+model.pause_s=0.02", "training.steps=200"]
    typed += ["training.validate_every=10", "search.startup=1", "search=grid", "search.seed=2"]
    done = sweep(folder, *PLANTED, *typed, "search.pruner=median")
    assert done.returncode == 0, done.stderr
    good, behind = read(only(folder), "comparison.json")["rows"]
    assert (good["status"], good["summary"]["steps"]) == ("done", 200)
    assert behind["status"] == "stopped" and behind["reason"].startswith("pruned at validation ")
    assert behind["summary"]["steps"] < 200 and behind["summary"]["checkpoint"]["last"]
    assert read(only(folder), "search.json")["trials"][1]["status"] == "pruned"


@pytest.mark.slow
def test_a_killed_search_continues_with_its_trials(folder: Path) -> None:
    typed = ["+model.x=interval(0,1)", "+model.pause_s=0.05", "training.steps=40"]
    typed += ["search.trials=6", "search.parallel=2", "search=random", "search.pruner=none"]
    typed += ["checkpoint.every=10", *SHORT[2:], "data=cancer", *PLANTED]
    killed = start_sweep(folder, *typed)

    def trials() -> list[dict[str, Any]]:
        files = folder.glob("outputs/sweeps/*/*/search.json")
        return [trial for file in files for trial in read(file.parent, file.name)["trials"]]

    wait_until(lambda: len(trials()) >= 4, killed)
    killed.kill()
    killed.wait()
    done = {t["number"]: t for t in trials() if t["status"] == "done"}
    assert done and len(trials()) < 6
    assert start_sweep(folder, *typed).wait(300) == 0
    assert [t["number"] for t in trials()] == list(range(6))
    assert {t["status"] for t in trials()} == {"done"}
    assert {n: t for n, t in enumerate(trials()) if n in done} == done
    rows = read(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == statuses(only(folder)) == ["done"] * 6
    # they were taken up, with their values
    assert any(job["tries"] > 1 for job in read(only(folder))["jobs"])
