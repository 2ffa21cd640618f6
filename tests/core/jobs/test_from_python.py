"""Runs that are built and trained from Python, in programs and in notebooks."""

import logging
import pydoc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import runner
from runner import build, compare, compose, load, train
from runner.core.build.setup import Components
from runner.core.config import composed
from runner.core.errors import CheckpointError, ConfigError, UsageError
from runner.core.record.console import NOTEBOOK_ENV
from runner.core.record.hydra_files import read_flat_config, read_overrides
from runner.measure.auto.resolve import resolve_auto
from tests import runs
from tests.core.checks.spoiled import Spoiled
from tests.measure.parity.parity_mutants import mutant

TYPED = ("data=cancer", "model=mlp", "training.steps=8", "device=cpu", "monitoring.progress=false")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose config was changed after it was composed."""
    folder = tmp_path_factory.mktemp("python") / "outputs/runs/mine"
    config = compose([*TYPED, "optimizer.lr=0.01"])
    config.training.batch_size = 50
    config.optimizer.options = {"betas": [0.9, 0.95]}
    with build(config, folder) as run:
        train(run)
    return folder


def test_the_folder_is_as_the_command_line_leaves_it(trained: Path, tmp_path: Path) -> None:
    same = ("optimizer.lr=0.01", "training.batch_size=50", "hydra.run.dir=outputs/runs/typed")
    made = runs.command(tmp_path, *TYPED, *same)
    assert made.returncode == 0, made.stderr

    def files(folder: Path) -> set[str]:
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        names = {re.sub(r"tfevents.*", "tfevents", name) for name in names}
        return names - {"run.log", "table.json"}

    assert files(trained) == files(tmp_path / "outputs/runs/typed")


def test_what_was_changed_is_loaded_and_continued_without_typing_it_again(trained: Path) -> None:
    with load(trained) as model:
        assert model.config.training.batch_size == 50
        assert model.config.optimizer.options == {"betas": [0.9, 0.95]}
    typed = ("checkpoint.resume=outputs/runs/mine", "training.steps=12", *runs.QUICK)
    made = runs.command(trained.parents[2], *typed)
    assert made.returncode == 0, made.stderr
    assert "continuing after step 8" in made.stderr
    assert "batch_size" not in made.stderr and "betas" not in made.stderr  # as before


def test_a_run_of_one_folder_is_continued_from_python_with_its_new_config(tmp_path: Path) -> None:
    for steps in (4, 6):
        config = compose([*TYPED, f"training.steps={steps}", "checkpoint.resume=auto"])
        with build(config, tmp_path) as run:
            assert train(run).steps == steps
    with load(tmp_path) as model:
        assert model.config.training.steps == 6


@mutant
def Nothing(builder: Any) -> None:
    """Applies without a change."""


def _given(part: str) -> Components:
    """The components of which one is a part that the caller has made."""
    if part == "techniques":
        return Components(techniques={"mine": Nothing(enabled=True)})
    if part == "data":
        return Components(data=Spoiled())
    model = nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 2))
    if part == "optimizer":
        return Components(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    if part == "objective":
        with build(compose([*TYPED])) as run:
            return Components(objective=run.objective)
    if part == "optimization":
        return Components(optimization=compose(["optimization=none"]).optimization)
    return Components(model=model)


@pytest.mark.parametrize(
    "part", ["model", "data", "objective", "optimizer", "techniques", "optimization"]
)
def test_a_config_is_not_recorded_if_an_object_of_the_caller_replaces_a_part_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    config = compose([*TYPED])
    config.optimization.extra = ["mine"] * (part == "techniques")
    caplog.set_level(logging.INFO, "runner")
    with build(config, tmp_path, _given(part)) as run:
        train(run)
    assert (tmp_path / "checkpoints").is_dir() and not (tmp_path / ".hydra").exists()
    (message,) = [text for text in caplog.messages if "config is not recorded" in text]
    assert part in message


def test_a_run_with_an_automatic_choice_of_techniques_is_recorded_and_loaded(
    tmp_path: Path,
) -> None:
    config = compose([*TYPED, "optimization=auto"])
    with build(config, tmp_path, resolve_auto(config, search=False)) as run:
        train(run)
    with load(tmp_path) as model:
        assert model.config.optimization.level == "auto"


def test_numbers_of_numpy_tuples_and_paths_are_recorded_as_plain_values(tmp_path: Path) -> None:
    rows = "\n".join(f"{n},{n % 7},{n % 2}" for n in range(80))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}\n")
    typed = "data=tabular data.path=other.csv data.target=y model=mlp training.steps=3 device=cpu"
    config: Any = compose(typed.split())
    config.optimizer.lr = numpy.float64(1e-3)
    config.model.width = numpy.int64(16)
    config.data.path = tmp_path / "t.csv"
    config.optimizer.options = {"betas": (0.5, 0.99)}
    folder = tmp_path / "run"
    with build(config, folder) as run:
        train(run)
    with load(folder) as model:
        loaded = model.config
    assert (loaded.optimizer.lr, loaded.model.width) == (1e-3, 16)
    assert loaded.optimizer.options == {"betas": [0.5, 0.99]}
    again = compose(read_overrides(folder))
    assert again.optimizer == loaded.optimizer and again.model == loaded.model
    assert again.data.path == str(tmp_path / "t.csv")


@pytest.mark.parametrize("value", [{"a, b": 1}, object()], ids=["unreadable", "object"])
def test_a_value_that_cannot_be_recorded_is_a_warning_and_nothing_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    config = compose([*TYPED])
    config.model.arguments = {"names": [value]}
    composed.record_config(config, tmp_path, [], has_checkpoints=False)
    assert not any(tmp_path.iterdir())
    assert any("the config is not recorded" in text for text in caplog.messages)


def test_a_config_that_the_disk_does_not_take_is_a_warning_and_nothing_of_it_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = composed.hydra_files.save_config

    def fail_at_the_second(content: Any, name: str, folder: Path) -> None:
        if name != "config.yaml":
            raise OSError(28, "No space left on device")
        save(content, name, folder)

    monkeypatch.setattr(composed.hydra_files, "save_config", fail_at_the_second)
    with build(compose([*TYPED]), tmp_path) as run:
        train(run)
    assert (tmp_path / "checkpoints").is_dir() and not (tmp_path / ".hydra").exists()
    assert any("the config is not recorded" in text for text in caplog.messages)


def test_a_recorded_config_is_never_of_another_run_that_was_not_trained(tmp_path: Path) -> None:
    config = compose([*TYPED, "model.width=16"])
    for width in (64, 32):
        with build(compose([*TYPED, f"model.width={width}"]), tmp_path):
            pass
    assert (tmp_path / ".hydra-resumed").is_dir()
    with build(replace(config, seed=1), tmp_path) as run:  # of unknown origin
        train(run)
    assert not (tmp_path / ".hydra-resumed").exists()
    assert read_flat_config(tmp_path) == {}


def test_the_config_of_a_trained_run_stays_when_one_of_unknown_origin_continues_it(
    tmp_path: Path,
) -> None:
    with build(compose([*TYPED]), tmp_path) as run:
        train(run)
    other = compose([*TYPED, "training.steps=10", "checkpoint.resume=auto"])
    with build(other, tmp_path):
        pass
    with build(replace(other, name="other"), tmp_path) as run:
        assert train(run).steps == 10
    assert read_flat_config(tmp_path)["training.steps"] == 8
    made = runs.command(tmp_path, *TYPED, "checkpoint.resume=auto", "training.steps=12",
                        f"hydra.run.dir={tmp_path}")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert read_flat_config(tmp_path)["training.steps"] == 12  # that of the command line stays


def test_public_names_and_nothing_else_are_listed() -> None:
    assert dir(runner) == sorted(runner.__all__)
    _, _, documented = pydoc.plain(pydoc.render_doc(runner)).partition("\nCLASSES\n")
    classes = re.findall(r"^    class (\w+)", documented, re.M)
    others = re.findall(r"^    (\w+)(?:\(| = )", documented.partition("\nFUNCTIONS\n")[2], re.M)
    listed = {*classes, *others} - {"__all__"}
    assert listed == {*runner.__all__} - {"__version__"}
    assert "import_module" not in documented


@pytest.mark.slow
def test_a_type_checker_knows_the_public_names_and_refuses_others(tmp_path: Path) -> None:
    lines = [
        "import runner",
        f"from runner import {', '.join(runner.__all__)}",
        "known = runner.errors.RunnerError, runner.train, runner.Components()",
        "runner.nonsense",
        "from runner import misspelt",
        "train(3)",
    ]
    (tmp_path / "user.py").write_text("\n".join(lines))
    done = runs.python("-m", "mypy", "--no-error-summary", str(tmp_path / "user.py"))
    assert [line.partition("user.py:")[2] for line in done.stdout.splitlines()] == [
        '4: error: Module has no attribute "nonsense"  [attr-defined]',
        '5: error: Module "runner" has no attribute "misspelt"  [attr-defined]',
        '6: error: Argument 1 to "train" has incompatible type "int"; expected "Run"  [arg-type]',
    ], done.stdout + done.stderr


def test_a_run_whose_block_has_ended_is_not_trained() -> None:
    with build(compose([*TYPED])) as run:
        pass
    with pytest.raises(UsageError, match="^train: the run's `with` block has ended"):
        train(run)
    assert run.progress.step == 0


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (["optimizer=sgd", "optimizer.options={nesterov: true, momentum: fast}"], "momentum"),
        (["optimizer.options={betas: fast}"], "betas"),
    ],
)
def test_an_option_of_a_wrong_type_is_named(typed: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer.options.{key}: is not for \w+: .*'str'"):
        build(compose([*TYPED, *typed]))


def test_a_sweeps_folder_is_answered_with_that_of_its_newest_job(trained: Path) -> None:
    for folder in (trained.parent, trained.parent.parent):
        with pytest.raises(CheckpointError, match=rf"the newest in it is {trained}$"):
            load(folder)


def test_progress_is_lines_in_a_program_and_one_line_in_a_notebook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_notebook in (False, True):
        if is_notebook:
            monkeypatch.setenv(NOTEBOOK_ENV, "1")
        with build(compose([*TYPED])) as run:
            train(run, progress=True)
        shown = capsys.readouterr()
        text = shown.out if is_notebook else shown.err
        assert text.count("validation accuracy") >= 2
        assert ("\r" in text) is is_notebook
        assert text.count("\n") == 1 if is_notebook else text.count("\n") >= 2
        with build(compose([*TYPED])) as run:
            train(run)
        assert capsys.readouterr() == ("", "")


def test_a_cell_shows_the_end_table_the_curves_and_the_comparison(trained: Path) -> None:
    summary = runner.Summary.read(trained)
    assert "val/accuracy" in summary._repr_html_() and "<pre" in summary._repr_html_()
    with build(compose([*TYPED, "checkpoint.resume=auto"]), trained) as run:
        curves = run._repr_html_()
        assert curves is not None and curves.startswith("<svg")
    shown, text = compare(trained)._repr_html_(), str(compare(trained))
    assert "mine" in shown and "val/accuracy" in shown
    assert "val/accuracy (best)" in text and max(map(len, text.splitlines())) < 400
    assert not (trained / "comparison.html").exists()
    with pytest.raises(runner.errors.RunnerError):
        compare(trained / "none")


@pytest.mark.parametrize("folder", ["", 5, "a\0b", "FILE", "FILE/below"])
@pytest.mark.parametrize("call", ["build", "Stability"])
def test_what_cannot_be_a_folder_is_refused_by_name(tmp_path: Path, call: str, folder: Any) -> None:
    (tmp_path / "FILE").write_text("a")
    if isinstance(folder, str) and folder.startswith("FILE"):
        folder = str(tmp_path / folder)
    with pytest.raises(UsageError, match=f"{call}: folder"):
        if call == "build":
            build(compose([*TYPED]), folder)
        else:
            runner.Stability(folder=folder)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        *((lambda _, wrong=wrong: compare(wrong), "compare: takes") for wrong in (3, [3], [])),
        (lambda folder: load(None), "load: run must be"),  # type: ignore[arg-type]
        (lambda folder: load(folder, trusted="abc"), "load: trusted must be a list"),
        (lambda folder: load(folder, trusted=3), "load: trusted must be a list"),  # type: ignore[arg-type]
        (lambda folder: load(folder).generate("a"), "generate: needs a language model"),
        (lambda folder: runner.debugger.export(5), "export: path must be"),  # type: ignore[arg-type]
        (lambda folder: runner.debugger.context(5).__enter__(), "context: name must be"),  # type: ignore[arg-type]
        (lambda folder: runner.debugger.context("x", anomaly="yes").__enter__(), "anomaly True"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind_are_named(trained: Path, call: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        call(trained)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"components": 5}, r"must be runner\.Components"),
        ({"components": Components(), "given": Components()}, "give one of them"),
        ({"components": Components(model=5)}, r"Components\(model=…\) must be a torch\.nn\.Module"),
        ({"components": Components(objective=5)}, "must be a runner Objective"),
        ({"components": Components(optimizer=torch.optim.SGD)}, "not its class"),
        ({"components": Components(techniques=5)}, "techniques by name"),
        ({"components": Components(validation=[1])}, "DataLoader or a stream of yours"),
        ({"components": Components(data=[1], validation=[1])}, r"pipeline\(.*validation=…"),
    ],
)
def test_objects_that_a_run_cannot_use_are_refused_by_name(
    given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        build(compose([*TYPED]), **given)


def test_texts_one_row_and_tables_of_others_are_predicted_as_the_same_rows(tmp_path: Path) -> None:
    rows = "\n".join(f"{n},{n % 7},{'yes' if n % 2 else 'no'}" for n in range(80))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}\n")
    typed = ("data=tabular", f"data.path={tmp_path}/t.csv", "data.target=y", "training.steps=3")
    with build(compose([*typed, "device=cpu"]), tmp_path / "run") as run:
        train(run)
    with load(tmp_path / "run") as model:
        expected = model.predict([{"a": 3, "b": 4}])
        assert model.predict({"a": 3, "b": 4})["probability yes"] == expected["probability yes"]
        table = pytest.importorskip("pandas").DataFrame({"a": [3, 5], "b": [4, 5]})
        both = model.predict(table)["probability yes"]
        assert len(both) == 2
        numpy.testing.assert_allclose(both[:1], expected["probability yes"], rtol=1e-5)
    text = "\n".join(f"{'great fun' if n % 2 else 'dull stuff'} {n},{n % 2}" for n in range(60))
    (tmp_path / "texts.csv").write_text(f"text,label\n{text}\n")
    typed = ("data=text", f"data.path={tmp_path}/texts.csv", "model=classifier", "model.width=16",
             "model.depth=1", "training.steps=3", "device=cpu")  # fmt: skip
    with build(compose(list(typed)), tmp_path / "texts") as run:
        train(run)
    with load(tmp_path / "texts") as model:
        rows_of_dicts = model.predict([{"text": "great fun"}, {"text": "dull"}])
        texts = model.predict(["great fun", "dull"])
        assert texts["probability 1"].tolist() == rows_of_dicts["probability 1"].tolist()
