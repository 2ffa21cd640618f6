"""Precision of gradients and updates: backward outside of autocast, float64 with fused kernels."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Stability, optimize, train_step
from runner.core.build.setup import Components
from runner.core.optim.optimizer import fill_momentum
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.stability import StabilityConfig
from runner.core.techniques.fused_optimizer import fastest_implementation
from runner.core.train.step import make_step
from tests import runs

from .steps import take_step

AMP = ["amp.enabled=true", "amp.dtype=bf16", "amp.min_mflop=0", "fused_optimizer.enabled=true"]
SGD = [
    *["optimizer.name=SGD", "optimizer.lr=1.0", "optimizer.weight_decay=0", "schedule=constant"],
    *["stability.clip_norm=null", "optimization=none", "data=digits", "training.steps=8"],
]


class Float32Head(nn.Module):
    """Its last layer is kept in fp32, as those of many published models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x.flatten(1))).float()
        with torch.autocast(x.device.type, enabled=False):
            return self.head(hidden)


def gradients(*techniques: str) -> list[Tensor]:
    """The gradients of a step under bf16 autocast, from the change of the weights."""
    overrides = [f"optimization.{name}" for name in [*AMP, *techniques]]
    model = Float32Head()
    before = copy.deepcopy(model)
    with runs.opened(*SGD, *overrides, given=Components(model=model)) as run:
        run.model.train()
        make_step(run, next(run.train.batches(0)))
        run.train.close()
        if "whole_step.enabled=true" in techniques:
            assert run.step_graph is not None and run.step_graph.steps == 1
        assert not run.fallback_reasons
    pairs = zip(before.parameters(), model.parameters(), strict=True)
    return [(old - new).detach() for old, new in pairs]


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and run, but no code is generated from them."""
    compile_function = torch.compile

    def trace(function: Any, *, fullgraph: bool = False, **options: Any) -> Any:
        return compile_function(function, fullgraph=fullgraph, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", trace)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("technique", ["whole_step", "compile"])
def test_a_graph_s_backward_is_outside_of_autocast_as_the_eager_one_is(technique: str) -> None:
    eager = gradients()
    compiled = gradients(f"{technique}.enabled=true")
    for value, expected in zip(compiled[2:], eager[2:], strict=True):  # 2e-3 in 16 bits
        assert relative_error(value, expected) < 1e-5
    for value, expected in zip(compiled[:2], eager[:2], strict=True):
        assert relative_error(value, expected) < 1e-2


@pytest.mark.usefixtures("traced_only")
def test_an_optimized_model_s_compiled_backward_is_outside_of_autocast() -> None:
    plain, model = Float32Head(), Float32Head()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = plain(x).square().mean()
    loss.backward()
    techniques = [*AMP[:3], "compile.enabled=true"]
    overrides = [f"optimization.{name}" for name in techniques]
    with optimize(model, "none", example=x, overrides=overrides) as optimized:
        optimized(x).square().mean().backward()
    for value, expected in zip(model.head.parameters(), plain.head.parameters(), strict=True):
        assert value.grad is not None and expected.grad is not None
        assert relative_error(value.grad, expected.grad) < 1e-5


def call_train_step(net: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    train_step(net, optimizer, batch, nn.functional.cross_entropy)


def call_stability(net: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    with Stability() as stability:
        stability.step(net, nn.functional.cross_entropy(net(batch[0]), batch[1]), optimizer)


CALLS: list[Callable[..., None]] = [call_train_step, call_stability]


@pytest.mark.parametrize("call", CALLS)
def test_a_library_call_within_autocast_runs_backward_outside_of_it(
    call: Callable[..., None],
) -> None:
    noise = torch.Generator().manual_seed(1)
    batch = torch.randn(16, 64, generator=noise), torch.randint(0, 10, (16,), generator=noise)
    plain, net = Float32Head(), Float32Head()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(plain(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    with torch.autocast("cpu", torch.bfloat16):
        call(net, torch.optim.SGD(net.parameters(), lr=1.0), batch)
    start = Float32Head().head.weight
    change, expected = net.head.weight - start, plain.head.weight - start
    assert relative_error(change.detach(), expected.detach()) < 1e-5


# -- float64 ---------------------------------------------------------------------------------------

FUSED: list[tuple[type[Any], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


def wide_model(mixed: bool) -> nn.Sequential:
    """In float64; if `mixed` the first layer is in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if mixed:
        net[0].float()
        net[1].register_forward_hook(lambda module, inputs, output: output.double())
    return net


def wide_batch(mixed: bool) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(1)
    x = 9 * torch.randn(16, 6, generator=noise, dtype=torch.float64)
    return x.float() if mixed else x, torch.randint(0, 3, (16,), generator=noise)


def clip_norm(part: nn.Module, limit: float) -> None:
    """As torch clips, without the 1e-6 that it adds to the norm."""
    values = [p.grad for p in part.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(values)
    for gradient in values:
        gradient.div_((norm / limit).clamp(min=1.0))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("cls", "options"), FUSED, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize(
    "clip", [{"clip_norm": 0.1}, {"clip_norm": 0.1, "clip_per_group": True}, {"clip_value": 0.01}]
)
def test_fused_updates_of_float64_weights_are_clipped_in_float64(
    clip: dict[str, Any], cls: type[Any], options: dict[str, Any], mixed: bool
) -> None:
    ours, theirs = wide_model(mixed), wide_model(mixed)
    config = StabilityConfig(**clip)
    how, _ = fastest_implementation(cls, ours)
    assert how == {"fused": True}
    groups = [{"params": list(ours[0].parameters())}, {"params": list(ours[2].parameters())}]
    optimizer = cls(groups, lr=0.05, **options, **how)
    fill_momentum(optimizer)
    update = OptimizerStep(ours, optimizer, config, 0.05, [1.0], loss_scale=8.0)
    assert update.in_kernel
    plain = cls(theirs.parameters(), lr=0.05, **options, foreach=False)
    x, y = wide_batch(mixed)
    for _ in range(3):
        take_step(update, lambda: nn.functional.cross_entropy(ours(x), y))
        plain.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        if config.clip_value is not None:
            nn.utils.clip_grad_value_(theirs.parameters(), config.clip_value)
        for part in (theirs[0], theirs[2]) if config.clip_per_group else (theirs,):
            clip_norm(part, config.clip_norm or math.inf)
        plain.step()
    for value, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        exact = 1e-11 if value.dtype is torch.float64 and not mixed else 2e-4
        assert torch.allclose(value, expected, rtol=exact, atol=exact)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mixed", [False, True])
def test_library_calls_update_float64_models(call: Callable[..., None], mixed: bool) -> None:
    net = wide_model(mixed)
    before = net[2].weight.detach().clone()
    call(net, torch.optim.AdamW(net.parameters()), wide_batch(mixed))
    assert not torch.equal(before, net[2].weight)


def test_a_float32_model_with_a_float64_loss_is_updated() -> None:
    net = nn.Linear(6, 3)
    before = net.weight.detach().clone()
    x, y = wide_batch(mixed=True)
    loss_fn = nn.functional.cross_entropy
    train_step(net, torch.optim.SGD(net.parameters()), (x, y), lambda z, t: loss_fn(z.double(), t))
    assert not torch.equal(before, net.weight)


def test_a_missing_fused_kernel_is_the_reason_in_the_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Any, *args: Any, fused: bool | None = None, **options: Any) -> None:
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be …")
        init(self, *args, **options)

    init = torch.optim.Adagrad.__init__
    refuse.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.optim.Adagrad, "__init__", refuse)
    small = ["data=cancer", "training.steps=4", "optimizer.name=Adagrad", "optimization=basic"]
    summary = runs.trained(*small)
    row = runs.status(summary, "fused_optimizer")
    assert summary.status == "done" and not row.engaged
    assert row.evidence["implementation"] == "foreach"
    assert row.reason == f"torch {torch.__version__} has no fused Adagrad for float32 on cpu"
