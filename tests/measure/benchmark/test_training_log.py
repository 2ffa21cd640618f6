"""What an arm's process is asked to train, and the checks that it trains at all."""

import math
import random
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from runner.core.config.run_config import config_hash
from runner.core.interfaces.hook import Report
from runner.core.security.pickle_transfer import pickle_parts
from runner.measure.benchmark.workers.turn_hook import TrainingLog
from runner.measure.benchmark.workers.worker import measurement_config, planned_techniques
from tests.runs import config


def problems(losses: Sequence[float], norm: float = 1.0, skipped: bool = False) -> list[str]:
    log = TrainingLog()
    for first in range(0, len(losses), 10):
        part = list(losses[first : first + 10])
        log.add(Report(first + 1, part, [norm] * len(part), [skipped] * len(part), 0.1, 1.0, 1))
    return log.problems()


def noise(count: int, mean: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, 0.2) for _ in range(count)]


def test_the_work_is_that_of_the_config_but_for_what_has_an_end() -> None:
    asked = config("schedule=cosine", "training.patience=3", "stability=strict", "seed=7")
    before = config_hash(asked)
    work = measurement_config(asked)
    assert config_hash(asked) == before  # which is the caller's
    assert work.schedule.kind.value == "constant"
    assert work.schedule.warmup == asked.schedule.warmup > 0
    assert not work.checkpoint.enabled
    assert (work.stability, work.seed, work.data) == (asked.stability, 7, asked.data)
    assert work.training == asked.training  # techniques decide by the length asked for


@pytest.mark.parametrize(
    ("losses", "how", "expected"),
    [
        ([2.3 * math.exp(-n / 80) + 0.1 * math.sin(n) for n in range(200)], {}, ""),
        (noise(400, 2.3), {}, "the loss does not move: 2."),
        (
            [*noise(60, 1.0), *noise(60, 3.0)],
            {},
            r"the loss rises: [\d.]+ over the first 50 steps, 3",
        ),
        (noise(15, 1.0), {"skipped": True}, "every update was skipped"),
        (noise(15, 1.0), {"norm": 0.0}, "gradients are zero"),
        ([1.0, math.nan, 1.0], {}, "the loss was not finite in 1 of 3 steps"),
    ],
)
def test_signs_that_an_arm_does_not_train_are_named(
    losses: list[float], how: dict[str, float], expected: str
) -> None:
    texts = problems(losses, **how)  # type: ignore[arg-type]
    assert len(texts) == bool(expected) and all(re.match(expected, text) for text in texts)


def test_starting_a_process_imports_no_torch() -> None:
    """Neither the parent's part nor what the process has before it is in its own session."""
    ours = "runner.measure.benchmark.workers.pool"
    code = f"import sys, {ours}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_short_run_of_a_level_that_compiles_when_measured_skips_compiling() -> None:
    short = config("data=digits", "optimization=ultra", "training.steps=900")
    planned = planned_techniques(short, pickle_parts({"metrics": {}}))
    assert planned["fused_optimizer"] == "engaged"
    for name in ("compile", "whole_step"):
        assert planned[name].startswith("run too short (900 steps; tried from")
    measured = {name for name, plan in planned.items() if plan == "tried"}
    assert not measured & {"compile", "whole_step"} and "recompute" not in planned
