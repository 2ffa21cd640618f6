"""What an arm's process is asked to train, and the checks that it trains at all."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from runner import compose
from runner.benchmark.workers.results import (
    TrainingLog,
    compute_checksums,
    find_unchanged,
)
from runner.benchmark.workers.worker import benchmarked
from runner.config import config_hash
from runner.training.hook import Report


def course(losses: Sequence[float], norm: float = 1.0, skipped: bool = False) -> TrainingLog:
    found = TrainingLog()
    for first in range(0, len(losses), 10):
        part = list(losses[first : first + 10])
        found.add(Report(first + 1, part, [norm] * len(part), [skipped] * len(part), 0.1, 1.0, 1))
    return found


def noise(count: int, mean: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, 0.2) for _ in range(count)]


def test_the_work_is_that_of_the_config_but_for_what_has_an_end() -> None:
    asked = compose(["schedule=cosine", "training.patience=3", "stability=strict", "seed=7"])
    before = config_hash(asked)
    found = benchmarked(asked)
    assert config_hash(asked) == before  # which is the caller's
    assert found.schedule.kind.value == "constant"
    assert found.schedule.warmup == asked.schedule.warmup > 0
    assert not found.checkpoint.enabled
    assert (found.stability, found.seed, found.data) == (asked.stability, 7, asked.data)
    assert found.training == asked.training  # techniques decide by the length asked for


def test_a_run_that_learns_has_no_problems() -> None:
    losses = [2.3 * math.exp(-step / 80) + 0.1 * math.sin(step) for step in range(200)]
    assert course(losses).problems() == []


def test_a_loss_that_only_wavers_does_not_move() -> None:
    assert course(noise(400, 2.3)).problems()[0].startswith("the loss does not move: 2.")


def test_a_loss_that_goes_up_is_said_with_its_numbers() -> None:
    (said,) = course([*noise(60, 1.0), *noise(60, 3.0)]).problems()
    assert said.startswith("the loss rises: ") and "over the first 50 steps" in said


def test_skipped_steps_zero_gradients_and_bad_losses_are_named() -> None:
    assert "every update was skipped" in course(noise(20, 1.0), skipped=True).problems()
    assert "gradients are zero" in course(noise(20, 1.0), norm=0.0).problems()
    assert course([1.0, math.nan, 1.0]).problems() == ["the loss was not finite in 1 of 3 steps"]
    assert "gradients are zero" not in course(noise(20, 1.0), norm=math.nan).problems()


def test_the_step_at_which_a_target_is_reached_is_the_first_whose_mean_is_there() -> None:
    found = TrainingLog(target=1.0)
    losses = [2.0] * 15 + [0.5] * 30
    for first in range(0, 45, 10):
        part = losses[first : first + 10]
        found.add(Report(first + 1, part, [1.0] * len(part), [False] * len(part), 0.1, 1.0, 1))
    assert found.reached == 22  # three of ten are 2.0 still: 0.95
    assert found.steps == 45 and len(found.last) == 45


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_one_bit_of_a_parameter_is_a_change_and_nothing_is_not(form: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=form)
    model[1].bias.requires_grad_(False)
    before = compute_checksums(model)
    assert list(before) == ["0.weight", "0.bias", "1.weight"]
    assert find_unchanged(model, before) == list(before)
    with torch.no_grad():
        value = model[0].weight[2, 1, 0, 2]
        value.copy_(torch.nextafter(value, torch.tensor(9.0)))
    assert find_unchanged(model, before) == ["0.bias", "1.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_every_type_and_shape_of_parameter_has_a_checksum(dtype: torch.dtype) -> None:
    model = nn.Module()
    for name, shape in (("scalar", ()), ("none", (0, 3)), ("large", (3, 1 << 20))):
        model.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))
    before = compute_checksums(model)
    assert find_unchanged(model, before) == ["scalar", "large"]
    with torch.no_grad():
        model.scalar.add_(1)
        model.large[2, -1] = 2
    assert find_unchanged(model, before) == []


def test_starting_a_process_imports_no_torch() -> None:
    """Neither the parent's part nor what the process has before it is in its own session."""
    ours = "runner.benchmark.workers.pool"
    code = f"import sys, {ours}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
