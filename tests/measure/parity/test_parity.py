"""Techniques that are right pass, and mutants of them fail with the tensor they went wrong at."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from runner.core.build.setup import Components
from runner.core.config.variants import without_techniques
from runner.measure.parity import trajectory
from runner.measure.parity.distance import Agreement, Parity
from runner.measure.parity.reference import ParityReference, check_parity
from tests import runs
from tests.measure.parity.test_mutants import BF16, MODELS, OWN
from tests.my_package import Computed

QUIET = ["optimization=none"]
PARTS = ["optimization.accumulation.enabled=true", "optimization.accumulation.micro_batch=6"]
FUSED = ["optimization.fused_optimizer.enabled=true"]
NHWC = ["optimization.channels_last.enabled=true"]
STEPS = 8  # enough for what is wrong at once; tests/measure/parity/test_mutants.py makes all 40


pytestmark = pytest.mark.usefixtures("parity_mutants")


def judged(model: list[str], technique: list[str], mutant: str = "") -> Parity:
    extra = [f"optimization.extra=[parity_mutants.{mutant}]"] if mutant else []
    overrides = [*QUIET, *model, *technique, *extra]
    return check_parity(runs.config(*overrides), runs.config(*QUIET, *model), STEPS, attribute=True)


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
                self.copy.weight.lerp_(self.net.weight, self.rate)
                self.copy.bias.lerp_(self.net.bias, self.rate)
            soft = self.copy(x)
        return self.net(x) + 0.1 * soft


# -- what is right passes --------------------------------------------------------------------------


FOURIER = Computed(  # with complex weights
    lambda model, x: model.out(torch.fft.ifft(torch.fft.fft(x) * model.weight).real),
    weight=nn.Parameter(torch.randn(30, dtype=torch.cfloat)),
    out=nn.Linear(30, 2),
)
TWO_BRANCHES = Computed(  # weights without a gradient in some steps
    lambda model, x: model.layers[int(model.training and torch.rand(()) < 0.5)](x),
    layers=nn.ModuleList(nn.Linear(30, 2) for _ in range(2)),
)
SLOW_TEACHER = pytest.param(Teacher(False), marks=pytest.mark.slow)
TABLE = [*QUIET, "data=cancer"]


@pytest.mark.parametrize(
    "model",
    [FOURIER, TWO_BRANCHES, Teacher(True), SLOW_TEACHER],
    ids=["complex", "unused", "frozen teacher", "teacher"],
)
def test_complex_unused_or_moved_weights_give_no_false_alarm(model: nn.Module) -> None:
    reference = ParityReference(runs.config(*TABLE), STEPS, Components(model=model))
    found = reference.judge(runs.config(*TABLE, *FUSED))
    assert found.verdict is not Agreement.fail, found.first
    assert found.reference == "fp64"
    kinds = {row.kind for row in found.rows}
    assert {"gradient", "update"} <= kinds
    assert ("buffer" in kinds) is isinstance(model, Teacher)
    if isinstance(model, Teacher):
        extra = "optimization.extra=[parity_mutants.FasterTeacher]"  # moved twice as far
        wrong = reference.judge(runs.config(*TABLE, *FUSED, extra, *OWN))
        assert wrong.verdict is Agreement.fail and wrong.first is not None
        assert wrong.first.name in ("copy.weight", "copy.bias", "loss", "grad_norm", "net.weight")
        if not model.copy.weight.requires_grad:  # compared as a buffer alone
            kinds = {row.kind: row.within for row in wrong.rows if row.name == "copy.weight"}
            assert kinds["buffer"] is False and "update" not in kinds


def test_an_update_is_measured_from_the_weights_that_the_forward_left() -> None:
    reference = ParityReference(runs.config(*TABLE), STEPS, Components(model=Teacher(True)))
    found = reference.judge(runs.config(*TABLE, "optimization.extra=[parity_mutants.Frozen]", *OWN))
    row = next(row for row in found.rows if (row.kind, row.name) == ("update", "net.weight"))
    assert row.error == pytest.approx(1.0, abs=1e-3) and not row.within  # all of the update


@pytest.mark.parametrize("model", ["mlp", "gpt"])  # the others: test_mutants.py
def test_real_techniques_are_explained_by_precision_on_every_model(model: str) -> None:
    reference = ParityReference(runs.config(*QUIET, *MODELS[model]), STEPS)
    for technique in (BF16, [*FUSED, *NHWC], PARTS):
        found = reference.judge(runs.config(*QUIET, *MODELS[model], *technique))
        assert found.verdict is not Agreement.fail, (technique, found.first)
        assert found.techniques and found.rows and found.reference == "fp64"


def test_what_changes_nothing_is_exact() -> None:
    found = judged(MODELS["mlp"], [], "Harmless")
    assert found.verdict is Agreement.exact and found.first is None


# -- mutants fail ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "technique", "mutant", "kind", "culprits"),
    [
        ("mlp", BF16, "DroppedGradient", "gradient", ["DroppedGradient"]),
        ("dropping", BF16, "NoDropout", "draw", ["NoDropout"]),
        ("dropping", PARTS, "SumOfParts", "loss", ["accumulation", "SumOfParts"]),
    ],
)
def test_a_mutant_fails_at_what_it_spoils_and_is_named(
    model: str, technique: list[str], mutant: str, kind: str, culprits: list[str]
) -> None:
    found = judged(MODELS[model], technique, mutant)
    assert found.verdict is Agreement.fail and found.first is not None
    assert found.first.kind == kind
    assert kind != "loss" or found.first.step == 1
    assert found.culprits == culprits
    wrong_alone = [name for name, verdict in found.alone.items() if verdict == "FAIL"]
    assert wrong_alone == (culprits if len(culprits) == 1 else [])


# -- what is no fault of a technique's -------------------------------------------------------------


def test_batch_norm_under_accumulation_is_held_against_a_baseline_cut_the_same_way() -> None:
    found = judged(MODELS["cnn"], PARTS)
    assert found.verdict is Agreement.exact
    assert any("micro-batch of 6" in note for note in found.notes)


def test_a_model_that_does_not_run_in_fp64_is_held_against_the_baseline() -> None:
    own = ["model._target_=parity_mutants.WrittenInFp32", *OWN]
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
