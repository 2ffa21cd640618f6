"""`safe_inference` and `check_model`: checked answers of a model, and faults of the model."""

import json
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import check_model, optimize, safe_inference
from runner.core.errors import OutOfMemory, UsageError


class Large(nn.Module):
    """Allocates more than any machine has when it gets more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(4, 3), most
        self.seen: list[int] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        self.seen.append(len(x))
        if len(x) > self.most:
            torch.empty(2**50)
        y = self.layer(x)
        return {"logits": y if scale is None else y * scale, "scale": torch.ones(2)}


class Broken(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y[0, 0], y[1, 1], y[2, 2] = math.nan, math.inf, -math.inf
        return y, torch.arange(len(x))


def test_the_output_is_the_models_in_eval_mode_without_gradients(net: nn.Module) -> None:
    net[2].eval()
    modes = [m.training for m in net.modules()]
    x = torch.randn(6, 64)
    result = safe_inference(net, x)
    assert [m.training for m in net.modules()] == modes
    assert net.training and not net[2].training
    net.eval()
    assert torch.equal(result.output, net(x))
    assert result.ok and result.problems == [] and result.non_finite == 0
    assert (result.pieces, result.device) == (1, "cpu")
    assert result.seconds > 0 and not result.output.requires_grad


@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict"])
def test_out_of_memory_falls_back_to_pieces_whose_rows_are_those_of_the_whole(shape: str) -> None:
    model, x, scale = Large(3), torch.randn(11, 4), torch.tensor([1.0, 2.0, 3.0])
    batch: Any = {"tensor": x, "tuple": (x, scale), "dict": {"x": x, "scale": scale}}[shape]
    result = safe_inference(model, batch)
    expected = model.layer(x) * (1 if shape == "tensor" else scale)
    assert torch.allclose(result.output["logits"], expected)
    assert result.output["scale"].tolist() == [1, 1]  # not one for each sample
    assert model.seen == [11, 6, 3, 3, 3, 2]
    assert result.ok and result.pieces == 4
    assert result.problems == [
        "out of memory with 11 samples; 6 at a time",
        "out of memory with 6 samples; 3 at a time",
    ]
    model.most = 0
    with pytest.raises(OutOfMemory, match="safe_inference: out of memory with one sample on cpu"):
        safe_inference(model, batch)


def test_non_finite_values_are_counted_by_tensor_and_replaced() -> None:
    x = torch.randn(4, 4)
    x[3, 3] = math.nan
    result = safe_inference(Broken(), x, nan=-1.0, inf=9.0)
    output, order = result.output
    assert [output[i, i].item() for i in range(4)] == [-1.0, 9.0, -9.0, -1.0]
    assert torch.equal(order, torch.arange(4))
    assert not result.ok and result.non_finite == 4
    assert result.problems == [
        "inputs: 1 NaN of 16 values",
        "output[0]: 2 NaN and 2 Inf of 16 values",
    ]
    assert safe_inference(Broken(), x).output[0][1, 1] == torch.finfo(torch.float32).max
    kept = safe_inference(Broken(), x, sanitise=False)
    assert not kept.ok and kept.output[0][0, 0].isnan() and kept.non_finite == 4


def test_random_states_and_modes_are_as_before_also_after_an_error() -> None:
    error = ValueError("my own mistake")

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            random.random()
            if len(x) == 3:
                raise error
            return x + torch.randn(4)

    model = Drawing()
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    safe_inference(model, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="my own mistake") as caught:
        safe_inference(model, torch.zeros(3, 4))
    assert caught.value is error
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert model.training


def test_an_optimized_model_answers_under_its_techniques(net: nn.Module) -> None:
    x = torch.randn(8, 64)
    expected = safe_inference(net, x).output
    bf16 = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]
    with optimize(net, "none", overrides=bf16) as fast:
        result = safe_inference(fast, x)
        assert result.ok and result.output.dtype is torch.float32
        assert not torch.equal(result.output, expected)  # it was computed in 16 bits
        assert torch.allclose(result.output, expected, atol=0.05)
        assert check_model(fast, x).ok
    assert net.training


def test_a_mistake_names_the_argument(net: nn.Module) -> None:
    x: Any = torch.randn(2, 64)
    for arguments, options, message in (
        ((torch.relu, x), {}, "model must be a torch.nn.Module, got a builtin"),
        ((net, "text"), {}, "batch must be tensors .* got a str"),
        ((net, torch.ones(())), {}, "first dimension is the sample"),
        ((net, x), {"nan": math.inf}, "nan must be a finite number"),
    ):
        with pytest.raises(UsageError, match=message):
            safe_inference(*arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="check_model: model must be a torch.nn.Module"):
        check_model(torch.relu)  # type: ignore[arg-type]


# -- the model itself ------------------------------------------------------------------------------


def test_a_sound_model_is_ok_and_outputs_for_the_probes_that_are_not_finite_are_a_fault(
    net: nn.Module, digits: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    report = check_model(net, digits[1][0][:64])
    assert report.ok and report.reasons == []
    assert report.facts["parameters"] == sum(p.numel() for p in net.parameters())
    net[4].weight.data.fill_(3e38)
    assert [reason.code for reason in check_model(net).reasons] == ["weights.huge"]
    reason, _ = check_model(net, torch.randn(8, 64)).reasons
    assert reason.code == "outputs.not_finite" and reason.evidence.endswith("of 80 values")


def test_a_report_prints_one_line_a_finding(net: nn.Module) -> None:
    net[1].weight.data[3, 5] = math.nan
    net.register_buffer("<script>\n|x", torch.tensor([math.inf, 0.0]))
    report = check_model(net)
    lines = str(report).splitlines()
    assert not report.ok and sum("weights.not_finite" in line for line in lines) == 2
    assert any("1.weight: 1 NaN of 2,048 values, the first at [3, 5]" in line for line in lines)
    assert sum("<script>" in line for line in lines) == 1 and "<script>\\n|x" in str(report)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["ok"] is False and plain["reasons"][0]["severity"] == "fault"
