"""Losses with a link: predictions and metrics are in the unit of the targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runner.core.data.target_scale import in_target_unit
from runner.core.interfaces.batch import Sizes
from runner.core.jobs.evaluate import build_trained
from runner.core.objectives.build import adapt_sizes
from runner.core.objectives.named_metrics import build_named_metrics
from runner.core.schemas.models import ObjectiveConfig
from runner.datasets.predict import predict_batches
from tests import runs

LOSS = "objective._target_=torch.nn.PoissonNLLLoss"


@pytest.mark.parametrize(
    ("more", "link"), [((), np.exp), (("+objective.log_input=false", "+objective.eps=10"), None)]
)
def test_predictions_of_a_poisson_loss_are_rates_unless_the_model_returns_them(
    tmp_path: Path, more: tuple[str, ...], link: np.ufunc | None
) -> None:
    generator = np.random.default_rng(0)
    x = generator.random(60)
    counts = generator.poisson(np.exp(1 + 2 * x))
    rows = "\n".join(f"{a:.4f},{n}" for a, n in zip(x, counts, strict=True))
    (tmp_path / "counts.csv").write_text(f"x,n\n{rows}\n")
    data = ["data=tabular", f"data.path={tmp_path}/counts.csv", "data.target=n"]
    data += ["data.task=regression", LOSS, *more, "training.steps=5", "optimization=none"]
    summary = runs.trained(*data, folder=tmp_path / "run")
    choices = [choice.value for choice in summary.choices if choice.key == "objective"]
    assert choices == (["predictions are exp of the output"] if link else [])
    asked = [*data, "job=predict", f"checkpoint.resume={tmp_path}/run"]
    with build_trained(runs.config(*asked), None) as run:
        columns = list(predict_batches(run))
        rows_in_order = np.concatenate([part["line"] for part in columns]) - 2
        predicted = np.concatenate([part["prediction"] for part in columns])
        inputs, _ = run.validation.fetch.source.fetch(rows_in_order, None)
        with torch.no_grad():
            output = run.model(inputs)[:, 0].double().numpy()
    np.testing.assert_allclose(predicted, link(output) if link else output, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "link"),
    [
        ("torch.nn.PoissonNLLLoss", torch.exp),
        ("torch.nn.functional.poisson_nll_loss", torch.exp),
        ("torch.nn.BCEWithLogitsLoss", torch.sigmoid),
        ("torch.nn.functional.binary_cross_entropy_with_logits", torch.sigmoid),
        ("torch.nn.MSELoss", torch.clone),
        ("own.poisson", torch.clone),
    ],
)
def test_a_loss_determines_the_function_from_output_to_target_unit(loss: str, link: object) -> None:
    sizes = Sizes("regression", classes=1, target_mean=5.0, target_deviation=2.0)
    adapted, _ = adapt_sizes(ObjectiveConfig(_target_=loss), sizes, own=False)
    output = torch.linspace(-2, 2, 9)
    assert callable(link)
    torch.testing.assert_close(in_target_unit(adapted, output), link(output))
    torch.testing.assert_close(in_target_unit(sizes, output), output * 2 + 5)
    if link is torch.exp:
        named, _ = build_named_metrics(["MeanAbsoluteError"], adapted, None)
        state = named.batch_sums(output[:, None], output.exp())
        assert state.compute(named)["MeanAbsoluteError"] < 1e-6
