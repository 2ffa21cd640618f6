"""Each example runs as a script, in an empty folder, and comes to what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def ran(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
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
