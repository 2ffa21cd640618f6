"""Techniques that are right pass, and mutants of them fail with the tensor they went wrong at."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runner.core.build.setup import Components
from runner.core.config.variants import without_techniques
from runner.measure.parity import trajectory
from runner.measure.parity.distance import Agreement, Parity
from runner.measure.parity.reference import ParityReference, check_parity
from tests import runs

QUIET = ["optimization=none"]
MODELS = {
    "mlp": ["model.width=32"],
    "cnn": "model=cnn model.width=8 model.stages=2 model.blocks=1".split(),
    "gpt": """
    data=stdlib_text data.sequence=32 model=gpt model.width=32 model.depth=2
    model.heads=2 training.batch_size=8
    """.split(),
    "classifier": """
    data=stdlib_parts data.sequence=32 model=classifier model.width=32 model.heads=2
    training.batch_size=16
    """.split(),
}
DROPPING = [*MODELS["mlp"], "model.dropout=0.2"]
BF16 = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]
PARTS = ["optimization.accumulation.enabled=true", "optimization.accumulation.micro_batch=6"]
FUSED = ["optimization.fused_optimizer.enabled=true"]
NHWC = ["optimization.channels_last.enabled=true"]
STEPS = 8  # enough for what is wrong at once; tests/measure/parity/test_mutants.py makes all 40


@pytest.fixture(autouse=True)
def _mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def judged(model: list[str], technique: list[str], mutant: str = "") -> Parity:
    extra = [f"optimization.extra=[parity_mutants.{mutant}]", "security.trusted=[parity_mutants]"]
    overrides = [*QUIET, *model, *technique, *(extra if mutant else [])]
    return check_parity(runs.config(*overrides), runs.config(*QUIET, *model), STEPS, attribute=True)


class Fourier(nn.Module):
    """A layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, dtype=torch.cfloat))
        self.out = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.ifft(torch.fft.fft(x) * self.weight).real)


class TwoBranches(nn.Module):
    """One of two layers a step: weights without a gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(self.training and torch.rand(()) < 0.5)](x)


class Teacher(nn.Module):
    """A copy that the forward moves, frozen or not, and weights that it limits."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.net = nn.Linear(30, 2)
        self.copy, self.rate = deepcopy(self.net).requires_grad_(not frozen), 0.1

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.net.weight.clamp_(-0.1, 0.1)
                for moved, weight in zip(
                    self.copy.parameters(), self.net.parameters(), strict=True
                ):
                    moved.lerp_(weight, self.rate)
            soft = self.copy(x)
        return self.net(x) + 0.1 * soft


# -- what is right passes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        Fourier(),
        TwoBranches(),
        Teacher(True),
        pytest.param(Teacher(False), marks=pytest.mark.slow),
    ],
    ids=["complex", "unused", "frozen teacher", "teacher"],
)
def test_complex_unused_or_moved_weights_give_no_false_alarm(
    model: nn.Module,
) -> None:
    given = Components(model=model)
    table = [*QUIET, "data=cancer"]
    reference = ParityReference(runs.config(*table), STEPS, given)
    found = reference.judge(runs.config(*table, *FUSED))
    assert found.verdict is not Agreement.fail, found.first
    assert found.reference == "fp64"
    kinds = {row.kind for row in found.rows}
    assert {"gradient", "update"} <= kinds
    assert ("buffer" in kinds) is isinstance(model, Teacher)
    if isinstance(model, Teacher):
        # moved twice as far
        extra = ["optimization.extra=[parity_mutants.FasterTeacher]"]
        trusted = "security.trusted=[parity_mutants]"
        wrong = reference.judge(runs.config(*table, *FUSED, *extra, trusted))
        assert wrong.verdict is Agreement.fail and wrong.first is not None
        assert wrong.first.name in ("copy.weight", "copy.bias", "loss", "grad_norm", "net.weight")
        if not model.copy.weight.requires_grad:  # compared as a buffer alone
            kinds = {row.kind: row.within for row in wrong.rows if row.name == "copy.weight"}
            assert kinds["buffer"] is False and "update" not in kinds


def test_an_update_is_measured_from_the_weights_that_the_forward_left() -> None:
    table = [*QUIET, "data=cancer"]
    reference = ParityReference(runs.config(*table), STEPS, Components(model=Teacher(True)))
    frozen = ["optimization.extra=[parity_mutants.Frozen]", "security.trusted=[parity_mutants]"]
    found = reference.judge(runs.config(*table, *frozen))
    row = next(row for row in found.rows if (row.kind, row.name) == ("update", "net.weight"))
    assert row.error == pytest.approx(1.0, abs=1e-3) and not row.within  # all of the update


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.slow) if m in ("classifier", "cnn") else m for m in MODELS],
)
def test_real_techniques_are_explained_by_precision_on_every_model(model: str) -> None:
    reference = ParityReference(runs.config(*QUIET, *MODELS[model]), STEPS)
    for technique in (BF16, [*FUSED, *NHWC], PARTS):
        found = reference.judge(runs.config(*QUIET, *MODELS[model], *technique))
        assert found.verdict is not Agreement.fail, (technique, found.first)
        assert found.techniques
        assert found.reference == "fp64"
        assert found.rows


def test_what_changes_nothing_is_exact() -> None:
    found = judged(MODELS["mlp"], [], "Harmless")
    assert found.verdict is Agreement.exact
    assert found.first is None


# -- mutants fail ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "technique", "mutant", "kind"),
    [
        (MODELS["mlp"], BF16, "DroppedGradient", "gradient"),
        (DROPPING, BF16, "NoDropout", "draw"),
    ],
)
def test_a_mutant_fails_at_what_it_spoils_and_is_named(
    model: list[str], technique: list[str], mutant: str, kind: str
) -> None:
    found = judged(model, technique, mutant)
    assert found.verdict is Agreement.fail
    assert found.first is not None
    assert found.first.kind == kind
    assert found.culprits == [mutant]
    assert all(verdict != "FAIL" for name, verdict in found.alone.items() if name != mutant)


def test_a_loss_scaled_wrong_under_accumulation_fails_and_takes_both_to_blame() -> None:
    found = judged(DROPPING, PARTS, "SumOfParts")
    assert found.verdict is Agreement.fail
    assert found.first is not None
    assert (found.first.kind, found.first.step) == ("loss", 1)
    assert found.culprits == ["accumulation", "SumOfParts"]
    assert "FAIL" not in found.alone.values()


# -- what is no fault of a technique's -------------------------------------------------------------


def test_batch_norm_under_accumulation_is_held_against_a_baseline_cut_the_same_way() -> None:
    found = judged(MODELS["cnn"], PARTS)
    assert found.verdict is Agreement.exact
    assert any("micro-batch of 6" in note for note in found.notes)


def test_a_model_that_does_not_run_in_fp64_is_held_against_the_baseline() -> None:
    own = ["model._target_=parity_mutants.WrittenInFp32", "security.trusted=[parity_mutants]"]
    fused = judged(own, FUSED)
    assert fused.verdict is Agreement.explained
    assert fused.reference == "the baseline itself"
    assert judged(own, [], "OneInAThousand").verdict is Agreement.fail


def test_a_large_model_makes_fewer_steps_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    small = runs.config(*QUIET, *MODELS["mlp"], *FUSED)
    monkeypatch.setattr(trajectory, "MAX_WEIGHT_STEPS", 12 * 3_466)
    found = check_parity(small, without_techniques(small))
    assert found.verdict is Agreement.explained
    assert 6 <= found.steps <= 12
    assert any("steps: 3,466 weights, 0.0 GFLOP a step" in one for one in found.not_judged)


def test_rounding_to_16_bits_is_named_as_a_place_for_faults_and_no_switch_stays() -> None:
    def switches() -> list[object]:
        import torch._inductor.config as inductor

        return [
            inductor.fallback_random,
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
        ]

    before = switches()
    alone = judged(MODELS["mlp"], BF16)
    assert any("the tolerance comes from amp itself" in omission for omission in alone.not_judged)
    both = judged(MODELS["mlp"], [*BF16, *FUSED])
    assert not any("gradients" in omission for omission in both.not_judged)
    assert switches() == before


@pytest.mark.parametrize(
    "optimizer", [["optimizer=adamw"], ["optimizer=sgd", "optimizer.weight_decay=0.1"]]
)
def test_gradients_are_inferred_from_the_moments_of_the_optimizer(optimizer: list[str]) -> None:
    fused = "optimization.fused_optimizer.enabled=true"
    with runs.opened(*QUIET, "model.width=8", *optimizer, fused, "stability.clip_norm=0.5") as run:
        batches = run.train.batches(0)
        for _ in range(3):
            capture, before = trajectory.TrajectoryCapture(), trajectory._copy_moments(run)
            step = trajectory.make_finite_step(run, next(batches), [capture])
            inferred = trajectory._infer_gradients(run, step, before)
            assert inferred.keys() == capture.gradients.keys()
            for name, gradient in capture.gradients.items():
                error = torch.linalg.vector_norm(inferred[name] - gradient)
                assert error <= 1e-4 * torch.linalg.vector_norm(gradient), name
            run.progress.step += 1
