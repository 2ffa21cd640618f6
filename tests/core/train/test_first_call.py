"""The first training call of model and loss: broadcasting, activations, unused losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner import train
from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.objective import Objective
from runner.core.objectives.custom import CustomObjective
from runner.core.record.text import describe_error
from tests import runs

OFF = ("checkpoint=off", "training.steps=3", "training.batch_size=8", "optimization=none")
Loss = Callable[[Any, Any], Tensor]


def table(targets: int = 1, shape: tuple[int, ...] = (40,)) -> Dataset:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    sizes = Sizes("regression", in_features=3, classes=targets)
    return TensorsDataset(x, x.sum(1).reshape(shape), sizes, (np.arange(32), np.arange(32, 40)))


def trained(loss: Loss | Objective, data: Dataset, *more: str, model: Any = None) -> Any:
    objective = loss if isinstance(loss, Objective) else CustomObjective(loss, "own.loss")
    given = Components(model=model or nn.Linear(3, 1), data=data, objective=objective)
    with build(runs.config(*OFF, *more), given=given) as run:
        try:
            train(run)
        finally:
            trained.steps = run.progress.step  # type: ignore[attr-defined]
        return run


class Doubled(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * 2, target.double().float())


class OwnObjective(CustomObjective):
    """An objective by a user's class."""


OwnObjective.__module__ = "own"
BROADCASTING: dict[str, Any] = {
    "difference": lambda output, target: ((output - target) ** 2).mean(),
    "after sigmoid": lambda output, target: (torch.sigmoid(output) - target).abs().mean(),
    "target first": lambda output, target: (target.clone().sub(output.tanh()) ** 2).mean(),
    "mse_loss": Doubled(),
    "smooth_l1_loss": lambda output, target: F.smooth_l1_loss(output.exp(), target),
    "torch.where": lambda o, t: torch.where(t > 0, o, -o).mean(),
    "objective": OwnObjective(lambda o, t: (o * t).mean(), "x"),
}
BROADCASTING["objective"].loss_name = None


@pytest.mark.parametrize("name", BROADCASTING)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_that_broadcasts_output_and_target_to_pairs_ends_before_the_first_update(
    name: str,
) -> None:
    with pytest.raises(ConfigError) as raised:
        trained(BROADCASTING[name], table())
    text = str(raised.value)
    assert "output [8, 1]" in text and "target [8]" in text and "[8, 8]" in text
    assert "output.squeeze(1)" in text and Path(__file__).name in text
    assert trained.steps == 0  # type: ignore[attr-defined]


def test_a_target_with_one_more_dimension_than_the_output_is_an_error_with_its_fix() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    with pytest.raises(ConfigError, match=r"target.squeeze\(1\)"):
        trained(BROADCASTING["difference"], table(shape=(40, 1)), model=model)


FINE: dict[str, Loss] = {
    "squeezed": lambda output, target: ((output.squeeze(1) - target) ** 2).mean(),
    "reshaped": lambda output, target: F.mse_loss(output, target.reshape(-1, 1)),
    "matched": lambda output, target: F.l1_loss(output.view_as(target), target),
    "outer by intent": lambda o, t: (o.squeeze(1)[:, None] - t[None]).square().mean(),
    "einsum": lambda o, t: torch.einsum("ij,k->ik", o, t).square().mean(),
    "weights": lambda o, t: ((o[:, 0] - t).square() * (t > 0)).mean(),
}


@pytest.mark.parametrize("name", FINE)
def test_a_loss_without_such_a_broadcast_is_called_once_a_step_and_unchanged(name: str) -> None:
    plain = nn.Linear(3, 1)
    calls = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(target))
        return FINE[name](output, target)

    trained(loss, table(), "training.validate_every=100", model=plain)
    assert calls[:3] == [8, 8, 8]


def test_the_loss_of_a_step_in_one_graph_is_watched_too() -> None:
    whole = ("optimization.whole_step.enabled=true", "optimization.measure=false")
    with pytest.raises(ConfigError, match="all pairs"):
        trained(BROADCASTING["difference"], table(), *whole)
    assert trained.steps == 0  # type: ignore[attr-defined]


# -- faults that are named, and end no run ---------------------------------------------------------


class Ending(nn.Module):
    """Two layers, and what they end in."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(3, 2), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


def classes() -> Dataset:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    sizes = Sizes("classification", in_features=3, classes=2)
    return TensorsDataset(x, (x[:, 0] > 0).long(), sizes, (np.arange(32), np.arange(32, 40)))


def named_faults(model: nn.Module, data: Dataset, objective: Any, *more: str) -> dict[str, str]:
    given = Components(model=model, data=data, objective=objective)
    with build(runs.config(*OFF, *more), given=given) as run:
        train(run)
        return {fault.kind: fault.message for fault in run.history.faults.values()}


ENDINGS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "softmax": (lambda x: F.softmax(x, 1), "softmax"),
    "module": (nn.Softmax(1), "softmax"),
    "sigmoid in a tuple": (lambda x: (x.sigmoid().clone().float(),), "sigmoid"),
    "clamped": (lambda x: x.softmax(1).clamp(1e-6, 1).view(-1, 2), "softmax"),
    "logits": (lambda x: x, ""),
    "log_softmax": (lambda x: F.log_softmax(x, 1), ""),  # twice is once
    "softmax inside": (lambda x: x.softmax(1) * 2, ""),
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("loss", ["built-in", "torch.nn.CrossEntropyLoss"])
def test_a_softmax_or_sigmoid_before_a_loss_that_applies_its_own_is_named(
    name: str, loss: str
) -> None:
    end, activation = ENDINGS[name]
    own = CustomObjective(nn.CrossEntropyLoss(), loss) if loss != "built-in" else None
    if own is not None and "tuple" in name:
        return  # the loss would get the tuple
    faults = named_faults(Ending(end), classes(), own)
    assert ("double_activation" in faults) is bool(activation)
    assert activation in faults.get("double_activation", "")


@pytest.mark.slow
def test_it_is_named_where_the_step_is_one_graph() -> None:
    whole = ("optimization.whole_step.enabled=true", "optimization.measure=false")
    model = Ending(lambda x: x.softmax(1))
    assert "double_activation" in named_faults(model, classes(), None, *whole)


def test_a_softmax_before_a_loss_of_probabilities_is_not_named() -> None:
    nll = CustomObjective(lambda o, t: F.nll_loss(o.log(), t), "own.nll")
    assert named_faults(Ending(lambda x: x.softmax(1)), classes(), nll) == {}


@pytest.mark.parametrize(
    ("end", "name"),
    [
        (lambda x: (x, x.square().mean()), "index 1"),
        (lambda x: {"logits": x, "aux_loss": x.square().mean()}, "`aux_loss`"),
        (lambda x: {"logits": x, "hidden": x.square()}, ""),
        (lambda x: (x, x.detach().mean()), ""),
    ],
)
def test_a_loss_in_the_output_that_is_not_trained_is_named(end: Any, name: str) -> None:
    faults = named_faults(Ending(end), classes(), None)
    assert ("unused_loss" in faults) is bool(name)
    assert name in faults.get("unused_loss", "")


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_target_that_is_the_input_of_a_language_model_is_named(shift: int) -> None:
    tokens = torch.arange(40 * 8).reshape(40, 8) % 16
    sizes = Sizes("language_modelling", vocab=16, sequence=8)
    target = tokens.roll(-shift, 1)
    data = TensorsDataset(tokens, target, sizes, (np.arange(32), np.arange(32, 40)))
    assert ("copied_target" in named_faults(NextToken(), data, None)) is (shift == 0)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("sanity", ["true", "false"])
def test_an_input_of_another_size_is_named_with_the_sizes_of_the_data(sanity: str) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        trained(F.mse_loss, table(), f"training.sanity={sanity}", model=nn.Linear(5, 1))
    text = describe_error(raised.value)[0]
    note = "data gives the model float32 of shape [8, 3]; a model._target_ of your own may take "
    assert text.endswith(f"; {note}in_features=3, classes=1")


class TwoInputs(nn.Linear):
    def forward(self, a: Tensor, b: Tensor | None, *, c: int = 0) -> Tensor:
        return super().forward(a if b is None else a + b)


class WrongInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, 1)  # type: ignore[call-arg]


@pytest.mark.parametrize("typed", ["seed=0", "training.sanity=false", "optimization=advanced"])
def test_inputs_that_forward_has_no_parameters_for_are_named_with_its_signature(typed: str) -> None:
    message = (
        r"^model: TwoInputs\.forward\(a, b, \*, c=0\) does not take what data gives, "
        r"float32 of shape \[\d, 3\]; change model or data: a dict is passed by name, a tuple by"
    )
    with pytest.raises(ConfigError, match=message) as raised:
        trained(F.mse_loss, table(), typed, model=TwoInputs(3, 1))
    assert raised.value.key == "model"
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        trained(F.mse_loss, table(), typed, model=WrongInside(3, 1))


def test_a_loss_that_depends_on_no_weight_is_named_with_its_fix() -> None:
    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        trained(F.l1_loss, table(1, (40, 1)), model=Detached(3, 1))
    assert "depends on no weight that is trained; remove .detach()" in str(raised.value.__notes__)
