"""No count of a config is without a limit, and one beyond it is refused before anything acts."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.core.bounds import DEFAULT_LIMIT, LIMITS, SEED_KEYS, check_counts
from runner.core.config.composing import compose, config_from_plain
from runner.core.config.run_config import RunConfig, WrittenConfig
from runner.core.errors import ConfigError
from runner.core.schemas import data as data_config
from runner.core.schemas import models as model_config
from runner.core.schemas.sweep import LauncherConfig
from runner.core.train.length import resolve_steps

HUGE = {
    "device.threads=1000000000": [],
    "device.affinity=[0,99999999999999999999]": [],
    "distributed.processes=1025": ["distributed=ddp"],
    "data.samples=1000000000000": ["data=synthetic"],
    "model.depth=1000000000": ["data=stdlib_text", "model=gpt"],
    "debug.every=99999999999999999999": [],
    "checks.inputs.schema.classes=99999999999999999999": [],
}


@pytest.mark.parametrize("override", HUGE)
def test_a_count_beyond_its_limit_is_refused_with_the_key_and_the_limit(
    override: str,
) -> None:
    key = override.partition("=")[0]
    most = LIMITS.get(key, DEFAULT_LIMIT)
    with pytest.raises(ConfigError, match=f"{key}: .* is too many; use {most:,} or less") as caught:
        compose([*HUGE[override], override])
    assert caught.value.key == key


def test_the_limits_themselves_are_allowed() -> None:
    config = compose(["device.threads=1024", "data.workers=256", "debug.every=1000000000",
                      "seed=9223372036854775807", "model._target_=torch.nn.Linear",
                      "+model.arguments.seed=99999999999999999999"])  # fmt: skip
    assert config.device.threads == 1024


def test_a_config_of_a_checkpoint_is_held_to_the_same_limits() -> None:
    values = WrittenConfig(compose([])).plain()
    values["device"]["threads"] = 10**9
    with pytest.raises(ConfigError, match=r"device\.threads: 1,000,000,000 is too many"):
        config_from_plain(values)


def test_epochs_may_not_make_more_steps_than_there_may_be() -> None:
    config = compose(["training.epochs=1e12"])
    with pytest.raises(ConfigError, match=r"training\.steps: .* is too many"):
        resolve_steps(config, 45)


def test_a_model_beyond_the_memory_is_refused() -> None:
    from runner import build

    config = compose(["data=stdlib_text", "model=gpt", "model.width=65536", "model.depth=8"])
    with pytest.raises(
        ConfigError, match=r"model\.width: the weights take .* GB; use a model smaller"
    ):
        build(config)


def test_synthetic_data_beyond_the_memory_are_refused() -> None:
    from runner import build

    config = compose(["data=synthetic", "data.samples=100000000", "data.image_size=16384"])
    with pytest.raises(ConfigError, match=r"data\.samples: .* GB; use less than"):
        build(config)


def keys_of(schema: type, prefix: str) -> set[str]:
    """Every key of whole numbers that a schema has, at any depth."""
    found: set[str] = set()
    hints = get_type_hints(schema)
    for field in fields(schema):
        kind, key = hints[field.name], f"{prefix}{field.name}"
        if is_dataclass(kind):
            found |= keys_of(kind, f"{key}.")  # type: ignore[arg-type]
        elif kind in (int, int | None, int | str | None, list[int], list[int] | None):
            found.add(key)
    return found


def test_each_limit_is_of_a_key_that_there_is_and_each_key_has_one() -> None:
    keys = keys_of(RunConfig, "") | keys_of(LauncherConfig, "hydra.launcher.")
    for group, schemas in (("data", data_config.OPTIONS), ("model", model_config.OPTIONS)):
        for schema in schemas.values():
            keys |= keys_of(schema, f"{group}.")
    assert keys >= LIMITS.keys()
    for key in keys - set(SEED_KEYS):
        tree: dict[str, object] = {}
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})  # type: ignore[assignment]
        inner[name] = 10**20
        with pytest.raises(ConfigError, match="is too many"):
            check_counts(tree)


def test_the_command_line_is_answered_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is too many; use"):
        check(read_arguments(["training.steps=1", "-m", "hydra.launcher.jobs=100000"]))
    assert list(tmp_path.iterdir()) == []
