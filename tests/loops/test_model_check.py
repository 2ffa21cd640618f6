"""`check_model` on behaviour, hooks and classes: a planted finding is named, and nothing else."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from runner import check_model, optimize, train_step
from runner.core.errors import UsageError
from runner.core.findings import Severity


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def probes(samples: int = 32) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1000 * x


def codes(net: nn.Module, *args: Any, **options: Any) -> list[str]:
    return [reason.code for reason in check_model(net, *args, **options).reasons]


def no_weights(net: nn.Sequential) -> None:
    net[3].weight.data.zero_()


def one_class(net: nn.Sequential) -> None:
    net[3].bias.data[2] += 100


def hook(net: nn.Sequential) -> None:
    net[2].register_forward_hook(lambda module, args, output: output)


def weight_hook(net: nn.Sequential) -> None:
    net[0].weight.register_hook(lambda gradient: gradient)


PLANTED: dict[str, tuple[Callable[[nn.Sequential], Any], dict[str, Any], list[str], str]] = {
    "a dead layer": (
        no_weights,
        {"low": -1, "high": 1},
        ["weights.dead", "outputs.constant"],
        "3.weight: all its values are 0",
    ),
    "a constant class": (one_class, {}, ["outputs.one_class"], "class 2 for all 32 samples"),
    "out of range": (
        lambda net: net.append(Scaled()),
        {"low": -10.0},
        ["outputs.range"],
        "outside -10.0 to Inf, in ",
    ),
    "huge": (
        lambda net: net[3].weight.data[0].fill_(-2e6),
        {"low": -1e9},
        ["weights.huge"],
        "3.weight: its largest value is 2e+06",
    ),
    "a hook": (hook, {}, ["hooks.unexpected"], "2: forward hook tests.loops.test_model_check.hook"),
    "a hook of a weight": (weight_hook, {}, ["hooks.unexpected"], "0.weight: backward hook tests."),
    "a foreign class": (
        lambda net: net.append(Scaled()),
        {"trusted": ["tests.loops.builders"]},
        ["class.foreign"],
        "4: 1 module of tests.loops.test_model_check.Scaled",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_finding_is_a_warning_and_nothing_else_is_found(what: str) -> None:
    plant, options, expected, text = PLANTED[what]
    net = model()
    assert check_model(net, probes(), **options | {"low": None, "high": None}).reasons == []
    plant(net)
    report = check_model(net, probes(), **options)
    assert [reason.code for reason in report.reasons] == expected, str(report)
    assert {reason.severity for reason in report.reasons} == {Severity.WARNING}
    assert not report.ok and text in str(report)
    assert net.training


def test_samples_out_of_range_are_numbered_as_the_plain_comparison_says() -> None:
    net, x = model().eval(), probes()
    high = net(x).max().item() - 0.05
    rows = (net(x) > high).any(1).nonzero().flatten().tolist()
    (reason,) = check_model(net, x, high=high).reasons
    assert reason.evidence.endswith(f"in {len(rows)} of 32 samples: {', '.join(map(str, rows))}")


def test_one_probe_tells_neither_constant_nor_one_class_and_a_note_says_so() -> None:
    net = model()
    no_weights(net)
    net[3].weight.data[0, 0] = 1e-30
    report = check_model(net, probes(1))
    assert report.ok and [reason.code for reason in report.reasons] == ["outputs.one_probe"]
    assert "constant, or one class, is not checked" in str(report)
    assert codes(net, probes(2)) == ["outputs.constant", "outputs.one_class"]


@pytest.mark.parametrize("width", [1, 2])
def test_numbers_are_no_scores_of_classes(width: int) -> None:
    """One output a sample, or several with limits, are of a regression."""
    net = nn.Sequential(nn.Linear(6, width))
    net[0].bias.data = torch.tensor([100.0, 0.0][:width])
    limits = {} if width == 1 else {"low": -1e3}
    assert codes(net, probes(), **limits) == []
    if width == 2:
        assert codes(net, probes()) == ["outputs.one_class"]


def test_hooks_and_classes_of_torch_and_the_runner_are_known() -> None:
    net = model()
    parametrizations.weight_norm(net[0])
    parametrizations.orthogonal(net[3])
    net.append(nn.LazyLinear(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
        net.append(torch.jit.script(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(net[3].parameters(), lr=0.0)
    net(probes())
    train_step(net, optimizer, (probes(), torch.zeros(32).long()), nn.functional.cross_entropy)
    assert codes(net, trusted=[]) == []
    net.append(Scaled())
    assert codes(net, trusted=[]) == ["class.foreign"]
    assert codes(net, trusted=["tests"]) == codes(net) == []
    with optimize(net, "none") as fast:
        assert codes(fast, trusted=["test"]) == ["class.foreign"]  # not a package of that name


def test_a_mistake_names_the_argument() -> None:
    x: Any = probes()
    for options, message in (
        ({"low": 2, "high": 1}, "check_model: low must be at most high"),
        ({"low": math.nan}, "check_model: low must be a number or None, got nan"),
        ({"trusted": "torch"}, "trusted must be a list of names of packages, got a str"),
        ({"trusted": [nn]}, "trusted must be a list"),
        ({"probes": x[:0]}, "probes must be tensors whose first"),
        ({"probes": None, "high": 1}, "limits of outputs; give probes"),
    ):
        with pytest.raises(UsageError, match=message):
            check_model(model(), **{"probes": x} | options)  # type: ignore[arg-type]
