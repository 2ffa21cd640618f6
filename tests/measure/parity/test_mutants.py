"""Every planted fault is caught, and nothing that is right is called wrong."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from runner import compose
from runner.core.config.variants import without_techniques
from runner.measure.parity.distance import Agreement, Parity, ParityRow
from runner.measure.parity.reference import ParityReference, check_parity

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
    Fault("DecayOnBiases", "mlp", "update"),
    Fault("CoupledDecay", "mlp", "update"),
    Fault("ShortSecondMoment", "mlp", "update"),
    Fault("ShortFirstMoment", "mlp", "update"),
    Fault("LargeEps", "mlp", "update"),
    Fault("LateSchedule", "mlp", "update"),
    Fault("NoClip", "mlp", "update"),
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
# One fault of each kind is planted in every run of the suite; others are in test_parity.py.
QUICK = set(
    "MeanOfMeans ShortFirstMoment NoClip TripledEvaluation StaleAverage TiredAfterThirty Frozen "
    "UnscaledDropoutInAttention".split()
)
# times the limit: a fault is beyond the one, what is right below the other
CAUGHT, SILENT = 1.3, 0.7
SEEDS = (0, 1, 2)  # of what is compared by statistics
RANDOM = {
    **{name: MODELS[name] for name in ("dropping", "lstm", "attention", "gpt2", "bert")},
    **{name: [*MODELS[name], "model.dropout=0.1"] for name in ("gpt", "classifier")},
}
BF16 = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]
LEVELS = {"basic": [], "advanced": BF16, "memory_efficient": []}


pytestmark = pytest.mark.usefixtures("parity_mutants")


def judged(model: Sequence[str], mutant: str, seed: int, *overrides: str) -> Parity:
    extra = f"optimization.extra=[parity_mutants.{mutant}]"
    config = compose([*QUIET, *model, *overrides, extra, f"seed={seed}"])
    return check_parity(config, without_techniques(config))


def worst_draw(result: Parity) -> ParityRow:
    return max((row for row in result.rows if row.kind == "draw"), key=lambda row: row.excess)


PLANTED = [
    pytest.param(
        fault,
        seed,
        marks=[] if fault.mutant in QUICK and seed == 0 else pytest.mark.slow,
        id=f"{fault.mutant}-{seed}",
    )
    for fault in FAULTS
    for seed in (SEEDS if fault.kind == "draw" else SEEDS[:1])
]


@pytest.mark.parametrize(("fault", "seed"), PLANTED)
def test_a_planted_fault_is_caught_in_what_it_spoils(fault: Fault, seed: int) -> None:
    found = judged(MODELS[fault.model], fault.mutant, seed, *fault.overrides.split())
    assert found.verdict is Agreement.fail, found.rows
    assert found.first is not None
    assert found.first.kind == fault.kind
    if fault.kind == "draw":
        assert found.first == worst_draw(found)
        assert found.first.excess > CAUGHT, found.first


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", RANDOM)
def test_right_dropout_by_other_random_numbers_is_far_below_the_limit(
    model: str, seed: int
) -> None:
    if model in ("gpt2", "bert"):
        pytest.importorskip("transformers")
    result = judged(RANDOM[model], "OtherNumbers", seed, NONE)
    assert result.verdict is not Agreement.fail, result.first
    assert worst_draw(result).excess < SILENT


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_right_technique_raises_no_alarm(model: str) -> None:
    if model in ("gpt2", "bert"):
        pytest.importorskip("transformers")
    reference = ParityReference(compose([*QUIET, *MODELS[model], NONE]))
    for level, more in LEVELS.items():
        found = reference.judge(compose([*QUIET, *MODELS[model], f"optimization={level}", *more]))
        assert found.verdict is not Agreement.fail, (level, found.first)
