"""Every model: shapes, gradients, 16 bits; of transformers causality, padding, positions."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core.errors import DataError
from runner.core.interfaces.batch import call_model
from runner.core.models.cnn import CNN
from runner.core.models.mlp import MLP
from runner.core.models.transformer import GPT, TextClassifier


def mlp(**changes: Any) -> MLP:
    return MLP(
        **{"in_features": 64, "classes": 10, "width": 32, "depth": 2, "dropout": 0.0, **changes}
    )


def cnn(**changes: Any) -> CNN:
    sizes = {"in_channels": 1, "image_size": 8, "classes": 10}
    return CNN(**{**sizes, "width": 8, "stages": 3, "blocks": 2, **changes})


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


def images() -> Tensor:
    return torch.randn(5, 1, 8, 8)


def masked() -> tuple[Tensor, Tensor]:
    return ids(), mask(16, 3, 1, 9, 12).bool()


def large_cnn() -> CNN:
    return cnn(in_channels=3, image_size=32)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], tuple[int, ...]]] = {
    "mlp over images": (lambda: mlp(dropout=0.5), images, (5, 10)),
    "mlp without hidden layers": (lambda: mlp(depth=0), lambda: torch.randn(5, 64), (5, 10)),
    "cnn 8": (cnn, images, (5, 10)),
    "cnn 32": (large_cnn, lambda: torch.randn(4, 3, 32, 32), (4, 10)),
    "cnn deeper than the image halves": (lambda: cnn(stages=5, width=4), images, (5, 10)),
    "gpt": (lambda: gpt(dropout=0.2), ids, (5, SEQUENCE, VOCAB)),
    "classifier": (lambda: classifier(dropout=0.1), ids, (5, 6)),
    "classifier with a mask": (lambda: classifier(dropout=0.1), masked, (5, 6)),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_reaches_every_parameter(case: str, precision: str) -> None:
    make, inputs, shape = CASES[case]
    model = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = call_model(model, inputs())
    assert output.shape == shape and output.isfinite().all()
    logits = output.float().flatten(0, -2)
    F.cross_entropy(logits, torch.arange(len(logits)) % shape[-1]).backward()
    assert list(model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_cnn_works_on_at_most_64_pixels_and_at_least_4_after_its_stem() -> None:
    model = cnn(in_channels=3, image_size=200, stages=7, blocks=1, width=2)
    sides: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, y: sides.append(y.shape[-1]))
    model(torch.randn(1, 3, 200, 200))
    assert sides == [50, 25, 13, 7, 7, 7, 7]


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
