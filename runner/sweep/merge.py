"""A sweep over ways to benchmark is one benchmark: its jobs become the arms."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import product

from runner.overrides.spelling import Typed, read
from runner.record.text import quote_for_hydra

OF_THE_SWEEP = ("hydra.sweep", "hydra/launcher", "hydra.launcher", "hydra.mode", "sweep.")
MOST = 64  # arms; more are a mistake


def merged(overrides: Sequence[str]) -> list[str] | None:
    """`benchmark.arms=[…]` in place of the values swept over; None where that is not possible.

    To be asked only where every job is a benchmark. What is swept over may be neither the
    benchmark's own settings nor its arms.
    """
    typed = [o for o in map(read, overrides) if not o.key.startswith(OF_THE_SWEEP)]
    swept = [o for o in typed if o.parsed.is_sweep_override()]
    fixed = [o for o in typed if not o.parsed.is_sweep_override()]
    if not swept:
        return [str(o) for o in fixed]
    if any(o.key == "benchmark.arms" for o in fixed):
        return None
    if any(o.key.partition(".")[0] in ("benchmark", "job") for o in swept):
        return None
    values = [_values(o) for o in swept]
    if not all(values):
        return None
    arms = [" ".join(map(shlex.quote, one)) for one in product(*values)]
    if len(arms) > MOST:
        return None
    listed = ",".join(quote_for_hydra(_name(arm)) for arm in arms)
    return [*(str(o) for o in fixed), f"benchmark.arms=[{listed}]"]


def _values(typed: Typed) -> list[str]:
    """The override once for each of its values; none where Hydra alone knows them."""
    if not typed.parsed.is_discrete_sweep() or type(typed.parsed.value()).__name__ == "Glob":
        return []
    key = typed.parsed.get_key_element()
    return [f"{key}={value}" for value in typed.parsed.sweep_string_iterator()]


def _name(arm: str) -> str:
    """Levels go by their name."""
    key, _, value = arm.partition("=")
    return value if key == "optimization" and value.isidentifier() else arm
