"""Outputs in order: finite, within limits, all else bit for bit."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner import build, compose, safe_inference, sanitise
from runner.core.checks.outputs import Changes, describe_changes
from runner.core.errors import UsageError
from runner.core.execution.evaluation import evaluate
from runner.core.jobs.evaluate import _evaluate

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3e38, 1 + 1e-6, 0.3)


def bits(x: Tensor) -> Tensor:
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return x.view(whole[x.element_size()])


def planted(seed: int, dtype: torch.dtype) -> Tensor:
    """A matrix of chance size and scale, odd values at chance places, some rows all odd."""
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 40)), int(rng.choice([1, 2, 3, 10, 1000])))
    x = rng.normal(0, 10.0 ** rng.integers(-3, 4), shape)
    where = rng.random(shape) < rng.choice([0.0, 0.02, 0.5])
    where[rng.random(shape[0]) < 0.1] = True
    x[where] = rng.choice(ODD, int(where.sum()))
    return torch.from_numpy(x).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_outputs_become_finite_and_finite_ones_keep_their_bits(dtype: torch.dtype) -> None:
    for seed in range(20):
        x = planted(seed, dtype)
        before = x.clone()
        clean, changes = sanitise(x, nan=-2.0, inf=100.0)
        assert torch.equal(bits(x), bits(before))  # what was given stays
        assert clean.dtype is dtype and bool(clean.isfinite().all())
        sound = x.isfinite()
        assert torch.equal(bits(clean)[sound], bits(x)[sound])
        assert clean[x.isnan()].tolist() == [-2.0] * int(x.isnan().sum())
        assert bool((clean[x.isinf()].abs() == 100).all())
        counts = {"nan": int(x.isnan().sum()), "inf": int(x.isinf().sum()), "limited": 0}
        assert changes.read() == counts
        low, high = (-1.5, 2.0) if seed % 2 else (0.0, None)
        clean, changes = sanitise(x, low=low, high=high)
        assert bool((clean >= low).all()) and bool(clean.isfinite().all())
        assert high is None or bool((clean <= high).all())
        sound = (x >= low) & (x <= (high if high is not None else torch.finfo(dtype).max))
        assert torch.equal(bits(clean)[sound], bits(x)[sound])
        assert changes.read()["limited"] == int((~sound & x.isfinite()).sum())


def test_nests_come_back_as_they_were_and_their_changes_are_summed() -> None:
    Pair = namedtuple("Pair", ["a", "b"])
    x = torch.tensor([1.0, math.nan])
    nest = {"pair": Pair(x, [x, "name", None]), "ids": torch.arange(3), "none": torch.empty(0, 3)}
    clean, changes = sanitise(nest, low=0.0)
    assert type(clean["pair"]) is Pair and clean["pair"].b[1:] == ["name", None]
    assert clean["ids"] is nest["ids"] and clean["none"].shape == (0, 3)
    assert changes.read() == {"nan": 2, "inf": 0, "limited": 0}
    assert type(sanitise(OrderedDict(a=x))[0]) is OrderedDict
    assert Changes().read() == {"nan": 0, "inf": 0, "limited": 0}
    assert (Changes() + changes).read() == changes.read()
    assert describe_changes(changes.read()) == "2 NaN" and describe_changes(Changes().read()) == ""


def test_masked_logits_still_give_nothing_to_the_masked_class() -> None:
    x = torch.tensor([[1.0, -math.inf, 2.0]])
    assert torch.equal(sanitise(x)[0].softmax(1), x.softmax(1))


NAN, NO_TENSOR = torch.tensor([math.nan]), "output must be a tensor, or tensors in dicts"


@pytest.mark.parametrize(
    ("output", "options", "problem"),
    [
        (NAN.to_sparse(), {}, r"to_dense\(\)"),
        ({"a": [torch.complex(NAN, NAN)]}, {}, r"to_dense\(\)"),
        *((output, {}, NO_TENSOR) for output in (math.nan, np.array([math.nan]), "text", [None])),
        (NAN, {"nan": math.nan}, "nan must be a finite number, got nan"),
        (NAN, {"nan": None}, "nan must be a finite number, got None"),
        (NAN, {"low": "0"}, "low must be a finite number, got '0'"),
        (NAN, {"inf": -1.0}, "inf must be > 0, got -1.0"),
        (NAN, {"low": 2.0, "high": 1.0}, "low must be at most high"),
    ],
    ids=str,
)
def test_an_output_without_dense_tensors_and_wrong_arguments_are_refused(
    output: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        sanitise(output, **options)


def test_nothing_is_read_from_the_device_before_it_is_asked_for() -> None:
    """On the meta device there are no values: whatever reads one fails."""
    clean, changes = sanitise(torch.empty(4, 3, device="meta"), low=0.0)
    assert clean.shape == (4, 3)
    with pytest.raises((RuntimeError, NotImplementedError)):
        (changes + changes).read()


def test_safe_inference_keeps_limits_and_counts_what_it_changed() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([[0.5, 0.5, 0.0], [2.0, 0.0, 0.0], [0.2, math.nan, 0.2]])
    result = safe_inference(model, x, low=0.0, high=1.0)
    assert result.output.tolist() == [
        [0.5, 0.5, 0.0],
        [1.0, 0.0, 0.0],
        [pytest.approx(0.2), 0.0, pytest.approx(0.2)],
    ]
    assert result.changed == {"nan": 1, "inf": 0, "limited": 1}
    assert not result.ok and result.non_finite == 1
    assert result.problems[-1] == "output: 1 beyond their limits"
    fine = safe_inference(model, x[:1], low=0.0, high=1.0)
    assert fine.ok and fine.problems == [] and torch.equal(fine.output, x[:1])


CONFIG = ["data=cancer", "model=mlp", "training.steps=2", "optimization=none", "checkpoint=off",
          "monitoring.progress=false"]  # fmt: skip


def spoil(model: nn.Module) -> None:
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        last.bias[0] = math.nan


def test_evaluation_counts_bad_outputs_and_does_not_improve_the_metrics(
    tmp_path: Path,
) -> None:
    config = compose(CONFIG)
    with build(config, tmp_path) as run:
        run.recorder.open(0)
        before = _evaluate(run, config.checks.outputs).metrics
        assert before == evaluate(run).metrics and "outputs" not in run.history.counts
        spoil(run.model)
        forward = run.forward
        spoiled = _evaluate(run, config.checks.outputs).metrics
        assert math.isnan(spoiled["val/loss"]) and run.forward is forward
        (message,) = [f.message for f in run.history.faults.values() if f.kind == "outputs"]
    assert message == "outputs on the validation set: 114 NaN"


@pytest.mark.gpu
def test_on_an_accelerator_the_host_waits_once_when_the_counts_are_read() -> None:
    x = planted(4, torch.float32).cuda()
    host, counts = sanitise(x.cpu(), low=0.0, high=2.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clean, changes = sanitise(x, low=0.0, high=2.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(clean.cpu(), host)
    assert changes.read() == counts.read()
