"""A worker process for each arm: started, asked for turns, ended; how it ended is reported."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import LoadMonitor
from runner.benchmark.workers import worker
from runner.benchmark.workers.messages import FINISH, Failed, Finished, Lap, Ready
from runner.benchmark.workers.worker import LOG, WorkerSpec
from runner.device import cgroup
from runner.device.config import omp_env
from runner.errors import StorageError, UsageError
from runner.record.text import escape_control_chars
from runner.security.parcel import packed
from runner.security.registry import permit
from runner.training.summary import Summary

FINISH_S = 300.0  # to gather the results of an arm; by then it has been measured
SLOW_S, SLOW = 60.0, 20.0  # a turn may take so long, and so many times as long as it should
STEPS = 20  # of a turn, at most, where a step takes longer than the turn should
PATIENCE_S = 5.0  # for processes that were asked to end
LEAVING_S = 30.0  # for one that is done, to close its files
UNGUARDED = 77  # exit code of one in which the script would have started further ones
TAIL = 4096  # bytes of its log that are read when it died silently
MEMORY = ("std::bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory", "MemoryError")

T = TypeVar("T")


class Unguarded(UsageError):
    """The script starts itself again in each worker."""


class WorkerPool:
    """The arms' processes; as a context manager, none outlives it.

    `given` are parts that the caller has made (`build.Components`), `metrics` functions of the
    finished run by their names; both are sent to each process and must be picklable: else
    UsageError. SecurityError for a metric of the settings that is not trusted. Every method raises
    `ArmEnded` for an arm that has ended: failed (with the error), killed (by which signal),
    timeout, oom.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.settings, self.folder = settings, folder
        for arm in arms:
            for name in settings.metrics:
                permit(name, "benchmark.metrics", arm.config.security.names)
        parts = {} if given is None else {f.name: getattr(given, f.name) for f in fields(given)}
        self.parcel = packed({**parts, "metrics": dict(metrics or {})})
        self.workers: dict[str, WorkerProcess] = {}
        self.ready: dict[str, Ready] = {}
        self.mean = False  # compare mean steps: an arm has data workers
        # where nothing leaves the context, at least the interpreter's end does not wait for them
        self.at_exit = multiprocessing.util.Finalize(
            self, _end_all, args=(self.workers, os.getpid()), exitpriority=100
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Ask waiting workers to leave, so that they close their files; then end all."""
        try:
            waiting = [self.workers[name] for name in self.ready]
            for process in waiting:
                process.dismiss()
            until = time.monotonic() + PATIENCE_S
            for process in waiting:
                process.wait(until - time.monotonic())
        finally:  # also at a second Ctrl-C
            self.ready.clear()
            self.at_exit()

    def start(self, name: str, within_s: float | None = None) -> Ready:
        """Start the process, build the run, make the warm-up steps, within `timeout_s`."""
        self.end(name)
        arm = self.arms[name]
        spec = WorkerSpec(
            arm.config, self.settings, self._folder(arm), arm.command, time.perf_counter()
        )
        with self._cleaned_up(name):
            self.workers[name] = process = WorkerProcess(name, spec)
            process.start(self.parcel)
            timeout_s = self.settings.timeout_s if within_s is None else within_s
            ready = _expect(Ready, process.answer(timeout_s))
        self.ready[name] = ready
        self.mean = self.mean or ready.workers > 0
        return ready

    def turn(self, name: str, seconds: float) -> Turn:
        """Steps for so many seconds, at least three, while the other arms are paused.

        Data workers deliver a batch each and then none for a while, so where any arm has them the
        median step is not what steps cost: times per sample are those of the mean, in all arms.
        """
        with self._busy(name) as (process, ready):
            monitor = LoadMonitor(process.pid)
            process.ask(seconds)
            timeout_s = SLOW_S + SLOW * max(seconds, STEPS * ready.warm_ms / 1e3)
            lap = _expect(Lap, process.answer(timeout_s, (seconds / 2, monitor.read_clock)))
            load = monitor.load(lap.device_mhz)
        if self.mean:
            lap = replace(lap, per_sample_ms=1e3 * lap.seconds / lap.samples)
        values = {f.name: getattr(lap, f.name) for f in fields(lap) if f.name != "device_mhz"}
        return Turn(**values, load=load)

    def finish(self, name: str) -> Finished:
        """Let the run end as runs do, with its evidence, and its process after it."""
        with self._busy(name) as (process, _):
            process.ask(FINISH)
            finished = _expect(Finished, process.answer(FINISH_S))
        del self.workers[name], self.ready[name]
        process.wait(LEAVING_S)
        process.end()
        return finished

    def end(self, name: str) -> None:
        """End the process at once, with all that it started; nothing if there is none."""
        self.ready.pop(name, None)
        process = self.workers.get(name)
        if process is not None:
            process.end()
            del self.workers[name]

    @contextmanager
    def _busy(self, name: str) -> Iterator[tuple[WorkerProcess, Ready]]:
        """The arm's process while it works: should that be cut short, it is not asked to leave."""
        if name not in self.ready:
            raise ArmEnded("failed", f"{name} was not started, or has ended")
        ready = self.ready.pop(name)
        with self._cleaned_up(name):
            yield self.workers[name], ready
        self.ready[name] = ready

    @contextmanager
    def _cleaned_up(self, name: str) -> Iterator[None]:
        """An arm that ended leaves no process behind, and a summary with how it ended."""
        try:
            yield
        except ArmEnded as ended:
            self.end(name)
            _write_end(self._folder(self.arms[name]), ended)
            raise

    def _folder(self, arm: Arm) -> Path | None:
        return self.folder / arm.folder if self.folder is not None and arm.folder else None


def _expect(kind: type[T], answer: Any) -> T:
    if not isinstance(answer, kind):
        raise ArmEnded("failed", f"it answered with {type(answer).__name__}")
    return answer


def _write_end(folder: Path | None, ended: ArmEnded) -> None:
    """The run itself could not record that it was killed."""
    if folder is None:
        return
    with suppress(StorageError):  # it had none yet, or the disk is full: the arm's row says it
        summary = Summary.read(folder)
        if summary.status == "running" or ended.status == "oom":
            summary.status, summary.reason = ended.status, ended.reason
            summary.write(folder)


def _end_all(workers: dict[str, WorkerProcess], owner: int) -> None:
    if os.getpid() == owner:
        for process in workers.values():
            process.end()
        workers.clear()


class WorkerProcess:
    """One worker from its parent's side. It answers one question at a time."""

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = spec.folder
        self.answered = False  # anything yet
        self.oom_kills = cgroup.oom_kills() or 0
        self.pipe, self.theirs = context.Pipe()
        self.listens, self.lifeline = context.Pipe(duplex=False)
        # not a daemon: those may have no children, and runs have data workers and compilers
        self.process = context.Process(
            target=worker.main,
            args=(spec, self.theirs, self.listens),
            name=f"arm {name}",
            daemon=False,
        )

    def start(self, parcel: bytes) -> None:
        """Begin; `parcel` is what the caller has made for it. ArmEnded if it dies at once."""
        leave_if_imported()
        try:
            with worker_environment(), block_interrupt():
                self.process.start()
        finally:
            self.theirs.close()
            self.listens.close()
        try:
            self.pipe.send_bytes(parcel)
        except OSError:
            raise self._explain_death() from None

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        if self.process.pid is None:
            raise ValueError("it was not started")
        return self.process.pid

    def ask(self, question: Any) -> None:
        """Send what it is to do next. ArmEnded where it is dead."""
        try:
            self.pipe.send(question)
        except OSError:
            raise self._explain_death() from None

    def answer(
        self, timeout_s: float, meanwhile: tuple[float, Callable[[], None]] | None = None
    ) -> Any:
        """Its answer, within so long; `meanwhile` is to be called after so many seconds.

        Raises ArmEnded, in which case the process is still to be ended.
        """
        until = time.monotonic() + timeout_s
        if meanwhile is not None:
            seconds, act = meanwhile
            if not self._has_answered(min(seconds, timeout_s)):
                act()
        if not self._has_answered(until - time.monotonic()):
            raise ArmEnded("timeout", f"it was not done within {timeout_s:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._explain_death() from None
        self.answered = True
        if isinstance(answer, Failed):
            raise ArmEnded(answer.status, f"{answer.reason}{self._log_hint()}")
        return answer

    def dismiss(self) -> None:
        """Ask one that waits to leave, and wait for nothing."""
        with suppress(OSError):
            self.pipe.send(None)

    def wait(self, seconds: float) -> None:
        """For it to leave."""
        self.process.join(max(0.0, seconds))

    def end(self) -> None:
        """End it at once, with all that it started."""
        if self.process.pid is None:
            return
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(self.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # it may have no group of its own yet
        for process in started:
            with suppress(psutil.Error):  # it knows a process by its start too
                process.kill()
        self.process.join()
        self.pipe.close()
        self.lifeline.close()

    def _has_answered(self, seconds: float) -> bool:
        """Whether it has answered, or died, within so long; costs no CPU."""
        return bool(wait([self.pipe, self.process.sentinel], max(0.0, seconds)))

    def _explain_death(self) -> ArmEnded:
        """How a process ended that sent nothing."""
        self.process.join(PATIENCE_S)
        code, tail, hint = self.process.exitcode, self._log_tail(), self._log_hint()
        starved = any(sign in tail for sign in MEMORY)
        if code is None:
            return ArmEnded("failed", f"it closed its pipe and lives on{hint}")
        if code < 0:
            name = signal.Signals(-code).name
            if code == -signal.SIGKILL and (cgroup.oom_kills() or 0) > self.oom_kills:
                return ArmEnded("oom", f"the system killed it when memory ran out ({name})")
            if starved:
                return ArmEnded("oom", f"memory ran out, and {name} ended it{hint}")
            return ArmEnded("killed", f"killed by {name}{hint}")
        script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
        if code == UNGUARDED and not self.answered:
            raise Unguarded(
                f'{Path(script).name} has to do this under `if __name__ == "__main__":`, for it is '
                "imported by the processes that are measured"
            )
        last = escape_control_chars(tail.strip().rpartition("\n")[2])[:300]
        text = f"it ended with exit code {code}{f': {last}' if last else ''}"
        if not (self.answered or last) and script.startswith("<"):
            text += "; Python reads what is piped in only once: put it into a file"
        return ArmEnded("oom" if starved else "failed", f"{text}{hint}")

    def _log_hint(self) -> str:
        log = self._log()
        return f"; see {log}" if log is not None and log.exists() else ""

    def _log_tail(self) -> str:
        log = self._log()
        if log is None:
            return ""
        try:
            return log.read_bytes()[-TAIL:].decode(errors="replace")
        except OSError:
            return ""

    def _log(self) -> Path | None:
        return None if self.folder is None else self.folder / LOG


def leave_if_imported() -> None:
    """Exit a worker in which an unguarded script starts workers again."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


@contextmanager
def worker_environment() -> Iterator[None]:
    """Passive OpenMP threads, and no module from the current folder.

    Python would put the current folder first on the path before the parent's path is known.
    """
    more = {**omp_env(os.environ), "PYTHONSAFEPATH": "1"}
    before = {key: os.environ.get(key) for key in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextmanager
def block_interrupt() -> Iterator[None]:
    """A Ctrl-C before the process has a session of its own is not for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
