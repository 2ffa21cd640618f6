"""Language modelling: loss per token, its units, and what does not count."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runner.core.errors import ConfigError
from runner.core.objectives.language_modelling import LanguageModellingObjective
from tests.core.objectives.sums import totals, weighted_loss

CUTS = ([4, 4, 1], [1, 6, 2])


def samples(vocab: int, masked: bool = False) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, vocab, (9, 7))
    logits = torch.randn(9, 7, vocab) + 2 * F.one_hot(target, vocab)
    if masked:  # rows keep 7, 6, 5, … tokens
        target[torch.arange(7) < torch.arange(9)[:, None] % 7] = -100
    return logits, target


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_metrics_over_uneven_batches_are_those_of_numpy(cuts: list[int], masked: bool) -> None:
    logits, target = samples(30, masked)
    objective = LanguageModellingObjective(30)
    sums = totals(objective, logits, target, cuts)
    whole = float(objective(logits, target))
    assert int(objective.weight(target)) == int((target >= 0).sum())
    assert weighted_loss(objective, logits, target, cuts) == pytest.approx(whole)
    rows, labels = logits.numpy().reshape(-1, 30).astype(np.float64), target.numpy().reshape(-1)
    rows, labels = rows[labels != -100], labels[labels != -100]
    log_p = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    loss = float(-log_p[np.arange(len(labels)), labels].mean())
    assert objective.metrics(sums) == pytest.approx(
        {
            "loss": loss,
            "bits_per_token": loss / log(2),
            "perplexity": exp(loss),
            "accuracy": float((rows.argmax(1) == labels).mean()),
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("vocab", "unit"), [(256, "bits_per_byte"), (50, "bits_per_token"), (None, "bits_per_token")]
)
def test_bits_are_per_byte_where_tokens_are_bytes(vocab: int | None, unit: str) -> None:
    objective = LanguageModellingObjective(vocab)
    metrics = objective.metrics(objective.batch_sums(*samples(vocab or 50)))
    assert metrics[unit] == pytest.approx(metrics["loss"] / log(2))
    assert sum(name.startswith("bits") for name in metrics) == 1


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((9, 7, 20), r"20 logits a token for 30 ids"),
        ((9, 30, 7), r"returns \[9, 30, 7\] for targets of \[9, 7\]"),
        ((9, 30), r"returns \[9, 30\] for targets of \[9, 7\]"),
    ],
)
def test_logits_that_do_not_fit_are_an_error(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LanguageModellingObjective(30)(torch.randn(shape), samples(30)[1])


def test_many_logits_are_tallied_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = samples(30, masked=True)
    objective = LanguageModellingObjective(30)
    expected = objective.metrics(objective.batch_sums(logits.bfloat16(), target))
    rows_of_4 = 30 * 4
    monkeypatch.setattr("runner.core.objectives.language_modelling.LOGITS_PER_SLICE", rows_of_4)
    metrics = objective.metrics(objective.batch_sums(logits.bfloat16(), target))
    assert metrics == pytest.approx(expected)
