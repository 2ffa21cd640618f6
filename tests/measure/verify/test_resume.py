"""A run that continues in the same bits, and one that does not."""

import random
import shutil
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import RunConfig, build
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.state_schema import STATE
from runner.core.train.run_state import save
from runner.measure.verify.end_state import IGNORED_STATE, read_end_state, saved_steps
from runner.measure.verify.job import compare_resumed, draw_cuts, name_differences, verify_resume
from runner.measure.verify.processes import RunProbe, prepare_config, train_in_processes
from tests import runs

MLP = ("data=cancer", "model=mlp", "model.width=8", "device.threads=1")
STATEFUL = ("data=digits", "model=cnn", "model.width=8", "model.stages=1", "device.threads=1")
STATEFUL += ("optimizer.ema=0.9", "optimization=amp", "optimization.amp.dtype=fp16")
STATEFUL += ("data.validation_samples=50", "training.batch_size=8")
# of a checkpoint, not of the run that goes on from it
PLANNED = {"planned", "clean", "next_lr", "criterion", "seeds_own_generators"}


@pytest.mark.usefixtures("parity_mutants")
def test_a_counter_that_no_checkpoint_holds_is_a_difference_even_at_its_period(
    tmp_path: Path,
) -> None:
    hidden = ["optimization.extra=[parity_mutants.Forgetful]", "security.trusted=[parity_mutants]"]
    found = verify_resume(runs.config(*MLP, *hidden), tmp_path, 12)
    assert not found.exact
    assert found.differing[0].startswith("metric train/")
    assert int(found.differing[0].rpartition(" ")[2]) > found.cuts[0]  # right up to there
    assert len(found.cuts) == 2 and found.cuts[-1] == found.cut
    assert "state outside it" in found.cause
    assert any(name.startswith("parameter layers.0.weight") for name in found.differing)
    assert any(name.startswith("optimizer optimizer.state.0.exp_avg") for name in found.differing)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_counter_of_any_period_differs_after_one_of_the_drawn_cuts() -> None:
    def fires(steps: int, period: int, cuts: list[int]) -> list[int]:
        count, fired = 0, []
        for step in range(1, steps + 1):
            count += 1
            fired += [step] if count % period == 0 else []
            count = 0 if step in cuts else count  # a resumed process starts at 0
        return fired

    for seed in range(40):
        cuts = draw_cuts(seed, 20)
        assert 0 < cuts[0] < cuts[1] < 20
        for period in range(2, 21):
            assert fires(20, period, cuts) != fires(20, period, []), (cuts, period)
    assert len({tuple(draw_cuts(seed, 20)) for seed in range(40)}) > 10


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run that was killed after step 5, with a checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    config = prepare_config(runs.config(*STATEFUL), 8, checkpoint_every=4)
    config.monitoring.every = 3
    train_in_processes(config, folder, RunProbe(kill_at=5))
    assert max(saved_steps(folder)) == 4 and not (folder / "report.md").exists()
    config.checkpoint.resume = "auto"
    return config, folder


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, Tensor):
        state = torch.Generator().manual_seed(9).get_state()
        return state if value.dtype is torch.uint8 else value + 1
    if isinstance(value, dict):
        return {**value, "spike": 1}
    if isinstance(value, tuple | list):  # of a random generator
        name = value[0]
        kinds = {"MT19937": lambda: (name, *value[1:2], value[2] - 1, *value[3:])}
        return kinds.get(name, random.Random(9).getstate)()
    if isinstance(value, bool | str):
        return not value if isinstance(value, bool) else f"{value}x"
    return value + 1 if isinstance(value, int) else min(value, 9.0) / 2 + 0.1


def parts(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path to the first value of each part of a state, of its update and its random state."""
    if path and (path[0] == "random" or path[-1] == "counts") and len(path) == 2:
        yield path
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        skipped = IGNORED_STATE | PLANNED | {"param_groups", "options", "names"}
        skipped |= {"step"} if path == ("progress",) else set()  # compared with the manifest
        leaves = chain.from_iterable(
            parts(item, *path, key) for key, item in items if key not in skipped
        )
        yield from islice(leaves, None if path in ((), ("update",), ("random",)) else 1)
    elif value is not None:
        yield path


def resumed_differences(
    config: RunConfig, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> list[str]:
    """What differs in the state that is restored from a checkpoint which is changed while read."""
    shutil.copytree(folder, place, symlinks=True)
    right = Checkpointer.restore

    def restore(checkpointer: Checkpointer, *arguments: Any) -> Any:
        restored = right(checkpointer, *arguments)
        assert restored is not None
        change(restored.model, restored.state)
        return restored

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "restore", restore)
        with build(config, place) as run, run.own_random_state():
            run.saved_step = -1
            save(run, final=True)
    before, after = (read_end_state(each, [4]).values for each in (folder, place))
    return name_differences(before, after, [4])[0]


def test_each_part_of_a_checkpoint_that_is_lost_is_named(
    stopped: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = stopped
    whole = Checkpointer(None, keep=1).restore(folder)
    assert whole is not None
    buffer = next(name for name in whole.model if "running" in name)
    paths = [("model", next(iter(whole.model))), ("model", buffer)]
    paths += [("state", *path) for path in parts(whole.state)]
    assert {path[1] for path in paths[2:]} == {*STATE, "inputs"} - IGNORED_STATE - PLANNED
    same = resumed_differences(config, folder, tmp_path / "same", monkeypatch, lambda *_: None)
    assert same == []
    for number, path in enumerate(paths):

        def alter(model: Any, state: Any, path: Any = path) -> None:
            *above, key = path[1:]
            part = {"model": model, "state": state}[path[0]]
            for name in above:
                part = part[name]
            part[key] = changed(part[key])

        place = tmp_path / f"{number}"
        names = resumed_differences(config, folder, place, monkeypatch, alter)
        shutil.rmtree(place)
        name = ".".join(map(str, path[1:])).removeprefix("update.")
        assert any(name in text for text in names), (path, names)
        assert len(names) < 4, (path, names)


def test_a_damaged_checkpoint_is_what_differs(
    stopped: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, folder = stopped
    for place in ("once", "twice"):
        shutil.copytree(folder, tmp_path / place, symlinks=True)
    (tmp_path / "twice/checkpoints/step_00000004/state.pt").write_bytes(b"nothing")
    for other in saved_steps(tmp_path / "twice").keys() - {4}:
        shutil.rmtree(saved_steps(tmp_path / "twice")[other])
    found = compare_resumed(config, tmp_path / "once", tmp_path / "twice", [4], 5)
    assert found.differing == ["checkpoint of step 4"]
    assert "state.pt" in found.cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "processes", "kinds"),
    [
        ((*MLP, "optimizer.ema=0.9", "distributed=ddp", "distributed.processes=2"), 2, {"average"}),
        ((*MLP, "optimizer.ema=0.9", "distributed=fsdp", "distributed.processes=2"), 2, set()),
        (STATEFUL, 1, {"buffer", "average", "loss_scale", "guard", "random"}),
    ],
)
def test_a_run_continues_in_the_same_bits(
    tmp_path: Path, overrides: tuple[str, ...], processes: int, kinds: set[str]
) -> None:
    job = ("job=verify", "verify.what=resume")
    found = verify_resume(runs.config(*overrides, *job), tmp_path, 12)
    assert found.exact, (found.differing, found.cause)
    assert (found.processes, found.rank) == (processes, processes - 1)
    assert found.compared.keys() >= kinds
