"""Attention: the same numbers from every kernel, and what was chosen is what ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner import train
from runner.core.build.setup import Components
from runner.core.techniques import attention
from tests import runs

ON = "optimization.attention.enabled=true"
KERNEL = "optimization.attention.kernel="
GPT = [
    *["training.steps=2", "data=stdlib_text", "data.sequence=32", "data.validation_samples=8"],
    *["training.batch_size=4", "model=gpt", "model.width=32", "model.heads=2", "model.depth=2"],
    ON,
]
TABLE = [
    *["data=synthetic", "data.form=tabular", "data.features=16", "data.classes=10"],
    *["training.steps=2", "training.batch_size=32"],
]
BF16 = [
    *["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"],
    "optimization.amp.min_mflop=0",
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def heads(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def flash_calls(step: Callable[[], object]) -> int:
    with profiler_legacy.profile() as profiler:
        step()
    return sum("flash_attention" in event.key for event in profiler.key_averages())


def options() -> dict[str, dict[str, Any]]:
    some = torch.rand(2, 1, 6, 9) > 0.4
    some[0, 0, 2] = False  # a query that may see nothing
    added = torch.zeros(2, 1, 6, 9).masked_fill(~some, float("-inf"))
    return {
        "boolean": {"attn_mask": some},
        "added": {"attn_mask": added},
        "learned": {"attn_mask": torch.randn(4, 6, 9, requires_grad=True)},
        "causal": {"is_causal": True},
        "scaled": {"scale": 0.5},
        "grouped": {"enable_gqa": True, "is_causal": True},
        "keys": {"attn_mask": torch.tensor([[True] * 9, [True] * 4 + [False] * 5])[:, None, None]},
    }


@pytest.mark.parametrize("kind", options())
def test_plain_is_torchs_attention_and_so_are_its_gradients(kind: str) -> None:
    chosen, shared = options()[kind], 2 if kind == "grouped" else 4
    leaves = [heads(2, 4, 6, 8), heads(2, shared, 9, 8), heads(2, shared, 9, 8)]
    learned = [m] if (m := chosen.get("attn_mask")) is not None and m.requires_grad else []
    with sdpa_kernel([SDPBackend.MATH]):
        expected = F.scaled_dot_product_attention(*leaves, **chosen)
    ours = attention.plain_attention(*leaves, **chosen)
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves + learned, upstream),
        torch.autograd.grad(expected, leaves + learned, upstream),
    )


@runs.needs_compiler
@pytest.mark.slow
def test_the_compiler_does_not_turn_plain_back_into_a_fused_kernel() -> None:
    leaves = [torch.randn(2, 4, 32, 16) for _ in range(3)]

    def scaled_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(-1).matmul(v)

    def compiled(form: Callable[..., Tensor]) -> int:
        torch._dynamo.reset()
        step = torch.compile(form)
        step(*leaves)
        return flash_calls(lambda: step(*leaves))

    assert compiled(scaled_after)  # it knows the usual spelling, so the next can fail
    assert not compiled(attention.plain_attention)


@runs.needs_compiler
@pytest.mark.slow
def test_what_was_compiled_for_one_kernel_is_not_taken_from_the_cache_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    leaves = [torch.randn(2, 4, 32, 16) for _ in range(3)]
    for kernel in ("math", "flash"):
        with attention.use_kernel(kernel, nn.Identity()):
            torch._dynamo.reset()
            compiled = torch.compile(lambda: F.scaled_dot_product_attention(*leaves))
            compiled()
            assert bool(flash_calls(compiled)) is (kernel == "flash"), kernel


def switches() -> list[object]:
    cuda = torch.backends.cuda
    return [
        F.scaled_dot_product_attention,
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        torch.compiler.config.cache_key_tag,
    ]


@pytest.mark.parametrize(
    ("kernel", "ran", "engaged"),
    [
        ("flash", {"flash": 2}, False),  # which is what torch takes by itself here
        ("math", {"math": 2}, True),
        ("plain", {"bmm": 12}, True),
    ],
)
def test_a_kernel_asked_for_by_name_runs_and_is_engaged_unless_torch_takes_it_anyway(
    kernel: str, ran: Mapping[str, int], engaged: bool
) -> None:
    before = switches()
    with runs.opened(*GPT, KERNEL + kernel) as run:
        assert switches() != before
        row = runs.status(train(run), "attention")
    assert row.engaged is engaged, row.reason
    assert row.reason == ("" if engaged else "torch's own choice is flash, too")
    assert row.evidence["kernel"] == kernel
    assert row.evidence["ran"] == ran  # two layers
    assert switches() == before


@pytest.mark.parametrize(
    ("more", "limit", "chosen", "reason"),
    [
        (BF16, 1024, "plain", "16 bits"),
        (BF16, 0, "default", "rule out"),
        ([], 1024, "default", ""),
    ],
)
def test_auto_goes_by_a_rule_gives_it_keeps_it_on_resume_and_engages_unless_it_is_torchs(
    more: list[str],
    limit: int,
    chosen: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "MAX_MATRIX_MB", limit)
    with runs.opened("optimization=none", *GPT, *more, folder=tmp_path) as run:
        (choice,) = [c for c in run.choices if c.key == attention.KEY]
        row = runs.status(train(run), "attention")
    assert choice.value == chosen and reason in choice.reason
    assert row.engaged is (chosen != "default"), row.reason
    assert row.engaged or row.reason == f"kernel default: {choice.reason}"
    again = ["optimization=none", *GPT, *more, "checkpoint.resume=auto"]
    with runs.opened(*again, folder=tmp_path) as run:
        (choice,) = [c for c in run.choices if c.key == attention.KEY]
    assert (choice.value, choice.reason) == (chosen, "kept from the resumed run")


def test_a_kernel_that_cannot_be_had_here_has_a_reason() -> None:
    with runs.opened(*GPT, f"{KERNEL}cudnn") as run:
        row = next(row for row in run.unapplied_techniques if row.name == "attention")
    assert "NVIDIA GPUs only" in row.reason


class Dropping(nn.Module):
    """Has the function under a name of its own, and drops shares."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(16, 10), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 4, 2)
        attended = scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)
        return self.layer(attended.flatten(1))


scaled_dot_product_attention = F.scaled_dot_product_attention


def test_a_function_that_was_imported_by_name_is_replaced_too() -> None:
    model, x = Dropping(0.0), torch.randn(2, 16)
    with attention.use_kernel("plain", model):
        assert not flash_calls(lambda: model(x))
    assert flash_calls(lambda: model(x))


def test_what_a_kernel_cannot_take_is_detected_by_trying() -> None:
    asked = [*TABLE, ON, f"{KERNEL}flash"]
    with runs.opened(*asked, given=Components(Dropping())) as run:
        row = next(row for row in run.unapplied_techniques if row.name == "attention")
    assert "flash does not support the model's calls" in row.reason and "dropout" in row.reason


class WrittenByHand(nn.Module):
    """Multiplies matrices as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.attention(self.first(x).view(-1, 4, 4)).flatten(1))  # type: ignore[no-any-return]

    def attention(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, x.transpose(1, 2)).div(2.0).softmax(-1), x)


class OnlyOfFew(WrittenByHand):
    """Calls attention for the samples of the trial, and multiplies matrices in training."""

    def attention(self, x: Tensor) -> Tensor:
        if len(x) > attention.SAMPLES:
            return super().attention(x)
        return F.scaled_dot_product_attention(x, x, x)


ULTRA = ["optimization=ultra", "optimization.measure=false"]
LEVELS = [
    pytest.param(["optimization=none", ON], id="eager"),
    pytest.param(ULTRA, id="ultra", marks=[runs.needs_compiler, pytest.mark.slow]),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", [WrittenByHand, OnlyOfFew])
def test_matrix_products_are_not_counted_as_attention(
    model: type[nn.Module], level: list[str]
) -> None:
    asked = [*TABLE, *level, f"{KERNEL}math"]
    with runs.opened(*asked, given=Components(model())) as run:
        row = runs.status(train(run), "attention")
    assert row.requested and not row.engaged
    if model is OnlyOfFew:
        assert row.status == "failed"
        assert row.reason == "no attention kernel ran" and row.evidence["ran"] == {}
    else:
        assert row.status == "skipped"
        assert row.reason == "the model does not call scaled_dot_product_attention"
