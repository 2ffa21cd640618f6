"""`check_model`: a report that reads well, and mistakes that name the argument."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from runner import check_model, optimize
from runner.errors import UsageError


def test_a_sound_model_is_ok_and_the_report_says_what_was_looked_at(
    net: nn.Module, digits: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    report = check_model(net, digits[1][0][:64], outputs="logits", classes=10, trained=False)
    assert report.ok and report.findings == []
    assert report.facts["parameters"] == sum(p.numel() for p in net.parameters())
    assert "probes: 64" in str(report)


def test_a_zero_layer_is_a_note_unless_the_model_is_said_to_be_trained(net: nn.Module) -> None:
    nn.init.zeros_(net[4].weight)
    report = check_model(net)
    assert report.ok and {r.code for r in report.reasons} == {"weights.dead"}
    assert "trained: not known; with trained=True" in str(report)
    assert {r.severity.word for r in check_model(net, trained=True).reasons} == {"warning"}


def test_an_optimized_model_is_the_model_within(net: nn.Module) -> None:
    with optimize(net, "none") as fast:
        assert check_model(fast, torch.randn(8, 64)).ok


def test_a_mistake_names_the_argument(net: nn.Module) -> None:
    for model, options, message in (
        (torch.relu, {}, "model must be a torch.nn.Module, got a builtin"),
        (net, {"probes": "text"}, "probes must be tensors .* got a str"),
        (net, {"outputs": "scores"}, "outputs must be one of logits, .* got scores"),
    ):
        with pytest.raises(UsageError, match=message):
            check_model(model, **options)  # type: ignore[arg-type]


def test_a_report_prints_one_line_a_finding(net: nn.Module) -> None:
    net[1].weight.data[3, 5] = math.nan
    net.register_buffer("<script>\n|x", torch.tensor([math.inf]))
    report = check_model(net)
    assert not report.ok and report.verdict == "2 faults"
    lines = str(report).splitlines()
    assert lines[0] == "2 faults"
    assert sum("weights.not_finite" in line for line in lines) == 2
    assert any("1.weight: 1 NaN of 2,048 values, the first at [3, 5]" in line for line in lines)
    assert sum("<script>" in line for line in lines) == 1 and "<script>\\n|x" in str(report)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["ok"] is False and plain["reasons"][0]["severity"] == "fault"
