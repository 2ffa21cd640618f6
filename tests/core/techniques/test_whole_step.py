"""The whole step as one graph: the same numbers as the ordinary one, and a way back to it."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import train
from runner.core.errors import DataError
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.core.techniques import compiler
from runner.core.train.step import make_step
from tests import runs
from tests.runs import differences, weights

pytestmark = runs.needs_compiler

TABLE = [
    *["device.threads=2", "optimization=none"],
    *["data=synthetic", "data.form=tabular", "data.features=16", "data.samples=390"],
    "training.batch_size=32",
]
TINY = [*TABLE, "model.width=16", "model.depth=1"]
WHOLE = [
    *["optimization.whole_step.enabled=true", "optimization.fused_optimizer.enabled=true"],
    "optimization.whole_step.cpp_wrapper=false",
]


def trained(*overrides: str, folder: Path | None = None) -> tuple[Run, Summary, list[float]]:
    losses: list[float] = []
    with runs.opened(*overrides, folder=folder) as run:
        run.hooks.append(runs.hook(on_report=lambda run, report: losses.extend(report.loss)))
        return run, train(run), losses


def everything(run: Run) -> list[Any]:
    return deepcopy([run.model.state_dict(), run.update.optimizer.state_dict()["state"]])


@pytest.mark.parametrize(
    "optimizer",
    [
        "optimizer.name=AdamW optimizer.ema=0.9 schedule=cosine",
        "optimizer.name=Adam optimizer.weight_decay=0.1 objective.loss=focal "
        "objective.class_weights=balanced",
    ],
    ids=["adamw", "adam and a focal loss"],
)
@pytest.mark.slow
def test_200_steps_in_one_graph_have_the_losses_of_the_ordinary_ones(optimizer: str) -> None:
    typed = [*TINY, "training.steps=200", *optimizer.split()]
    eager, _, expected = trained(*typed)
    whole, summary, losses = trained(*typed, *WHOLE)
    evidence = runs.status(summary, "whole_step").evidence
    assert evidence["graphs"] == 1
    assert evidence["graph_breaks"] == 0
    assert evidence["steps_in_one_graph"] == 200 - 200 // eager.train.steps_per_epoch  # ragged last
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[0] > 1.3 * losses[-1]
    for mine, theirs in zip(whole.update.average, eager.update.average, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.usefixtures("my_package")
def test_a_skipped_step_leaves_weights_state_and_buffers_bit_equal_and_compiles_nothing() -> None:
    own = ["model._target_=my_package.Statistics", *runs.OURS]
    with runs.opened(*TABLE, *own, *WHOLE, "training.steps=9") as run:
        run.model.train()
        inputs, target = next(run.train.batches(0))
        step, _ = make_step(run, (inputs, target))
        graphs = compiler.compilation_facts()["graphs"]
        assert run.step_graph is not None
        run.step_graph.check()
        before = everything(run)

        def skipped(inputs: Tensor, target: Tensor) -> Step:
            made, _ = make_step(run, (inputs, target))
            assert made.skipped.item() == 1
            assert differences(before, everything(run)) == []
            return made

        spoiled = inputs.clone()
        spoiled[3] = float("nan")
        assert not torch.isfinite(skipped(spoiled, target).grad_norm)
        for loss, norm in ((0.5, math.inf), (math.inf, 0.5), (0.25, 0.25)):
            run.update.set_limits(loss * float(step.loss), norm * float(step.grad_norm))
            made = skipped(inputs, target)
            assert made.loss.isfinite() and made.grad_norm.isfinite()
        run.update.set_limits(math.inf, math.inf)
        wrong = target.clone()
        wrong[7] = 1000
        skipped(inputs, wrong)
        with pytest.raises(DataError, match="target 1000 is out of range: classes are 0 to"):
            run.step_graph.check()
        wrong[7] = -100  # stands for no target
        assert make_step(run, (inputs, wrong))[0].skipped.item() == 0
        assert differences(before, everything(run))
        assert compiler.compilation_facts()["graphs"] == graphs
        assert run.step_graph.steps == 7


@pytest.mark.slow
def test_every_kind_of_clipping_is_in_the_graph_as_it_is_outside() -> None:
    typed = [*TINY, "training.steps=9", "optimizer=sgd", "optimizer.lr=1.0"]
    kinds = [f"stability.clip_{kind}" for kind in ("value=0.01", "adaptive=0.05", "norm=0.1")]
    kinds += ["stability.clip_per_group=true", "optimizer.weight_decay=0.01"]
    eager, _, expected = trained(*typed, *kinds)
    whole, summary, losses = trained(*typed, *kinds, *WHOLE)
    plain, _, _ = trained(*typed)
    assert runs.status(summary, "whole_step").evidence["steps_in_one_graph"] == 9
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, value in weights(eager).items():
        torch.testing.assert_close(weights(whole)[name], value, atol=1e-5, rtol=1e-4)
    assert not all(
        torch.allclose(weights(plain)[name], value, atol=1e-3)
        for name, value in weights(eager).items()
    )


def test_a_resumed_run_ends_with_the_weights_of_one_never_stopped(tmp_path: Path) -> None:
    never, _, _ = trained(*TINY, "training.steps=30", *WHOLE, folder=tmp_path / "a")
    trained(*TINY, "training.steps=30", "training.validate_every=15", *WHOLE, folder=tmp_path / "b")
    resume = f"checkpoint.resume={tmp_path / 'b' / 'checkpoints' / 'step_00000015'}"
    resumed, _, _ = trained(*TINY, "training.steps=30", resume, *WHOLE, folder=tmp_path / "c")
    assert resumed.progress.step == 30
    assert differences(weights(resumed), weights(never)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("my_package")
def test_a_number_of_the_model_that_changes_each_step_is_not_frozen() -> None:
    own = ["model._target_=my_package.Cooling", *runs.OURS]
    _, _, expected = trained(*TABLE, "training.steps=14", *own)
    _, summary, losses = trained(*TABLE, "training.steps=14", *WHOLE, *own)
    assert losses == pytest.approx(expected, rel=1e-4)  # compiled again, in the end given up
    assert summary.status == "done"


def test_a_hook_gets_gradients_and_options_of_the_optimizer_that_change_are_seen() -> None:
    class Changes(Hook):
        every = 3

        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_gradients(self, run: Run, step: Step) -> None:
            self.norms.append(float(run.update.parameters[0].grad.norm()))  # type: ignore[union-attr]

        def on_step(self, run: Run, step: Step) -> None:
            if step.number == 3:
                run.update.optimizer.param_groups[0]["weight_decay"] = 5.0

    results = []
    for overrides in ([], WHOLE):
        changes = Changes()
        with runs.opened(*TINY, "training.steps=9", *overrides) as run:
            run.hooks.append(changes)
            train(run)
            results.append(weights(run))
            assert (run.step_graph.steps if run.step_graph else 0) == (6 if overrides else 0)
        assert len(changes.norms) == 3 and all(norm > 0 for norm in changes.norms)
    eager, whole = results
    for name, value in eager.items():
        torch.testing.assert_close(whole[name], value, atol=1e-5, rtol=1e-4)


def test_a_user_loss_may_ignore_labels_and_gets_an_error_for_an_unknown_class() -> None:
    from torch.nn import functional as F

    from runner import create_training_pipeline

    inputs, target = torch.randn(96, 8), torch.randint(0, 3, (96,))
    target[::7] = -1
    model = torch.nn.Linear(8, 3)
    quiet = ["training.epochs=2", "monitoring=quiet", "training.batch_size=16"]
    with create_training_pipeline(
        model,
        (inputs, target),
        loss_fn=lambda o, t: F.cross_entropy(o, t, ignore_index=-1),
        level="ultra",
        overrides=[*quiet, "data.shuffle=false"],
        folder=None,
    ) as pipeline:
        assert pipeline.train().skipped_steps == 0


def test_after_a_wrong_target_what_was_learned_is_saved(tmp_path: Path) -> None:
    def spoil(run: Run) -> None:
        assert run.step_graph is not None
        run.step_graph.targets.any_wrong.fill_(True)

    with runs.opened(*TINY, *WHOLE, "training.steps=40", folder=tmp_path) as run:
        run.hooks.append(runs.AtSteps(4, spoil))
        with pytest.raises(DataError, match="is out of range"):
            train(run)
    steps = [int(p.name.removeprefix("step_")) for p in tmp_path.glob("checkpoints/step_*")]
    assert max(steps) >= 4
