"""Attention: the same numbers from every kernel, and what was chosen is what ran."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner import build, compose, train
from runner.errors import ConfigError
from runner.techniques import kernels
from runner.techniques.base import TechniqueStatus

QUICK = ["training.steps=2", "monitoring.progress=false", "device=cpu", "device.threads=2"]
GPT = [
    *QUICK,
    "data=stdlib_text",
    "data.sequence=32",
    "data.validation_samples=8",
    "training.batch_size=4",
    "model=gpt",
    "model.width=32",
    "model.heads=2",
    "model.depth=2",
    "optimization.attention.enabled=true",
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ here")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attention(*overrides: str) -> TechniqueStatus:
    with build(compose([*GPT, *overrides])) as run:
        summary = train(run)
    return next(row for row in summary.techniques if row.name == "attention")


def heads(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


def ran(step: Callable[[], object]) -> Mapping[str, int]:
    with profiler_legacy.profile() as profiler:
        step()
    return {event.key: event.count for event in profiler.key_averages()}


def fused(operators: Mapping[str, int]) -> int:
    return sum("flash_attention" in name for name in operators)


# -- the form that is written out --------------------------------------------------------------


def masks() -> dict[str, dict[str, Any]]:
    some = torch.rand(2, 1, 6, 9) > 0.4
    some[0, 0, 2] = False  # a query that may see nothing
    added = torch.zeros(2, 1, 6, 9).masked_fill(~some, float("-inf"))
    return {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": some},
        "added": {"attn_mask": added},
        "learned": {"attn_mask": torch.randn(4, 6, 9, requires_grad=True)},
        "scaled": {"scale": 0.5, "is_causal": True},
        "keys": {"attn_mask": torch.tensor([[True] * 9, [True] * 4 + [False] * 5])[:, None, None]},
    }


@pytest.mark.parametrize("kind", masks())
def test_plain_is_torchs_attention_and_so_are_its_gradients(kind: str) -> None:
    options = masks()[kind]
    leaves = [heads(2, 4, 6, 8), heads(2, 4, 9, 8), heads(2, 4, 9, 8)]
    learned = [m] if (m := options.get("attn_mask")) is not None and m.requires_grad else []
    with sdpa_kernel([SDPBackend.MATH]):
        expected = F.scaled_dot_product_attention(*leaves, **options)
    found = kernels.plain(*leaves, **options)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves + learned, upstream),
        torch.autograd.grad(expected, leaves + learned, upstream),
    )


def test_plain_shares_keys_among_groups_of_queries() -> None:
    query, key, value = heads(2, 6, 5, 8), heads(2, 2, 5, 8), heads(2, 2, 5, 8)
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": True}
    torch.testing.assert_close(
        kernels.plain(query, key, value, **options),
        F.scaled_dot_product_attention(query, key, value, **options),
    )


@needs_compiler
@pytest.mark.slow
def test_the_compiler_does_not_turn_plain_back_into_a_fused_kernel() -> None:
    leaves = [torch.randn(2, 4, 32, 16) for _ in range(3)]

    def scaled_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(-1).matmul(v)

    def compiled(form: Callable[..., Tensor]) -> Mapping[str, int]:
        torch._dynamo.reset()
        step = torch.compile(form)
        step(*leaves)
        return ran(lambda: step(*leaves))

    assert fused(compiled(scaled_after))  # it knows the usual spelling, so the next can fail
    assert not fused(compiled(kernels.plain))


# -- a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "math", "plain"])
def test_a_kernel_asked_for_by_name_is_the_one_that_ran(kernel: str) -> None:
    row = attention(f"optimization.attention.kernel={kernel}")
    assert row.engaged, row.reason
    assert row.evidence["kernel"] == kernel
    two_layers = {"flash": {"flash": 2}, "math": {"math": 2}, "plain": {"bmm": 12}}
    assert row.evidence["ran"] == two_layers[kernel]


@needs_compiler
@pytest.mark.slow
def test_what_was_compiled_for_one_kernel_is_not_taken_from_the_cache_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    leaves = [torch.randn(2, 4, 32, 16) for _ in range(3)]

    def step() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True)

    for kernel in ("math", "flash"):
        with kernels.use(kernel, nn.Identity(), strictly=True):
            torch._dynamo.reset()
            compiled = torch.compile(step)
            compiled()
            assert bool(fused(ran(compiled))) is (kernel == "flash"), kernel


def test_auto_says_what_it_measured_and_takes_hold() -> None:
    bf16 = ["optimization.amp.dtype=bf16", "optimization.amp.min_mflop=0"]
    with build(compose([*GPT, *bf16])) as run:
        choice = next(c for c in run.choices if c.key == "optimization.attention.kernel")
        summary = train(run)
    assert choice.value in ("default", "flash", "math", "plain")
    assert "plain" in choice.reason
    assert "torch's choice at 4x2x32x16 (bfloat16)" in choice.reason
    row = next(row for row in summary.techniques if row.name == "attention")
    assert row.engaged, row.reason


def test_auto_leaves_out_what_would_hold_large_matrices() -> None:
    with build(compose([*GPT, "optimization.attention.matrix_mb=0"])) as run:
        choice = next(c for c in run.choices if c.key == "optimization.attention.kernel")
    assert choice.value in ("default", "flash")
    assert "rule out math and plain" in choice.reason


def test_a_resumed_run_keeps_the_kernel_that_was_chosen(tmp_path: Path) -> None:
    with build(compose(GPT), tmp_path) as run:
        train(run)
        first = next(c for c in run.choices if c.key == "optimization.attention.kernel")
    with build(compose([*GPT, "checkpoint.resume=auto"]), tmp_path) as run:
        again = next(c for c in run.choices if c.key == "optimization.attention.kernel")
    assert (again.value, again.reason) == (first.value, "as before the run was resumed")


def test_a_closed_run_leaves_torchs_attention_as_it_was() -> None:
    def switches() -> list[object]:
        cuda = torch.backends.cuda
        return [
            F.scaled_dot_product_attention,
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            torch.compiler.config.cache_key_tag,
        ]

    before = switches()
    for kernel in ("plain", "math"):
        with build(compose([*GPT, f"optimization.attention.kernel={kernel}"])):
            assert switches() != before
        assert switches() == before


def test_a_kernel_that_cannot_be_had_here_is_a_reason_and_an_error_under_strict() -> None:
    asked, says = [*GPT, "optimization.attention.kernel=cudnn"], "NVIDIA GPUs only"
    with build(compose(asked)) as run:
        row = next(row for row in run.engagements if row.name == "attention")
    assert says in row.reason
    with pytest.raises(ConfigError, match=rf"optimization\.attention.*{says}"):
        build(compose(["optimization=basic", *asked, "optimization.strict=true"]))


# -- models of others --------------------------------------------------------------------------


class Named(nn.Module):
    """Has the function under a name of its own, and drops shares."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


scaled_dot_product_attention = F.scaled_dot_product_attention


def test_a_function_that_was_imported_by_name_is_replaced_too() -> None:
    model, x = Named(0.0), heads(1, 2, 8, 4)
    assert fused(ran(lambda: model(x)))
    with kernels.use("plain", model, strictly=True):
        assert not fused(ran(lambda: model(x)))
    assert fused(ran(lambda: model(x)))


def test_what_a_kernel_cannot_take_is_found_out_by_trying() -> None:
    model, x = Named(0.5), heads(1, 2, 8, 4)
    calls = kernels.calls_of(lambda: model(x))
    assert [call.times for call in calls] == [1]
    reason = kernels.refusal("flash", calls, model)
    assert reason is not None
    assert "flash does not take queries of [1, 2, 8, 4] in float32" in reason
    assert "dropout" in reason
    assert kernels.refusal("plain", calls, model) is None
    with kernels.use("flash", model, strictly=False):  # what auto chose leaves it to another
        model(x)
