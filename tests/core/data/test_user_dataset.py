"""A data set of the user's own: what is inferred, what is refused, and that chance is seeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset, Subset

from runner.core.data.loader import BatchLoader, _choose_workers
from runner.core.data.open import open_data
from runner.core.data.order import mix, sample_seeds
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions, Preprocessing
from runner.core.data.usable import fetch_usable
from runner.core.data.user_dataset import UserDataset, comparable, find_generators, get_states
from runner.core.errors import ConfigError, DataError
from runner.core.interfaces.batch import Sizes
from runner.core.schemas.data import BadSamples, DataConfig, Digits, SplitRule

Load = Callable[..., BatchLoader]


class Made:
    """Samples made by a function, with any attributes."""

    def __init__(self, make: Callable[[int], Any], samples: int = 20, **attributes: Any) -> None:
        self.make, self.samples = make, samples
        self.asked: list[int] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.make(index)


def adapted(dataset: Any, name: str = "my_package.Made") -> UserDataset:
    return UserDataset(dataset, name, DataConfig(kind="own"))


def opened(make: Callable[[int], Any], samples: int = 20, **attributes: Any) -> UserDataset:
    return adapted(Made(make, samples, **attributes))


@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_the_time_to_fetch_a_sample_is_without_seeding(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_seed, now = UserDataset._seed, [0.0]  # a clock that the data set alone moves

    def slow(self: UserDataset, seed: int) -> None:
        now[0] += 0.01
        own_seed(self, seed)

    def make(index: int) -> tuple[torch.Tensor, int]:
        now[0] += seconds
        return features(index)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("runner.core.data.user_dataset.time", clock)
    monkeypatch.setattr(UserDataset, "_seed", slow)
    source = opened(make)
    assert source.sample_seconds == pytest.approx(seconds, abs=1e-9)
    workers, (choice,) = _choose_workers(source, DataConfig(kind="own"), 32)
    assert (workers > 0) is (seconds > 0) and "ms to fetch" in choice.reason


def features(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((3,), float(index)), index % 4


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (features, Sizes("classification", 3, classes=4)),
        (lambda i: (torch.zeros(3, 8, 8), i % 2),
         Sizes("classification", 192, in_channels=3, image_size=8, classes=2)),
        (lambda i: (np.zeros(3, np.float32), np.zeros(2, np.float32)),
         Sizes("regression", 3, classes=2)),
        (lambda i: (torch.arange(6) + i, torch.arange(6) + i + 1),
         Sizes("language_modelling", classes=26, vocab=26, sequence=6)),
        (lambda i: {"input_ids": [i, 1, 2], "attention_mask": [1, 1, 0], "labels": i % 2},
         Sizes("classification", classes=2, vocab=20, sequence=3)),
        (lambda i: (torch.zeros(3), torch.zeros(5), i % 2), Sizes("classification", 3, classes=2)),
    ],
    ids=["features", "images", "two targets", "tokens", "dict", "two inputs"],
)  # fmt: skip
def test_sizes_follow_from_the_samples(make: Callable[[int], Any], expected: Sizes) -> None:
    assert opened(make).sizes == expected


def test_what_the_data_set_states_goes_first() -> None:
    assert opened(features, classes=9).sizes.classes == 9
    named = opened(features, classes=["a", "b", "c", "d"])
    assert named.sizes.class_names == ("a", "b", "c", "d")
    assert opened(lambda i: (torch.arange(4), i % 2), vocab=50).sizes.vocab == 50
    assert opened(features, sizes={"in_features": 7}).sizes.in_features == 7


def test_labels_in_an_attribute_save_the_scan() -> None:
    dataset = Made(features, targets=[0, 6] * 10)
    source = adapted(dataset)
    assert (source.sizes.classes, dataset.asked) == (7, [0, 1, 2, 3])  # which are timed
    assert "largest of my_package.Made.targets" in source.choices[0].reason


TOKENS, MASKED = torch.tensor([0, 1, 2]), torch.tensor([1, -100, 2])


@pytest.mark.parametrize(
    ("usual", "odd", "stated", "problem"),
    [
        ((torch.zeros(3), 1), (torch.zeros(4), 1), {"classes": 2},
         r"sample 7: inputs is float32 of shape \[4\].*float32 of shape \[3\]"),
        ((torch.zeros(3), 1), (torch.zeros(3).double(), 1), {"classes": 2},
         "sample 7: inputs is float64 of shape.*must match"),
        ((torch.zeros(3), 1), (torch.zeros(3), 4), {"classes": 4}, "sample 7: 4 is not in 0 to 3"),
        ((torch.zeros(3), 1), (torch.zeros(3), -1), {"classes": 4}, "sample 7: -1 is not in 0 to"),
        ((TOKENS, MASKED), (torch.tensor([0, 1, 9]), MASKED), {"vocab": 5},
         "inputs of sample 7: 9 is not in 0 to 4.*`vocab`"),
    ],
    ids=["shape", "double", "label", "negative label", "token"],
)  # fmt: skip
def test_a_sample_unlike_the_others_or_out_of_range_is_named(
    usual: Any, odd: Any, stated: dict[str, int], problem: str
) -> None:
    source = opened(lambda i: odd if i == 7 else usual, **stated)
    assert torch.equal(source.fetch(np.arange(7), None)[1][6], torch.as_tensor(usual[1]))
    with pytest.raises(DataError, match=problem):
        source.fetch(np.arange(5, 15), None)


class AtOnce(Made):
    """Samples that are read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(len(indices))
        return [self.make(index) for index in indices]


def test_a_batch_is_read_at_once_where_the_data_set_can() -> None:
    dataset = AtOnce(features, targets=[0, 3] * 10)
    source = adapted(Subset(dataset, range(20)))
    dataset.asked.clear()
    inputs, target = source.fetch(np.array([3, 9, 4]), None)
    assert dataset.asked == [3]
    assert (inputs[:, 0].tolist(), target.tolist()) == ([3.0, 9.0, 4.0], [3, 1, 0])


def test_torchs_own_wrappers_keep_the_seed_of_each_sample() -> None:
    labels = [0, 1] * 10
    noise = Made(lambda _: torch.rand(3))
    pairs = StackDataset(noise, labels)
    for wrapped in (pairs, Subset(pairs, range(20))):
        wrapped.sizes = {"task": "classification", "in_features": 3, "classes": 2}
        source = adapted(wrapped)
        one, other = (np.array(indices) for indices in ([1, 2, 5], [7, 5]))
        batches = [source.fetch(part, part.astype(np.uint64))[0] for part in (one, other)]
        assert torch.equal(batches[0][-1], batches[1][-1])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda indices: [features(0)], "of 3 samples returns a list of 1; return a list with"),
        (lambda indices: torch.zeros(3), "of 3 samples returns a Tensor; return a list with"),
        (lambda indices: 1 / 0, "fails for 3 samples that __getitem__ can read: ZeroDivisionError"),
    ],
    ids=["short", "no list", "fails"],
)
def test_faults_of_a_batch_that_is_read_at_once(answer: Any, problem: str) -> None:
    dataset = AtOnce(features, sizes={"in_features": 3, "classes": 4})
    source = adapted(dataset)
    dataset.__class__ = type("Broken", (AtOnce,), {"__getitems__": lambda _, i: answer(i)})
    with pytest.raises(DataError, match=problem):
        source.fetch(np.array([1, 2, 3]), None)


def test_a_sample_that_fails_in_a_batch_read_at_once_is_the_one_left_out() -> None:
    dataset = AtOnce(lambda i: features(i if i != 9 else 1 // 0), classes=4)
    source = UserDataset(dataset, "Made", DataConfig(kind="own", bad_samples=BadSamples.drop))
    usable = fetch_usable(source, np.array([3, 9, 4]), None, np.arange(20))
    assert usable.indices.tolist() == [3, 4]
    assert "sample 9: ZeroDivisionError" in usable.bad[9]


def test_a_sample_that_reads_torchs_seed_gets_its_own() -> None:
    source = opened(lambda i: (torch.full((2,), float(torch.initial_seed() % 1000)), i % 2))
    seeds = np.array([5, 6, 7], np.uint64)
    assert source.fetch(np.arange(3), seeds)[0][:, 0].tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda i: torch.zeros(3), "sample 0 is float32 of shape"),
        (lambda i: {"x": torch.zeros(3)}, "{x: float32 of shape .*; .* one of labels, label"),
        (lambda i: ("words", 1), "inputs is a str; return a tensor"),
        (lambda i: [][i], "sample 0: IndexError: list index out of range"),
        (lambda i: (torch.zeros(3), torch.zeros(4, 4, dtype=torch.int64)), "cannot infer the task"),
        (lambda i: (torch.zeros(3), -5), "the label -5 is negative.*regression.*float32"),
        (lambda i: (torch.zeros(4, dtype=torch.complex64), 1), "complex64.*sizes = {'task'"),
    ],
)
def test_unusable_samples_are_refused_at_opening(make: Callable[[int], Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        opened(make)


def test_a_class_that_is_no_data_set_is_refused() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ConfigError, match=r"data._target_: my_package.Stream has no __len__"):
        adapted(Stream(), "my_package.Stream")
    with pytest.raises(DataError, match="my_package.Made: 0 samples"):
        opened(features, samples=0)


def noisy(index: int) -> tuple[torch.Tensor, float]:
    return torch.randn(2) + torch.tensor(np.random.randn(2)).float(), random.random()


def test_chance_depends_on_the_samples_seed_alone() -> None:
    source = opened(noisy)
    both = np.array([5, 2])
    seeds = sample_seeds(0, 3, both)
    x, y = source.fetch(both, seeds)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    alone, target = source.fetch(both[1:], seeds[1:])
    assert torch.equal(alone[0], x[1])
    assert torch.equal(target[0], y[1])
    assert not torch.equal(source.fetch(both, sample_seeds(0, 4, both))[0], x)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


class Keeper:
    """Draws from generators of its own, which it keeps in `place`."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        rngs = find_generators(self)
        return torch.tensor([draw_number(rng) for rng in rngs]), float(index)


def draw_number(rng: Any) -> float:
    if isinstance(rng, torch.Generator):
        return float(torch.rand((), generator=rng))
    return float(rng.random() if hasattr(rng, "random") else rng.random_sample())


class Transform:
    __slots__ = ("chance",)

    def __init__(self, chance: Any) -> None:
        self.chance = chance


def kept_generators() -> list[Any]:
    return [
        np.random.default_rng(0), np.random.Generator(np.random.MT19937(0)),
        np.random.RandomState(0), np.random.RandomState(np.random.PCG64(0)),
        torch.Generator(), random.Random(0), np.random.default_rng(0),
    ]  # fmt: skip


def test_each_generator_that_a_data_set_keeps_is_seeded_for_each_sample_and_restored() -> None:
    source, again = (adapted(Keeper(kept_generators())) for _ in range(2))
    before = comparable(get_states(source.generators))
    both = np.array([5, 2])
    seeds = sample_seeds(0, 3, both)
    x, _ = source.fetch(both, seeds)
    assert len(source.generators) == 7 and source.draws_itself()
    assert len(set(x.flatten().tolist())) == 14  # a stream for each generator and sample
    again.fetch(both, sample_seeds(0, 9, both))
    assert torch.equal(again.fetch(both[1:], seeds[1:])[0][0], x[1])
    assert not torch.equal(source.fetch(both, sample_seeds(0, 4, both))[0], x)
    assert comparable(get_states(source.generators)) == before
    # numpy's own, seeded with the same number
    assert x[0, 0] == np.float32(np.random.default_rng(mix(int(seeds[0]), 0)).random())
    assert x[1, 5] == np.float32(random.Random(mix(int(seeds[1]), 5)).random())


@pytest.mark.parametrize(
    "place",
    [
        lambda rng: rng,
        lambda rng: {"a": [({"b": [rng]},)]},
        lambda rng: [Transform([Transform(partial(draw_number, rng))])],
        lambda rng: torch.utils.data.Subset(Keeper(rng), [0]),
        lambda rng: Transform(lambda: draw_number(rng)),
        lambda rng: Transform(rng.random),
    ],
    ids=["attribute", "containers", "objects", "wrapped data set", "closure", "method"],
)
def test_generators_are_found_wherever_a_data_set_keeps_them(place: Any) -> None:
    for rng in (random.Random(3), np.random.default_rng(3)):
        assert find_generators(Keeper(place(rng))) == [rng]


def test_global_generators_of_the_system_and_beyond_64_are_no_own_ones() -> None:
    shared = [
        np.random.mtrand._rand, torch.default_generator, random.SystemRandom(),
        random.random.__self__, np.random,
    ]  # fmt: skip
    assert find_generators(Keeper(shared)) == []
    assert len(find_generators(Keeper([random.Random(i) for i in range(70)]))) == 64


def test_a_batch_read_at_once_seeds_the_kept_generators_by_its_first_sample() -> None:
    class AtOnce(Keeper):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    source = adapted(AtOnce([np.random.default_rng(0)]))
    batch = np.array([4, 7])
    x, _ = source.fetch(batch, batch.astype(np.uint64))
    rng = np.random.default_rng(mix(4, 0))
    assert source.draws_itself()
    assert x[:, 0].tolist() == np.float32([rng.random(), rng.random()]).tolist()
    assert torch.equal(x, source.fetch(batch, batch.astype(np.uint64))[0])


def test_a_target_is_built_with_its_arguments() -> None:
    config = Digits(_target_="my_package.Made", arguments={"make": features, "samples": 10})
    source = open_data(config, lambda target, key: lambda make, samples: Made(make, samples))
    assert len(source.train) == 8


def test_a_stratified_split_needs_labels_that_can_be_read_and_is_the_same_when_resumed() -> None:
    config = DataConfig(kind="own", split=SplitRule.stratified)
    labels = [0] * 40 + [1] * 10

    def features_of(index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3), labels[index]

    def split(config: DataConfig, opening: OpenOptions = DEFAULT_OPENING, **attributes: Any) -> Any:
        dataset = Made(features_of, 50, **attributes)
        return UserDataset(dataset, "my_package.Made", config, opening)

    counted = split(config)
    assert np.bincount(np.array(labels)[counted.validation]).tolist() == [8, 2]
    declared = split(config, classes=2, targets=labels)
    assert declared.validation.tolist() == counted.validation.tolist()
    with pytest.raises(ConfigError, match="data.split: stratified needs .*attribute `targets`"):
        split(config, classes=2)  # so that no sample is read
    fitted = Preprocessing.of(config, counted)
    for resumed in (config, DataConfig(kind="own")):
        opening = OpenOptions(fitted=fitted, split_rule=fitted.split)
        assert split(resumed, opening).validation.tolist() == counted.validation.tolist()
    by_default = split(DataConfig(kind="own")).validation  # random
    assert by_default.tolist() != counted.validation.tolist()
