"""`create_training_pipeline`: a whole run around a live model and live data."""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from runner import Components, Hook, Verdict, build, compose, create_training_pipeline
from runner.core.errors import ConfigError, DataError, UsageError
from runner.core.schemas.optimizer import OptimizerConfig, ScheduleConfig
from runner.loops.pipeline import split_into_dataset
from tests import runs

QUICK = [*runs.QUICK, "optimizer.lr=3e-3"]


def test_digits_are_learned_and_recorded(net: nn.Module, digits: Any, tmp_path: Path) -> None:
    with create_training_pipeline(
        net,
        digits[0],
        validation=digits[1],
        level="basic",
        folder=tmp_path / "run",
        overrides=[*QUICK, "training.epochs=8"],
    ) as pipeline:
        summary = pipeline.train()
        assert pipeline.evaluate() == summary.metrics
    assert summary.metrics["val/accuracy"] > 0.95
    assert summary.status == "done"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"summary.json", "metrics.jsonl", "checkpoints", "report.md"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    recorded = runs.read(tmp_path / "run")
    assert recorded["name"] == "tensors-Sequential"
    assert recorded["metrics"] == summary.metrics


def test_one_cut_off_continues_to_the_same_bits(digits: Any, tmp_path: Path) -> None:
    stop = runs.AtSteps(30, lambda run: Verdict.STOP)

    def trained(folder: str, hooks: list[Hook], resume: str = "none") -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
        )
        with create_training_pipeline(
            model,
            digits[0],
            level="basic",
            folder=tmp_path / folder,
            hooks=hooks,
            overrides=[*QUICK, "training.steps=60", f"checkpoint.resume={resume}"],
        ) as pipeline:
            pipeline.train()
        return model.state_dict()

    whole = trained("whole", [])
    trained("cut", [stop])
    resumed = trained("cut", [], "auto")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_a_data_set_and_an_optimizer_of_the_callers(net: nn.Module, digits: Any) -> None:
    optimizer = torch.optim.SGD(
        [{"params": net[1].parameters(), "lr": 0.0}, {"params": net[4].parameters()}],
        lr=0.1,
        momentum=0.9,
    )
    frozen = net[1].weight.detach().clone()
    x, y = digits[0]
    with create_training_pipeline(
        net,
        TensorDataset(x[:400], y[:400]),
        optimizer=optimizer,
        level="basic",
        record=False,
        overrides=[*runs.QUICK, "training.epochs=6", "data.workers=0"],
    ) as pipeline:
        summary = pipeline.train()
        assert pipeline.folder is None
    assert summary.metrics["val/accuracy"] > 0.7
    assert torch.equal(net[1].weight, frozen)  # its own rate is 0
    assert optimizer.state_dict()["state"]


def test_a_loss_of_the_callers_over_dicts_and_arrays() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, *, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(torch.stack([a, b, a * b], 1)).squeeze(1)

    rng = np.random.default_rng(0)
    data = {"a": rng.normal(size=300), "b": rng.normal(size=300)}
    data["y"] = 2 * data["a"] - data["b"] + 1
    with create_training_pipeline(
        Named(),
        data,
        loss_fn=nn.functional.l1_loss,
        level="none",
        record=False,
        overrides=[*QUICK, "training.steps=400", "optimizer.lr=0.05", "schedule=linear"],
    ) as pipeline:
        assert pipeline.train().metrics["val/loss"] < 0.1


class Pairs:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(64), torch.tensor([[1, 2], [3, 4]])


class Ragged:
    """Samples of different lengths, which `collate_fn` cuts to `width` and multiplies."""

    def __init__(self, width: int, factor: float, start: int = 0) -> None:
        self.width, self.factor, self.start = width, factor, start
        self.targets = [0, 1] * 12
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((self.width + index % 3,), float(self.start + index)), index % 2

    def collate_fn(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        inputs = torch.stack([x[: self.width] for x, _ in samples])
        return self.factor * inputs, torch.tensor([y for _, y in samples])


class Batched(Ragged):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked += indices
        return [self[index] for index in indices]


def test_training_and_validation_set_are_read_and_collated_each_in_its_own_way() -> None:
    data, validation = Ragged(4, 1.0), Batched(4, 10.0, start=100)
    options: dict[str, Any] = {"record": False, "overrides": [*runs.QUICK, "data.workers=0"]}
    for train, held_out in ((data, validation), (validation, data)):
        validation.asked.clear()
        subset = Subset(train, range(20))  # as of random_split
        with create_training_pipeline(
            nn.Linear(4, 2), subset, validation=held_out, **options
        ) as pipeline:
            source = pipeline.run.train.fetch.source
            for part, indices in ((train, [1, 3]), (held_out, [21, 23])):
                inputs, target = source.fetch(np.array(indices), None)
                rows = [part[index % 20][0][:4] for index in indices]
                assert torch.equal(inputs, part.factor * torch.stack(rows)) and target.all()
        assert validation.asked and max(validation.asked) < 24
    with create_training_pipeline(
        nn.Linear(4, 2), data, validation=validation, **options
    ) as pipeline:
        assert pipeline.run.train.fetch.source.labels().tolist() == [0, 1] * 24


class Ordered(IterableDataset[Any]):
    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.columns, strict=True)


def load_rows(*columns: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*columns), 8)


def as_given(*columns: Tensor) -> Any:
    return columns


def own_loss(output: Tensor, target: Any) -> Tensor:
    """Compare the first output with the first target, of any form."""
    first = target[0] if isinstance(target, tuple) else target
    return (output[:, :1] - first.flatten(1).float().mean()).square().mean()


OWN = "security.trusted=[tests]", "objective._target_=tests.loops.test_pipeline.own_loss"


def trained(model: nn.Module, data: Any, *overrides: str, **options: Any) -> tuple[Any, Any]:
    """Train for two steps; return the first target, and the sizes of the data."""
    typed = [*runs.QUICK, "training.steps=2", "training.batch_size=8", *overrides]
    options = {"validation": data, "record": False} | options
    with create_training_pipeline(model, data, overrides=typed, **options) as pipeline:
        pipeline.train()
        source = pipeline.run.train.fetch.source
        return source.fetch(np.arange(8), None)[1], source.sizes


@pytest.mark.parametrize("make", [as_given, TensorDataset, Ordered, load_rows])
def test_labels_of_any_width_are_classes_but_a_loss_of_the_callers_gets_them_unchanged(
    make: Any,
) -> None:
    x, y = torch.randn(16, 4), torch.arange(16).unsqueeze(1) % 2
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int32):
        target, sizes = trained(nn.Linear(4, 2), make(x, y.flatten().to(dtype)))
        assert (target.dtype, sizes.classes) == (torch.int64, 2)
    data = make(x, y.int())
    assert trained(nn.Linear(4, 1), data, *OWN)[0].dtype == torch.int32
    assert trained(nn.Linear(4, 1), data, loss_fn=own_loss)[0].dtype == torch.int32


class Nested:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4), (torch.tensor([index % 2]), float(index))


@pytest.mark.parametrize("data", [Nested(), (torch.ones(16, 4), torch.ones(16, 2, 2).long())])
def test_a_loss_of_the_callers_interprets_targets_of_any_form(data: Any) -> None:
    with pytest.raises(DataError, match="cannot infer the task.*give a loss of your own"):
        trained(nn.Linear(4, 1), data)
    for options in ({}, {"validation": None}):
        assert trained(nn.Linear(4, 1), data, *OWN, **options)[1].task == "given"
        assert trained(nn.Linear(4, 1), data, loss_fn=own_loss, **options)[1].task == "given"


def test_integers_of_any_shape_are_classes_if_that_is_typed() -> None:
    x, y = torch.randn(16, 3, 4, 4), torch.arange(256).reshape(16, 4, 4) % 3
    with pytest.raises(DataError, match="type objective=classification if they are classes"):
        trained(nn.Conv2d(3, 3, 1), (x, y))
    y[0, 0, 0] = 255
    typed = "objective=classification", "objective.ignore_index=255"
    for labels in (y, y.to(torch.uint8)):
        target, sizes = trained(nn.Conv2d(3, 3, 1), (x, labels), *typed)
        assert torch.equal(target, y[:8]) and (sizes.task, sizes.classes) == ("classification", 3)
    plain = TensorDataset(x, y.clamp(max=2))
    target, sizes = trained(nn.Conv2d(3, 3, 1), plain, "objective=classification")
    assert target.shape == (8, 4, 4) and sizes.classes == 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": DataLoader(TensorDataset(torch.zeros(4, 64)), 2)}, DataError, "return .inputs"),
        ({"data": (torch.zeros(4, 64), torch.zeros(3))}, DataError, "the first dimension must be"),
        ({"data": (torch.zeros(4, 64), ["a"])}, UsageError, "got a str"),
        ({"data": torch.zeros(4, 64)}, UsageError, "data"),
        ({"data": Pairs()}, DataError, "cannot infer the task"),
        (
            {"data": Pairs(), "validation": DataLoader(Pairs())},
            UsageError,
            "validation must be .* got a DataLoader",
        ),
        ({"model": nn.ReLU()}, UsageError, "nothing to train"),
        ({"model": "net"}, UsageError, "model must be"),
        ({"loss_fn": "mse"}, UsageError, "loss_fn must be"),
        ({"overrides": "training.steps=3"}, UsageError, "overrides must be a list"),
        ({"overrides": ["model=cnn"]}, UsageError, "model=cnn has no effect, as model is given"),
        ({"overrides": ["+model.width=8"]}, UsageError, "has no effect, as model is given"),
        ({"overrides": ["data=digits"]}, UsageError, "has no effect, as data is given"),
        (
            {"loss_fn": nn.MSELoss(), "overrides": ["objective.label_smoothing=0.1"]},
            UsageError,
            "label_smoothing=0.1 has no effect, as loss_fn is given",
        ),
        ({"data": Subset(TensorDataset(torch.zeros(4, 64)), [])}, DataError, "0 samples; training"),
        ({"hooks": [Hook]}, UsageError, "hooks must be a list of runner.Hook instances"),
        ({"hooks": Hook()}, UsageError, "hooks must be a list of runner.Hook instances"),
    ],
)
def test_a_mistake_names_the_argument(
    net: nn.Module, digits: Any, change: dict[str, Any], error: Any, message: str
) -> None:
    arguments = {"model": net, "data": digits[0], "record": False, "overrides": QUICK} | change
    with pytest.raises(error, match=message):
        create_training_pipeline(**arguments)


IGNORED = {  # values of the keys that a given optimizer replaces
    "optimizer": "sgd",
    "optimizer.name": "SGD",
    "optimizer.lr": "0.1",
    "optimizer.weight_decay": "0.5",
    "optimizer.options": "{}",
    "optimizer.groups": "[]",
    "optimizer._target_": "my_package.Lion",
    "schedule": "cosine",
    **{f"schedule.{field.name}": "1" for field in fields(ScheduleConfig)},
}
ACTING = {"optimizer.ema": "0.9", "optimizer.ema_warmup": "false", "optimizer.freeze": "[1]"}


def test_a_key_that_a_given_optimizer_replaces_is_refused_and_the_others_act(digits: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    create = partial(create_training_pipeline, model, digits[0], optimizer=optimizer, record=False)
    names = {f"optimizer.{field.name}" for field in fields(OptimizerConfig)}
    assert names == {key for key in IGNORED | ACTING if key.startswith("optimizer.")}
    for typed in (*map("=".join, IGNORED.items()), "+optimizer.options.eps=1", "~schedule.warmup"):
        message = f"^create_training_pipeline: {re.escape(typed)} has no effect, as optimizer is"
        with pytest.raises(UsageError, match=message):
            create(overrides=[*runs.QUICK, typed])
    with create(overrides=[*runs.QUICK, *map("=".join, ACTING.items())]) as pipeline:
        update = pipeline.run.update
        assert update.average and not update.ema_warmup
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


SPLIT = {"validation": "0.5", "split": "stratified", "folds": "5", "fold": "0"}
ORDER = {"shuffle": "true", "drop_last": "true", "split_seed": "1", "most_bad": "0.2"}
ORDER["validation"] = "0.5"
PROCESSES = {"workers": "0", "prefetch": "3", "persistent_workers": "true", "timeout_s": "9"}
PROCESSES["worker_restarts"] = "1"
ROWS = torch.zeros(16, 4), torch.arange(16) % 2


@pytest.mark.parametrize(
    ("data", "part", "keys"),
    [
        (ROWS, "validation", SPLIT),
        (TensorDataset(*ROWS), "validation", SPLIT),
        (Ordered(*ROWS), "a stream", ORDER),
        (load_rows(*ROWS), "a DataLoader", ORDER | PROCESSES),
    ],
)
def test_keys_of_data_without_effect_on_the_given_ones_are_refused_by_name(
    data: Any, part: str, keys: dict[str, str]
) -> None:
    typed = [*runs.QUICK, "training.steps=2", "training.batch_size=8", "checkpoint=off"]
    create = partial(create_training_pipeline, nn.Linear(4, 2), data, validation=data, record=False)
    components = Components(nn.Linear(4, 2), data, validation=data)
    for key, value in keys.items():
        overrides = [*typed, f"data.{key}={value}"]
        message = f"data.{key}={value} has no effect, as {part} is given; leave it out"
        with pytest.raises(UsageError, match=f"^create_training_pipeline: {message}"):
            create(overrides=overrides)
        if part != "validation":  # Components take one for the others alone
            with pytest.raises(UsageError, match=f"^build: {message}"):
                build(compose(overrides), components=components)
    acting = {k: v for k, v in (ORDER | PROCESSES).items() if k not in keys}
    others = [f"data.{key}={value}" for key, value in acting.items()]
    create(overrides=[*typed, *others, "data.pin_memory=false"]).close()


def test_a_limit_of_validation_samples_acts_on_samples_or_is_refused() -> None:
    typed = [*runs.QUICK, "training.steps=2", "training.batch_size=8", "data.validation_samples=3"]
    create = partial(create_training_pipeline, nn.Linear(4, 2), record=False, overrides=typed)
    for data in (ROWS, TensorDataset(*ROWS), Ordered(*ROWS)):
        with create(data, validation=data) as pipeline:
            assert [len(y) for _, y in pipeline.run.validation.batches(0)] == [3]
    with pytest.raises(ConfigError, match="data.validation_samples: counts samples, and"):
        create(load_rows(*ROWS), validation=load_rows(*ROWS))


def test_tensors_have_the_dtype_of_a_float64_model_and_are_float32_beside_others() -> None:
    x, y = torch.randn(16, 4, dtype=torch.float64), torch.randn(16, 2)
    for data in ((x, y), (x.numpy(), y.double().numpy()), (x.float(), y)):
        assert trained(nn.Linear(4, 2).double(), data)[0].dtype == torch.float64
        assert trained(nn.Linear(4, 2), data)[0].dtype == torch.float32
    components = nn.Linear(4, 2).double(), (x, y), None, compose([]), True
    kept = split_into_dataset("test", *components).fetch(np.arange(16), None)[0]
    assert torch.equal(kept, x)  # not rounded on the way


@pytest.mark.parametrize("make", [as_given, TensorDataset])
def test_data_split_stratified_holds_out_the_same_share_of_each_class(make: Any) -> None:
    labels = torch.tensor([0] * 80 + [1] * 12 + [2] * 8)
    data = make(torch.randn(100, 4), labels.int())
    create = partial(create_training_pipeline, nn.Linear(4, 3), record=False)

    def held_out(data: Any, *typed: str) -> list[int]:
        with create(data, overrides=[*runs.QUICK, "data.workers=0", *typed]) as pipeline:
            return pipeline.run.validation.fetch.order.indices.tolist()

    def counts(*typed: str) -> list[int]:
        return torch.bincount(labels[held_out(data, *typed)], minlength=3).tolist()

    stratified, by_default = "data.split=stratified", held_out(data)
    assert counts(stratified) == [16, 2, 2]
    for fold in range(4):
        assert counts(stratified, "data.folds=4", f"data.fold={fold}") == [20, 3, 2]
    assert by_default == held_out(data, "data.split=random") != held_out(data, stratified)
    with pytest.raises(ConfigError, match="stratified needs classes.*attribute `targets`"):
        held_out(make(torch.randn(100, 4), torch.randn(100)), "data.split=stratified")


def test_labels_that_are_ignored_are_no_class_and_the_key_acts_on_metrics_of_a_given_loss() -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    for ignored, typed in ((255, []), (0, ["objective.metrics=[Accuracy]"])):
        labels = torch.where(torch.arange(60) % 5 == 0, ignored, y)
        loss = nn.CrossEntropyLoss(ignore_index=ignored) if typed else None
        overrides = [*runs.QUICK, "training.steps=1", f"objective.ignore_index={ignored}", *typed]
        with create_training_pipeline(
            nn.Linear(4, 3), (x, labels), loss_fn=loss, record=False, overrides=overrides
        ) as pipeline:
            assert pipeline.run.sizes.classes == 3
