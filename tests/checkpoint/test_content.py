"""What is no state of a run is refused by name, before anything is done with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import build, compose, train
from runner.checkpoint import content
from runner.checkpoint.content import check_state
from runner.checkpoint.folder import load
from runner.checkpoint.manifest import MODEL, NAME, STATE, Manifest, read_manifest
from runner.errors import CheckpointError
from runner.record.history import Fault
from runner.run import Progress
from runner.stability.anomalies import Anomaly
from runner.stability.spike import Limits
from runner.stability.words import Decision
from runner.storage import write_file

OVERRIDES = [
    "data=cancer", "model.width=8", "training.steps=6", "checkpoint.every=3", "checkpoint.keep=9",
    "device.threads=1", "monitoring=quiet", "optimization=basic", "training.validate_every=6",
]  # fmt: skip
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with build(compose(OVERRIDES), folder) as run:
        train(run)
    return folder


@pytest.fixture(scope="module")
def state(trained: Path) -> dict[str, Any]:
    return load(trained / "checkpoints" / "step_00000006").state


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


def take_out(name: str) -> Change:
    return lambda state: state.pop(name)


ODD: dict[str, tuple[Change, str]] = {
    "nothing": (lambda s: s.clear(), "state has no 'progress'"),
    "no optimizer": (put(update={}), "state.update has no 'optimizer'"),
    "no planned": (take_out("planned"), "state has no 'planned'"),
    "other progress": (put(progress={"step": 6, "x": 1}), "state.progress has an unknown 'x'"),
    "a step as text": (put(progress__step="6"), "is '6', and should be a whole number, 0 to"),
    "a step that is true": (put(progress__step=True), "state.progress.step is True"),
    "a negative step": (put(progress__step=-5), "state.progress.step is -5"),
    "an absurd step": (put(progress__step=10**300), "state.progress.step is a int"),
    "another step": (put(progress__step=7), "is 7, and the manifest says 6"),
    "a best step to come": (put(progress__best_step=9), "best_step is 9, beyond the step 6"),
    "other metrics": (put(progress__metrics={"a": "b"}), "state.progress.metrics.a is 'b'"),
    "updates before the first": (put(update__updates=torch.tensor(-9)), "updates is -9"),
    "more updates than steps": (put(update__updates=torch.tensor(99)), "updates is 99"),
    "many updates": (put(update__updates=torch.zeros(9, dtype=torch.int64)), "of shape [9]"),
    "a rate of infinity": (put(update__backoff=float("inf")), "state.update.backoff is inf"),
    "rows of text": (put(reader__rows=[["a", 1.0, 2.0]]), "state.reader.rows[0][0] is 'a'"),
    "short rows": (put(reader__rows=[[1.0]]), "rows[0] is a list, and should be a list of 3"),
    "history of another kind": (put(history=[{"kind": "X"}]), "state.history is a list"),
    "a fault without words": (put(history__faults=[{"kind": "X"}]), "has no 'category'"),
    "a long text": (put(seed=0, threads="x" * 99), f"threads is '{'x' * 40}', and"),
    "settings": (put(settings=None), "state.settings is None, and should be a dict"),
    "numbered settings": (put(settings={1: "x"}), "state.settings has the key 1"),
    "a place in the record": (put(record="a"), "state.record is 'a'"),
    "a short generator": (put(random__numpy=("MT19937", torch.zeros(1), 0, 0, 0.0)), "numpy[1]"),
    "a generator beyond its end": (
        lambda s: s["random"].update(numpy=(*s["random"]["numpy"][:2], 9**9, 0, 0.0)),
        "state.random.numpy[2] is 387420489, and should be a whole number, 0 to 624",
    ),
    "a rate of a million": (put(update__backoff=1e6), "backoff is 1000000.0, and should be"),
    "no rate at all": (put(stability__share=0.0), "state.stability.share is 0.0"),
    "a rate of no number": (put(stability__share=float("nan")), "state.stability.share is nan"),
    "a number beyond floats": (put(progress__best=10**400), "state.progress.best is a int"),
    "a decision": (put(stability__decision={"row": "x"}), "decision has no 'kind'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_in_a_state_is_named_in_one_line(kind: str, state: dict[str, Any]) -> None:
    change, problem = ODD[kind]
    check_state(state, 6, "here")
    odd = deepcopy(state)
    change(odd)
    with pytest.raises(CheckpointError) as told:
        check_state(odd, 6, "here")
    message = str(told.value)
    assert message.startswith("here: not what a run of the runner keeps: state")
    assert problem in message and "checkpoint.resume" in message
    assert "\n" not in message and len(message) < 300


def test_a_state_of_a_version_that_kept_less_or_more_is_one(state: dict[str, Any]) -> None:
    before = deepcopy(state)
    for name in ("inputs", "clean"):
        del before[name]
    check_state(before | {"later": 1}, 6, "here")


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        (content.PROGRESS, Progress), (content.FAULT, Fault), (content.DECISION, Decision),
        (content.ANOMALY, Anomaly), (content.LIMITS, Limits),
    ],
)  # fmt: skip
def test_the_table_has_every_field_of_what_is_kept(form: content.Fields, kept: Any) -> None:
    assert {*form.forms, *form.later} == {f.name for f in fields(kept)}
    needed = {f.name for f in fields(kept) if f.default is f.default_factory is MISSING}
    assert needed <= form.forms.keys()


def forge(folder: Path, change: Change) -> Path:
    """Change the state, and write a manifest that fits."""
    whole = torch.load(folder / STATE, weights_only=True)
    change(whole["state"])
    facts = read_manifest(folder)
    for name in (STATE, NAME):
        (folder / name).unlink()
    written = write_file(folder / STATE, partial(torch.save, whole))
    body = {**vars(facts), "files": {MODEL: facts.files[MODEL], STATE: written}}
    write_file(folder / NAME, Manifest(**body).write)
    return folder


def small_moment(state: dict[str, Any]) -> None:
    state["update"]["optimizer"]["state"][1]["exp_avg"] = torch.zeros(1)


def states_by_text(state: dict[str, Any]) -> None:
    kept = state["update"]["optimizer"]
    kept["state"] = {str(number): one for number, one in kept["state"].items()}


def count_of_none(count: float) -> Change:
    def change(state: dict[str, Any]) -> None:
        state["update"]["optimizer"]["state"][1]["step"] = torch.tensor(count)

    return change


def groups_of_numbers(state: dict[str, Any]) -> None:
    state["update"]["optimizer"]["param_groups"][0]["params"] = 5


ABOUT_NOTHING = {"row": 99, "kind": "zz", "step": 3, "message": "m"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (small_moment, "exp_avg has not its weight's shape"),  # a fused kernel would read on
        (states_by_text, "an optimizer's state is by the numbers of its weights"),
        (count_of_none(-1.0), "an optimizer's step is -1.0, and should be"),
        (count_of_none(float("nan")), "an optimizer's step is nan"),
        (put(stability__decision=ABOUT_NOTHING), "a decision about 'zz', which is no kind"),
        (groups_of_numbers, "does not fit this run's model or optimizer"),
        (put(progress__step=-5), "state.progress.step is -5"),
        (put(random__torch=torch.zeros(3, dtype=torch.uint8)), "RuntimeError: "),
    ],
    ids=[
        "a small moment",
        "states by text",
        "a count below 0",
        "no count",
        "a decision",
        "groups",
        "progress",
        "a short generator",
    ],
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


def test_the_checkpoint_before_one_with_an_odd_state_is_used(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    forge(folder / "checkpoints" / "step_00000006", put(settings=None))
    with build(compose([*OVERRIDES, "checkpoint.resume=auto"]), folder) as run:
        assert run.progress.step == 3
    assert "state.settings is None" in caplog.text


def test_a_decision_about_no_bad_step_ends_no_run(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    theirs = {"row": None, "kind": "asked", "step": 6, "message": "m", "stuck": True, "in_a_row": 3}
    for kind in ("asked", "weights"):
        forged = put(stability__decision=theirs | {"kind": kind})
        forge(folder / "checkpoints" / "step_00000006", forged)
        with build(compose([*OVERRIDES, "checkpoint.resume=auto"]), folder) as run:
            assert run.progress.step == 6 and run.guardian.decision is None
