"""objective=model: the loss that the model itself returns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
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
from runner.core.data.user_dataset import UserDataset
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.objectives.from_model import ModelLossObjective, TargetInput, find_loss
from runner.core.schemas.data import DataConfig
from tests import runs

OFF = ("checkpoint=off", "optimization=none", "training.batch_size=8", "training.steps=6")
ONE, TWO = torch.tensor(1.5), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (ONE, 1.5),
        ({"loss": ONE, "logits": torch.ones(3)}, 1.5),
        (SimpleNamespace(loss=ONE, logits=torch.ones(3)), 1.5),
        ((torch.ones(3), ONE, TWO), 1.5),
        ({"box": ONE, "class": TWO}, 3.5),
        (torch.tensor([1.5]), 1.5),
        ({"logits": torch.ones(3), "loss": None}, None),
        ({"box": ONE, "scores": torch.ones(3)}, None),
        (torch.ones(3), None),
        ((torch.ones(3), torch.tensor(1)), None),  # a count
    ],
)
def test_the_loss_is_that_of_an_output_a_number_or_a_sum(output: Any, loss: float | None) -> None:
    objective = ModelLossObjective("regression")
    if loss is None:
        assert find_loss(output) is None
        with pytest.raises(ConfigError, match="without a loss"):
            objective(output, torch.ones(3))
    else:
        assert objective(output, torch.ones(3)).item() == loss


class Detector(nn.Module):
    """Losses by name; in evaluation mode only if it `always` returns them."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.layer, self.always = nn.Linear(3, 1), always

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        values = self.layer(x)[:, 0]
        if target is None or not (self.training or self.always):
            return {"logits": values}
        return {"square": F.mse_loss(values, target), "absolute": F.l1_loss(values, target)}


def numbers() -> Dataset:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    sizes = Sizes("regression", in_features=3, classes=1)
    return TensorsDataset(x, x.sum(1), sizes, (np.arange(32), np.arange(32, 40)))


def test_a_dict_of_losses_trains_its_sum_and_has_metrics_by_name() -> None:
    given = Components(model=Detector(True), data=numbers())
    with build(runs.config("objective=model", *OFF), given=given) as run:
        metrics = train(run).metrics
        inputs, target = run.validation.fetch.source.fetch(np.arange(32, 40), None)
        with torch.no_grad():
            losses = run.model(inputs, target)
    assert metrics["val/loss/square"] == pytest.approx(float(losses["square"]), rel=1e-6)
    assert metrics["val/loss/absolute"] == pytest.approx(float(losses["absolute"]), rel=1e-6)
    assert metrics["val/loss"] == pytest.approx(float(sum(losses.values())), rel=1e-6)
    assert not run.objective.rises("val/loss/square")


def test_a_loss_in_training_mode_alone_has_no_val_loss_and_needs_metrics() -> None:
    given = Components(model=Detector(False), data=numbers())
    with pytest.raises(ConfigError, match=r"evaluation mode, .*objective.metrics"):
        runs.trained("objective=model", *OFF, given=given)
    pytest.importorskip("torchmetrics")
    name = "MeanAbsoluteError"
    more = ("objective=model", f"objective.metrics=[{name}]", f"training.monitor=val/{name}")
    given = Components(model=Detector(False), data=numbers())
    assert runs.trained(*OFF, *more, given=given).metrics.keys() == {f"val/{name}"}


class Copies:
    """Tokens with the labels of transformers' collators: the tokens themselves, some ignored."""

    sizes: Any = {"task": "language_modelling", "vocab": 16, "sequence": 12}

    def __init__(self) -> None:
        steps = torch.arange(40)[:, None] % 3 + 1
        self.ids = (torch.arange(12) * steps + torch.arange(40)[:, None]) % 16

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[: 1 + index % 4] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def decoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 1}
    settings = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(settings)


@pytest.mark.parametrize("micro_batch", [8, 3])
def test_a_language_model_with_labels_inside_trains_its_own_loss(micro_batch: int) -> None:
    given = Components(model=decoder(), data=UserDataset(Copies(), "Copies", DataConfig()))
    parts = ("schedule=constant", "optimizer=sgd", "stability.clip_norm=null", "optimizer.lr=0.1")
    more = (*parts, f"training.micro_batch={micro_batch}", "optimizer.weight_decay=0")
    with build(runs.config(*OFF, *more), given=given) as run:
        assert [c.value for c in run.choices if c.key == "objective"] == ["model"]
        plain = decoder()
        optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        options = run.update.optimizer.param_groups[0]
        optimizer.param_groups[0].update({k: options[k] for k in ("momentum", "nesterov")})
        batches = [run.train.at(step)[0] for step in range(6)]
        metrics = train(run).metrics
        for batch in batches:
            optimizer.zero_grad()
            plain(**batch).loss.backward()
            optimizer.step()
        for ours, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        run.model.eval()
        indices = run.validation.fetch.order.indices
        inputs, target = run.validation.fetch.source.fetch(np.array(indices), None)
        with torch.no_grad():
            output = run.model(**inputs, labels=target)
        assert metrics["val/loss"] == pytest.approx(float(output.loss), rel=1e-5)
        compared = target[:, 1:] != -100
        right = output.logits[:, :-1].argmax(-1) == target[:, 1:]
        assert metrics["val/accuracy"] == pytest.approx(float(right[compared].double().mean()))


class Positional(nn.Module):
    def forward(self, idx: Tensor, mask: Any = None, targets: Any = None) -> None:
        """As in nanoGPT."""


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [(1, {"idx": 1, "targets": 9}), ((1, 2), {"idx": 1, "mask": 2, "targets": 9})],
)
def test_a_target_becomes_the_parameter_named_for_it(inputs: Any, expected: dict[str, int]) -> None:
    add_target = TargetInput.of(Positional(), None)
    assert add_target is not None
    assert add_target((inputs, 9)) == (expected, 9)
    assert add_target(({"idx": 1, "targets": 5}, 9)) == ({"idx": 1, "targets": 5}, 9)
    assert TargetInput.of(nn.Linear(1, 1), "labels") is None


def test_a_classifier_with_labels_keeps_the_objective_of_its_task(tmp_path: Path) -> None:
    class Rows(Copies):
        classes, sizes = 3, None

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": self.ids[index], "labels": index % 3}

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(16, 3)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            assert labels is None
            return self.table(input_ids)

    data = UserDataset(Rows(), "Rows", DataConfig())
    with build(runs.config(*OFF), given=Components(model=Bag(), data=data)) as run:
        assert not run.objective.from_model
        assert "val/accuracy" in train(run).metrics
