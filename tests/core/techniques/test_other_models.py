"""Models of other authors go through every level; hard ones end in a run or a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner import optimize_training_loop
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.record.summary import Summary
from tests import runs

STEPS = "training.steps=6"
GPT2 = [
    *["data.sequence=32", "training.batch_size=4", "security.trusted=[transformers]"],
    *["data=stdlib_text", "model._target_=transformers.GPT2LMHeadModel"],
    *["+model.config._target_=transformers.GPT2Config", "+model.config.n_layer=2"],
    *["+model.config.n_embd=32", "+model.config.n_head=2", "+model.config.vocab_size=256"],
    *["+model.config.n_positions=32", "+model.config.use_cache=false"],
]
FORM = ["data=synthetic", "data.form=tabular", "data.features=16"]
OWN = ["training.batch_size=32", *runs.OURS, STEPS]
ULTRA = ["optimization=ultra", "optimization.measure=false"]
pytestmark = pytest.mark.usefixtures("my_package")


def requested(summary: Summary) -> dict[str, TechniqueStatus]:
    """The techniques that were requested: each either engaged or has a reason."""
    assert summary.status == "done"
    rows = {row.name: row for row in summary.techniques if row.requested}
    for name, row in rows.items():
        assert row.engaged or row.reason, name
        assert "Traceback" not in row.reason
        assert "could not be collected" not in row.reason, (name, row.reason)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "level",
    [
        *("memory_efficient", "advanced"),
        *[pytest.param(level, marks=runs.needs_compiler) for level in ("compile", "ultra", "full")],
    ],
)
def test_a_hugging_face_model_goes_through_every_level(level: str) -> None:
    pytest.importorskip("transformers")
    by_rule = "optimization.measure=false"
    rows = requested(runs.trained(*GPT2, STEPS, f"optimization={level}", by_rule))
    if level == "ultra":
        assert rows["whole_step"].engaged, rows["whole_step"].reason
        assert rows["attention"].reason.startswith("kernel default: torch's choice")


@runs.needs_compiler
@pytest.mark.parametrize(
    "model", ["Breaking", pytest.param("Mapped", marks=pytest.mark.slow), "Complex"]
)
def test_a_hard_model_trains_under_ultra_and_each_technique_reports_what_it_did(
    model: str,
) -> None:
    data = ["data._target_=my_package.MappedTable"] if model == "Mapped" else FORM
    own = [f"model._target_=my_package.{model}", "optimization.whole_step.cpp_wrapper=false"]
    summary = runs.trained(*data, *OWN, *own, *ULTRA)
    rows = requested(summary)
    assert torch.isfinite(torch.tensor(summary.metrics["val/loss"]))
    if model == "Mapped":
        assert rows["whole_step"].engaged, rows["whole_step"].reason
    if model == "Breaking":
        assert not rows["whole_step"].engaged
        assert not rows["compile"].engaged
        assert "Tensor.item()" in rows["compile"].reason


def test_no_compiler_on_the_path_leaves_the_rest_of_ultra_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    mlp = ["model=mlp", "model.width=256", "optimization=ultra"]
    rows = requested(runs.trained(*FORM, *OWN, *mlp))
    for name in ("compile", "whole_step"):
        assert "no C++ compiler" in rows[name].reason
    assert rows["fused_optimizer"].engaged


def test_a_model_that_knows_its_batch_size_trains_and_what_had_to_try_it_gives_a_reason() -> None:
    sizes = ["data.drop_last=true", "data.samples=320", "data.validation=0.1"]
    asked = ["optimization=advanced", "optimization.attention.enabled=true"]
    asked += ["optimization.compile.enabled=false", "model._target_=my_package.KnowsItsBatch"]
    requested(runs.trained(*FORM, *OWN, *sizes, *asked))


def test_a_part_that_its_owner_keeps_in_evaluation_mode_stays_in_it() -> None:
    backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    model = torch.nn.Sequential(backbone, torch.nn.Linear(8, 2))
    model[1].train()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 8), torch.randint(0, 2, (16,))
    loss = torch.nn.functional.cross_entropy
    with optimize_training_loop(model, optimizer, loss, level="advanced") as loop:
        for _ in range(3):
            loop(batch)
        loop.summary()
        assert not backbone.training and model[1].training
    assert int(backbone[1].num_batches_tracked) == 0
