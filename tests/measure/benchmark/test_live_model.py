"""`benchmark_optimizations`: live models and data, in processes of their own."""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner import Evidence, Technique, benchmark_optimizations, show_comparison
from runner.core.errors import UsageError
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import RunBuilder
from runner.measure.benchmark.result import BenchmarkResult
from runner.measure.comparison import compare_arms
from tests import runs
from tests.my_package import Computed


@dataclass
class Waste(Technique):
    """Computes something for nothing with each forward."""

    size: int = 512

    def apply(self, builder: RunBuilder) -> str | None:
        before, matrix = builder.forward, torch.randn(self.size, self.size)

        def forward(*args: object, **named: object) -> object:
            _ = matrix @ matrix @ matrix @ matrix
            return before(*args, **named)

        builder.forward = forward
        return None

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(320, 16), torch.randint(0, 3, (320,))


def test_arms_of_a_live_model_are_measured_and_the_caller_keeps_what_he_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net().eval()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = TensorDataset(*data())
    noise = torch.get_rng_state()
    result = benchmark_optimizations(
        model, samples, ["none"], techniques=[Waste()], optimizer=optimizer, budget_s=3,
        overrides=["training.batch_size=40"], parity=False, control=False, folder=tmp_path,
    )  # fmt: skip
    assert [(arm.name, arm.status) for arm in result.arms] == [("none", "done"), ("Waste", "done")]
    plain, waste = result.arms
    assert plain.samples_per_step == waste.samples_per_step == 40
    assert waste.speedup is not None
    assert waste.speedup < 0.9  # planted: eight times as much to compute, and more
    assert {row["name"]: row["engaged"] for row in waste.summary["techniques"]}["Waste"] is True
    assert BenchmarkResult.read(tmp_path).arm("Waste").blocks == waste.blocks
    assert (tmp_path / "comparison.html").is_file()

    assert not model.training and runs.differences(before, model.state_dict()) == []
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.state == {}
    assert torch.equal(noise, torch.get_rng_state())

    show_comparison(result, tmp_path)
    assert "Waste" in capsys.readouterr().out
    assert [row.name for row in compare_arms(result, tmp_path).rows] == ["none", "Waste"]


def test_what_cannot_be_sent_to_a_process_is_named_with_the_way_out() -> None:
    unsendable = Computed(lambda model, x: model.layer(x), layer=nn.Linear(16, 3))
    with pytest.raises(UsageError, match="model cannot be sent.*classes and functions of a module"):
        benchmark_optimizations(unsendable, data(), ["none", "basic"], budget_s=3)
    loss: Any = lambda output, target: output.sum()  # noqa: E731
    with pytest.raises(UsageError, match="objective cannot be sent.*no lambda"):
        benchmark_optimizations(net(), data(), ["none", "basic"], loss_fn=loss, budget_s=3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"arms": "none"}, "one string"),
        ({"arms": ["none", "quick"]}, "quick"),
        ({"techniques": [nn.Linear]}, "inherit from runner.Technique"),
        ({"techniques": [Waste, Waste]}, "twice"),
        ({"loss_fn": 3}, "loss_fn"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "has none of the model's"),
        ({"arms": ["none", "model=cnn"]}, "model=cnn has no effect, as model is given"),
        ({"arms": ["none", "objective=model"], "loss_fn": nn.MSELoss()}, "as loss_fn is given"),
        ({"budget_s": 0.01}, "budget_s"),
    ],
)
def test_a_mistake_is_answered_before_any_process_is_started(
    more: dict[str, object], message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        benchmark_optimizations(net(), data(), **{"arms": ["none", "basic"], **more})  # type: ignore[arg-type]
    assert type(caught.value).__module__ == "runner.core.errors"


def test_a_model_typed_into_a_shell_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mine(nn.Linear): ...

    Mine.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # it has no file
    with pytest.raises(UsageError, match="Mine is defined in a notebook or shell.*move it to"):
        benchmark_optimizations(Mine(16, 3), data(), ["none", "basic"], budget_s=3)
