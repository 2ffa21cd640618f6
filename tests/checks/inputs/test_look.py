"""What is wrong with a batch is found and named, and nothing is found in healthy ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner import build, compose
from runner.checks.config import InputsConfig, Policy, SchemaConfig
from runner.checks.inputs.look import InputChecks
from runner.errors import ConfigError

N, FEATURES, CLASSES = 32, 10, 5


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    own = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(N, FEATURES, generator=own),
            torch.randint(0, CLASSES, (N,), generator=own),
        )
        for _ in range(count)
    ]


def warmed(**options: Any) -> InputChecks:
    """Checks that have seen forty ordinary batches, and had nothing to say."""
    config = InputsConfig(baseline=20, **options)
    checks = InputChecks(config, classes=CLASSES)
    for batch in batches(40):
        assert checks.look(batch, 0) == []
    return checks


def put(x: Tensor, value: float, row: int = 3) -> Tensor:
    x = x.clone()
    x[row, 2] = value
    return x


FRESH = batches(1, seed=99)[0]
BAD = {
    "nan": ((put(FRESH[0], math.nan), FRESH[1]), "input.not_finite"),
    "inf": ((put(FRESH[0], math.inf), FRESH[1]), "input.not_finite"),
    "far out": ((put(FRESH[0], 1e4), FRESH[1]), "input.range"),
    "no class": ((FRESH[0], FRESH[1].index_fill(0, torch.tensor([5]), CLASSES)), "input.labels"),
    "negative class": ((FRESH[0], FRESH[1].index_fill(0, torch.tensor([5]), -7)), "input.labels"),
    "dtype": ((FRESH[0].double(), FRESH[1]), "input.form"),
    "shape": ((FRESH[0][:, :4], FRESH[1]), "input.form"),
    "dimensions": ((FRESH[0][:, None], FRESH[1]), "input.form"),
    "another tensor": (({"x": FRESH[0]}, FRESH[1]), "input.form"),
    "all zero": ((torch.zeros_like(FRESH[0]), FRESH[1]), "input.constant"),
    "pixels not divided by 255": ((FRESH[0] * 255, FRESH[1]), "input.range"),
    "shifted": ((FRESH[0] + 1.5, FRESH[1]), "input.drift"),
    "twice as wide": ((FRESH[0].clamp(-1.2, 1.2) * 3, FRESH[1]), "input.drift"),
    "hardly any spread": ((FRESH[0] * 0.01, FRESH[1]), "input.drift"),
    "one class": ((FRESH[0], torch.zeros_like(FRESH[1])), "input.drift"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named(what: str) -> None:
    batch, code = BAD[what]
    reasons = warmed().look(batch, 0)
    assert code in [reason.code for reason in reasons]
    assert all(reason.evidence and reason.way_out for reason in reasons)


@pytest.mark.parametrize("what", ["nan", "no class", "shape", "one class"])
def test_a_bad_batch_does_not_spoil_what_is_usual(what: str) -> None:
    batch, _ = BAD[what]
    checks = InputChecks(InputsConfig(baseline=20), classes=CLASSES)
    for i, good in enumerate(batches(40)):
        checks.look(good, 0)
        if 2 < i < 10 and (what != "one class" or i == 5):
            checks.look(batch, i)
    assert checks.baseline.full
    if what != "one class":  # which among the first ones nobody can know to be bad
        low, high = checks.baseline.ranges["inputs"]
        assert -15 < low < -8 and 8 < high < 15
    assert checks.look(FRESH, 99) == []


def again(batch: tuple[Tensor, Tensor], order: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    x, y = batch[0][order], batch[1][order]
    return x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(5)), y


@pytest.mark.parametrize("noise", [0.0, 1e-5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_batch_that_comes_again_is_known_in_any_order_and_with_a_little_noise(
    noise: float, shuffled: bool
) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    order = order if shuffled else torch.arange(N)
    checks = warmed()
    reasons = checks.look(again(batches(40)[17], order, noise), 0)
    assert [reason.code for reason in reasons] == ["input.duplicates"]
    assert "step 18" in reasons[0].evidence
    assert checks.look(again(batches(40)[3], order, noise), 1) == []  # another epoch's


def test_data_of_few_different_samples_are_not_called_repeated() -> None:
    checks = InputChecks()
    own = torch.Generator().manual_seed(0)
    corners = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])
    for _ in range(300):
        which = torch.randint(0, 4, (N,), generator=own)
        assert checks.look((corners[which], which), 0) == []


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_data_set_of_few_batches_may_be_gone_through_again_and_again(steps: int) -> None:
    few, checks = batches(steps), InputChecks(classes=CLASSES)
    for epoch in range(200):
        for batch in few:
            assert checks.look(batch, epoch) == []


def heavy(own: np.random.Generator, kind: str, n: int) -> Tensor:
    if kind == "lognormal":
        return torch.from_numpy(own.lognormal(0, 2, (n, 6)).astype(np.float32))
    if kind == "sparse":
        return torch.from_numpy((own.random((n, 6)) < 0.05).astype(np.float32))
    return torch.from_numpy(own.integers(0, 256, (n, 6)).astype(np.uint8))


@pytest.mark.parametrize("kind", ["lognormal", "sparse", "bytes"])
@pytest.mark.parametrize("seed", range(3))
def test_tails_zeros_and_bytes_are_no_drift(kind: str, seed: int) -> None:
    own, checks = np.random.default_rng(seed), InputChecks(InputsConfig(range=Policy.off))
    found = [r.code for _ in range(600) for r in checks.look((heavy(own, kind, 64), FRESH[1]), 0)]
    assert [code for code in found if code != "input.duplicates"] == []


DATA = {
    "digits": ["data=digits", "model=mlp"],
    "cancer": ["data=cancer", "model=mlp"],
    "stdlib_text": ["data=stdlib_text", "model=gpt", "training.batch_size=8"],
    "images": ["data=synthetic", "data.samples=256", "model=cnn"],
    "tabular": ["data=synthetic", "data.form=tabular", "model=mlp"],
    "tokens": ["data=synthetic", "data.form=tokens", "data.samples=256", "model=gpt",
               "training.batch_size=4"],
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_healthy_data_give_no_alarm(name: str, seed: int) -> None:
    rest = [f"seed={seed}", "optimization=none", "training.steps=300"]
    with build(compose([*DATA[name], *rest])) as run:
        assert run.inputs is not None
        for number, batch in zip(range(1, 301), run.train.batches(0), strict=False):
            run.inputs.admit(number, batch)
        assert run.inputs.checks.baseline.full
        assert list(run.history.faults) == []


@pytest.mark.parametrize("samples", [4, 16])
def test_constant_batches_of_sparse_data_are_usual(samples: int) -> None:
    own = torch.Generator().manual_seed(0)
    checks = InputChecks(classes=CLASSES)
    constant = 0
    for step in range(400):
        x = torch.rand(samples, 4, generator=own)
        x *= torch.rand(samples, 4, generator=own) > 0.9
        x = x[:2] if step % 20 == 19 else x  # the last of an epoch
        said = checks.look((x, torch.randint(0, CLASSES, (len(x),), generator=own)), step // 20)
        if step >= 20 and not x.any():  # before, it is yet to be learned what is usual
            constant += 1
            assert said == []
    assert constant > 5


def test_lengths_that_vary_among_the_first_batches_may_vary_on() -> None:
    checks = InputChecks(InputsConfig(baseline=8))
    for i in range(20):
        assert checks.look((torch.randn(8, 5 + i % 4, 3), torch.zeros(8)), None) == []
    assert checks.look((torch.randn(8, 40, 3), torch.zeros(8)), None) == []
    (reason,) = checks.look((torch.randn(8, 5, 4), torch.zeros(8)), None)
    assert reason.code == "input.form" and "[5, 4]" in reason.evidence


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ({"low": -1.0}, "input.range"),
        ({"high": 1.0}, "input.range"),
        ({"shape": [9]}, "input.form"),
        ({"dtype": "float16"}, "input.form"),
        ({"classes": 3}, "input.labels"),
        ({"shape": [-1], "dtype": "float32", "low": -9.0, "high": 9.0, "classes": 9}, None),
    ],
)
def test_a_schema_of_the_config_holds_from_the_first_batch(
    schema: dict[str, Any], code: str | None
) -> None:
    checks = InputChecks(InputsConfig(schema=SchemaConfig(**schema)), classes=CLASSES)
    assert [reason.code for reason in checks.look(FRESH)] == ([code] if code else [])


@pytest.mark.parametrize(
    ("key", "schema"),
    [
        ("low", {"low": 2.0, "high": 1.0}),
        ("high", {"high": math.inf}),
        ("shape", {"shape": [-2]}),
        ("dtype", {"dtype": "float"}),
        ("classes", {"classes": 0}),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused(key: str, schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"checks\.inputs\.schema\.{key}"):
        SchemaConfig(**schema)


def test_masked_labels_are_no_wrong_ones_and_tokens_are_below_the_vocabulary() -> None:
    checks = InputChecks(classes=8, ignored=-100, vocab=8)
    ids = torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(0))
    target = ids.clone()
    target[1, :4] = -100
    assert checks.look((ids, target)) == []
    assert [r.code for r in checks.look((ids + 5, target))] == ["input.labels"]
    assert [r.code for r in checks.look((ids, target - 1))] == ["input.labels"]


def test_checks_that_are_off_say_nothing() -> None:
    names = ("form", "not_finite", "range", "labels", "constant", "duplicates", "drift")
    off = dict.fromkeys(names, Policy.off)
    checks = InputChecks(InputsConfig(**off), classes=CLASSES)
    for batch, _ in BAD.values():
        assert checks.look(batch, 0) == []
