"""Each example runs as a script, in an empty folder, and comes to what it says."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def ran(name: str, folder: Path) -> str:
    script, *arguments = name.split(" ")
    done = runs.python(str(ROOT / "examples" / script), *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in folder.iterdir()} <= {"outputs"}  # nothing else is left
    return done.stdout


def test_the_list_of_examples_is_complete_and_they_are_short() -> None:
    listed = re.findall(r"`(\w+\.py)`", (ROOT / "examples/README.md").read_text())
    assert sorted(listed) == [path.name for path in EXAMPLES] and len(listed) == 4
    for path in EXAMPLES:
        source = path.read_text()
        assert len(source.splitlines()) <= 60 and source.count("\n# %% ") >= 2, path.name
        assert ast.get_docstring(ast.parse(source))


def test_a_table_becomes_predictions_that_know_size_and_city(tmp_path: Path) -> None:
    lines = ran("table_to_predictions.py", tmp_path).splitlines()
    genf, chur, _ = (int(line.rpartition(" ")[2]) for line in lines[-3:])
    assert 950 < genf < 1450 and 400 < chur < 800


def test_each_cell_of_the_notebook_has_stored_outputs_without_paths_of_a_machine() -> None:
    text = NOTEBOOK.read_text()
    assert len(text.encode()) <= 60_000 and not re.search(r"/(work|tmp|home)/", text)
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(cell["outputs"] for cell in cells)
    assert f"`{NOTEBOOK.name}`" in (ROOT / "examples/README.md").read_text()


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell_to_its_stored_outputs(tmp_path: Path) -> None:
    copy = tmp_path / "outputs" / NOTEBOOK.name
    copy.parent.mkdir()
    shutil.copy(NOTEBOOK, copy)
    ran(f"../scripts/run_notebook.py {copy}", tmp_path)
    stored, now = ([*outputs(path)] for path in (NOTEBOOK, copy))
    assert [sorted(one) for one in now] == [sorted(one) for one in stored]
    rows, progress, summary, curves, comparison, predicted, own = now
    assert rows == stored[0]
    assert "validation mae" in progress["stream"]
    assert "val/mae" in summary["text/html"] and "<svg" in curves["text/html"]
    assert "log" in comparison["text/html"] and "others" in comparison["text/html"]
    genf, chur = (float(x) for x in re.findall(r"\d+\.", predicted["text/plain"]))
    assert 1000 < genf < 1400 and 450 < chur < 750
    assert own["stream"].endswith("1 of 100 steps skipped\n")


@pytest.mark.slow
def test_the_blocks_of_the_pages_on_python_and_metrics_run(tmp_path: Path) -> None:
    python, metrics = (
        re.findall(r"```python\n(.*?)```", (ROOT / f"docs/how-to/{page}.md").read_text(), re.S)
        for page in ("use-from-python", "metrics-of-your-own")
    )
    assert len(python) == 3 and len(metrics) == 2
    (tmp_path / "page.py").write_text("".join(python))
    (tmp_path / "my_metrics.py").write_text("".join(metrics))
    asked = ["objective.metrics=[my_metrics.top3]", "security.trusted=[my_metrics]"]
    runner = ["-m", "runner", "training.steps=20", *asked, "training.monitor=val/top3"]
    for arguments, shown in ((["page.py"], r"0\.\d+"), (runner, "val/top3")):
        done = runs.python(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert re.search(shown, done.stdout)


def outputs(path: Path) -> Iterator[dict[str, str]]:
    """The outputs of a notebook, each as texts by kind."""
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {"stream": output.get("text", [])})
            yield {kind: "".join(lines) for kind, lines in data.items()}


@pytest.mark.slow
def test_a_loop_with_a_bad_batch_loses_one_step(tmp_path: Path) -> None:
    said = ran("own_loop.py", tmp_path)
    found = re.fullmatch(r"accuracy (0\.\d+|1\.000) after \d+ steps, 1 of them skipped\n", said)
    assert found and float(found[1]) > 0.9


@pytest.mark.slow
def test_a_user_model_and_loss_give_a_run_with_a_report(tmp_path: Path) -> None:
    first, *techniques = ran("own_model_and_loss.py", tmp_path).splitlines()
    loss, folder = first.split()
    assert float(loss) < 0.1
    assert (tmp_path / folder / "report.md").is_file()
    assert any(line.startswith("fused_optimizer True") for line in techniques)


@pytest.mark.slow
def test_a_sweep_ends_with_its_rows_and_its_page(tmp_path: Path) -> None:
    *_, page = ran("sweep_and_page.py", tmp_path).splitlines()
    assert (tmp_path / page).read_text().startswith("<!doctype html>")
