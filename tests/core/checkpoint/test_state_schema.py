"""What is no state of a run is refused by name, before anything is done with it."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import build, compose
from runner.core.checkpoint.manifest import STATE
from runner.core.checkpoint.reading import load_checkpoint
from runner.core.checkpoint.state_schema import check_state
from runner.core.errors import CheckpointError
from tests import runs
from tests.core.checkpoint.test_checkpoint_damage import forge_file

OVERRIDES = """
    data=cancer model.width=8 training.steps=6 checkpoint.every=3 checkpoint.keep=9
    device.threads=1 monitoring=quiet optimization=basic training.validate_every=6
    """.split()
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    runs.trained(*OVERRIDES, folder=folder)
    return folder


@pytest.fixture(scope="module")
def state(trained: Path) -> dict[str, Any]:
    return load_checkpoint(trained / "checkpoints" / "step_00000006").state


def put(**values: Any) -> Change:
    """Put values into the state, `a__b` being b within a."""

    def change(state: dict[str, Any]) -> None:
        for path, value in values.items():
            *outer, last = path.split("__")
            inner = state
            for name in outer:
                inner = inner[name]
            inner[last] = value

    return change


ODD: dict[str, tuple[Change, str]] = {
    "nothing": (lambda s: s.clear(), "state.progress must be a dict, got NoneType"),
    "no optimizer": (put(update={}), "state.update.optimizer must be a dict"),
    "a step as text": (put(progress__step="6"), "progress.step must be a whole number"),
    "another step": (put(progress__step=5), "progress.step differs from the manifest's, 6"),
    "a best step to come": (put(progress__best_step=9), "best_step must be a whole number, 0 to 6"),
    "more updates than steps": (put(update__updates=torch.tensor(99)), "updates must be"),
    "many updates": (put(update__updates=torch.zeros(9, dtype=torch.int64)), "updates must be"),
    "a rate of no number": (put(update__backoff=float("nan")), "backoff must be > 0 and ≤ 1"),
    "history of another kind": (put(history=[]), "state.history must be a dict, got list"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_malformed_state_is_named_in_one_line(kind: str, state: dict[str, Any]) -> None:
    change, problem = ODD[kind]
    check_state(state, 6, "here")
    odd = deepcopy(state)
    change(odd)
    with pytest.raises(CheckpointError) as told:
        check_state(odd, 6, "here")
    message = str(told.value)
    assert message.startswith("here: is not the state of a run: state")
    assert problem in message and "checkpoint.resume" in message
    assert "\n" not in message and len(message) < 300


def test_a_state_of_a_version_that_kept_less_or_more_is_one(state: dict[str, Any]) -> None:
    before = dict(state)
    for name in ("inputs", "clean"):
        del before[name]
    check_state(before | {"later": 1}, 6, "here")


def forge(folder: Path, change: Change) -> None:
    """Change the state, and write a manifest that fits."""
    whole = torch.load(folder / STATE, weights_only=True)
    change(whole["state"])
    torch.save(whole, data := BytesIO())
    forge_file(folder, STATE, data.getvalue())


def put_moment(name: str, value: Any) -> Change:
    return lambda state: state["update"]["optimizer"]["state"][1].update({name: value})


ABOUT_NOTHING = {"row": 99, "kind": "zz", "step": 3, "message": "m"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        # a fused kernel would read on
        (put_moment("exp_avg", torch.zeros(1)), "exp_avg must have its weight's shape"),
        (put_moment("step", torch.tensor(float("nan"))), "step must be one number"),
        (put(stability__decision=ABOUT_NOTHING), "KeyError: 'zz'"),
        (put(progress__step=-5), "progress.step must be"),
        (put(random__torch=torch.zeros(3, dtype=torch.uint8)), "RuntimeError: "),
    ],
    ids=["a small moment", "no count", "a decision", "progress", "a short generator"],
)
def test_a_run_that_cannot_go_on_from_a_state_leaves_its_folder_as_it_was(
    change: Change, problem: str, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    (folder / ".hydra-resumed").mkdir()
    forge(folder / "checkpoints" / "step_00000003", change)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    resume = f"checkpoint.resume={folder}/checkpoints/step_00000003"
    with pytest.raises(CheckpointError) as told:
        build(compose([*OVERRIDES, resume]), folder)
    assert problem in str(told.value) and "step_00000003" in str(told.value)
    assert "\n" not in str(told.value)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_the_checkpoint_before_one_with_a_malformed_state_is_used(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    forge(folder / "checkpoints" / "step_00000006", put(settings=None))
    with build(compose([*OVERRIDES, "checkpoint.resume=auto"]), folder) as run:
        assert run.progress.step == 3
    assert "state.settings must be a dict" in caplog.text
