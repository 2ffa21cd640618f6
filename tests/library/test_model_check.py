"""`check_model`: a report that reads well, and mistakes that name the argument."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from runner import check_model, optimize
from runner.errors import UsageError


def test_a_sound_model_is_ok(
    net: nn.Module, digits: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    report = check_model(net, digits[1][0][:64])
    assert report.ok and report.reasons == []
    assert report.facts["parameters"] == sum(p.numel() for p in net.parameters())
    with optimize(net, "none") as fast:
        assert check_model(fast, torch.randn(8, 64)).ok


def test_outputs_for_the_probes_that_are_not_finite_are_a_fault(net: nn.Module) -> None:
    net[4].weight.data.fill_(3e38)
    assert check_model(net).ok
    (reason,) = check_model(net, torch.randn(8, 64)).reasons
    assert reason.code == "outputs.not_finite" and reason.evidence.endswith("of 80 values")


def test_a_mistake_names_the_argument(net: nn.Module) -> None:
    for model, probes, message in (
        (torch.relu, None, "model must be a torch.nn.Module, got a builtin"),
        (net, "text", "batch must be tensors .* got a str"),
    ):
        with pytest.raises(UsageError, match=message):
            check_model(model, probes)  # type: ignore[arg-type]


def test_a_report_prints_one_line_a_finding(net: nn.Module) -> None:
    net[1].weight.data[3, 5] = math.nan
    net.register_buffer("<script>\n|x", torch.tensor([math.inf]))
    report = check_model(net)
    lines = str(report).splitlines()
    assert not report.ok and sum("weights.not_finite" in line for line in lines) == 2
    assert any("1.weight: 1 NaN of 2,048 values, the first at [3, 5]" in line for line in lines)
    assert sum("<script>" in line for line in lines) == 1 and "<script>\\n|x" in str(report)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["ok"] is False and plain["reasons"][0]["severity"] == "fault"
