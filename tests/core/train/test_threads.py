"""Runs in several threads of a process have the numbers that they have alone, or say why not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import build, compose, evaluate, optimize_training_loop, safe_inference, train
from runner.core.config.run_config import RunConfig
from runner.core.errors import Interrupted, UsageError
from runner.core.interfaces.run import Run
from tests.runs import AtSteps, differences, interrupt, weights

SHORT = ["data=cancer", "model=mlp", "model.dropout=0.5", "training.steps=6", "device=cpu",
         "optimization=none", "monitoring.progress=false"]  # fmt: skip


Weights = dict[str, Tensor]


@cache
def config(seed: int) -> RunConfig:
    return compose([*SHORT, f"seed={seed}"])


def trained(seed: int) -> Weights:
    with build(config(seed)) as run:
        train(run)
        return weights(run)


alone = cache(trained)  # weights by seed, without another thread


def in_a_thread(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(timeout=120)


def once_within_a_forward(run: Run, action: Callable[[], None]) -> None:
    """Call `action` between two layers of a training step, where dropout is still to draw."""
    first = next(module for module in run.model.modules() if isinstance(module, nn.Linear))
    calls: list[None] = []

    def hook(*_: object) -> None:
        calls.append(None)
        if len(calls) == 3:
            action()

    first.register_forward_hook(hook)


def step_a_loop() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with optimize_training_loop(model, optimizer, nn.functional.cross_entropy) as loop:
        loop((torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)))


def test_while_a_run_trains_another_thread_is_refused_what_would_change_its_numbers() -> None:
    with build(config(1)) as run, build(config(2)) as second:
        actions: dict[str, Callable[[], object]] = {
            "train": lambda: train(second),
            "build": lambda: build(config(2)),
            "evaluate": lambda: evaluate(second),
            "optimize_training_loop": step_a_loop,
            "safe_inference": lambda: safe_inference(nn.Dropout(), torch.ones(4, 4)),
        }
        errors: dict[str, str] = {}

        def try_all() -> None:
            for name, action in actions.items():
                try:
                    in_a_thread(action)
                except UsageError as error:
                    errors[name] = str(error)

        once_within_a_forward(run, try_all)
        train(run)
        assert differences(weights(run), alone(1)) == []
        assert errors.keys() >= actions.keys() - {"optimize_training_loop"}
        for name, text in errors.items():
            assert text.startswith(f"{name}: ") or name == "optimize_training_loop"
            assert "another thread of this process is training" in text
            assert "python -m runner" in text
        train(second)  # the refusals have changed nothing
        assert differences(weights(second), alone(2)) == []


def test_threads_that_train_at_once_have_the_numbers_of_one_alone_or_an_error() -> None:
    start = threading.Barrier(3)

    def build_and_train() -> Weights | str:
        start.wait()
        try:
            return trained(1)
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(build_and_train) for _ in range(3)]
        found = [result.result(timeout=120) for result in results]
    numbers = [result for result in found if isinstance(result, dict)]
    assert numbers and not any(differences(result, alone(1)) for result in numbers)
    assert all("another thread" in text for text in found if isinstance(text, str))


def test_a_training_that_failed_blocks_no_other_thread() -> None:
    with build(config(1)) as run:
        run.hooks.append(AtSteps(1, interrupt))
        with pytest.raises(Interrupted):
            train(run)
    assert differences(in_a_thread(lambda: trained(1)), alone(1)) == []


def test_a_hook_may_train_and_evaluate_on_the_same_thread() -> None:
    def train_another(run: Run) -> None:
        evaluate(run)
        assert differences(trained(2), alone(2)) == []
        with pytest.raises(UsageError, match="another thread"):
            in_a_thread(lambda: trained(2))

    assert alone(2)
    with build(config(1)) as run:
        run.hooks.append(AtSteps(2, train_another))
        train(run)
        assert differences(weights(run), alone(1)) == []


@pytest.fixture(autouse=True)
def _threads_unchanged() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == count
