"""Arms in processes of their own: one works at a time, and none outlives its pool."""

import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
import pytest

from runner import compose
from runner.core import fork_server
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import Turn, WorkerResults, WorkerSetup
from runner.measure.benchmark.engine import measure
from runner.measure.benchmark.workers.pool import WorkerPool
from tests.measure.benchmark import arm_parts
from tests.measure.benchmark.arm_parts import BASE, OWN, PARTS, QUICK, arm, is_gone


@dataclass
class Race:
    """Two arms that had three turns each."""

    ready: dict[str, WorkerSetup] = field(default_factory=dict)
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    finished: dict[str, WorkerResults] = field(default_factory=dict)
    idle_seconds: float = 0.0  # CPU time of the one while the other was at work
    waited_seconds: float = 0.0  # of the one, for its turns
    pids: list[int] = field(default_factory=list)
    folder: Path = Path()


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    result = Race(folder=tmp_path_factory.mktemp("race"))
    arms = [
        arm("none", *BASE, "optimization=none"),
        arm("basic", *BASE, "optimization=basic", "data.workers=1", "data.prefetch=2"),
    ]
    metrics = {name: getattr(arm_parts, name) for name in ("in_steps", "fails")}
    with WorkerPool(arms, QUICK, result.folder, None, metrics) as pool:
        for name in ("none", "basic"):
            result.ready[name] = pool.start(name)
            result.pids.append(pool.workers[name].pid)
        idle = psutil.Process(result.pids[0])
        for _ in range(3):
            time.sleep(0.5)  # a wait that exceeds a slow machine's warm-up steps
            result.waited_seconds += 0.5
            for name in ("none", "basic"):
                before = sum(idle.cpu_times()[:2])
                result.turns.setdefault(name, []).append(pool.turn(name, 0.1))
                if name == "basic":
                    result.idle_seconds += sum(idle.cpu_times()[:2]) - before
        for name in ("none", "basic"):
            result.finished[name] = pool.finish(name)
    return result


def test_a_turn_is_steps_of_about_the_time_that_was_asked_for(race: Race) -> None:
    for turn in (turn for turns in race.turns.values() for turn in turns):
        assert turn.steps == len(turn.step_ms) >= 3
        assert turn.samples == pytest.approx(32 * turn.steps, rel=0.1)  # an epoch's last is less
        assert turn.seconds >= 0.1
        assert sum(turn.step_ms) / 1e3 <= turn.seconds
        assert min(turn.step_ms) <= turn.median_ms <= max(turn.step_ms)
        # one of the arms has a worker
        assert turn.per_sample_ms == pytest.approx(1e3 * turn.seconds / turn.samples)
        assert 0 <= turn.data_seconds <= turn.seconds
        assert turn.other_cpu_share is None or 0 <= turn.other_cpu_share <= 1


def test_an_arm_works_in_its_own_turns_only_and_the_wait_is_in_no_step(race: Race) -> None:
    steps = sum(turn.steps for turn in race.turns["none"])
    assert race.finished["none"].summary["steps"] == 4 + 1 + steps
    assert race.idle_seconds <= 0.03  # of three turns of 0.1 s; the kernel counts in hundredths
    ready = race.ready["none"]
    warm_up = ready.setup_seconds + ready.settling_seconds + 3 * ready.warm_ms / 1e3
    worked = sum(turn.seconds for turn in race.turns["none"])
    assert race.finished["none"].metrics["in_steps"] < warm_up + worked + race.waited_seconds / 2


def test_a_healthy_arm_has_no_problems_a_folder_like_any_runs_and_leaves_no_process(
    race: Race,
) -> None:
    for name, finished in race.finished.items():
        assert finished.problems == []
        kept = json.loads((race.folder / name / "summary.json").read_text())
        assert (kept["status"], kept["reason"]) == ("stopped", "the benchmark has measured it")
        assert kept["command"] == f"python -P -m runner optimization={name}"
        assert kept["memory"]["peak_process_bytes"] > 2**26
        assert kept["memory"] == finished.summary["memory"]
        rows = (race.folder / name / "metrics.jsonl").read_text().splitlines()
        assert not any('"split": "val"' in row for row in rows)
        assert not (race.folder / name / "checkpoints").exists()
        assert any("fails: not known: KeyError" in note for note in finished.notes)
    assert race.finished["basic"].technique("fused_optimizer")["engaged"]
    assert all(is_gone(pid) for pid in race.pids)


@pytest.mark.slow
def test_renewed_processes_share_memory_and_hashes_with_none_of_before(tmp_path: Path) -> None:
    arms = [arm(name, *BASE, f"optimization={name}") for name in ("none", "basic")]
    hashes: list[list[int]] = []
    summaries: list[str] = []
    fork_server.stop()  # of earlier tests: a pool leaves one that runs to its owner
    with (
        pytest.MonkeyPatch.context() as patch,
        WorkerPool(arms, QUICK, tmp_path, None, {"string_hash": arm_parts.string_hash}) as pool,
    ):
        patch.delenv("PYTHONHASHSEED", raising=False)
        for _ in range(2):
            for one in arms:
                pool.start(one.name)
            hashes.append([pool.finish(one.name).metrics["string_hash"] for one in arms])
            summaries.append((tmp_path / "none/summary.json").read_text())
            pool.renew()
    assert hashes[0][0] == hashes[0][1] != hashes[1][0] == hashes[1][1]
    assert summaries[0] == summaries[1]  # of the first process
    assert sorted(path.name for path in tmp_path.iterdir()) == ["basic", "none"]
    assert not fork_server.is_running()


@pytest.mark.slow
def test_a_program_keeps_its_own_fork_server() -> None:
    mine = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60.0,))
    mine.start()
    try:
        with WorkerPool([arm("none", *BASE)], QUICK, None) as pool:
            pool.start("none")
            pool.renew()
            assert pool.start("none").workers == 0
        assert mine.is_alive()
    finally:
        mine.terminate()
        mine.join()
        fork_server.stop()
    assert mine.exitcode == -signal.SIGTERM


@pytest.mark.slow
def test_equal_arms_in_several_real_processes_are_not_told_apart(tmp_path: Path) -> None:
    arms = [arm("none", *BASE), arm("same", *BASE)]
    settings = BenchmarkConfig(budget_s=600.0, narrow=0.3, processes=3, block_s=0.1, parity=False)
    result = measure(arms, settings, tmp_path)
    assert 2 <= result.processes == len(result.process_starts) <= 3
    assert [row.status for row in result.arms] == ["done", "done"]
    assert result.arms[1].claim not in ("faster", "slower")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["benchmark.json", "none", "same"]


# -- data workers ----------------------------------------------------------------------------------

SLOW = ["model=mlp", f"data._target_={PARTS}.Slow", "+data.seconds=0.012", "training.batch_size=5"]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """An arm that fetches by itself, and one with two workers; 60 ms a batch, asleep, which is
    what a crowded machine does not make longer.
    """
    arms = [Arm(f"w{n}", compose([*OWN, *SLOW, f"data.workers={n}"]), []) for n in (0, 2)]
    with WorkerPool(arms, QUICK, None) as pool:
        for one in arms:
            pool.start(one.name)
        workers = psutil.Process(pool.workers["w2"].pid).children()
        yield pool
    assert not any(worker.is_running() for worker in workers)  # a stopped one ends all the same


@pytest.mark.slow
def test_two_data_workers_are_twice_as_fast_and_no_more(pool: WorkerPool) -> None:
    ratios = []
    for _ in range(3):
        turns = {name: pool.turn(name, 0.1) for name in ("w0", "w2")}
        assert turns["w2"].steps >= 8 and turns["w2"].steps % 2 == 0  # whole rounds of batches
        ratios.append(turns["w0"].per_sample_ms / turns["w2"].per_sample_ms)
    assert 1.3 < median(ratios) < 2.7


@pytest.mark.slow
def test_data_workers_are_stopped_while_another_arm_has_its_turn(pool: WorkerPool) -> None:
    workers = psutil.Process(pool.workers["w2"].pid).children()
    assert len(workers) == 2
    assert {worker.status() for worker in workers} == {psutil.STATUS_STOPPED}
    pool.turn("w2", 0.05)  # and then continue
