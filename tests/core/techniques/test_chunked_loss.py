"""A loss over chunks of tokens: the numbers of the whole logits, without the whole logits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner import evaluate, train
from runner.core.errors import DataError
from runner.core.interfaces.nested import DeferredLogits
from runner.core.objectives.chunked_cross_entropy import defer_logits, mean_cross_entropy
from runner.core.objectives.language_modelling import LanguageModellingObjective
from runner.core.train.step import forward_backward
from tests import runs

TOKENS, WIDTH, VOCAB = 50, 16, 301
CHUNKED = [
    "optimization.chunked_loss.enabled=true",
    "optimization.chunked_loss.min_mb=0",
    "optimization.chunked_loss.chunk=48",
]
GPT = ["model=gpt", "model.width=16", "model.heads=2", "model.depth=1"]


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


Sample = tuple[Tensor, Tensor, Tensor | None, Tensor]


def sample(bias: bool = True) -> Sample:
    target = torch.randint(0, VOCAB, (TOKENS,))
    target[[3, 4, 20]] = -100
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH).mul(0.3).requires_grad_()
    return hidden, weight, torch.randn(VOCAB, requires_grad=True) if bias else None, target


def gradients(loss: Tensor, case: Sample, upstream: float = 1.0) -> list[Tensor]:
    leaves = [t for t in case[:3] if t is not None]
    return [loss.detach(), *torch.autograd.grad(loss * upstream, leaves)]


def chunked(case: Sample, chunk: int, upstream: float = 1.0) -> list[Tensor]:
    loss = mean_cross_entropy(DeferredLogits(*case[:3], chunk), case[3], -100)
    return gradients(loss, case, upstream)


@pytest.mark.parametrize(("chunk", "bias"), [(1, True), (16, False), (16, True), (64, True)])
def test_loss_and_gradients_are_those_of_the_whole_logits(chunk: int, bias: bool) -> None:
    hidden, weight, added, target = case = sample(bias=bias)
    whole = F.cross_entropy(F.linear(hidden, weight, added).float(), target)
    torch.testing.assert_close(chunked(case, chunk), gradients(whole, case))


def test_an_upstream_gradient_multiplies_in_fp16_too() -> None:
    case = sample()
    with torch.autocast("cpu", torch.float16):
        once, scaled = chunked(case, 16), chunked(case, 16, 65536.0)
    torch.testing.assert_close([g / 65536 for g in scaled[1:]], once[1:])
    assert all(float(g.abs().max()) > 0 for g in once)


def test_a_target_outside_the_vocabulary_is_an_error_that_names_it() -> None:
    hidden, weight, bias, target = sample()
    target[7] = VOCAB
    with pytest.raises(DataError, match=f"target {VOCAB} is out of range"):
        LanguageModellingObjective(VOCAB)(DeferredLogits(hidden, weight, bias, 16), target)


class Embedded(nn.Module):
    """An embedding and an output layer."""

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.tokens(input_ids))


class Capped(Embedded):
    def forward(self, input_ids: Tensor) -> Tensor:
        return 30 * torch.tanh(super().forward(input_ids) / 30)


class Warmed(Embedded):
    """Divides its logits, but only in training."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits / 2 if self.head.training else logits


@runs.needs_compiler
# the tracer makes an instance of torch.autograd.Function and warns of it (torch 2.13)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_into_one_graph_with_its_gradients() -> None:
    model = Embedded()
    defer_logits(model.head, 16)
    ids, target = torch.randint(0, VOCAB, (2, 25)), torch.randint(0, VOCAB, (2, 25))
    objective, parameters = LanguageModellingObjective(VOCAB), list(model.parameters())

    def step(ids: Tensor, target: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(model(ids), target)
        return [loss.detach(), *torch.autograd.grad(loss * 8.0, parameters)]

    expected = step(ids, target)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.testing.assert_close(compiled(ids, target), expected, rtol=0.02, atol=1e-3)


@pytest.fixture
def tokens(tmp_path: Path) -> list[str]:
    """A run over token ids below 300."""
    ids = np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16)
    ids.tofile(tmp_path / "train.bin")
    ids[:600].tofile(tmp_path / "val.bin")
    return [
        *["training.steps=3", "data=tokens", f"data.path={tmp_path}", "data.vocab=300"],
        *["data.sequence=16", "training.batch_size=12", "security.trusted=[tests]"],
    ]


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_a_step_of_gpt_is_the_same_also_in_micro_batches(
    tokens: list[str], micro_batch: int
) -> None:
    steps = []
    for more in (CHUNKED, []):
        with runs.opened(*tokens, *GPT, f"training.micro_batch={micro_batch}", *more) as run:
            loss = forward_backward(run, next(run.train.batches(0))).loss
            steps.append([loss, *(p.grad for p in run.model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*steps)


def test_the_evidence_is_the_largest_slice_and_evaluation_and_a_closed_run_know_nothing_of_it(
    tokens: list[str],
) -> None:
    with runs.opened(*tokens, *GPT) as run:
        keys, expected = list(run.model.state_dict()), evaluate(run).metrics
    with runs.opened(*tokens, *GPT, *CHUNKED) as run:
        assert list(run.model.state_dict()) == keys
        assert evaluate(run).metrics == pytest.approx(expected)
        row = runs.status(train(run), "chunked_loss")
        ids = torch.zeros(1, 4, dtype=torch.long)
        assert isinstance(run.model.eval()(ids), Tensor)
        assert isinstance(run.model.train()(ids), DeferredLogits)
    assert isinstance(run.model(ids), Tensor)
    assert row.engaged, row.reason
    facts = row.evidence
    assert (facts["tokens"], facts["vocab"], facts["chunks"]) == (192, 300, 4)
    assert facts["largest_mb"] == pytest.approx(48 * 300 * 4 / 2**20, abs=0.05)
    assert facts["whole_mb"] == pytest.approx(192 * 300 * 4 / 2**20, abs=0.05)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([*GPT, "optimization.chunked_loss.min_mb=64"], r"take 0\.2 MB \(min_mb=64\)"),
        ([*GPT, "optimization.chunked_loss.chunk=192"], "192 tokens fit in one chunk"),
        (
            ["model._target_=tests.core.techniques.test_chunked_loss.Capped"],
            "not the output of a linear",
        ),
        (
            ["model._target_=tests.core.techniques.test_chunked_loss.Warmed"],
            "needs its full logits .* TypeError",
        ),
    ],
    ids=["small", "one chunk", "capped", "warmed"],
)
def test_where_nothing_is_to_be_had_the_reason_is_given_and_the_run_continues(
    tokens: list[str], overrides: list[str], reason: str
) -> None:
    summary = runs.trained(*tokens, *CHUNKED, *overrides)
    row = runs.status(summary, "chunked_loss")
    assert summary.status == "done" and not row.engaged
    assert re.search(reason, row.reason), row.reason
