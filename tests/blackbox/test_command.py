"""Names that people type, mistakes and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.runs import command

CONTRACT = {
    "name": "mine", "seed": 3, "training.steps": 7, "training.batch_size": 8,
    "training.micro_batch": 4, "training.validate_every": 5, "optimizer.lr": 0.01,
    "data.path": "x.csv", "data.target": "y", "data.workers": 1, "checkpoint.every": 5,
    "checkpoint.resume": "none", "optimization.amp.enabled": True, "optimization.strict": False,
    "debug.every": 9, "benchmark.budget_s": 5, "benchmark.attribute": True,
    "benchmark.baseline": "z", "security.trusted": ["own"], "model._target_": "own.Net",
}  # fmt: skip


def test_every_name_of_the_contract_is_a_key(tmp_path: Path) -> None:
    def typed(value: object) -> str:
        return "[own]" if isinstance(value, list) else json.dumps(value).strip('"')

    overrides = [f"{key}={typed(value)}" for key, value in CONTRACT.items()]
    done = command(
        tmp_path, "--cfg", "job", "data=tabular", "objective=regression", *overrides,
        "+model.width=64", "optimization_level=ultra", "debug_mode=full",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    for key, value in CONTRACT.items():
        found = config
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert config["optimization"]["level"] == "ultra"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        (["training.stepz=3"], 2, "training.steps"),
        (["job=predict", "data.path=x.csv"], 2, "checkpoint.resume: job=predict needs a run"),
        (["data=tabular", "data.path=gone.csv", "data.target=y"], 2, "data.path: gone.csv"),
        (["training.steps=-1"], 2, "training.steps"),
        (["model._target_=os.system"], 3, "model._target_: os.system is refused"),
        (["model._target_=own.Net"], 3, "security.trusted=[own]"),
        (["checkpoint.resume=outputs/runs/gone/1"], 5, "checkpoint.resume: there is no folder"),
    ],
)
def test_a_mistake_is_one_line_its_exit_code_and_no_folder(
    typed: list[str], code: int, says: str, tmp_path: Path
) -> None:
    done = command(tmp_path, *typed)
    assert done.returncode == code
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_mistake_about_data_leaves_a_named_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("size,price\n" + "1,2.5\n" * 20)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/notes.txt").touch()
    for folder in ("new/deep", "kept/run", "kept"):
        typed = ("data=tabular", "data.path=t.csv", "data.target=prise")
        done = command(tmp_path, *typed, f"hydra.run.dir={folder}")
        assert done.returncode == 2 and "did you mean 'price'?" in done.stderr
        if folder != "kept":  # a run that was refused is recorded beside what was there
            assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "kept"}
            assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]
    assert (tmp_path / "kept/notes.txt").exists()


def test_a_missing_package_is_one_line_with_the_way_to_it(tmp_path: Path) -> None:
    done = command(tmp_path, flags=("-S",))  # without site-packages
    assert done.returncode == 2
    assert done.stderr.startswith("error: omegaconf is not installed for ")
    assert "activate" in done.stderr or "pip install" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
