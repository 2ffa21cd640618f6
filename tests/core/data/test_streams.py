"""Data that are read in order: which samples, by whom, and where a resumed run goes on."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runner import Verdict, build, create_training_pipeline, evaluate, train
from runner.core.build.build import Components
from runner.core.data.collate import as_pair, stack, stack_plain
from runner.core.data.stream import StreamDataset
from runner.core.data.stream_loader import Position, Reader, StreamShard
from runner.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    SecurityError,
    UsageError,
)
from runner.core.interfaces.run import Run
from runner.core.schemas.data import DataConfig
from tests import my_package, runs
from tests.runs import opened

pytestmark = pytest.mark.usefixtures("my_package")

NET = (*runs.OURS, "model._target_=my_package.Net")
STREAM = (*NET, "data._target_=my_package.Counted", "training.batch_size=16")
START = Position()
GPT = ("model=gpt", "model.width=16", "model.heads=2", "model.depth=1", "optimizer.lr=0.01")


def data(*made: Any, **config: Any) -> StreamDataset:
    """An adapter of streams that are made one after another, the last one again and again."""
    streams = [*made]
    make = lambda: streams.pop(0) if len(streams) > 1 else streams[0]  # noqa: E731
    return StreamDataset(make, "my_package.Stream", DataConfig(kind="own", **config))


def reader(
    source: StreamDataset, shard: StreamShard, at: Position = START, size: int = 4
) -> Reader:
    return Reader(source, shard, size, 0, at)


def numbers(source: StreamDataset, shard: StreamShard, batches: int, **how: Any) -> list[int]:
    """The numbers of the samples in some batches of a shard."""
    one, taken = reader(source, shard, **how), list[int]()
    with one.worker_info():
        for number in range(one.at.batches, one.at.batches + batches):
            taken += [round(100 * float(x[0])) for x, _ in one.read(number)]
    return taken


def numbers_of(batch: Any) -> list[int]:
    return [round(100 * x) for x in batch[0][:, 0].tolist()]


class Generated:
    """Knows of no workers."""

    classes = 2

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return my_package.counted(40)


@pytest.mark.parametrize("stream", [my_package.Counted(40), Generated()])
def test_the_shards_of_a_stream_have_each_sample_once(stream: Any) -> None:
    """Also of one that asks for no shard, which would be read whole by each worker of torch's."""
    source = data(stream)
    shards = [numbers(source, StreamShard(n, 5, is_told=True), 2) for n in range(5)]
    assert sorted(number for shard in shards for number in shard) == [*range(40)]
    assert numbers(source, StreamShard(), 10) == [*range(40)]


def test_a_stream_that_ends_starts_over_in_the_same_batch() -> None:
    one = reader(data(my_package.Counted(10)), StreamShard())
    batches = [[round(100 * float(x[0])) for x, _ in one.read(n)] for n in range(5)]
    assert batches[2] == [8, 9, 0, 1] and [*map(len, batches)] == [4] * 5
    assert one.at == Position(5, 1, 10, pass_items=10) and one.at.passes_read == 2
    assert [kind for kind, _ in one.notes] == ["ended"]
    assert "my_package.Stream ended after 10 samples and starts over" in one.notes[0][1]


def test_an_empty_shard_is_an_error_that_says_which() -> None:
    with pytest.raises(DataError, match=r"no samples for reader 4 of 4; use fewer data.workers"):
        numbers(data(my_package.Counted(3)), StreamShard(3, 4, is_told=True), 1)
    with pytest.raises(DataError, match=r"my_package.Stream has no samples"):
        data(my_package.Counted(0))


@pytest.mark.parametrize("kind", [my_package.Counted, my_package.Stateful])
@pytest.mark.parametrize("shard", [StreamShard(), StreamShard(1, 3, is_told=True)])
def test_a_reader_at_a_position_reads_what_the_whole_one_reads_next(
    kind: type[my_package.Counted], shard: StreamShard
) -> None:
    """Noise from all global generators included, at any batch of any pass."""
    source = StreamDataset(lambda: kind(22), "my_package.Stream", DataConfig(kind="own"))
    whole, positions, batches = reader(source, shard), [Position()], list[Any]()
    with whole.worker_info():
        for number in range(14):
            batches.append([x.tolist() for x, _ in whole.read(number)])
            positions.append(whole.position())
    assert whole.at.passes >= 1
    for number in range(14):
        torch.manual_seed(number), np.random.seed(number), random.seed(number)
        for at in (positions[number], Position()):  # a lost position is found by skipping
            one = reader(source, shard, at)
            with one.worker_info():
                assert [x.tolist() for x, _ in one.read(number)] == batches[number]
            skips = kind is my_package.Counted and at.items or (at == Position() and number)
            assert ("skipped" in dict(one.notes)) == bool(skips)


def test_only_plain_state_can_be_saved_which_is_said_at_the_first_batch() -> None:
    class Odd(my_package.Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"where": iter(())}

    with pytest.raises(DataError, match=r"state_dict of my_package.Stream.where is a .*iterator"):
        numbers(data(Odd()), StreamShard(), 1)


def test_an_error_of_the_stream_names_it_and_the_sample() -> None:
    class Torn(my_package.Counted):
        def sample(self, number: int) -> tuple[Tensor, int]:
            return (torch.zeros(6), 1) if number < 5 else {}[number]

    with pytest.raises(DataError, match=r"my_package.Stream: sample 5: KeyError: 5\nTraceback"):
        numbers(data(Torn()), StreamShard(), 2)


def test_classes_that_are_not_declared_are_counted_and_a_later_one_is_named() -> None:
    class Late(my_package.Counted):
        classes = None  # type: ignore[assignment]

        def sample(self, number: int) -> tuple[Tensor, int]:
            return torch.zeros(6), 1 if number < 1500 else 2

    source = data(Late(2000))
    assert source.sizes.classes == 2
    assert source.choices[0].reason.startswith("from the largest in the first 1,000 of")
    with pytest.raises(DataError, match=r"target of sample 1500: 2 is not in 0 to 1"):
        source.assemble_items([*Late(1501)][1499:], 1499)


def test_plain_pairs_are_stacked_as_others() -> None:
    for target in (1, 0.5, torch.tensor([1.0, 2.0])):
        samples = [(torch.randn(3, 2), target) for _ in range(4)]
        pairs = [as_pair(sample, i) for i, sample in enumerate(samples)]
        fast = stack_plain(samples)
        assert fast is not None
        for values, column, name in zip(fast, zip(*pairs, strict=True), "xy", strict=True):
            expected = stack(column, range(4), name)
            assert torch.equal(values, expected) and values.dtype is expected.dtype
    assert stack_plain([(torch.zeros(2), 1), (torch.zeros(3), 1)]) is None
    assert stack_plain([(torch.zeros(2), 1), (torch.zeros(2), 1.0)]) is None
    assert stack_plain([([1], 1), ([2], 1)]) is None


@pytest.mark.parametrize(
    ("typed", "key", "fix"),
    [
        ((), "training.steps", "is read in order, and has no length; training.steps=1000"),
        (("training.epochs=2",), "training.steps", "in place of training.epochs"),
        (("training.steps=5", "data._target_=my_package.NoSplit"), "data.validation_target",
         "let its constructor take `split`; training.validate_every=0 goes without"),
        (("training.steps=5", "data.split=random"), "data.split", "needs samples with an index"),
        (("training.steps=5", "data.bad_samples=drop"), "data.bad_samples=drop", "leave it out"),
        (("training.steps=5", "data._target_=my_package.Noisy",
          "data.validation_target=my_package.Counted"), "data.validation_target", "is for streams"),
        (("data=digits", "data._target_=null", "data.validation_target=my_package.Counted"),
         "data.validation_target", "needs data._target_"),
        (("training.validate_every=0", "training.patience=2"), "training.patience", "has none"),
        (("training.validate_every=0", "training.monitor=val/loss"), "training.monitor", "none"),
    ],
)  # fmt: skip
def test_what_a_stream_needs_and_cannot_is_said_before_the_first_step(
    typed: tuple[str, ...], key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught, opened(*STREAM, *typed):
        pass
    assert caught.value.key == key and fix in str(caught.value)


def test_code_to_validate_on_is_trusted_like_other_code() -> None:
    with pytest.raises(SecurityError, match=r"data.validation_target: other.Stream is refused"):
        runs.config(*STREAM, "data.validation_target=other.Stream")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_trained_on_and_the_same_samples_validate_each_time(workers: int) -> None:
    typed = ("training.steps=10", f"data.workers={workers}", "data.validation_samples=40")
    trained, held_out = list[list[int]](), list[list[int]]()

    def note(seen: list[list[int]], batch: Any) -> Any:
        seen.append(numbers_of(batch))
        return batch

    with opened(*STREAM, *typed, "training.sanity=false") as run:
        run.train.placements = [partial(note, trained)]
        run.validation.placements = [partial(note, held_out)]
        train(run)
    assert held_out == 5 * [[*range(1000, 1016)], [*range(1016, 1032)], [*range(1032, 1040)]]
    firsts = [[*range(0, 32, 2)], [*range(1, 32, 2)]] if workers else [[*range(16)]]
    assert trained[: len(firsts)] == firsts
    assert sorted(number for batch in trained[:10] for number in batch) == [*range(160)]


@pytest.mark.parametrize(("target", "samples"), [
    ("Stateful", 70), ("Counted", 70), ("counted", 70), ("Shuffled", 70), ("Shuffled", 200),
    ("Buffered", 200),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    tmp_path: Path, target: str, samples: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    typed = (*STREAM, f"data._target_=my_package.{target}", f"+data.samples={samples}",
             "training.steps=17",
             f"data.workers={workers}", "checkpoint.every=5")  # fmt: skip
    with opened(*typed) as run:
        whole = train(run)
        weights = runs.weights(run)
    with opened(*typed, folder=tmp_path) as run:
        run.hooks.append(runs.AtSteps(12, lambda run: Verdict.STOP))
        train(run)
    with opened(*typed, "checkpoint.resume=auto", folder=tmp_path) as run:
        assert run.progress.step == 12
        resumed = train(run)
        assert not runs.differences(runs.weights(run), weights)
    assert resumed.metrics == whole.metrics and resumed.epochs == whole.epochs >= 1
    said = [x for x in caplog.messages if "were read before and had to be skipped" in x]
    assert bool(said) == (target != "Stateful") and all(text.endswith(" s") for text in said)


class Positioned(my_package.Stateful):
    """Starts over when it is iterated, unless a state was loaded."""

    start = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.taken, self.start = self.start, 0
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["taken"]


def hugging_face(samples: int, split: str = "train") -> Any:
    hub = pytest.importorskip("datasets")
    offset = 0 if split == "train" else 1000
    rows = [{"x": [(offset + n) / 100, n % 2, n % 3], "labels": n % 2} for n in range(samples)]
    return hub.Dataset.from_list(rows).to_iterable_dataset(num_shards=3).with_format("torch")


@pytest.mark.parametrize("kind", [
    my_package.Stateful, Positioned, my_package.Counted, hugging_face,
])  # fmt: skip
def test_a_stream_object_that_is_given_is_continued_twice_as_if_never_interrupted(
    tmp_path: Path, kind: Any
) -> None:
    typed = [*runs.QUICK, "training.batch_size=16", "training.steps=24", "checkpoint.every=4",
             "data.validation_samples=24", "training.validate_every=5"]  # fmt: skip

    def run_to(stop: int, folder: Path, *more: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        streams = [kind(70, split) for split in ("train", "validation")]
        parts: Any = {"folder": folder, "overrides": [*typed, *more], "level": "none"}
        parts["hooks"] = [runs.AtSteps(stop, lambda run: Verdict.STOP)]
        model = my_package.Net(3 if kind is hugging_face else 6, 2)
        with create_training_pipeline(model, streams[0], validation=streams[1], **parts) as made:
            summary = made.train()
            again = [[str(batch) for batch in made.run.validation.batches(0)] for _ in range(2)]
            assert again[0] == again[1]
        return summary, model.state_dict()

    whole, weights = run_to(0, tmp_path / "whole")
    run_to(9, tmp_path / "stopped")
    for stop in (11, 0):
        resumed, again = run_to(stop, tmp_path / "stopped", "checkpoint.resume=auto")
    assert resumed.metrics == whole.metrics and resumed.epochs == whole.epochs
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_a_stream_with_a_state_cannot_be_trained_and_validated_on_at_once() -> None:
    stream = my_package.Stateful()
    with pytest.raises(UsageError, match="must be another object than data"):
        create_training_pipeline(my_package.Net(6, 2), stream, validation=stream, record=False)


def test_passes_that_end_with_the_run_are_counted_as_epochs() -> None:
    typed = ("+data.samples=80", "training.steps=20")
    for workers in (0, 2):
        with opened(*STREAM, *typed, f"data.workers={workers}", "training.batch_size=8") as run:
            assert train(run).epochs == 2.0


def test_a_stream_shorter_than_a_batch_is_looked_at_once() -> None:
    source = data(my_package.Counted(10))
    first = source.fetch(np.arange(16), None)
    source.make = lambda: pytest.fail("opened again")
    assert numbers_of(source.fetch(np.arange(16), None)) == numbers_of(first) == [*range(10)]


def test_another_number_of_readers_cannot_go_on(tmp_path: Path) -> None:
    typed = (*STREAM, "training.steps=4", "checkpoint.every=2")
    with opened(*typed, folder=tmp_path) as run:
        train(run)
    with pytest.raises(CheckpointError, match=r"was read by 1 readers .* now there are 2"):
        with opened(*typed, "training.steps=6", "data.workers=2", "checkpoint.resume=auto",
                    folder=tmp_path):  # fmt: skip
            pass


def test_a_worker_that_is_killed_is_replaced_where_it_was(tmp_path: Path) -> None:
    typed = (*STREAM, "training.steps=12", "data.workers=2", "data._target_=my_package.Dying")
    died = f"+data.once={tmp_path}/died"
    with opened(*typed, died.replace("died", "")) as run:
        run.train.inspector = None
        whole = [numbers_of(batch) for batch in islice(run.train.batches(0), 12)]
    with opened(*typed, died) as run:
        lost = list[Any]()
        run.train.report_lost_workers(lost.append)
        assert [numbers_of(batch) for batch in islice(run.train.batches(0), 12)] == whole
        assert len(lost) == 1


def test_without_validation_the_last_weights_are_the_result(tmp_path: Path) -> None:
    typed = ("data._target_=my_package.NoSplit", "training.steps=10", "training.validate_every=0")
    with opened(*STREAM, *typed, folder=tmp_path) as run:
        summary = train(run)
        with pytest.raises(ConfigError, match="data.validation_target"):
            evaluate(run)
    assert summary.status == "done" and summary.metrics == {} and summary.best is None
    assert summary.checkpoint.last == "checkpoints/step_00000010"
    assert runs.rows(tmp_path, "val") == []
    with opened("data=cancer", "model=mlp", "training.steps=6", "training.validate_every=0") as run:
        assert train(run).metrics == {}
        assert "val/accuracy" in evaluate(run).metrics  # its data are held out as ever


def test_a_batch_of_a_stream_cannot_be_fetched_again() -> None:
    with opened(*STREAM, "training.steps=4") as run:
        first = run.train.at(0)
        assert numbers_of(first) == [*range(16)] == numbers_of(run.train.peek())
        train(run)
        assert numbers_of(run.train.at(3)) == [*range(48, 64)]
        with pytest.raises(DataError, match="not applicable: a stream: batch 2 cannot be fetched"):
            run.train.at(1)


def test_bad_batches_of_a_stream_are_skipped_like_others() -> None:
    typed = (*STREAM, "data._target_=my_package.Spoilt", "checks.inputs.not_finite=skip")
    with opened(*typed, "training.steps=10") as run:
        summary = train(run)
        assert summary.skipped_steps == 1 and run.history.counts["input_not_finite"] == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("target", ["Lengths", "Ragged"])
def test_ragged_samples_are_collated_in_batches_of_the_data_set(target: str, workers: int) -> None:
    typed = (*runs.OURS, *GPT, f"data._target_=my_package.{target}", f"data.workers={workers}")
    with opened(*typed, "training.steps=36", "training.batch_size=10") as run:
        summary = train(run)
        assert summary.metrics["val/accuracy"] > 0.3 and summary.skipped_steps == 0
        widths = [tuple(batch[0].shape) for batch in islice(run.train.batches(36), 4)]
    if target == "Lengths":  # equal lengths in a batch; two workers take every other one
        assert set(widths) == {(10, 4), (10, 7), (10, 10)}
    else:
        assert {width for _, width in widths} == {10}  # padded to the longest


def test_batches_of_its_own_have_a_length_and_epochs() -> None:
    typed = (*runs.OURS, *GPT, "data._target_=my_package.Listed", "training.epochs=2")
    with opened(*typed) as run:
        summary = train(run)
    assert summary.steps == 18 and summary.epochs == 2.0


class Twice(IterableDataset):
    """Says which worker of a DataLoader's own has read a sample."""

    classes = 2

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        for number in range(40):
            yield torch.tensor([float(number), -1.0 if info is None else info.id, 1.0]), number % 2


def loader(samples: int = 60, seed: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(my_package.Noisy(samples), 10, shuffle=True, generator=generator)


def test_a_loader_given_to_build_is_used_as_it_is_and_resumed_by_skipping(tmp_path: Path) -> None:
    expected = [y.tolist() for _, y in loader()]

    def run_with(stop: int = 0, *more: str, folder: Path | None = None) -> tuple[Any, Any, Any]:
        seen: list[Any] = []
        parts = Components(data=loader(), validation=loader(20))
        with build(runs.config(*NET, "training.epochs=3", *more), folder, components=parts) as run:
            keep = lambda run: seen.append(run.train.at(run.progress.step - 1)[1])  # noqa: E731
            run.hooks.append(runs.AtSteps(range(99), keep))
            if stop:
                run.hooks.append(runs.AtSteps(stop, lambda run: Verdict.STOP))
            summary = train(run)
            return summary, run.model.state_dict(), seen

    summary, weights, seen = run_with()
    assert summary.steps == 18 and summary.epochs == 3.0
    assert [c.value for c in summary.choices if c.key == "training.batch_size"] == [10]
    assert [y.tolist() for y in seen[:6]] == expected
    run_with(10, folder=tmp_path)
    resumed, again, _ = run_with(0, "checkpoint.resume=auto", folder=tmp_path)
    assert resumed.metrics == summary.metrics and not runs.differences(again, weights)


def test_a_loader_or_a_stream_is_data_of_a_training_pipeline() -> None:
    quick = [*runs.QUICK, "training.steps=12"]
    model = my_package.Net(3, 2)
    streams = DataLoader(Twice(), 8, num_workers=2)
    options = {"record": False, "level": "none"}
    with create_training_pipeline(
        model, streams, validation=Twice(), overrides=quick, **options
    ) as made:
        assert made.train().steps == 12
        assert made.run.train.at(11)[0][:, 1].min() >= 0  # read by the loader's own workers
        assert made.run.train.batch_size == 8
    without = [*quick, "training.validate_every=0"]
    with create_training_pipeline(model, Twice(), overrides=without, **options) as made:
        assert made.train().metrics == {}
    with pytest.raises(ConfigError, match="data.validation_target: is required"):
        create_training_pipeline(model, streams, overrides=quick, **options)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_does_not_grow_with_what_was_read(tmp_path: Path, workers: int) -> None:
    """1 GB of tar files, in samples of 1 MB; the model is small."""
    for shard in range(16):
        with tarfile.open(tmp_path / f"{shard:02}.tar", "w") as archive:
            for number in range(64):
                member = tarfile.TarInfo(f"{number % 2}.bin")
                member.size = 2**20
                archive.addfile(member, io.BytesIO(bytes([number]) * 2**20))
    mib = list[float]()

    def measure(run: Run) -> None:
        me = psutil.Process()
        each = [me, *me.children(recursive=True)]
        mib.append(sum(process.memory_info().rss for process in each) / 2**20)

    typed = (*NET, "data._target_=my_package.Shards", f"+data.folder={tmp_path}")
    typed += (f"data.workers={workers}", "training.batch_size=8", "training.validate_every=0")
    with opened(*typed, "training.steps=128", "checkpoint=off") as run:
        run.hooks.append(runs.AtSteps({32, 64, 96, 128}, measure))
        train(run)
    assert max(mib[1:]) - mib[0] < 48, mib
