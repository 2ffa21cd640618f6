"""Whether an arm's numbers are those of the plain run, found out in a process of its own.

So what a compiler or a kernel leaves in memory affects nothing else, and an arm that kills its
process costs its own verdict only.
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
from runner.benchmark.workers.pool import block_interrupt, worker_environment
from runner.config import RunConfig
from runner.errors import UsageError
from runner.security.parcel import opened, packed

if TYPE_CHECKING:
    from runner.parity.reference import ParityReference

PLAIN = "is the plain run: no technique was asked for"
TAIL = 300  # characters of the output of a process that ended without an answer
ENDING_S = 10.0  # for a process that is to end
TOLD_S = 10.0  # between two calls of `waiting`
END = b""  # in place of a config


@dataclass(frozen=True)
class Verdict:
    """`parity` as in ArmResult; None where it could not be found out, and `reason` says why."""

    parity: str | None
    reason: str = ""


class ParityChecker:
    """One process for many arms, so that the plain run's numbers are computed once.

    As a context manager it ends the process with all that it started; one that died, or had to be
    ended, is replaced when the next arm comes. `given` (`build.Components`) is sent to it, so it
    has to be picklable; `timeout_s` is for one verdict.
    """

    def __init__(self, timeout_s: float, given: Any = None) -> None:
        self.timeout_s, self.given = timeout_s, given
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None
        descriptor, name = tempfile.mkstemp(prefix="runner-parity-")
        os.close(descriptor)
        self.output = Path(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pipe is not None and self.process is not None and error[0] is None:
            with suppress(OSError):
                self.pipe.send_bytes(END)
                self.process.join(ENDING_S)  # so that it returns its semaphores to the system
        self._end()
        self.output.unlink(missing_ok=True)

    def check(
        self,
        arm: Arm,
        choices: Mapping[str, Any] | None = None,
        within_s: float | None = None,
        waiting: Callable[[float], None] | None = None,
    ) -> Verdict:
        """The verdict on one arm; `choices` that a run of it had made are made again.

        Within `within_s`, else `timeout_s`; meanwhile `waiting` receives the seconds so far, every
        ten seconds.
        """
        if not asks(arm.config):
            return Verdict("exact", PLAIN)
        limit_s = self.timeout_s if within_s is None else within_s
        try:
            pipe = self.pipe or self._start()
            pipe.send_bytes(packed({"config": arm.config, "choices": choices or {}}))
            if _wait_for(pipe, limit_s, waiting):
                parity, reason = pipe.recv()
                return Verdict(parity, reason)
        except (EOFError, OSError):
            return Verdict(None, self._explain_death())
        except UsageError as error:
            return Verdict(None, str(error))
        self._end()
        limit = f"benchmark.timeout_s={limit_s:.4g}" if within_s is None else f"{limit_s:.4g} s"
        return Verdict(None, f"not judged within {limit}")

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        parcel = packed({"given": self.given})
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_main,
            args=(theirs, parcel, str(self.output), multiprocessing.get_start_method()),
            daemon=False,  # a daemon may not have workers that load data
        )
        try:
            with worker_environment(), block_interrupt():
                self.process.start()
        finally:
            theirs.close()
        return self.pipe

    def _explain_death(self) -> str:
        code = None
        if self.process is not None and self.process.pid is not None:
            self.process.join(ENDING_S)
            code = self.process.exitcode
        self._end()
        lines = self.output.read_text("utf-8", "replace")[-TAIL:].strip().splitlines()
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


def _wait_for(pipe: Connection, seconds: float, waiting: Callable[[float], None] | None) -> bool:
    """Whether there is an answer within so long."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        if pipe.poll(min(TOLD_S, seconds - waited)):
            return True
        if waiting is not None:
            waiting(time.monotonic() - began)
    return False


# -- in the process --------------------------------------------------------------------------------


def _main(pipe: Connection, parcel: bytes, output: str, start_method: str) -> None:
    """A verdict for each config that comes."""
    os.setsid()
    multiprocessing.set_start_method(start_method, force=True)  # for its own children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(sink, stream)
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, requests), daemon=True).start()
    sys.argv[:] = ["runner-parity"]

    from runner.parity.candidates import without_techniques  # once output is redirected
    from runner.parity.reference import ParityReference

    references: list[ParityReference] = []
    while (request := requests.get()) != END:
        try:
            config, choices = opened(request).values()
            new = ParityReference(without_techniques(config), given=opened(parcel)["given"])
            known = next((one for one in references if one.baseline == new.baseline), None)
            if known is None:
                references.append(new)
            answer: tuple[str | None, str] = _check(known or new, config, choices)
        except Exception as error:
            answer = None, f"could not be judged: {type(error).__name__}: {error}"
        pipe.send(answer)


def _check(
    reference: ParityReference, config: RunConfig, choices: Mapping[str, Any]
) -> tuple[str, str]:
    started = time.monotonic()
    result = reference.judge(config, choices)
    reason = f"in {result.precision}, held against {result.reference} over {result.steps} steps"
    first = result.first
    if first is not None:
        where = first.kind if first.name == first.kind else f"{first.kind} of {first.name}"
        reason += (
            f"; {where} at step {first.step} is off by {first.error:.1e}, rounding or chance "
            f"explains {first.bound:.1e}"
        )
    reason += "".join(f"; {note}" for note in result.notes)
    reason += "".join(f"; not judged: {omission}" for omission in result.not_judged)
    return result.verdict.value, f"{reason}; judged in {time.monotonic() - started:.0f} s"


def _receive(pipe: Connection, requests: SimpleQueue[bytes]) -> None:
    """Queue what comes; end the process group once the other end is closed."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(pipe.recv_bytes())
    os.killpg(0, signal.SIGKILL)
