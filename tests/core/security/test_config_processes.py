"""The door for configs, as it is met on the command line: real processes in a hostile folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import runs

TRAP = "open({ran!r}, 'a').write(__name__ + ' ')\n"
BEFORE_US = set(
    "importlib contextlib functools warnings types collections keyword operator reprlib".split()
)
"""What Python imports for `-m` itself; only `python -P -m runner` keeps the folder from those."""
ABSENT = "colorama flint gmpy2 triton colorlog optree torch_xla sitecustomize tensorflow".split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a shadow of every module of the standard library and of all that we use."""
    names = {n for n in sys.stdlib_module_names if not n.startswith("_")} - BEFORE_US
    used = {"torch", "numpy", "yaml", "hydra", "omegaconf", "antlr4", "rich", "psutil", "packaging",
            "safetensors", "tensorboard", "matplotlib", "PIL"}  # fmt: skip
    trap = TRAP.format(ran=str(tmp_path / "ran"))
    for name in names | used | {*ABSENT}:
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "hydra_plugins" / "trap").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "trap" / "__init__.py").write_text(trap)
    return tmp_path


SWEEP = pytest.param(["-m", "seed=0"], marks=pytest.mark.slow)


@pytest.mark.parametrize("sweep", [[], SWEEP], ids=["run", "sweep"])
def test_nothing_in_the_folder_stands_in_for_a_module(sweep: list[str], folder: Path) -> None:
    typed = "data=cancer training.steps=2 optimization=none device=cpu".split()
    model = ["model._target_=torch.nn.Linear", "+model.in_features=30", "+model.out_features=2"]
    done = runs.python("-m", "runner", *typed, *model, *sweep, folder=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert not (folder / "ran").exists()


def test_what_hydra_composes_by_itself_is_refused_as_well(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "experiment"
    theirs.mkdir(parents=True)
    (theirs / "own.yaml").write_text(
        "# @package _global_\nhydra: {hydra_logging: {version: 1, handlers: {x: {(): os.mkdir, "
        f"path: {tmp_path / 'ran'}}}}}, root: {{handlers: [x]}}}}}}\n"
    )
    done = runs.command(tmp_path, "--config-dir=theirs", "-m", "experiment=glob(ow*)",
                        "hydra/launcher=basic", "hydra/job_logging=default")  # fmt: skip
    assert done.returncode == 3 and "is refused: a config file may set plain" in done.stderr
    assert not (tmp_path / "ran").exists()
