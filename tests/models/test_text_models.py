"""The transformers: causality, padding, initial weights, positions."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import DataError
from runner.models.transformer import GPT, TextClassifier

VOCAB, SEQUENCE = 50, 16


def gpt(**changes: Any) -> GPT:
    own = {"width": 32, "depth": 3, "heads": 4, "dropout": 0.0}
    return GPT(**{"vocab": VOCAB, "sequence": SEQUENCE, **own, **changes})


def classifier(**changes: Any) -> TextClassifier:
    own = {"width": 32, "depth": 2, "heads": 4, "dropout": 0.0}
    return TextClassifier(**{"vocab": VOCAB, "sequence": SEQUENCE, "classes": 6, **own, **changes})


def ids(batch: int = 5, length: int = SEQUENCE) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length))


def mask(*lengths: int) -> Tensor:
    return (torch.arange(SEQUENCE) < torch.tensor(lengths)[:, None]).long()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_reaches_every_parameter_of_gpt(precision: str) -> None:
    model, tokens = gpt(dropout=0.2), ids(5, SEQUENCE + 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = model(tokens[:, :-1])
    assert output.shape == (5, SEQUENCE, VOCAB)
    F.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    check_gradients(model)


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_a_gradient_reaches_every_parameter_of_the_classifier(masked: bool) -> None:
    model = classifier(dropout=0.1)
    output = model(ids(), mask(16, 3, 1, 9, 12).bool() if masked else None)
    assert output.shape == (5, 6)
    F.cross_entropy(output.float(), torch.arange(5)).backward()
    check_gradients(model)


def test_a_fresh_gpt_finds_every_token_about_equally_likely() -> None:
    model = gpt(vocab=256, depth=6, width=64)
    tokens = torch.randint(0, 256, (16, SEQUENCE + 1))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(log(256), abs=0.1)


@pytest.mark.parametrize("length", [SEQUENCE, 7])
def test_a_later_token_does_not_change_gpts_earlier_logits(length: int) -> None:
    model, tokens = gpt().eval(), ids(2, length)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert ((after - before)[:, 4:].abs().amax(-1) > 1e-6).all()


def test_gpt_ties_its_output_to_its_embedding() -> None:
    model = gpt()
    assert [n for n, p in model.named_parameters() if p.shape[0] == VOCAB] == ["tokens.weight"]
    storages = [t.untyped_storage().data_ptr() for t in model.state_dict().values()]
    assert len(storages) == len(set(storages))
    model(torch.zeros(1, 4, dtype=torch.long)).logsumexp(-1).sum().backward()
    grad = model.tokens.weight.grad
    assert grad is not None
    assert (grad[1:].abs().sum(1) > 0).all()  # rows that were not looked up: from the output


def test_padding_does_not_change_the_classifiers_output() -> None:
    model, lengths = classifier().eval(), (16, 3, 1, 9)
    tokens = ids(4)
    padded = model(tokens, mask(*lengths))
    other = torch.where(mask(*lengths).bool(), tokens, ids(4))
    torch.testing.assert_close(model(other, mask(*lengths)), padded)
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length])
        torch.testing.assert_close(alone, padded[row : row + 1], atol=1e-5, rtol=1e-4)


def test_an_empty_text_gives_a_finite_output_and_gradient() -> None:
    model = classifier()
    output = model(ids(2), mask(0, 4))
    assert output.isfinite().all()
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [gpt, classifier])
def test_more_tokens_than_positions_is_an_error_that_names_both(make: Any) -> None:
    with pytest.raises(DataError, match=r"17 tokens.* 16.*data\.sequence=17"):
        make()(ids(2, 17))
