"""Models that nobody here wrote go through every level; hard ones end in a run or a clear error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from runner import build, compose, train
from runner.techniques.base import TechniqueStatus
from runner.training.summary import Summary

COMPILES = shutil.which("g++") is not None
QUIET = ["monitoring.progress=false", "device=cpu", "device.threads=2", "training.steps=6"]
GPT2 = [
    "data=stdlib_text",
    "data.sequence=32",
    "training.batch_size=4",
    "model._target_=transformers.GPT2LMHeadModel",
    "+model.config._target_=transformers.GPT2Config",
    "+model.config.n_layer=2",
    "+model.config.n_embd=32",
    "+model.config.n_head=2",
    "+model.config.vocab_size=256",
    "+model.config.n_positions=32",
    "+model.config.use_cache=false",
    "security.trusted=[transformers]",
]
BERT = [
    "data=stdlib_parts",
    "data.sequence=32",
    "training.batch_size=4",
    "model._target_=transformers.BertForSequenceClassification",
    "+model.config._target_=transformers.BertConfig",
    "+model.config.num_hidden_layers=2",
    "+model.config.hidden_size=32",
    "+model.config.num_attention_heads=2",
    "+model.config.intermediate_size=64",
    "+model.config.vocab_size=258",
    "+model.config.max_position_embeddings=32",
    "+model.config.id2label={0:a,1:b,2:c,3:d,4:e,5:f}",
    "security.trusted=[transformers]",
]
TABLE = [
    "data=synthetic",
    "data.form=tabular",
    "data.features=16",
    "training.batch_size=32",
    "security.trusted=[my_package]",
]
pytestmark = pytest.mark.usefixtures("my_package")


def trained(*overrides: str) -> Summary:
    with build(compose([*QUIET, *overrides])) as run:
        return train(run)


def rows(summary: Summary) -> dict[str, TechniqueStatus]:
    return {row.name: row for row in summary.techniques if row.requested}


def told(summary: Summary) -> None:
    """Each technique asked for either took hold or says why not."""
    assert summary.status == "done"
    for name, row in rows(summary).items():
        assert row.engaged or row.reason, name
        assert "Traceback" not in row.reason
        assert "could not be looked at" not in row.reason, (name, row.reason)


LEVELS = ["memory_efficient", pytest.param("advanced", marks=pytest.mark.slow)]
COMPILED = [
    pytest.param(
        level,
        marks=[pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="compiling needs g++")],
    )
    for level in ("compile", "ultra", "full")
]


@pytest.mark.parametrize("level", [*LEVELS, *COMPILED])
@pytest.mark.parametrize("model", [GPT2, BERT], ids=["gpt2", "bert"])
def test_a_hugging_face_model_goes_through_every_level(model: list[str], level: str) -> None:
    pytest.importorskip("transformers")
    summary = trained(*model, f"optimization={level}")
    told(summary)
    if level == "ultra":
        found = rows(summary)
        assert found["whole_step"].engaged, found["whole_step"].reason
        assert found["attention"].engaged, found["attention"].reason


@pytest.mark.skipif(not COMPILES, reason="compiling needs g++")
@pytest.mark.parametrize("model", ["Breaking", "Mapped", "Complex"])
def test_a_hard_model_trains_under_ultra_and_each_technique_says_what_became_of_it(
    model: str,
) -> None:
    data = ["data._target_=my_package.MappedTable"] if model == "Mapped" else TABLE[:3]
    summary = trained(
        *data,
        *TABLE[3:],
        f"model._target_=my_package.{model}",
        "optimization=ultra",
        "optimization.whole_step.cpp_wrapper=false",
    )
    told(summary)
    assert torch.isfinite(torch.tensor(summary.metrics["val/loss"]))
    found = rows(summary)
    if model == "Mapped":
        assert found["whole_step"].engaged, found["whole_step"].reason
    if model == "Breaking":
        assert not found["whole_step"].engaged
        assert not found["compile"].engaged
        assert "Tensor.item()" in found["compile"].reason


def test_batchnorm_under_recompute_counts_each_batch_once() -> None:
    def buffers(*overrides: str) -> dict[str, torch.Tensor]:
        own = ["model._target_=my_package.Statistics", *overrides]
        with build(compose([*QUIET, *TABLE, *own])) as run:
            train(run)
        return dict(run.model.named_buffers())

    plain = buffers("optimization=none")
    again = buffers(
        "optimization=none",
        "optimization.recompute.enabled=true",
        "optimization.recompute.what=full",
    )
    assert plain
    assert all(torch.equal(again[name], value) for name, value in plain.items())


def test_no_compiler_on_the_path_leaves_the_rest_of_ultra_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    summary = trained(*TABLE, "model=mlp", "model.width=256", "optimization=ultra")
    told(summary)
    found = rows(summary)
    assert "no C++ compiler" in found["compile"].reason
    assert "no C++ compiler" in found["whole_step"].reason
    assert found["fused_optimizer"].engaged


def test_a_model_that_knows_its_batch_size_trains_and_what_had_to_look_ahead_says_so() -> None:
    data = ["data.drop_last=true", "data.samples=320", "data.validation=0.1"]
    asked = [
        "optimization=advanced",
        "optimization.attention.enabled=true",
        "optimization.compile.enabled=false",
    ]
    told(trained(*TABLE, *data, *asked, "model._target_=my_package.KnowsItsBatch"))


def test_a_part_that_its_owner_keeps_in_evaluation_mode_stays_in_it() -> None:
    from runner import optimize_training_loop

    backbone = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    model = torch.nn.Sequential(backbone, torch.nn.Linear(8, 2))
    model[1].train()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 8), torch.randint(0, 2, (16,))
    with optimize_training_loop(
        model, optimizer, torch.nn.functional.cross_entropy, level="advanced"
    ) as loop:
        for _ in range(3):
            loop(batch)
        loop.summary()
        assert not backbone.training and model[1].training
    assert int(backbone[1].num_batches_tracked) == 0
