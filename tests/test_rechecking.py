"""What a program sets on a config is checked as what is typed; wrong arguments are one line."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import build, compose, evaluate, train
from runner.data.config import Tabular
from runner.errors import ConfigError, SecurityError, UsageError
from runner.jobs.config import JobKind
from runner.rechecking import rechecked

composed = cache(lambda: compose(["data=cancer"]))


def changed(key: str, value: Any) -> Any:
    config: Any = deepcopy(composed())
    part = config
    *path, name = key.split(".")
    for step in path:
        part = getattr(part, step)
    setattr(part, name, value)
    return config


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("training.steps", -4, "training.steps: -4 is not positive"),
        ("training.steps", "x", "training.steps: 'x' is not an int"),
        ("training.stepz", 4, "training.stepz: there is no such key; did you mean training.steps?"),
        ("training", 4, "training: is a part with keys of its own"),
        ("training", None, "training: null is no value"),
        ("data", "digits", "data: is a part with keys of its own"),
        ("name", "???", "name: has no value"),
        ("name", "a/b", "name: 'a/b' is no folder's name"),
        ("model.width", 0, "model.width: 0 is not a count"),
        ("job.kind", "trian", "job.kind: 'trian' is not one of train.*did you mean job.kind=train"),
        ("optimization.compile.enabled", "so", "optimization.compile.enabled: 'so' is not true or"),
        ("security.trusted", "mine", "security.trusted: is a list"),
        ("model.arguments", {"f": print}, "model.arguments.f: "),
        ("optimizer.options", None, "optimizer.options: "),
        ("training.epochs", 0, "training.epochs: 0.0 is not positive; use more than 0"),
    ],
)
def test_what_was_set_by_hand_is_refused_as_what_is_typed(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as error:
        build(changed(key, value))
    assert "\n" not in str(error.value)


def test_trust_is_asked_for_again() -> None:
    with pytest.raises(SecurityError, match=r"^optimization\.extra: mine\.Own is refused"):
        build(changed("optimization.extra", ["mine.Own"]))
    assert rechecked(changed("optimization.extra", ["mine.Own"]), {"mine.Own"})


@pytest.mark.parametrize(
    ("key", "value", "became"),
    [
        ("training.steps", "4", 4),
        ("job.kind", "verify", JobKind.verify),
        ("optimizer.options", {"a": [1, "x${y}"]}, {"a": [1, "x${y}"]}),
        ("data.ignore", ("a", "${b}"), ["a", "${b}"]),
        ("data.ignore", np.array(["a"]), ["a"]),
        ("training.steps", np.int64(4), 4),
        ("optimizer.lr", torch.tensor(0.5), 0.5),
        ("optimizer.options", {"eps": np.float64(0.25)}, {"eps": 0.25}),
    ],
)
def test_a_value_becomes_what_it_does_on_the_command_line(
    key: str, value: Any, became: Any
) -> None:
    config = changed("data", Tabular(path="x", target="y"))
    part, name = key.split(".")
    setattr(getattr(config, part), name, value)
    assert getattr(getattr(rechecked(config), part), name) == became


def test_what_a_job_needs_is_not_asked_of_the_runs_that_it_makes() -> None:
    config = compose(["data=cancer", "optimization=basic", "job=verify"])
    config.optimization = compose(["optimization=none"]).optimization
    assert rechecked(config) == config


def test_a_config_as_composed_stays_what_it_is() -> None:
    config = compose(["data=cancer", "optimization=ultra", "+optimizer.options.eps=1e-7"])
    assert rechecked(config) == config


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: build(["training.steps=3"]), r"build: the config is a list; give what comp"),  # type: ignore[arg-type]
    "one text": (lambda: compose("training.steps=3"), r"compose: overrides is one string; give"),
    "numbers": (lambda: compose([3]), r"compose: overrides is a list of texts"),  # type: ignore[list-item]
    "no run": (lambda: train(compose([])), r"train: takes a run, not a RunConfig: with build"),  # type: ignore[arg-type]
    "no run either": (lambda: evaluate([]), r"evaluate: takes a run, not a list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_config_and_no_run_is_one_line(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises(UsageError, match=f"^{said}"):
        call()


def test_a_folder_may_be_a_text(tmp_path: Path) -> None:
    with build(compose(["data=cancer", "training.steps=2"]), str(tmp_path / "run")) as run:
        assert run.folder == tmp_path / "run"
