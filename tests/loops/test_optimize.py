"""`optimize` and `@optimize_model`: faster to call, the same model, and everything undone."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import optimize, optimize_model
from runner.core.errors import ConfigError, UsageError
from runner.core.interfaces.technique import TechniqueStatus

NHWC = ["optimization.channels_last.enabled=true", "optimization.measure=false"]
BF16 = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]


def row(optimized: Any, name: str) -> TechniqueStatus:
    return next(row for row in optimized.engagements() if row.name == name)


class Scaled(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(64, width)

    def forward(self, x: Tensor, scale: float | None = None) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"y": y if scale is None else y * scale}


def test_it_is_called_as_the_model_and_is_the_model_until_it_is_closed(net: nn.Module) -> None:
    net.eval()
    keys, x = list(net.state_dict()), torch.randn(5, 64)
    with torch.no_grad(), optimize(net, "basic", example=x) as fast:
        assert torch.equal(fast(x), net(x))
        assert fast.model is net
        assert list(net.state_dict()) == keys
    with pytest.raises(UsageError, match="optimize: it is closed"):
        fast(x)


def test_products_run_in_16_bits_from_the_first_call_on_and_outputs_come_back_in_32(
    net: nn.Module,
) -> None:
    seen = []
    net[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with optimize(net, "none", overrides=BF16) as fast:
        assert "first batch" in row(fast, "amp").reason
        assert fast(torch.randn(5, 64)).dtype is torch.float32
        assert seen[-1] is torch.bfloat16
        assert row(fast, "amp").engaged
    net(torch.randn(5, 64))
    assert seen[-1] is torch.float32


def test_what_needs_a_loop_gives_that_reason(net: nn.Module) -> None:
    reasons = {
        "whole_step": "optimize_training_loop",
        "accumulation": "optimize_training_loop",
        "quantization": "create_training_pipeline",
        "fused_optimizer": "optimize_training_loop",
        "tf32": "no TF32",
    }
    asked = [f"optimization.{name}.enabled=true" for name in reasons]
    with optimize(net, "basic", example=torch.randn(4, 64), overrides=asked) as fast:
        for name, reason in reasons.items():
            status = row(fast, name)
            assert status.requested and not status.engaged
            assert reason in status.reason


def test_looking_leaves_gradients_buffers_and_random_numbers_alone(net: nn.Module) -> None:
    with optimize(net, "none", example=torch.randn(4, 64), overrides=BF16) as fast:
        fast(torch.randn(4, 64)).sum().backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        buffers = copy.deepcopy(dict(net.named_buffers()))
        noise = torch.get_rng_state()
        fast.engagements()
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert all(torch.equal(buffers[k], v) for k, v in net.named_buffers())
        assert torch.equal(torch.get_rng_state(), noise)


def test_a_decorated_class_or_function_makes_optimized_models() -> None:
    @optimize_model("none", overrides=BF16)
    class Net(Scaled):
        """Mine."""

    @optimize_model("basic")
    def make(width: int) -> nn.Module:
        return Scaled(width)

    x = torch.randn(6, 64)
    with Net(4) as net:
        out = net(x, scale=2.0)["y"]
        assert isinstance(net.model, Scaled) and Net.__doc__ == "Mine."
        assert [n for n, _ in net.named_parameters()] == ["layer.weight", "layer.bias"]
        expected = 2 * nn.functional.linear(x, net.layer.weight, net.layer.bias)
        assert torch.allclose(out, expected, atol=0.05)
        assert row(net, "amp").engaged
    with make(3) as fast:
        assert fast(x)["y"].shape == (6, 3)


def test_a_decorated_step_function_gets_the_optimized_model_which_is_kept() -> None:
    seen: list[Any] = []

    @optimize_model("amp", overrides=["optimization.amp.dtype=bf16"])
    def step(model: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
        """Predict."""
        seen.append(model)
        return model(x) * scale

    torch.manual_seed(0)
    nets, x = [nn.Linear(64, 8) for _ in range(2)], torch.randn(4, 64)
    for net in nets:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = net(x).float() * 2
        assert not torch.equal(expected, net(x) * 2)
        assert torch.equal(step(net, x, scale=2.0), expected)
        assert torch.equal(step(model=net, x=x, scale=2.0), expected)
        step(net, x).sum().backward()
        assert net.weight.grad is not None
    assert step.__name__ == "step" and step.__doc__ == "Predict."
    assert [type(model).__name__ for model in seen] == ["Optimized"] * 6
    assert [seen[i].model for i in (0, 3)] == nets
    assert len({id(model) for model in seen}) == 2
    with pytest.raises(UsageError, match="step: model must be .* got a str; for a function that"):
        step("linear")
    assert torch.equal(step(seen[0], x), step(nets[0], x)) and len({*map(id, seen)}) == 2
    step.close()
    assert seen[0].lazy.closed and seen[3].lazy.closed
    step(nets[0], x)
    assert seen[-1] is not seen[0]
    step.close()


@pytest.mark.parametrize("around", [torch.inference_mode, torch.enable_grad])
def test_a_frozen_model_is_optimized_wherever_it_is_first_called(around: Any) -> None:
    model = Scaled().requires_grad_(False)
    timed = ["optimization.compile.enabled=true", "optimization.compile.min_steps=null"]
    short = ["training.steps=1"]  # so that a step is timed, and compiling is not worth it
    with around(), optimize(model, "none", overrides=[*BF16, *timed, *short]) as fast:
        fast(torch.randn(2, 64))
        assert row(fast, "amp").engaged
        assert not row(fast, "compile").engaged


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ here")
def test_closing_gives_weights_their_memory_format_back_with_the_same_values() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)).eval()
    odd = nn.Conv2d(4, 4, 3)
    odd.weight.data = odd.weight.data.to(memory_format=torch.channels_last)  # as it was given
    net.append(odd)
    x = torch.randn(2, 3, 12, 12)
    expected, strides = net(x), [p.stride() for p in net.parameters()]
    values, parameters = [p.detach().clone() for p in net.parameters()], [*net.parameters()]
    with optimize(net, "none", example=x, overrides=NHWC) as fast:
        assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
        fast(x).sum().backward()
    assert [p.stride() for p in net.parameters()] == strides
    assert not net[0].weight.is_contiguous(memory_format=torch.channels_last)
    for parameter, value in zip(net.parameters(), values, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
    assert [*map(id, net.parameters())] == [*map(id, parameters)]
    assert torch.allclose(net(x), expected, atol=1e-6)


def test_it_compiles_in_place_until_it_is_closed() -> None:
    model = Scaled()
    keys, x = list(model.state_dict()), torch.randn(4, 64)
    with optimize(model, "compile", example=x) as fast:
        fast(x)
        compiled = row(fast, "compile")
        assert compiled.engaged, compiled.reason
        assert compiled.evidence["graphs"] == 1
        assert list(model.state_dict()) == keys
    assert model._compiled_call_impl is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ here")
@pytest.mark.parametrize("called", [None, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_model_compiled_for_calls_without_gradients_is_engaged(
    training: bool, called: Any
) -> None:
    model, x = Scaled().train(training), torch.randn(4, 64)
    with optimize(model, "compile", example=x) as fast:
        if called is not None:
            with called():
                fast(x)
        compiled = row(fast, "compile")
    assert compiled.engaged, compiled.reason
    assert model.training is training


WITHOUT_EFFECT = {
    "debug=full": "create_training_pipeline",
    "training.validate_every=5": "create_training_pipeline",
    "stability.spike.enabled=false": "create_training_pipeline",
    "stability.clip_norm=2": "optimize_training_loop",
    "optimizer.lr=1": "optimize_training_loop",
}


def test_a_mistake_names_the_argument_and_the_fix(net: nn.Module) -> None:
    anything: Any = net
    for call, error, message in (
        (lambda: optimize(3), UsageError, "optimize: model must be .* got a int"),
        (lambda: optimize(net, "advancd"), ConfigError, "optimization"),
        (lambda: optimize(net, overrides="a=1"), UsageError, "overrides must be a list"),
        (lambda: optimize(net, overrides=["optimization.ampp=1"]), ConfigError, "amp"),
        *(
            (lambda key=key: optimize(net, overrides=[key]), UsageError, f"{key} has .*; use {use}")
            for key, use in WITHOUT_EFFECT.items()
        ),
        (lambda: optimize(net, device="gpu"), ConfigError, "device.*gpu"),
        (lambda: optimize(net, device="meta"), ConfigError, "device.*meta"),
        (lambda: optimize(net, example=3), UsageError, "batch must be .* got a int"),
        (
            lambda: optimize(net, "basic", example=torch.ones(2, 3)),
            UsageError,
            r"failed on float32 of shape \[2, 3\]",
        ),
        (lambda: optimize_model(anything), UsageError, r"write @optimize_model\(\)"),
        (lambda: optimize_model()(int), UsageError, "subclass of torch.nn.Module"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_parameters_that_the_config_freezes_are_frozen(net: nn.Module) -> None:
    with optimize(
        net, "none", example=torch.randn(4, 64), overrides=["optimizer.freeze=[1.weight]"]
    ):
        assert not next(net.parameters()).requires_grad
