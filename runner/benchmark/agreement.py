"""Whether an arm's numbers are those of the plain run, found out in a process of its own.

By itself, so that what a compiler or a kernel leaves behind in memory stays out of everything
else, and so that an arm that takes its process down costs its own verdict only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from runner.benchmark.arms import Arm, asks
from runner.benchmark.crew.process import environment, no_interrupt
from runner.config import RunConfig
from runner.errors import UsageError
from runner.security.parcel import opened, packed

if TYPE_CHECKING:
    from runner.measure.parity import Yardstick

PLAIN = "is the plain run: no technique was asked for"
TAIL = 300  # characters of what a process that ended without an answer had said
ENDING_S = 10.0  # for a process that is to end to be no more
TOLD_S = 10.0  # from one word to whoever waits to the next
ENOUGH = b""  # in place of what is to be judged


@dataclass(frozen=True)
class Verdict:
    """`parity` as in ArmResult; None where it could not be found out, and `reason` says why."""

    parity: str | None
    reason: str = ""


class Judge:
    """One process for many arms: what the plain run computes is found out once for all of them.

    As a context manager it ends the process with all that it started; one that went down, or had
    to be ended, is replaced when the next arm comes. `given` (`runner.build.Given`) is sent to it,
    so it has to be picklable; `timeout_s` is for one verdict.
    """

    def __init__(self, timeout_s: float, given: Any = None) -> None:
        self.timeout_s, self.given = timeout_s, given
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None
        descriptor, name = tempfile.mkstemp(prefix="runner-parity-")
        os.close(descriptor)
        self.said = Path(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pipe is not None and self.process is not None and error[0] is None:
            with suppress(OSError):
                self.pipe.send_bytes(ENOUGH)
                self.process.join(ENDING_S)  # by itself it takes back what the system lent it
        self._end()
        self.said.unlink(missing_ok=True)

    def judge(
        self,
        arm: Arm,
        choices: Mapping[str, Any] | None = None,
        within_s: float | None = None,
        waiting: Callable[[float], None] | None = None,
    ) -> Verdict:
        """The verdict on one arm; `choices` that a run of it had made are made again.

        It may take `timeout_s`, or as long as is said here; meanwhile `waiting` hears every ten
        seconds how many there have been.
        """
        if not asks(arm.config):
            return Verdict("exact", PLAIN)
        most = self.timeout_s if within_s is None else within_s
        try:
            pipe = self.pipe or self._start()
            pipe.send_bytes(packed({"config": arm.config, "choices": choices or {}}))
            if self._heard(pipe, most, waiting):
                parity, reason = pipe.recv()
                return Verdict(parity, reason)
        except (EOFError, OSError):
            return Verdict(None, self._what_became())
        except UsageError as error:
            return Verdict(None, str(error))
        self._end()
        asked = "benchmark.timeout_s=" if within_s is None else ""
        unit = "" if asked else " s"
        return Verdict(None, f"not judged within {asked}{most:.4g}{unit}")

    @staticmethod
    def _heard(pipe: Connection, seconds: float, waiting: Callable[[float], None] | None) -> bool:
        """Whether there is an answer within so long."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            if pipe.poll(min(TOLD_S, seconds - waited)):
                return True
            if waiting is not None:
                waiting(time.monotonic() - began)
        return False

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        parcel = packed({"given": self.given})
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_judge,
            args=(theirs, parcel, str(self.said), multiprocessing.get_start_method()),
            daemon=False,  # a daemon may not have workers that load data
        )
        try:
            with environment(), no_interrupt():
                self.process.start()
        finally:
            theirs.close()
        return self.pipe

    def _what_became(self) -> str:
        code = None
        if self.process is not None and self.process.pid is not None:
            self.process.join(ENDING_S)
            code = self.process.exitcode
        self._end()
        lines = self.said.read_text("utf-8", "replace")[-TAIL:].strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        if code is not None and code < 0:
            return f"the process that judged it was ended by {signal.Signals(-code).name}{last}"
        return f"the process that judged it ended with {code}{last}"

    def _end(self) -> None:
        process, self.process = self.process, None
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        if process is None or process.pid is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # a compiler's workers are in there
        process.kill()  # it may not have had the time to make a group of its own
        process.join()


def _judge(pipe: Connection, parcel: bytes, said: str, start_method: str) -> None:
    """The process: a verdict for each config that comes."""
    os.setsid()
    multiprocessing.set_start_method(start_method, force=True)  # for what it starts itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sink = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(sink, stream)
    asked: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, asked), daemon=True).start()
    sys.argv[:] = ["runner-parity"]

    from runner.measure.parity import Yardstick, without_techniques  # after its output has a home

    yardsticks: list[Yardstick] = []
    while (parcelled := asked.get()) != ENOUGH:
        try:
            config, choices = opened(parcelled).values()
            given = opened(parcel)["given"]
            fresh = Yardstick(without_techniques(config), given=given)
            known = next((y for y in yardsticks if y.baseline == fresh.baseline), None)
            if known is None:
                yardsticks.append(fresh)
            answer: tuple[str | None, str] = _verdict(known or fresh, config, choices)
        except Exception as error:
            answer = None, f"could not be judged: {type(error).__name__}: {error}"
        pipe.send(answer)


def _verdict(
    yardstick: Yardstick, config: RunConfig, choices: Mapping[str, Any]
) -> tuple[str, str]:
    started = time.monotonic()
    found = yardstick.judge(config, choices)
    reason = f"in {found.precision}, held against {found.reference} over {found.steps} steps"
    first = found.first
    if first is not None:
        where = first.kind if first.name == first.kind else f"{first.kind} of {first.name}"
        reason += (
            f"; {where} at step {first.step} is off by {first.error:.1e}, rounding or chance "
            f"explains {first.bound:.1e}"
        )
    reason += "".join(f"; {note}" for note in found.notes)
    reason += "".join(f"; not judged: {omission}" for omission in found.not_judged)
    return found.verdict.value, f"{reason}; judged in {time.monotonic() - started:.0f} s"


def _listen(pipe: Connection, asked: SimpleQueue[bytes]) -> None:
    """Hand on what comes; once nobody is at the other end, the process is of no use."""
    with suppress(EOFError, OSError):
        while True:
            asked.put(pipe.recv_bytes())
    os.killpg(0, signal.SIGKILL)
