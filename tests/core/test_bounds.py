"""Bounds stand with the key; docs/config.md is made of them and of the schema."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import pytest

from runner.core.bounds import bounded, check_bounds
from runner.core.config.composing import compose
from runner.core.config.groups import CONF
from runner.core.errors import ConfigError


@dataclass
class Part:
    every: int | None = bounded(None, min=1)
    share: float = bounded(0.5, above=0, max=1)
    tolerance: float = bounded(0.5, above=0, below=1)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("every", 0, "≥ 1"),
        ("share", 0.0, "> 0 and ≤ 1"),
        ("share", 1.5, "> 0 and ≤ 1"),
        ("tolerance", 1.0, "> 0 and < 1"),
        ("share", math.nan, "> 0 and ≤ 1"),
        ("every", math.inf, "≥ 1"),
    ],
)
def test_a_number_outside_its_bounds_is_refused_with_the_one_message(
    key: str, value: float, says: str
) -> None:
    part = Part()
    setattr(part, key, value)
    with pytest.raises(ConfigError, match=f"^part.{key}: must be {says}, got {value}$"):
        check_bounds(part, "part")


def test_bounds_include_their_ends_and_leave_null_alone() -> None:
    check_bounds(Part(every=1, share=1.0), "part")
    check_bounds(Part(every=None), "part")


@pytest.mark.parametrize(
    "override",
    ["debug.every=0", "training.epochs=0", "monitoring.line_every_s=0", "security.limits.hours=0",
     "debug.gradients.dead_share=2", "debug.gradcheck.tolerance=1", "checkpoint.keep=0",
     "security.limits.disk_mb=0", "security.limits.memory_mb=0", "device.clean_above=1.5",
     "security.limits.device_memory_mb=0", "stability.watch.stop_above=2", "debug.profile.steps=0"],
)  # fmt: skip
def test_the_config_s_own_keys_are_held_to_their_bounds(override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"^{key}: must be .*, got {value}"):
        compose([override])


@pytest.mark.parametrize("page", ["config", "api"])
def test_a_generated_page_is_that_of_the_source(page: str) -> None:
    file = CONF.parent / "scripts" / f"{page}_docs.py"
    spec = importlib.util.spec_from_file_location(f"{page}_docs", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = f"docs/{page}.md is stale: run python scripts/{page}_docs.py"
    assert module.document() == module.TARGET.read_text(encoding="utf-8"), stale
