"""Worker processes that fail, hang, are killed or outlive their owner: none goes unnoticed."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from runner.core.data.loader import BatchLoader, make_loader
from runner.core.data.user_dataset import UserDataset
from runner.core.data.workers import receive_batch, send_batch
from runner.core.errors import DataError, RunnerError, WorkerLost
from runner.core.schemas.data import BadSamples, DataConfig
from tests import runs

Load = Callable[..., BatchLoader]


class Unpicklable(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


class Faulty:
    """Forty samples; `at(7)` does what a test asks for."""

    sizes = {"task": "classification", "in_features": 2, "classes": 2}

    def __init__(self, at: Callable[[int], Any] = lambda index: None) -> None:
        self.at = at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            self.at(index)
        return torch.full((2,), float(index)), index % 2


def raiser(error: BaseException) -> Callable[[int], Any]:
    def fail(index: int) -> Any:
        raise error

    return fail


CPU = torch.device("cpu")


def workers(
    load: Load, at: Callable[[int], Any], count: int = 2, device: torch.device = CPU, **changes: Any
) -> BatchLoader:
    source = UserDataset(Faulty(at), "Faulty", DataConfig(kind="own"))
    config = DataConfig(kind="any", workers=count, **changes)
    return load(source, config, batch_size=4, device=device)


@pytest.fixture
def children() -> Iterator[Callable[[], list[psutil.Process]]]:
    """The processes that the test started; when it ends there are none."""
    before = set(psutil.Process().children(recursive=True))

    def started() -> list[psutil.Process]:
        return [p for p in psutil.Process().children(recursive=True) if p not in before]

    yield started


@pytest.mark.parametrize(
    ("at", "name"),
    [
        (raiser(ValueError("bad pixel")), "ValueError: bad pixel"),
        (raiser(Unpicklable("bad lock")), "Unpicklable: bad lock"),
        (raiser(StopIteration()), "StopIteration"),
    ],
    ids=["picklable", "unpicklable", "StopIteration"],
)
def test_an_exception_names_the_sample_and_brings_its_traceback(
    load: Load, at: Callable[[int], Any], name: str
) -> None:
    for count in (0, 2):
        with pytest.raises(DataError) as raised:
            list(zip(range(10), workers(load, at, count).batches(0), strict=False))
        message = str(raised.value)
        assert f"sample 7: {name}" in message
        assert "Traceback" in message and "in __getitem__" in message


def test_a_worker_that_exits_is_an_error_and_no_short_epoch(load: Load) -> None:
    with pytest.raises(RunnerError, match=r"user code called sys.exit\(0\) \(.*test_workers.py"):
        list(zip(range(10), workers(load, raiser(SystemExit(0))).batches(0), strict=False))
    with pytest.raises(WorkerLost, match=r"exit code 3.*data.worker_restarts=2 is reached"):
        list(zip(range(10), workers(load, lambda i: os._exit(3)).batches(0), strict=False))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_worker_that_dies_or_stands_still_is_replaced_and_no_batch_is_lost(
    how: signal.Signals, load: Load, children: Callable[[], list[psutil.Process]]
) -> None:
    loader = workers(load, lambda i: None, timeout_s=1.5)
    lost: list[WorkerLost] = []
    pool: Any = loader.pool
    pool.report_lost = lost.append
    batches = loader.batches(0)
    got = [next(batches)[0].clone()]
    for child in children():  # one hands over a batch, the other has one in the making
        child.send_signal(how)
    got += [batch[0].clone() for _, batch in zip(range(29), batches, strict=False)]
    plain = workers(load, lambda i: None, 0).batches(0)
    assert all(torch.equal(batch, next(plain)[0]) for batch in got)
    what = {signal.SIGSTOP: "= stopped) did not respond"}.get(how, f"killed by {how.name}")
    assert len(lost) == 2 and all(what in str(error) for error in lost)
    assert "of epoch 0" in str(lost[0])
    for child in children():
        child.kill()
    with pytest.raises(WorkerLost, match="data.worker_restarts=2 is reached"):
        list(zip(range(30), batches, strict=False))
    loader.close()
    assert children() == []


def test_a_hung_worker_is_an_error_when_its_time_is_up(
    load: Load, children: Callable[[], list[psutil.Process]]
) -> None:
    loader = workers(load, lambda i: time.sleep(600), timeout_s=0.3, worker_restarts=0)
    problem = "not respond for data.timeout_s=0.3 s.*of epoch 0; data.worker_restarts=0"
    with pytest.raises(WorkerLost, match=problem):
        list(zip(range(10), loader.batches(0), strict=False))
    loader.close()
    assert children() == []


def test_batches_in_shared_memory_keep_their_layout_and_leave_nothing_open(load: Load) -> None:
    square = torch.arange(12.0).reshape(3, 4)
    sent = {
        "views": (square, square.t(), square[1:]),
        "types": [torch.tensor([1 + 2j]), torch.tensor(True), torch.ones(3).bfloat16()],
        "empty": torch.empty(0, 3),
        "by value": (torch.eye(2).to_sparse(), "text", None),
    }
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    send_batch(theirs, 5, sent)
    number, got = receive_batch(ours)
    assert number == 5 and str(got) == str(sent)
    assert [view.stride() for view in got["views"]] == [(4, 1), (1, 4), (4, 1)]
    got["views"][0][1, 0] = -1.0
    assert got["views"][2][0, 0] == -1.0  # one storage, as before
    del got
    assert len(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()


def test_close_leaves_no_process(load: Load, children: Callable[[], list[psutil.Process]]) -> None:
    loader = workers(load, lambda i: time.sleep(600), count=3)
    next(loader.batches(0))
    assert len(children()) == 3
    children()[0].suspend()
    loader.close()
    assert children() == []
    loader.close()  # twice does no harm
    next(loader.batches(0))  # and it can start again


def private_memory() -> tuple[float, int]:
    """Return the MiB that a worker has copied after collections, and the frozen objects."""
    source = UserDataset(Faulty(lambda _: gc.collect()), "Faulty", DataConfig(kind="own"))
    loader = make_loader(
        source, source.train, config=DataConfig(kind="any", workers=1), device=CPU, batch_size=4,
        seed=3, shuffle=True, repeat=True, augment=True,
    )  # fmt: skip
    batches = loader.batches(0)
    for _ in range(10):  # an epoch
        next(batches)
    assert loader.pool is not None
    smaps = Path(f"/proc/{loader.pool.processes[0].pid}/smaps_rollup").read_text()
    own_mib = int(smaps.partition("\nPrivate_Dirty:")[2].split()[0]) / 1024
    loader.close()
    return own_mib, gc.get_freeze_count()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_collection_in_a_worker_copies_nothing_of_its_parent() -> None:
    # in a new process: what the tests before have left there would count too
    code = "from tests.core.data.test_workers import private_memory; print(*private_memory())"
    own_mib, frozen = map(float, runs.printed_by(code).split())
    assert own_mib < 25 and frozen == 0  # it was 60


def test_signals_to_the_group_do_not_reach_workers(
    load: Load, children: Callable[[], list[psutil.Process]]
) -> None:
    batches = workers(load, lambda i: None).batches(0)
    next(batches)
    for child in children():
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
    for _ in range(30):
        next(batches)
    assert len(children()) == 2


def test_a_raising_signal_handler_ends_waits(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Enough

    def wait_under_a_timer(*arguments: Any) -> Any:
        # only now: what a handler raises while a worker is forked is lost
        if not timers:
            timers.append(signal.setitimer(signal.ITIMER_REAL, 0.3))
        return wait(*arguments)

    timers: list[Any] = []
    monkeypatch.setattr("runner.core.data.workers.wait", wait_under_a_timer)
    batches = workers(load, lambda i: time.sleep(600)).batches(0)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Enough):
            list(zip(range(10), batches, strict=False))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


SCRIPT = """
import os, signal, sys, time, numpy as np, psutil, torch
from runner.core.data.workers import Workers

def fetch(key):
    if key[1] > 3:
        time.sleep(600)
    return torch.zeros(1), torch.zeros(1)

pool = Workers(fetch, 2, 2, 600.0)
batches = pool.batches(iter([(0, i) for i in range(100)]))
next(batches)
print(*[p.pid for p in psutil.Process().children()], flush=True)
if sys.argv[1] == "kill":
    next(batches), next(batches), next(batches), next(batches)
"""


@pytest.mark.parametrize("how", ["kill", pytest.param("forget", marks=pytest.mark.slow)])
def test_workers_end_with_their_owner(how: str) -> None:
    command, root = [sys.executable, "-c", SCRIPT, how], Path(__file__).parents[3]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    if how == "kill":
        assert len(left) == 2
        owner.kill()
    assert owner.wait(timeout=20) == (-signal.SIGKILL if how == "kill" else 0)
    assert not psutil.wait_procs(left, timeout=10)[1]
    owner.stdout.close()


@pytest.mark.parametrize("bad_samples", ["stop", "drop"])
def test_batches_of_workers_are_pinned_in_another_thread_and_in_order(
    load: Load, same: Callable[[Any, Any], bool], monkeypatch: pytest.MonkeyPatch, bad_samples: str
) -> None:
    threads: list[threading.Thread] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        return tensor.clone()

    plain = workers(load, lambda index: None, bad_samples=BadSamples(bad_samples)).batches(0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr("runner.core.data.loader.make_batch_mover", lambda *_: None)
    cuda = torch.device("cuda")
    loader = workers(load, lambda index: None, device=cuda, bad_samples=BadSamples(bad_samples))
    batches = loader.batches(0)
    for number in range(25):
        assert same(next(plain), next(batches))
        if loader.usable is not None:  # the record is of the batch that the loop has
            assert sorted(loader.usable.last.indices) == sorted(loader.indices(number))
        time.sleep(0.005)  # a step, in which the next batch arrives
    assert len(threads) >= 2 * 25 and threading.main_thread() not in threads
    assert len(set(threads)) == 1 and threads[0].is_alive()
    assert loader.pool is not None
    ready, requested = loader.ready()
    assert requested <= 26 and ready > 0
    in_flight = sum(map(len, loader.pool.pending)) + (loader.pool.next_prepared is not None)
    assert in_flight < loader.pool.count * loader.pool.ahead
    loader.close()
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_an_error_of_a_batch_that_is_pinned_ahead_is_raised_in_its_turn(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("runner.core.data.loader.make_batch_mover", lambda *_: None)
    loader = workers(load, raiser(ValueError("planted")), device=torch.device("cuda"))
    first_bad = next(n for n in range(10) if 7 in loader.indices(n))
    batches = loader.batches(0)
    for _ in range(first_bad):
        next(batches)
        time.sleep(0.05)  # the bad batch arrives during the step before it
    with pytest.raises(DataError, match="planted"):
        next(batches)
