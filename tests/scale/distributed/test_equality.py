"""A run by several processes computes what one process does: the number of them is no knob.

The runs of a module's cases are made one after another by processes that are started once.
"""

from collections.abc import Callable
from functools import cache

import pytest

from runner.core.schemas.device import FSDP_UNSUPPORTED
from tests import runs
from tests.scale.distributed.processes import (
    DOUBLE,
    Outcome,
    compose_cases,
    distances,
    run_together,
)

PROCESSES = [("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)]

# Measured on 2 and 4 processes: at most 4e-13 with Adam, whose first updates have the size of the
# sign of a gradient however small it is, and 2e-14 with SGD. A weight of 1/n in place of 1/m is
# off by 1e-3 and more, fp32 anywhere on the way by 1e-8.
ROUNDING = 1e-11
# Rounding in fp32 or bf16 grows from step to step. Each run is compared with the same in fp64, and
# several processes may be so many times as far from that as one is. Measured on 2: 1.0 to 1.6, and
# 3.4 for the CNN in fp32, whose BatchNorm is several operators in place of one.
ROUNDED = 10.0

ON = "optimization.{}.enabled=true".format
MLP = ("data=cancer", "model=mlp", "training.batch_size=64", "training.steps=9")  # of 8 an epoch
CNN = (
    "data=digits", "model=cnn", "model.width=8", "training.batch_size=127", "training.steps=6",
    "data.validation_samples=100",
)  # fmt: skip
GPT = (
    "data=synthetic", "data.form=tokens", "data.samples=64", "data.sequence=16", "model=gpt",
    "model.width=32", "training.batch_size=23", "training.steps=7",
)  # fmt: skip
MASKED = (
    *runs.OURS, "data._target_=my_package.Masked", "model=gpt", "model.width=32", "model.dropout=0",
    "training.batch_size=12", "training.steps=7",
)  # fmt: skip
MORE = ("optimizer.ema=0.9", "stability.clip_norm=0.1", "schedule=cosine")
AMP = ("optimization=amp", "optimization.amp.dtype=bf16")
SGD = ("optimizer=sgd", "optimizer.lr=0.01", "optimizer.options.momentum=0.9")

EXACT = {
    "mlp": (*MLP, *MORE, DOUBLE),
    "mlp: sgd": (*MLP, *MORE, *SGD, DOUBLE),
    "mlp: accumulation": (*MLP, *MORE, "training.micro_batch=5", DOUBLE),
    "mlp: each sends": (
        *MLP, *MORE, "training.micro_batch=5", "distributed.no_sync=false", DOUBLE,
    ),
    "mlp: one at a time": (*MLP, "training.batch_size=9", "training.micro_batch=1", DOUBLE),
    "mlp: class weights": (
        *MLP, "objective.class_weights=balanced", "training.micro_batch=5", DOUBLE,
    ),
    "mlp: balanced": (*MLP, "data.sampler=balanced", DOUBLE),
    "left out": (  # whole batches, and all that one process has of others
        *runs.OURS, "data._target_=my_package.Torn", "+data.tenths=6", "data.bad_samples=drop",
        "data.most_bad=0.9", "model=mlp", "training.batch_size=6", "training.micro_batch=2",
        "training.steps=26", *MORE, DOUBLE,
    ),
    "metrics": (  # of the user's, and of torchmetrics
        *runs.OURS, *MLP, "data=digits", "training.batch_size=50", DOUBLE,
        "objective.metrics=[my_package.top3,my_package.misses,my_package.Spread,F1Score]",
    ),
    "cnn": (*CNN, *MORE, DOUBLE),
    "cnn: recompute": (*CNN, ON("recompute"), ON("channels_last"), DOUBLE),
    "gpt": (*GPT, *MORE, DOUBLE),
    "gpt: recompute": (*GPT, *MORE, ON("recompute"), "training.micro_batch=5", DOUBLE),
    "gpt: chunked loss": (
        *GPT, ON("chunked_loss"), "optimization.chunked_loss.min_mb=0",
        "optimization.chunked_loss.chunk=16", DOUBLE,
    ),
    "masked": (*MASKED, *MORE, DOUBLE),
    "masked: one at a time": (*MASKED, *MORE, "training.micro_batch=1", DOUBLE),
    "idle weights": (
        *runs.OURS, *MLP, "model._target_=my_package.Idle", "training.micro_batch=20",
        "distributed.unused_parameters=true", DOUBLE,
    ),
}  # fmt: skip
ENGAGED = {
    "cnn: recompute": ("recompute", "channels_last"),
    "gpt: recompute": ("recompute",),
    "gpt: chunked loss": ("chunked_loss",),
}
ROUNDED_RUNS = {
    "cnn": (*CNN, *SGD, DOUBLE),
    "gpt": (*GPT, *SGD, DOUBLE),
    "cnn: fp32": (*CNN, *SGD, "optimization=none", ON("fused_optimizer")),
    "gpt: fp32": (*GPT, *SGD, "optimization=none", ON("fused_optimizer")),
    "cnn: amp": (*CNN, *SGD, *AMP),
    "gpt: amp": (*GPT, *SGD, *AMP),
    "cnn: compile": (*CNN, *SGD, "optimization=compile"),
    "gpt: compile": (*GPT, *SGD, "optimization=compile"),
}
ODD = {
    "whole step": (*GPT, "training.steps=2", "optimization=none", ON("whole_step")),
    "dropout": (*MLP, "model.dropout=0.3"),
    "own statistics": (*CNN, "distributed.sync_batchnorm=false"),
    "one sample": ("data=cancer", "model=mlp", "training.batch_size=1"),
    "last of one": ("data=cancer", "model=mlp", "training.batch_size=227"),
    "idle weights": (*runs.OURS, *MLP, "model._target_=my_package.Idle"),
}
COMPRESSED = {
    "compressed": (*GPT, *SGD, "optimization=none", "distributed.compression=bf16"),
}
FEW = {name: EXACT[name] for name in ("mlp: accumulation", "gpt: recompute", "masked", "metrics")}
MORE_OF_DDP = ("mlp", "mlp: each sends", "mlp: one at a time", "left out", "cnn", "idle weights")
SOME = FEW | {name: EXACT[name] for name in MORE_OF_DDP}
CASES = {
    "exact": EXACT, "some": SOME, "few": FEW, "rounded": ROUNDED_RUNS, "odd": ODD,
    "compressed": COMPRESSED,
}  # fmt: skip

Outcomes = Callable[..., dict[str, Outcome]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The outcomes of a set of cases by so many processes, which are made once."""

    @cache
    def make(which: str, processes: int, kind: str = "ddp") -> dict[str, Outcome]:
        return run_together(processes, compose_cases(CASES[which], processes, kind))[0]

    return make


@pytest.mark.usefixtures("my_package")
@pytest.mark.parametrize(
    ("kind", "processes", "which"),
    [
        ("ddp", 2, "few"),
        ("fsdp", 2, "few"),
        pytest.param("ddp", 2, "some", marks=pytest.mark.slow),
        *(pytest.param(*pair, "exact", marks=pytest.mark.slow) for pair in PROCESSES),
    ],
)
def test_in_fp64_weights_averages_losses_and_metrics_agree_to_rounding(
    outcomes: Outcomes, kind: str, processes: int, which: str
) -> None:
    alone = outcomes(which, 1)
    for name, several in outcomes(which, processes, kind).items():
        one = alone[name]
        assert (one.error, several.error) == ("", ""), name
        found = distances(several, one)
        assert max(found.values()) < ROUNDING, (name, max(found, key=lambda key: found[key]), found)
        assert several.metrics == pytest.approx(one.metrics, rel=1e-9), name
        assert several.same and several.skipped == one.skipped, name
        assert (one.skipped > 0) == (name == "left out"), name
        assert several.techniques[kind] == (True, ""), name
        for technique in ENGAGED.get(name, ()):
            on, reason = several.techniques[technique]
            refused = FSDP_UNSUPPORTED.get(technique) if kind == "fsdp" else None
            assert on is (refused is None) and reason == (refused or reason), (name, reason)
        facts = several.facts[kind]
        if kind == "fsdp":
            assert facts["sharded_bytes"] == facts["predicted_bytes"], (name, facts)


@pytest.mark.slow
@pytest.mark.usefixtures("my_package")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_reduced_once_a_step_for_any_number_of_micro_batches(
    outcomes: Outcomes, kind: str
) -> None:
    reduced = {"ddp": "all_reduce", "fsdp": "reduce_scatter"}[kind]
    calls = {
        name: outcome.facts[kind]["collectives"]
        for name, outcome in outcomes("some" if kind == "ddp" else "exact", 2, kind).items()
    }
    once = calls["mlp"][reduced]
    assert calls["mlp: accumulation"][reduced] == once  # of 7 micro-batches
    assert calls["mlp: one at a time"][reduced] == once
    assert calls["mlp: each sends"][reduced] > once
    if kind == "fsdp":
        assert calls["mlp: each sends"] == {**calls["mlp: accumulation"], reduced: 7 * once}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), PROCESSES)
def test_in_fp32_and_with_amp_rounding_alone_sets_them_apart(
    outcomes: Outcomes, kind: str, processes: int
) -> None:
    """Not further from fp64 than one process, by a factor: in losses and norms."""
    alone, together = outcomes("rounded", 1), outcomes("rounded", processes, kind)
    for name, one in alone.items():
        exact, several = alone[name.partition(":")[0]], together[name]
        assert (one.error, several.error) == ("", ""), name
        due, found = distances(one, exact), distances(several, exact)
        for key in ("loss", "norm"):
            assert found[key] < ROUNDED * due[key] + ROUNDING, (name, key, found[key], due[key])
        assert several.same, name
    for name in ("cnn: amp", "gpt: amp", "cnn: compile", "gpt: compile"):
        assert together[name].techniques[name.partition(": ")[2]][0], name
    if kind == "fsdp":  # the blocks' weights are gathered in half of the bytes
        low, full = together["gpt: amp"].facts["fsdp"], together["gpt: fp32"].facts["fsdp"]
        assert (low["modules_in_16_bits"], full["modules_in_16_bits"]) == (4, 0)
        assert low["collectives"] == full["collectives"]
        bytes_ = [facts["collective_bytes"]["all_gather"] for facts in (low, full)]
        assert bytes_[0] < 0.6 * bytes_[1]
        assert together["cnn: amp"].facts["fsdp"]["modules_in_16_bits"] == 0  # BatchNorm in each


@pytest.mark.slow
def test_gradients_in_bf16_take_half_of_the_bytes(outcomes: Outcomes) -> None:
    full, low = outcomes("rounded", 2)["gpt: fp32"], outcomes("compressed", 2)["compressed"]
    assert low.techniques["gradient_compression"] == (True, ""), low.techniques
    assert low.facts["gradient_compression"] == {"hook": "bf16_compress"}
    sent, all_ = (outcome.facts["ddp"]["collective_bytes"]["all_reduce"] for outcome in (low, full))
    assert low.same and sent < 0.6 * all_
    assert 0 < distances(low, full)["loss"] < 1e-2


@pytest.mark.slow
@pytest.mark.usefixtures("my_package")
def test_dropout_differs_between_processes_and_weights_do_not(outcomes: Outcomes) -> None:
    together = outcomes("odd", 2)
    assert len(set(together["dropout"].seeds)) == 2
    assert together["dropout"].same
    # rank 0's statistics count in the end, though each process has normalised by its own
    assert together["own statistics"].same and not together["own statistics"].error


@pytest.mark.slow
@pytest.mark.usefixtures("my_package")
def test_a_whole_step_does_not_apply(outcomes: Outcomes) -> None:
    reason = "gradients go to other processes in the middle of the step"
    assert outcomes("odd", 2)["whole step"].techniques["whole_step"] == (False, reason)


@pytest.mark.slow
@pytest.mark.usefixtures("my_package")
def test_a_batch_of_fewer_samples_than_processes_is_refused(outcomes: Outcomes) -> None:
    together = outcomes("odd", 2)
    for name, said in {
        "one sample": "training.batch_size: is 1, fewer than one sample for each of 2 processes",
        "last of one": "training.batch_size: leaves a last batch of 1, fewer than the 2 processes",
    }.items():
        assert said in together[name].error, name


@pytest.mark.usefixtures("my_package")
def test_weights_without_a_gradient_are_named_with_the_key_that_allows_them(
    outcomes: Outcomes,
) -> None:
    error = outcomes("odd", 2)["idle weights"].error
    assert "distributed.unused_parameters: is false" in error
    assert "depend on idle.weight and idle.bias" in error
