"""What is typed, and what Hydra is given."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from runner import compose
from runner.core.config.run_config import RunConfig
from runner.core.config.spelling import LIST_KEYS
from runner.core.errors import ConfigError
from runner.core.schemas import data, models


def list_keys(cls: Any, start: str = "") -> Iterator[str]:
    """Keys of a schema whose value is a list of plain values."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from list_keys(kind, f"{start}{field.name}.")
        elif str(kind).startswith("list[") and "dict" not in str(kind) or "list[int]" in str(kind):
            yield f"{start}{field.name}"


def test_every_list_takes_a_single_name_without_brackets() -> None:
    schemas = {"": RunConfig}
    found = {key for start, cls in schemas.items() for key in list_keys(cls, start)}
    for group, options in (("data", data.OPTIONS), ("model", models.OPTIONS)):
        found |= {key for cls in options.values() for key in list_keys(cls, f"{group}.")}
    assert found == LIST_KEYS


@pytest.mark.parametrize(
    ("typed", "section", "value"),
    [
        ("optimizer.freeze=embeddings.*", "optimizer.freeze", ["embeddings.*"]),
        ("optimizer.freeze=[a,b]", "optimizer.freeze", ["a", "b"]),
        ("monitoring.sinks=mlflow", "monitoring.sinks", ["mlflow"]),
        ("device.affinity=1", "device.affinity", [1]),
        ("device.affinity=null", "device.affinity", None),
        ("objective.metrics=f1", "objective.metrics", ["f1"]),
    ],
)
def test_a_single_name_is_a_list_of_one(typed: str, section: str, value: Any) -> None:
    config: Any = compose([typed])
    for name in section.split("."):
        config = getattr(config, name)
    assert config == value


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        (["seed=0", "1"], r"seed: '1' follows its value after a space; .*-m seed=0,1;"),
        (["seed=0", "1", "2"], r"-m seed=0,1,2;"),
        (["name=my", "run"], r"quoted: 'name=\"my run\"'"),
        (["checkpoint=outputs/runs/a"], r"did you mean checkpoint.resume=outputs/runs/a\?"),
    ],
)
def test_what_was_meant_is_said(typed: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        compose(typed)
