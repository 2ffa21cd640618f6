"""The int8 copy is int8, close to the float model, worth it, and leaves the float model alone."""

from __future__ import annotations

import math
import platform
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import train
from runner.core.execution.evaluation import copy_standalone_model, evaluate
from runner.core.schemas.optimization import Quantization
from runner.core.techniques import quantization
from runner.core.techniques.quantization import (
    INT8_LEVELS,
    Int8Linear,
    model_bytes,
    product_levels,
    quantizable_layers,
    replace_layers,
)
from tests import runs

QUICK = ["training.steps=40", "optimization=none", "optimization.quantization.enabled=true"]


@pytest.fixture(autouse=True)
def any_speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the widths of these tests int8 is slower on some machines, which is not their subject."""
    if "slower" not in request.node.name:
        monkeypatch.setattr(quantization, "MAX_LATENCY_RATIO", math.inf)


@pytest.mark.parametrize(
    ("seconds", "mode", "export", "engages"),
    [
        (0.003, "dynamic", "none", False),
        (0.0, "dynamic", "none", True),
        (0.003, "dynamic", "quantized", True),  # a file was asked for
        (0.003, "weight_only", "none", True),  # for its memory
    ],
)
def test_an_int8_copy_that_is_slower_at_this_width_is_not_engaged(
    seconds: float, mode: str, export: str, engages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted times are of a float model that takes 1 ms, and an int8 one that takes 1 to 4."""
    int8_forward = Int8Linear.forward

    def slow(self: Int8Linear, x: Tensor) -> Tensor:
        time.sleep(seconds)
        return int8_forward(self, x)

    monkeypatch.setattr(Int8Linear, "forward", slow)
    with runs.opened(*QUICK, "training.steps=2", f"optimization.quantization.mode={mode}") as run:
        run.settings = {**run.settings, "evaluate.export": export}
        float_forward = run.forward
        run.forward = lambda *x: (time.sleep(0.02 if not seconds else 0.001), float_forward(*x))[1]
        summary = train(run)
        row = runs.status(summary, "quantization")
        assert row.engaged is engages and (run.quantized is not None) is engages
        assert engages or ("slower at this width" in row.reason and row.status == "skipped")


def off(ours: Tensor, exact: Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


def quantised(model: nn.Module, dynamic: bool = False) -> nn.Module:
    return replace_layers(model, quantizable_layers(Quantization(), model, "cpu"), dynamic)


@pytest.mark.parametrize(
    ("dynamic", "bias", "shape"), [(True, True, (5,)), (True, False, (2, 3)), (False, True, (1,))]
)
def test_an_int8_layer_is_close_to_the_linear_layer_it_replaces(
    dynamic: bool, bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(70, 33, bias=bias), torch.randn(*shape, 70)
    with torch.no_grad():
        linear.weight[3] = 0.0  # a row without a scale
        linear.weight[4] *= 1000.0  # one that would drown the others, had they one scale
        exact, ours = linear(x), Int8Linear(linear.weight, linear.bias, dynamic)(x)
    assert ours.shape == exact.shape
    assert ours.dtype is torch.float32
    others = [i for i in range(33) if i != 4]
    assert off(ours[..., others], exact[..., others]) < 0.03
    assert off(ours, exact) < 0.03


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86 instructions")
def test_int8_products_are_exact_on_a_cpu_without_vnni() -> None:
    code = """
import torch
from runner.core.device.capabilities import cpu_flags
from runner.core.techniques.quantization import INT8_LEVELS, Int8Linear, product_levels
levels = product_levels("cpu")
vnni = {"avx512_vnni", "avx_vnni"} & set(cpu_flags())
layer = Int8Linear(torch.ones(8, 64), None, dynamic=True)
y = layer(torch.ones(4, 64))
# limited to AVX2 such a CPU saturates; one that has none may get torch's own loop, which is exact
assert levels == 64 or (levels == INT8_LEVELS and not vnni), levels
assert torch.allclose(y, torch.full((4, 8), 64.0), rtol=1e-3), y
"""
    runs.printed_by(code, ONEDNN_MAX_CPU_ISA="AVX2")


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_int8_layer_puts_out_what_autocast_would_and_takes_16_bit_inputs(dynamic: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64), torch.randn(4, 64)
    layer = Int8Linear(linear.weight, linear.bias, dynamic)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is linear(x).dtype is torch.bfloat16
        assert off(layer(x.bfloat16()), linear(x).float()) < 0.05
    assert layer(x.half()).dtype is torch.float16
    large = layer((100 * x).half())  # unscaled sums are far beyond 65504
    assert off(large, linear(100 * x).detach()) < 0.05


class Mixed(nn.Module):
    """Tied weights, a layer that is met twice, a subclass, a hook, a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.twice = nn.ModuleList([nn.Linear(64, 64)])
        self.twice.append(self.twice[0])
        self.own = nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
        self.hooked = nn.Linear(64, 64)
        self.hooked.register_forward_pre_hook(lambda module, inputs: None)
        self.small = nn.Linear(64, 8)


def test_what_shares_its_weights_or_does_more_than_a_product_stays_float() -> None:
    model = Mixed()
    before = model_bytes(model)
    quantised(model)
    int8 = [name for name, m in model.named_modules() if type(m) is Int8Linear]
    assert int8 == ["twice.0"] and model.twice[1] is model.twice[0]
    assert model.head.weight is model.tokens.weight
    assert model_bytes(model) < before
    assert type(quantised(nn.Linear(64, 64))) is Int8Linear


@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
def test_the_copy_is_int8_smaller_and_as_good_and_the_run_keeps_its_float_model(mode: str) -> None:
    averaged = ["optimizer.ema=0.99", "optimizer.ema_warmup=false"]
    with runs.opened(*QUICK, *averaged, f"optimization.quantization.mode={mode}") as run:
        summary = train(run)
        state = run.model.state_dict()
        assert run.quantized is not None
        metrics = evaluate(run, run.quantized.model).metrics
        assert evaluate(run).metrics == summary.metrics
        layer = run.quantized.model.get_submodule("layers.2")
        live = run.model.get_submodule("layers.2").weight
        with run.update.averaged():  # the averaged weights are those that are quantised
            average = live.detach().clone()
        assert isinstance(layer, Int8Linear)
        # by the levels that this CPU leaves the weights
        limit = {127: 0.01, 64: 0.02}[product_levels("cpu") if layer.dynamic else INT8_LEVELS]
        assert off(layer.weight, average) < limit < off(layer.weight, live.detach())
    row = runs.status(summary, "quantization")
    facts: dict[str, Any] = row.evidence
    assert row.engaged
    assert (facts["layers"], facts["left_float"]) == ({"Int8Linear": 2}, 1)  # ten are few outputs
    assert facts["int8_bytes"] < 0.3 * facts["float_bytes"] and facts["latency_ratio"] > 0
    assert facts["float"] == summary.metrics["val/accuracy"]
    assert facts["int8"] == metrics["val/accuracy"]
    assert metrics["val/loss"] != summary.metrics["val/loss"]
    assert metrics["val/loss"] == pytest.approx(summary.metrics["val/loss"], rel=0.02)
    assert all(tensor.dtype is torch.float32 for tensor in state.values())
    assert list(state) == [f"layers.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")]
    assert run.model.training


def test_a_model_that_loses_more_than_max_drop_is_not_worth_it() -> None:
    with runs.opened(*QUICK) as run:
        train(run)
        with torch.no_grad():  # of a corner that is white in every image: float is as it was
            run.model.get_submodule("layers.0").weight[:, 0] = 1e6
        run.quantized = None
        evidence = Quantization(enabled=True, max_drop=0.2).engaged(run)
        assert not evidence.engaged
        assert "max_drop=0.2" in evidence.reason
        assert evidence.facts["relative_drop"] > 0.2
        assert run.quantized is None
        assert Quantization(enabled=True, max_drop=1.0).engaged(run).engaged


def test_a_copy_that_stands_alone_calls_none_of_the_originals_layers() -> None:
    with runs.opened(*QUICK) as run:
        inputs = next(run.validation.batches(0))[0]
        layers = run.model.get_submodule("layers")
        plain = layers.forward
        replaced = lambda x: plain(x)  # noqa: E731  # as techniques do
        replaced.__module__ = "runner.core.techniques.recompute"
        layers.forward = replaced  # type: ignore[method-assign]
        run.model.compile(backend="eager")
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        copy = copy_standalone_model(run)
        assert copy._compiled_call_impl is None
        assert not any(p.requires_grad or p.grad is not None for p in copy.parameters())
        exact = run.model(inputs)
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.zero_()
        assert not copy(inputs).any()
        assert exact.any()
        assert all(torch.equal(before[k], v) for k, v in run.model.state_dict().items())


def test_a_model_without_a_large_linear_layer_gets_the_reason() -> None:
    small = ["model=cnn", "model.width=8"]
    with runs.opened(*QUICK, *small) as run:
        row = next(row for row in run.unapplied_techniques if row.name == "quantization")
    assert "no linear layer with 64" in row.reason
    with runs.opened(*QUICK, *small, "optimization.quantization.min_features=10") as run:
        assert [name for name, _ in run.techniques] == ["quantization"]


def test_gpt2_of_transformers_is_quantised_though_its_layers_are_no_linear_ones() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(16)[None]
    int8 = quantised(deepcopy(model), dynamic=True)
    with torch.no_grad():
        assert off(int8(ids).logits, model(ids).logits) < 0.05
    assert sum(isinstance(m, Int8Linear) for m in int8.modules()) == 4
    assert int8.lm_head.weight is int8.transformer.wte.weight
