"""What a forward changes besides BatchNorm's statistics is restored, saved and resumed."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import runner
from runner import build, evaluate, train
from runner.core.build.setup import Components
from runner.core.errors import CheckpointError, ConfigError, UsageError
from runner.core.models.modes import enter_training
from runner.core.optim.optimizer_state import check_optimizer_state, check_saved_state
from runner.core.schemas.jobs import ExportKind
from runner.datasets.export import export
from tests import runs

from .steps import assert_same

OPTIONS = (
    *("data=cancer", "optimization=none", "device.threads=1", "training.steps=8"),
    *("training.validate_every=4", "training.batch_size=32"),
)
LOSS = nn.functional.cross_entropy


class Moving(nn.Module):
    """Changes state of every kind in its forward in training mode."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 2)
        self.register_buffer("resized", torch.zeros(0))
        self.register_buffer("counted", torch.zeros(()), persistent=False)
        self.register_buffer("dropped", torch.ones(2))
        self.mean = nn.Parameter(torch.zeros(features), requires_grad=False)
        self.teacher = deepcopy(self.layer).requires_grad_(False)
        self.data = nn.Parameter(torch.zeros(features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.resized.resize_(x.shape[1]).copy_(x[0])
                self.counted += x.mean()
                self.mean.lerp_(x.mean(0), 0.1)  # in place
                self.data.data.add_(x[0])  # in place, without a new version
                for ours, other in zip(
                    self.teacher.parameters(), self.layer.parameters(), strict=True
                ):
                    ours.data = ours.data * 0.9 + other.data * 0.1  # new memory
                if "late" not in self._buffers:
                    self.register_buffer("late", torch.zeros(3))
                self.late += x[0, 0]
                self.dropped = None
        return self.layer(x - self.mean) + self.teacher(x)


def state_of(model: nn.Module) -> list[Any]:
    return [*model.state_dict().items(), *((n, b.clone()) for n, b in model.named_buffers())]


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_a_skipped_step_restores_resized_buffers_and_moved_frozen_parameters(bad: int) -> None:
    noise = torch.Generator().manual_seed(1)
    batches = [(torch.randn(6, 4, generator=noise), torch.arange(6) % 2) for _ in range(8)]
    results = []
    for skips in (False, True):
        torch.manual_seed(0)
        model = Moving()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, (x, y) in enumerate(batches):
            if skips and i == bad:
                step = runner.train_step(model, optimizer, (x * math.nan, y), LOSS)
                assert step.skipped.item() == 1
            runner.train_step(model, optimizer, (x, y), LOSS)
        results.append(state_of(model))
    assert_same(*results)


class Growing(nn.Module):
    """A buffer that each forward makes longer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.resize_(len(self.seen) + 1).fill_(float(len(self.seen)))
        return self.layer(x)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_skipped_step_undoes_the_resize_of_a_buffer(bad: int) -> None:
    model, y = Growing(), torch.arange(6) % 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        before = model.seen.clone()
        x = torch.full((6, 4), math.nan if i == bad else 1.0)
        runner.train_step(model, optimizer, (x, y), LOSS)
        assert torch.equal(model.seen, before) == (i == bad)


def test_frozen_parameters_that_do_not_move_are_not_copied_at_each_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        batch = (torch.randn(6, 4), torch.arange(6) % 2)
        runner.train_step(model, optimizer, batch, LOSS)
    frozen = vars(optimizer)["_runner_guarded"].update.buffers.frozen
    assert len(frozen.slots) == 2 and not frozen.saved and not frozen.undecided


def test_state_that_a_forward_changed_is_saved_and_resumed_bit_equal(tmp_path: Path) -> None:
    def end(folder: Path, *more: str) -> list[Any]:
        torch.manual_seed(0)
        with build(runs.config(*OPTIONS, *more), folder, Components(model=Moving(30))) as run:
            train(run)
            evaluate(run)
            return state_of(run.model)

    straight = end(tmp_path / "a")
    assert straight[0][1].abs().sum() > 0
    middle = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000004"
    assert_same(straight, end(tmp_path / "b", middle))


class Spectral(nn.Module):
    """Complex weights, as Fourier layers have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(30, 2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).real.float()


def test_complex_weights_are_in_checkpoints_and_exports(tmp_path: Path) -> None:
    model = Spectral(torch.complex64)
    with build(runs.config(*OPTIONS), tmp_path / "a", Components(model=model)) as run:
        train(run)
        export(run, ExportKind.weights, tmp_path / "exports")
    for path in ("a/checkpoints/last/model.safetensors", "exports/model.safetensors"):
        with safe_open(tmp_path / path, "pt") as file:
            assert torch.equal(file.get_tensor("w"), model.w)


def test_weights_that_safetensors_cannot_store_are_not_exported(tmp_path: Path) -> None:
    model = Spectral(torch.complex128)
    with build(runs.config(*OPTIONS), None, Components(model=model)) as run:
        with pytest.raises(ConfigError, match=r"does not hold w \(torch.complex128\)"):
            export(run, ExportKind.weights, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def sparse_optimizer(name: str) -> torch.optim.Optimizer:
    rows = nn.EmbeddingBag(6, 2, sparse=True)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        rows.parameters(), lr=0.1, **options
    )
    rows(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad makes sparse tensors
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_optimizer_state_of_sparse_gradients_can_be_resumed(name: str) -> None:
    optimizer = sparse_optimizer(name)
    check_optimizer_state(optimizer)
    check_saved_state(optimizer, optimizer.state_dict())


def test_state_that_could_not_be_resumed_is_refused_when_it_is_saved() -> None:
    optimizer = sparse_optimizer("SparseAdam")
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight]["exp_avg"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="SparseAdam cannot be saved.* must have its"):
        check_saved_state(optimizer, optimizer.state_dict())


# -- modules that the loss calls -------------------------------------------------------------------


def adversarial(late: bool) -> tuple[nn.Module, list[float]]:
    """Train a GAN whose generator's third step is NaN; `late` hides the discriminator at first."""
    torch.manual_seed(0)
    loss = nn.BCEWithLogitsLoss()
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    g, d = (torch.optim.Adam(net.parameters()) for net in (generator, discriminator))
    target, skipped = torch.ones(16, 1), []
    for i in range(6):
        real = torch.randn(16, 8)
        skipped.append(float(runner.train_step(discriminator, d, (real, target), loss).skipped))
        noise = torch.full((16, 4), math.nan) if i == 3 else torch.randn(16, 4)
        runner.train_step(
            generator,
            g,
            (noise, target),
            lambda fake, y, i=i: fake.mean() if late and i < 2 else loss(discriminator(fake), y),
        )
    return discriminator, skipped


def test_a_skipped_step_restores_the_buffers_of_modules_that_the_loss_calls() -> None:
    discriminator, skipped = adversarial(late=False)
    assert not any(skipped)
    assert all(bool(b.isfinite().all()) for b in discriminator.buffers())


def test_a_module_that_the_loss_calls_for_the_first_time_in_a_bad_step_is_restored() -> None:
    model, critic = nn.Linear(4, 8), nn.BatchNorm1d(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.full((6, 4), math.nan), torch.ones(6, 8))
    runner.train_step(model, optimizer, batch, lambda x, y: (critic(x) - y).square().mean())
    assert critic.running_mean is not None and critic.running_mean.eq(0).all()


def test_a_step_that_fails_after_the_loss_called_a_module_restores_all_buffers() -> None:
    model, critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.BatchNorm1d(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(6, 4), torch.ones(6, 8))
    for _ in range(2):
        with pytest.raises(UsageError):
            runner.train_step(model, optimizer, batch, lambda x, y: critic(x) - y)
        for module in (model[1], critic):
            assert module.running_mean.eq(0).all()  # type: ignore[operator,union-attr]


def test_a_model_with_poisoned_statistics_is_named_and_not_skipped_for_ever() -> None:
    with pytest.raises(
        UsageError, match=r"1\.running_mean is not finite, by a call outside of train_step"
    ):
        adversarial(late=True)


# -- parts in evaluation mode ----------------------------------------------------------------------


class Backbone(nn.Module):
    """A frozen BatchNorm in evaluation mode, and one that its own `train` freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.held = nn.BatchNorm1d(30), nn.BatchNorm1d(30)
        self.usual, self.out = nn.BatchNorm1d(30), nn.Linear(30, 2)
        self.frozen.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.held.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.usual(self.held(self.frozen(x))))


def test_parts_in_evaluation_mode_stay_there_also_after_a_validation() -> None:
    model = Backbone()
    with build(runs.config(*OPTIONS), None, Components(model=model)) as run:
        summary = train(run)
        modes = [m.training for m in (model, model.frozen, model.held, model.usual)]
    assert modes == [True, False, False, True]
    assert model.frozen.running_mean.eq(0).all() and not model.usual.running_mean.eq(0).all()
    assert any("stays there: frozen" in choice.reason for choice in summary.choices)


def test_a_model_given_in_evaluation_mode_is_trained_and_the_summary_says_so() -> None:
    model = nn.Sequential(nn.BatchNorm1d(30), nn.Dropout(), nn.Linear(30, 2)).eval()
    with build(runs.config(*OPTIONS), None, Components(model=model)) as run:
        summary = train(run)
    assert all(module.training for module in model.modules())
    assert any("evaluation mode as a whole" in choice.reason for choice in summary.choices)
    assert enter_training(model) == ""
