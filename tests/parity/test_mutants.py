"""Every planted fault is caught, and nothing that is right is called wrong.

`scripts/parity_mutants.py` makes all of them, and counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from runner import compose
from runner.parity.candidates import without_techniques
from runner.parity.parity import Agreement, Parity
from runner.parity.reference import ParityReference, check_parity

QUIET = ["device=cpu", "device.threads=1", "monitoring.progress=false"]
TEXT = ["data=stdlib_text", "data.sequence=32", "training.batch_size=8"]
PARTS = ["data=stdlib_parts", "data.sequence=32", "training.batch_size=8"]
HUGGING_FACE = "security.trusted=[transformers,parity_mutants]"
OWN = ["security.trusted=[parity_mutants]"]
MODELS = {
    "mlp": ["model.width=32", *OWN],
    "dropping": ["model.width=32", "model.dropout=0.2", *OWN],
    "cnn": ["model=cnn", "model.width=8", "model.stages=2", "model.blocks=1", *OWN],
    "gpt": [*TEXT, "model=gpt", "model.width=32", "model.depth=2", "model.heads=2", *OWN],
    "classifier": [*PARTS, "model=classifier", "model.width=32", "model.heads=2", *OWN],
    "lstm": [*TEXT, "model._target_=parity_mutants.Recurrent", *OWN],
    "attention": [*TEXT, "model._target_=parity_mutants.Attentive", *OWN],
    "gpt2": [
        *TEXT, "model._target_=transformers.GPT2LMHeadModel",
        "+model.config._target_=transformers.GPT2Config", "+model.config.vocab_size=256",
        "+model.config.n_positions=32", "+model.config.use_cache=false", "+model.config.n_layer=2",
        "+model.config.n_embd=32", "+model.config.n_head=2", HUGGING_FACE,
    ],
    "bert": [
        *PARTS, "model._target_=transformers.BertForSequenceClassification",
        "+model.config._target_=transformers.BertConfig", "+model.config.vocab_size=258",
        "+model.config.intermediate_size=64", "+model.config.max_position_embeddings=32",
        "+model.config.num_hidden_layers=2", "+model.config.hidden_size=32",
        "+model.config.num_attention_heads=2", "+model.config.id2label={0:a,1:b,2:c,3:d,4:e,5:f}",
        HUGGING_FACE,
    ],
}  # fmt: skip
NONE = "optimization=none"
MICRO = "optimization.accumulation.enabled=true optimization.accumulation.micro_batch=6"


class Fault(NamedTuple):
    """A mutant, the run that it is planted in, and the kind of tensor that it is first seen in."""

    mutant: str
    model: str
    kind: str
    overrides: str = NONE


FAULTS = [
    Fault("NotCausal", "gpt", "loss"),
    Fault("BlindToPadding", "classifier", "loss"),
    Fault("DroppedGradient", "mlp", "grad_norm"),
    Fault("StaleBuffer", "cnn", "buffer"),
    Fault("SumOfParts", "mlp", "loss", f"{NONE} {MICRO}"),
    Fault("MeanOfMeans", "mlp", "loss", f"{NONE} {MICRO}"),
    Fault("NoDropout", "dropping", "draw"),
    Fault("MoreDropout", "dropping", "draw"),
    Fault("NoDecay", "mlp", "update"),
    Fault("OneInAThousand", "mlp", "grad_norm"),
    Fault("TripledEvaluation", "mlp", "output"),
    Fault("DropoutInEvaluation", "dropping", "output"),
    Fault("BatchStatisticsInEvaluation", "cnn", "output"),
    Fault("DecayOnBiases", "mlp", "update"),
    Fault("CoupledDecay", "mlp", "update"),
    Fault("ShortSecondMoment", "mlp", "update"),
    Fault("ShortFirstMoment", "mlp", "update"),
    Fault("LargeEps", "mlp", "update"),
    Fault("LargerRate", "mlp", "update"),
    Fault("LateSchedule", "mlp", "update"),
    Fault("NoClip", "mlp", "update"),
    Fault("ClipEach", "mlp", "update", f"{NONE} stability.clip_norm=0.1"),
    Fault("Dampened", "mlp", "update", f"{NONE} optimizer=sgd optimizer.options.nesterov=false"),
    Fault("StaleAverage", "mlp", "average", f"{NONE} optimizer.ema=0.99"),
    Fault("NoDropoutInLSTM", "lstm", "draw"),
    Fault("NoDropoutInAttention", "attention", "draw"),
    Fault("UnscaledDropoutInAttention", "attention", "draw"),
    Fault("TiredAfterThirty", "mlp", "loss"),
    Fault("Frozen", "mlp", "update"),
    Fault("SumOnTheLast", "mlp", "loss"),
    Fault("PeeksOneAhead", "gpt", "loss"),
]
# One fault of each kind is planted in every run of the suite …
QUICK = (
    "DroppedGradient MeanOfMeans NoDropout ShortFirstMoment NoClip OneInAThousand "
    "TripledEvaluation StaleAverage TiredAfterThirty Frozen"
).split()
# … and these of torch's fused modules
FUSED = ("UnscaledDropoutInAttention", "NoDropoutInAttention", "NoDropoutInLSTM")
SEEDS = (0, 1, 2)  # of what is compared by statistics
CAUGHT, SILENT = (
    1.3,
    0.7,
)  # times the limit: a fault is beyond the one, what is right below the other
RANDOM = {
    **{name: MODELS[name] for name in ("dropping", "lstm", "attention", "gpt2", "bert")},
    **{name: [*MODELS[name], "model.dropout=0.1"] for name in ("gpt", "classifier")},
}
LEVELS = ("basic", "advanced", "memory_efficient")


@pytest.fixture(autouse=True)
def _mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def judged(model: Sequence[str], mutant: str, seed: int, *overrides: str) -> Parity:
    extra = f"optimization.extra=[parity_mutants.{mutant}]"
    config = compose([*QUIET, *model, *overrides, extra, f"seed={seed}"])
    return check_parity(config, without_techniques(config))


def judged_fault(fault: Fault, seed: int = 0) -> Parity:
    return judged(MODELS[fault.model], fault.mutant, seed, *fault.overrides.split())


def judged_draws(model: str, seed: int) -> Parity:
    """The right dropout by other random numbers."""
    return judged(RANDOM[model], "OtherNumbers", seed, NONE)


def draw_margin(result: Parity) -> float:
    """The largest error of a statistic over draws, in units of its limit."""
    rows = [row for row in result.rows if row.kind == "draw"]
    return max(row.error / row.bound if row.bound else math.inf for row in rows)


def judged_right(model: str, levels: Sequence[str] = LEVELS) -> dict[str, Parity]:
    """All levels by one reference, with amp in 16 bits where a level chooses none."""
    reference, amp = None, ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]
    found = {}
    for level in levels:
        more = amp if level == "advanced" else []
        config = compose([*QUIET, *MODELS[model], f"optimization={level}", *more])
        reference = reference or ParityReference(without_techniques(config))
        found[level] = reference.judge(config)
    return found


SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:]]


@pytest.mark.parametrize("seed", [0, *SLOW_SEEDS])
@pytest.mark.parametrize(
    "mutant", [FUSED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FUSED[1:])]
)
def test_dropout_that_a_fused_module_computes_wrong_is_far_beyond_the_limit(
    mutant: str, seed: int
) -> None:
    (fault,) = [fault for fault in FAULTS if fault.mutant == mutant]
    result = judged_fault(fault, seed)
    assert draw_margin(result) > CAUGHT, result.first
    assert result.first == max(
        (row for row in result.rows if row.kind == "draw"), key=lambda row: row.error / row.bound
    )


@pytest.mark.parametrize("seed", [0, *SLOW_SEEDS])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, marks=[] if m in ("dropping", "lstm", "attention") else [pytest.mark.slow])
        for m in RANDOM
    ],
)
@pytest.mark.slow
def test_right_dropout_by_other_random_numbers_is_far_below_the_limit(
    model: str, seed: int
) -> None:
    if model in ("gpt2", "bert"):
        pytest.importorskip("transformers")
    result = judged_draws(model, seed)
    assert result.verdict is not Agreement.fail, result.first
    assert draw_margin(result) < SILENT


def _cost(fault: Fault) -> pytest.Mark | object:
    marks = [] if fault.mutant in QUICK else [pytest.mark.slow]
    return pytest.param(fault, marks=marks, id=fault.mutant)


@pytest.mark.parametrize("fault", [_cost(fault) for fault in FAULTS])
def test_a_planted_fault_is_caught_in_what_it_spoils(fault: Fault) -> None:
    found = judged_fault(fault)
    assert found.verdict is Agreement.fail, found.rows
    assert found.first is not None
    assert found.first.kind == fault.kind


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=[] if m == "mlp" else [pytest.mark.slow]) for m in MODELS],
)
def test_what_is_right_raises_no_alarm(model: str) -> None:
    if model in ("gpt2", "bert"):
        pytest.importorskip("transformers")
    for level, found in judged_right(model, LEVELS if model != "mlp" else LEVELS[:1]).items():
        assert found.verdict is not Agreement.fail, (level, found.first)
