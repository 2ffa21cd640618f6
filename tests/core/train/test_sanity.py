"""One batch is validated before step 1, without a trace; an exception loses no training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from runner import build, compose, evaluate, train
from runner.core.build.setup import Components
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.folder import RestoredCheckpoint
from runner.core.config.run_config import config_hash
from runner.core.data.user_dataset import UserDataset
from runner.core.device.device import seed_everything
from runner.core.errors import ConfigError, Interrupted
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.objectives.custom import CustomObjective
from runner.core.schemas.data import DataConfig
from runner.core.train.run_state import NumpyState, PythonState
from tests.runs import NOISY, AtSteps, config, differences, hook, interrupt, rows

DEFAULT_HASH = "b96a6441f6abb7be98268e58a732b6b31acc91418b24e063009ef7cdfdd3c3ab"
QUIET = ("training.steps=12", "training.validate_every=4", "checkpoint.keep=9",
         "training.batch_size=16", "optimization=none")  # fmt: skip
READ: list[int] = []  # samples read by any data set
EVALUATED: list[int] = []  # samples of each forward in evaluation mode


class Stream:
    """Samples in the order in which they are read, whichever is asked for."""

    sizes = {"task": "regression", "in_features": 3, "classes": 1}

    def __init__(self, source: Any = None) -> None:
        self.reads, self.source = 0, iter(range(10_000)) if source is None else source
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        READ.append(index)
        number = next(self.source) + random.random() + float(np.random.rand())
        x = torch.randn(3, generator=self.generator) + number / 10_000
        return x, x.sum(0, keepdim=True)


class Changing(nn.Module):
    """Its forward changes buffers and attributes and draws random numbers, in both modes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.calls: list[int] = []
        self.fails: Callable[[Changing], bool] = lambda model: False

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls.append(len(x))
        if not self.training:
            EVALUATED.append(len(x))
        noise = torch.rand(()) + random.random() + float(np.random.normal())
        if self.fails(self):
            raise ValueError("the model fails")
        return self.layers(x) + 0.01 * noise + 0.01 * len(self.calls)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def made(
    *overrides: str,
    folder: Path | None = None,
    objective: CustomObjective | None = None,
    source: Any = None,
    make_optimizer: Any = None,
) -> Run:
    typed = config("data=cancer", *QUIET, *overrides)
    data = UserDataset(Stream(source), "Stream", DataConfig())
    objective = objective or CustomObjective(squared_error, "squared_error")
    seed_everything(0)  # the caller's generators, as the model is given
    model = Changing()
    optimizer = make_optimizer and make_optimizer(model.parameters(), lr=0.01)
    return build(typed, folder, Components(model, data, objective, optimizer))


def stored(folder: Path, step: int) -> RestoredCheckpoint:
    restored = Checkpointer(folder, 9).restore(folder / f"checkpoints/step_{step:08d}")
    assert restored is not None
    return restored


def test_the_sanity_check_is_made_and_leaves_no_trace(tmp_path: Path) -> None:
    counts = {}
    for name in ("true", "false"):
        EVALUATED.clear()
        with made(f"training.sanity={name}", folder=tmp_path / name) as run:
            train(run)
            counts[name] = len(EVALUATED)
            dataset: Any = run.train.fetch.source
            assert (len(run.model.calls), run.model.seen.item()) == (15, 15)
            assert dataset.dataset.reads == next(dataset.dataset.source)
    assert counts == {"true": 4, "false": 3}
    checked, unchecked = (stored(tmp_path / name, 12) for name in counts)
    for part in ("progress", "random", "update", "reader"):
        assert differences(checked.state[part], unchecked.state[part], part) == []
    assert differences(checked.model, unchecked.model) == []
    assert rows(tmp_path / "true", "train", "val") == rows(tmp_path / "false", "train", "val")


@pytest.mark.parametrize("kind", ["generator", "map"])
def test_no_sample_is_taken_from_a_stream_that_cannot_be_put_back(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = range(10_000)
    source = (n for n in numbers) if kind == "generator" else map(int, map(str, numbers))
    with made(source=source) as run:
        READ.clear()
        run.total_steps = 0
        with caplog.at_level("INFO"):
            train(run)
    assert READ == [] and "training.sanity: skipped: it holds a" in caplog.text


def test_a_resumed_run_makes_no_sanity_check(tmp_path: Path) -> None:
    with made("training.steps=6", "checkpoint.every=6", folder=tmp_path) as run:
        train(run)
    EVALUATED.clear()
    with made("checkpoint.resume=auto", folder=tmp_path) as run:
        train(run)
    assert len(EVALUATED) == 2  # the validations of steps 8 and 12


def test_an_objective_that_cannot_validate_ends_the_run_before_step_1_with_the_models_output(
    tmp_path: Path,
) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError("no boxes")
        return squared_error(output, target)

    says = (
        r"training\.sanity: RuntimeError: no boxes \(.*test_sanity\.py:\d+\), validating one batch "
        r"before step 1; in evaluation mode the model returned float32 of shape \[\d+, 1\]; "
        r"training\.sanity=false"
    )
    own = CustomObjective(loss, "own")
    with made(folder=tmp_path, objective=own) as run, pytest.raises(ConfigError, match=says):
        train(run)
    assert run.progress.step == 0 and not (tmp_path / "checkpoints").exists()


class NoLoss(CustomObjective):
    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {}


def test_a_missing_validation_loss_names_the_output_and_the_metrics_to_type() -> None:
    says = r"no val/loss: .* returned float32 .*objective\.metrics=\[MeanSquaredError\] training\."
    own = NoLoss(squared_error, "squared_error")
    with made(objective=own) as run, pytest.raises(ConfigError, match=says):
        train(run)


def fail_at(event: str) -> Hook:
    """Draws random numbers and raises, at an event of step 7 or the validation of step 8."""

    def fail(due: bool) -> None:
        if due:
            random.random(), np.random.rand(), torch.rand(1)
            raise ValueError("the hook fails")

    return hook(
        on_step=lambda run, step: fail(event == "on_step" and step.number == 7),
        on_validation=lambda run, e: fail(event == "on_validation" and e.step == 8),
    )


@pytest.mark.parametrize("place", ["forward", "validation", "on_step", "on_validation", "exit"])
def test_an_exception_between_two_updates_leaves_the_state_after_the_last_one(
    place: str, tmp_path: Path
) -> None:
    step = {"forward": 6, "on_step": 7}.get(place, 8)
    with made(f"checkpoint.every={step}", folder=tmp_path / "whole") as run:
        train(run)
    error: type[BaseException] = SystemExit if place == "exit" else ValueError
    with made("checkpoint.every=100", folder=tmp_path / "cut") as run:
        saved: list[int] = []
        save = run.checkpointer.save
        run.checkpointer.save = lambda n, *rest: (saved.append(n), save(n, *rest))[1]  # type: ignore[method-assign]
        run.hooks.append(fail_at(place))
        done = run.progress

        def fails(model: Changing) -> bool:
            due = done.step == step and model.training == (place == "forward")
            if due and place == "exit":
                raise SystemExit(3)
            return due and place in ("forward", "validation")

        run.model.fails = fails
        with pytest.raises(error):
            train(run)
    assert [n for n in saved if n != 4] == [0, step]  # that of step 4 is the best
    whole, cut = stored(tmp_path / "whole", step), stored(tmp_path / "cut", step)
    assert cut.state["planned"] is False
    if place in ("validation", "exit"):  # that of the whole run is of after its validation
        with made("checkpoint.every=100", folder=tmp_path / "before") as run:
            run.hooks.append(AtSteps(step, interrupt))
            with pytest.raises(Interrupted):
                train(run)
        whole = stored(tmp_path / "before", step)
    for part in ("update", "random"):
        assert differences(whole.state[part], cut.state[part], part) == []
    assert differences(whole.model, cut.model) == []


class Breaking(torch.optim.SGD):
    """Its seventh step changes a weight and raises."""

    def step(self, closure: Any = None) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        super().step()
        if self.steps == 7:
            raise ValueError("the optimizer fails")


def test_after_an_exception_inside_the_optimizers_step_the_last_checkpoint_stays(
    tmp_path: Path,
) -> None:
    with made(folder=tmp_path, make_optimizer=Breaking) as run:
        with pytest.raises(ValueError, match="the optimizer fails"):
            train(run)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))[-1] == "step_00000004"


def test_one_saved_after_an_exception_is_saved_again_as_scheduled_when_it_is_due(
    tmp_path: Path,
) -> None:
    with made("checkpoint.every=8", folder=tmp_path) as run:
        run.model.fails = lambda model: not model.training and run.progress.step == 8
        with pytest.raises(ValueError, match="the model fails"):
            train(run)
    assert stored(tmp_path, 8).state["planned"] is False
    with made("checkpoint.every=8", "checkpoint.resume=auto", folder=tmp_path) as run:
        run.progress.best = -math.inf  # as the best, it would be saved in any case
        train(run)
    assert stored(tmp_path, 8).state["planned"] is True


class Given(CustomObjective):
    """Metrics of each validation, by its number."""

    monitor, higher_is_better = "val/accuracy", True

    def __init__(self, *values: tuple[float, float]) -> None:
        super().__init__(squared_error, "squared_error")
        self.values, self.count = values, 0

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        self.count += 1
        accuracy, loss = self.values[min(self.count, len(self.values)) - 1]
        return {"loss": loss, "accuracy": accuracy}


def test_of_equal_metrics_the_one_with_the_lower_loss_is_best_and_patience_counts_on(
    tmp_path: Path,
) -> None:
    own = Given((0.9, 0.5), (0.9, 0.3), (0.9, 0.4))
    with made("training.patience=2", folder=tmp_path, objective=own) as run:
        summary = train(run)
    assert (summary.best, summary.best_step, summary.status) == (0.9, 8, "stopped")
    assert (tmp_path / "checkpoints/best").resolve().name == "step_00000008"
    with made(f"model.weights={tmp_path}") as run:  # the best, not the last
        start = run.model.state_dict()
    assert differences(start, stored(tmp_path, 8).model) == []
    assert differences(start, stored(tmp_path, 12).model) != []


def test_the_hash_of_the_default_config_is_that_of_before_the_key() -> None:
    assert config_hash(compose([])) == DEFAULT_HASH
    assert config_hash(compose(["training.sanity=false"])) != DEFAULT_HASH


def test_build_train_and_evaluate_leave_the_callers_generators_as_they_were(
    tmp_path: Path, my_package: None
) -> None:
    def drawn(folder: Path, **caller: int) -> tuple[list[list[str]], Any]:
        seed_everything(caller["seed"])
        before, changed = generators(), []
        with build(config(*NOISY, "training.steps=6"), folder) as run:
            changed.append(differences(before, generators()))
            train(run)
            changed.append(differences(before, generators()))
            evaluate(run)
            changed.append(differences(before, generators()))
        return changed, stored(folder, 6)

    (first, one), (second, other) = drawn(tmp_path / "1", seed=1), drawn(tmp_path / "2", seed=2)
    assert first == second == [[], [], []]
    assert differences(one.model, other.model) == []  # the run's numbers are those of its seed
    assert differences(one.state["random"], other.state["random"]) == []


def generators() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),  # the second is stored by the first
        lambda: random.seed(3),
        lambda: random.randbytes(624 * 4),  # the same position in the next block of numbers
        np.random.rand,
        np.random.randn,
        lambda: np.random.seed(3),
        lambda: np.random.bytes(624 * 4),
        lambda: np.random.set_state(np.random.RandomState(8).get_state()),
    ],
)
def test_the_state_of_a_generator_is_current_after_every_kind_of_draw(
    draw: Callable[[], Any],
) -> None:
    """Our readers ask the generator only after a change; its own answers are the truth."""
    python_state, numpy_state = PythonState(), NumpyState()
    seed_everything(0)
    for _ in range(4):
        assert python_state.read() == random.getstate()
        assert all(map(np.array_equal, numpy_state.read(), np.random.get_state()))
        draw()


class TokenLoss(nn.Linear):
    """A layer that returns its loss, too."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return cross_entropy(logits.flatten(0, -2), target.flatten()), logits


@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        ("classification", ["objective=classification", "objective.metrics=[F1Score]"]),
        ("language_modelling", ["objective=language_modelling"]),
        ("language_modelling", ["objective=model"]),
    ],
)
def test_a_batch_whose_targets_are_all_ignored_counts_for_nothing(
    task: str, overrides: list[str]
) -> None:
    if "objective.metrics" in str(overrides):
        pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    shape = (16,) if task == "classification" else (16, 5)
    x, target = torch.randn(*shape, 3), torch.randint(4, shape)
    target[:4] = -100  # the first batch of both
    data = TensorDataset(x, target)
    data.sizes = {"task": task, "classes": 4, "vocab": 4}  # type: ignore[attr-defined]
    model = (TokenLoss if "objective=model" in overrides else nn.Linear)(3, 4)
    loaders = [DataLoader(data, batch_size=4) for _ in range(2)]
    given = Components(model=model, data=loaders[0], validation=loaders[1])
    typed = ("training.steps=6", "training.batch_size=4", "optimization=none", *overrides)
    with build(config(*typed), given=given) as run:
        train(run)
        metrics = evaluate(run).metrics
        logits = nn.functional.linear(x, model.weight, model.bias).flatten(0, -2)
    expected = cross_entropy(logits, target.flatten()).item()
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-5)
    if task == "classification":
        assert metrics["val/F1Score"] == pytest.approx(metrics["val/f1"])
