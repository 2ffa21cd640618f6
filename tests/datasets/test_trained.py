"""`runner.load`: the numbers of job=predict from Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch

from runner import load
from runner.core.errors import CheckpointError, ConfigError, DataError, SecurityError, UsageError
from tests import runs
from tests.core.data.foreign_files import people, table_probabilities, write_csv

SHORT = ("optimization=none", "training.batch_size=32", "training.steps=20", "data.workers=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was started by a command, so that its overrides are recorded."""
    folder = tmp_path_factory.mktemp("trained")
    write_csv(folder / "people.csv", people(200))
    typed = "data=tabular data.path=people.csv data.target=buys model=mlp hydra.run.dir=run"
    done = runs.command(folder, *typed.split(), *SHORT, *runs.QUICK)
    assert done.returncode == 0, done.stderr
    return folder


def test_tables_in_memory_and_in_files_get_the_numbers_computed_by_hand(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = people(90, 5)
    path = write_csv(trained / "new.csv", rows, "city", "income", "age")
    expected = table_probabilities(trained / "run", rows)
    columns = {name: [row[name] for row in rows] for name in ("income", "age", "city")}
    with load(trained / "run") as model:
        assert [column.name for column in model.preprocessing.columns] == ["age", "income", "city"]
        assert repr(model).startswith("<Trained classification model of data=tabular")
        assert ", >" not in repr(model)
        several = [{name: cells[i] for name, cells in columns.items()} for i in range(3)]
        one = several[0]  # whose cells are NumPy's
        tensors = {n: torch.tensor(columns[n][:3]) for n in ("income", "age")}
        for data, count in (
            *((whole, 90) for whole in (path, str(path), columns, pyarrow.table(columns))),
            ({**columns, "extra": rows}, 90), (several, 3), (one, 1),
            ({**tensors, "city": columns["city"][:3]}, 3),
            ({**one, "age": torch.tensor(one["age"])}, 1),
        ):  # fmt: skip
            answers = model.predict(data)
            due = expected[:count]
            np.testing.assert_allclose(answers["probability yes"], due[:, 1], atol=1e-5)
            assert list(answers["prediction"]) == [("no", "yes")[i] for i in due.argmax(1)]
        caplog.clear()
        model.predict([{**row, "city": True} for row in several])
        assert "data.unknown_categories" in caplog.text and "3 of 3 rows" in caplog.text
        for wrong, error, message in (
            ({"age": [1.0], "income": [2.0]}, DataError, "lacks 'city', which the model was tra"),
            ({**one, "age": [1.0]}, UsageError, "the column 'income' is .*, not a list of cells,"),
            (
                [{**one, "age": "old"}],
                DataError,
                "^predict: the table: row 1, column .age.: old is",
            ),
            ({}, DataError, "^((?!lacks).)*lacks((?!lacks).)*$"),
            ([one, 5], UsageError, "^predict: item 2 of the list is 5, not a dict"),
            (7, UsageError, "int is not a table"),
            (torch.zeros(2, 2), UsageError, "was trained on"),
        ):
            with pytest.raises(error, match=message):
                model.predict(wrong)


@pytest.mark.usefixtures("my_package")
def test_no_metric_is_needed_and_texts_are_read_as_cells_of_a_csv(tmp_path: Path) -> None:
    areas = [f"{1000 + 7.5 * i:,.1f}" for i in range(120)]
    rows = "".join(f'"{area}",{i}.5\n' for i, area in enumerate(areas))
    (tmp_path / "houses.csv").write_text(f"area,price\n{rows}")
    typed = ["data=tabular", "data.path=houses.csv", "data.target=price", "model=mlp", *SHORT]
    asked = ["objective.metrics=[my_package.gap]", "training.monitor=val/gap"]
    trust = ["security.trusted=[my_package]", "training.monitor_mode=min"]
    done = runs.command(tmp_path, *typed, *asked, *trust, "hydra.run.dir=run", *runs.QUICK)
    assert done.returncode == 0, done.stderr
    (tmp_path / "new.csv").write_text('area\n"1,234.5"\n900\nn/a\n""\n')
    job = ["job=predict", "checkpoint.resume=run", "data.path=new.csv", "hydra.run.dir=new"]
    done = runs.command(tmp_path, *job)
    assert done.returncode == 0, done.stderr
    due = np.loadtxt(tmp_path / "new/predictions.csv", delimiter=",", skiprows=1)[:, 1]
    assert len({*due}) == 3  # 1,234.5, 900 and the fill value
    cells = ["1,234.5", "900", "n/a", ""]
    with load(tmp_path / "run") as model:
        for data in ({"area": cells}, [{"area": cell} for cell in cells]):
            np.testing.assert_array_equal(model.predict(data)["prediction"], due)
        with pytest.raises(UsageError, match="the column 'area': .*all its cells as numbers, or"):
            model.predict({"area": ["1,234.5", 900.0]})


@pytest.mark.usefixtures("my_package")
def test_tensors_and_code_of_the_users_own(tmp_path: Path) -> None:
    typed = *runs.OURS, "data=digits", "model._target_=my_package.Net", *SHORT
    runs.trained(*typed, folder=tmp_path / "run")
    advice = r"^load: model._target_: my_package.Net is refused: .*, add trusted=\['my_package'\]$"
    with pytest.raises(SecurityError, match=advice):
        with load(tmp_path / "run") as model:
            model.predict(torch.zeros(2, 1, 8, 8))
    images = torch.rand(70, 1, 8, 8)
    with load(tmp_path / "run", trusted=["my_package"]) as model, torch.no_grad():
        answers = model.predict(images)
        network = model._run.model  # type: ignore[union-attr]
        expected = network.eval()(images).softmax(1).numpy()
        again = model.predict(images[3:5])
    got = np.stack([answers[f"probability {digit}"] for digit in range(10)], 1)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_allclose(again["probability 7"], expected[3:5, 7], atol=1e-6)
    assert list(answers["sample"]) == list(range(70))


@pytest.mark.usefixtures("my_package")
def test_own_data_of_several_inputs_get_a_batch_of_them(tmp_path: Path) -> None:
    usual = (*runs.OURS, "data._target_=my_package.Scaled", "model._target_=my_package.Mapped")
    usual += ("+data.path=scale", *SHORT)
    (tmp_path / "scale").write_text("1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        runs.trained(*usual, folder=tmp_path / "run")
    values, scale = torch.rand(40, 16), torch.rand(40, 1)
    (tmp_path / "other").write_text("2")
    with load(tmp_path / "run", trusted=["my_package"]) as model, torch.no_grad():
        answers = model.predict({"values": values, "scale": scale})
        network = model._run.model.eval()  # type: ignore[union-attr]
        expected = network(values, scale)["logits"].softmax(1).numpy()
        got = np.stack([answers[f"probability {i}"] for i in range(3)], 1)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        for same in ((values, scale), {"scale": scale, "values": values}):
            np.testing.assert_equal(model.predict(same), answers)
        bytes_twice = model.predict((values, torch.full((40, 1), 2, dtype=torch.uint8)))
        np.testing.assert_equal(model.predict((values, torch.full((40, 1), 2.0))), bytes_twice)
        assert len(model.predict(tmp_path / "other")["prediction"]) == 320  # the class's samples
        for wrong, error, message in (
            (values, UsageError, r"\[40, 16\]: TypeError: .* missing 1 .*: 'scale'"),
            ({"values": values}, UsageError, "missing 1 .*: 'scale'$"),
            ((values, scale[:3]), UsageError, r"the sample in all tensors, got \(.*\[3, 1\]\)"),
            ((values[:0], scale[:0]), DataError, "^predict: the data has no rows$"),
            ([values, scale], UsageError, "list for a model of data=own; give a path, or the"),
            ({"values": [1.0]}, UsageError, "dict for a model of data=own; give a path, or the"),
        ):
            with pytest.raises(error, match=message):
                model.predict(wrong)


@pytest.mark.usefixtures("my_package")
@pytest.mark.parametrize(
    ("data", "name"),
    [("data=digits", "data=digits"), ("data._target_=my_package.Noisy", "my_package.Noisy")],
)
def test_a_path_for_data_that_take_none_is_refused(data: str, name: str, tmp_path: Path) -> None:
    runs.trained(*runs.OURS, data, "model=mlp", *SHORT, folder=tmp_path / "run")
    with load(tmp_path / "run", trusted=["my_package"]) as model:
        with pytest.raises(UsageError, match=f"^predict: {name}, .* takes no path; give a batch"):
            model.predict("new.csv")


def test_tensors_of_another_type_are_cast_and_other_shapes_refused(tmp_path: Path) -> None:
    usual = ("data=digits", "model=mlp", *SHORT)
    runs.trained(*usual, folder=tmp_path / "run")
    images = torch.rand(3, 1, 8, 8)
    with load(tmp_path / "run", overrides=usual) as model:
        for wrong, error, message in (
            (torch.rand(3, 7), UsageError, r"failed on .*\[3, 7\].* had the shape \[1, 8, 8\]"),
            (images[0, 0, 0], UsageError, r"the model failed on float32 of shape \[8\]"),
            (torch.tensor(1.0), UsageError, "first dimension is the sample"),
            (images[:0], DataError, "^predict: the data has no rows$"),
        ):
            with pytest.raises(error, match=message):
                model.predict(wrong)
        expected, got = model.predict(images), model.predict(images.double())
    np.testing.assert_array_equal(got["probability 3"], expected["probability 3"])


def test_a_run_of_a_named_config_needs_what_it_sets(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    record = tmp_path / "copy/run/.hydra/hydra.yaml"
    named = record.read_text().replace("config_name: config\n", "config_name: mine\n")
    record.write_text(named)
    with pytest.raises(UsageError, match=r"with the config mine, .*; give what it sets"):
        load(tmp_path / "copy/run")
    load(tmp_path / "copy/run", overrides=["optimizer.lr=0.01"]).close()


def test_a_run_that_recorded_no_overrides_and_a_folder_that_is_none(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "people.csv", people(100))
    usual = ("data=tabular", f"data.path={path}", "data.target=buys", "model=mlp", *SHORT)
    runs.trained(*usual, folder=tmp_path / "run")
    shutil.rmtree(tmp_path / "run/.hydra")  # as earlier versions left a run that Python started
    with pytest.raises(ConfigError, match="the model was trained on data=tabular"):
        load(tmp_path / "run")
    rows = people(10, 3)
    with load(tmp_path / "run", overrides=usual) as model:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        expected = table_probabilities(tmp_path / "run", rows)
        answers = model.predict(columns)
        np.testing.assert_allclose(answers["probability no"], expected[:, 0], atol=1e-5)
    with pytest.raises(CheckpointError, match="^load: run: .*there is no folder"):
        load(tmp_path / "ran")
