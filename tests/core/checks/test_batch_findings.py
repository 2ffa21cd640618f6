"""What is wrong with a batch is found and named, and healthy batches have no finding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import build, compose
from runner.core.checks.batch import BatchChecks, DataSpec, find_problems
from runner.core.errors import ConfigError
from runner.core.schemas.checks import CheckPolicy, InputsConfig, SchemaConfig

N, FEATURES, CLASSES = 32, 10, 5
DEFAULT = DataSpec(CLASSES)


def drawn(shape: list[int], seed: int = 0) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int = CLASSES, shape: tuple[int, ...] = ()) -> Tensor:
    return torch.randint(0, count, (N, *shape), generator=torch.Generator().manual_seed(3))


def checks_after(first: Any, spec: DataSpec = DEFAULT, **options: Any) -> BatchChecks:
    """Checks that have seen one ordinary batch, and found nothing."""
    checks = BatchChecks(InputsConfig(**options), spec)
    assert found(checks, first) == []
    return checks


def found(checks: BatchChecks, batch: Any) -> list[str]:
    return [one.check for one in find_problems(checks, checks.checkable_tensors(batch))]


def put(x: Tensor, value: Any) -> Tensor:
    x = x.clone()
    x[3, 2] = value
    return x


X, Y = drawn([FEATURES]), labels()
BAD = {
    "nan": ((put(X, math.nan), Y), "not_finite"),
    "inf": ((put(X, -math.inf), Y), "not_finite"),
    "far out": ((put(X, 1e4), Y), "range"),
    "no class": ((X, Y.index_fill(0, torch.tensor([5]), CLASSES)), "labels"),
    "negative class": ((X, Y.index_fill(0, torch.tensor([5]), -7)), "labels"),
    "dtype": ((X.double(), Y), "form"),
    "shape": ((X[:, :4], Y), "form"),
    "another tensor": (({"x": X}, Y), "form"),
    "a tensor missing": ((X, torch.zeros(0)), "form"),
    "all zero": ((torch.zeros_like(X), Y), "constant"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_batch_has_the_finding_and_none_where_its_check_is_off(what: str) -> None:
    batch, check = BAD[what]
    schema = SchemaConfig(low=-100, high=100)
    assert check in found(checks_after((X, Y), schema=schema), batch)
    off = checks_after((X, Y), schema=schema, **{check: CheckPolicy.off})
    assert check not in found(off, batch)


@pytest.mark.parametrize("what", ["nan", "inf", "far out", "no class", "all zero"])
def test_the_flag_on_the_device_agrees_with_the_findings(what: str) -> None:
    stops = dict.fromkeys(("not_finite", "range", "labels", "constant"), CheckPolicy.stop)
    checks = checks_after((X, Y), schema=SchemaConfig(low=-100, high=100), **stops)
    for batch, bad in (((X, Y), 0.0), (BAD[what][0], 1.0)):
        tensors = checks.checkable_tensors(batch)
        limits = checks.limits(tensors)
        flag = checks.veto(limits, checks.measure(tensors, limits))
        assert flag is not None and flag.item() == bad


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "uint8", "int64", "complex64"])
def test_values_of_every_dtype_are_compared_with_the_range(dtype: str) -> None:
    x = (X.abs() * 3).clamp(0, 20).to(getattr(torch, dtype))
    checks = checks_after((x, Y), schema=SchemaConfig(low=-1, high=21))
    (finding,) = find_problems(checks, checks.checkable_tensors((put(x, 100), Y)))
    assert finding.check == "range"
    assert finding.bad is not None and finding.bad.nonzero().flatten().tolist() == [3]
    if x.is_floating_point() or x.is_complex():
        assert found(checks, (put(x, math.nan), Y)) == ["not_finite", "range"]
    if x.is_complex():  # pairs of numbers
        assert found(checks, (put(x, complex(0, -1e4)).conj(), Y)) == ["range"]


@pytest.mark.parametrize("scale", [1e38, 1e-30, 1.7e18])
def test_numbers_of_any_size_are_finite(scale: float) -> None:
    checks = checks_after((X.clamp(-3, 3) * scale, Y))
    assert found(checks, (put(X * scale, math.inf), Y)) == ["not_finite"]
    assert checks_after((X.double() * 1e200, Y))


def test_every_tensor_of_a_batch_is_checked_and_a_sparse_one_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = {f"k{i}": drawn([3], i) for i in range(20)} | {"sparse": X.to_sparse()}
    checks = checks_after((x, Y))
    for name in ("k0", "k8", "k19"):
        assert found(checks, (x | {name: put(x[name], math.nan)}, Y)) == ["not_finite"]
    assert [record.getMessage() for record in caplog.records] == [
        "checks.inputs covers dense tensors of numbers only, not inputs.sparse"
    ]


def test_ignored_labels_pass_and_tokens_are_below_the_vocabulary() -> None:
    ids = labels(8, (6,))
    target = ids.clone()
    target[1, :4] = -100
    checks = checks_after((ids, target), DataSpec(8, -100, 8))
    assert found(checks, (ids + 5, target)) == ["labels"]
    assert found(checks, (ids, target - 1)) == ["labels"]
    inputs, safe = checks.make_harmless((ids + 5, target - 1))
    assert inputs.max() < 8 and safe.min() >= -100 and (safe[safe != -100] >= 0).all()


SHAPES: dict[str, tuple[list[list[int]], bool]] = {
    "speech, features last": ([[128, 8], [120, 8], [300, 8]], True),
    "speech, features first": ([[80, 128], [80, 90]], True),
    "sound of one channel": ([[1, 160], [1, 150]], True),
    "images": ([[3, 32, 32], [3, 40, 48], [3, 32, 40]], True),
    "images, channels last": ([[32, 32, 3], [40, 48, 3]], True),
    "video": ([[3, 8, 16, 16], [3, 6, 16, 16]], True),
    "features of a table": ([[10], [9]], False),
    "another dimension": ([[128, 8], [128, 8, 1]], False),
    "both ends": ([[128, 8], [120, 7]], False),
    "channels last for once": ([[3, 32, 32], [32, 32, 3]], False),
}


@pytest.mark.parametrize("what", SHAPES)
def test_shapes_that_a_model_takes_pass_and_others_are_found(what: str) -> None:
    (first, *later), honest = SHAPES[what]
    checks = checks_after((drawn(first), Y))
    for shape in later:
        assert found(checks, (drawn(shape), Y)) == ([] if honest else ["form"])


def test_texts_and_their_masks_may_be_of_any_length() -> None:
    def texts(length: int) -> Any:
        ids = labels(50, (length,))
        mask = torch.ones(N, 1, length, length, dtype=torch.bool)
        return {"input_ids": ids, "attention_mask": mask}, ids.clone()

    for spec in (DataSpec(vocab=50), DataSpec()):
        assert found(checks_after(texts(128), spec), texts(120)) == []
    columns = checks_after((labels(50, (128,)), Y), DataSpec())  # whole numbers are no text
    assert found(columns, (labels(50, (120,)), Y)) == ["form"]


@pytest.mark.parametrize(
    ("schema", "check"),
    [
        ({"low": -1.0}, "range"),
        ({"high": 0.0}, "range"),
        ({"classes": 3}, "labels"),
        ({"low": -9.0, "high": 9.0, "classes": 9}, None),
    ],
)
def test_a_schema_of_the_config_holds_from_the_first_batch(
    schema: dict[str, Any], check: str | None
) -> None:
    checks = BatchChecks(InputsConfig(schema=SchemaConfig(**schema)), DataSpec(CLASSES))
    assert found(checks, (X, Y)) == ([check] if check else [])


def test_a_config_that_makes_no_sense_is_refused() -> None:
    for key, schema in (
        ("low", {"low": 2.0, "high": 1.0}),
        ("high", {"high": math.inf}),
        ("classes", {"classes": 0}),
    ):
        with pytest.raises(ConfigError, match=rf"checks\.inputs\.schema\.{key}"):
            SchemaConfig(**schema)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"checks\.inputs\.labels: .* use skip"):
        InputsConfig(labels=CheckPolicy.drop)


DATA = {
    "stdlib_text": "data=stdlib_text model=gpt training.batch_size=8",
    "images": "data=synthetic data.samples=256 model=cnn",
    "tabular": "data=synthetic data.form=tabular model=mlp",
}


@pytest.mark.parametrize("name", DATA)
def test_healthy_data_give_no_alarm(name: str) -> None:
    with build(compose([*DATA[name].split(), "optimization=none", "training.steps=100"])) as run:
        assert run.batch_validator is not None
        run.batch_validator.table = None
        for number, batch in zip(range(1, 101), run.train.batches(0), strict=False):
            run.batch_validator.admit(number, batch)
        assert list(run.history.faults) == []
