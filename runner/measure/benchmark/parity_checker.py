"""Check in a separate process that an arm's numbers match those of its plain run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from runner.core.config.run_config import RunConfig
from runner.core.errors import UsageError, WorkerFailure, error_text
from runner.core.security.child_process import EXIT_TIMEOUT_S, ChildContext, RequestProcess
from runner.core.security.pickle_transfer import pickle_parts, unpickle_parts
from runner.measure.benchmark.arms import Arm, requests_techniques

if TYPE_CHECKING:
    from runner.measure.parity.reference import ParityReference

NO_TECHNIQUE = "is the plain run: no technique is enabled"


@dataclass(frozen=True)
class ParityVerdict:
    """`parity` as in ArmResult; None if unknown, with the `reason`."""

    parity: str | None
    reason: str = ""


class ParityChecker:
    """One process that judges several arms and computes each plain run only once.

    Leaving the context ends it and its children; one that died or timed out is replaced. `given`
    (`setup.Components`) is pickled; `timeout_s` is for one verdict.
    """

    def __init__(self, timeout_s: float, given: Any = None) -> None:
        self.timeout_s, self.given = timeout_s, given
        self.process: RequestProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None and error[0] is None:
            self.process.request_exit()
            self.process.wait(EXIT_TIMEOUT_S)  # so that it releases its semaphores
        self._end()

    def check(
        self, arm: Arm, choices: Mapping[str, Any] | None = None, within_s: float | None = None
    ) -> ParityVerdict:
        """Return the verdict on one arm, within `within_s`.

        The limit defaults to `timeout_s`; `choices` are the arm's automatic choices, to repeat.
        """
        if not requests_techniques(arm.config):
            return ParityVerdict("exact", NO_TECHNIQUE)
        limit_s = self.timeout_s if within_s is None else within_s
        try:
            if self.process is None:
                payload = pickle_parts({"given": self.given})
                self.process = RequestProcess(_judge_requests, (payload,), None)
                self.process.start()
            self.process.ask({"config": arm.config, "choices": choices or {}})
            return ParityVerdict(*self.process.answer(limit_s))
        except WorkerFailure as failure:
            self._end()
            reason = f"the parity process: {failure.reason}"
            if failure.status == "timeout":
                reason = f"not judged within {limit_s:.4g} s"
        except UsageError as error:
            reason = str(error)
        return ParityVerdict(None, reason)

    def _end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


# -- in the process --------------------------------------------------------------------------------


def _judge_requests(child: ChildContext, payload: bytes) -> None:
    """Answer each request with a verdict, until None arrives."""
    sys.argv[:] = ["runner-parity"]

    from runner.core.config.variants import without_techniques
    from runner.measure.parity.reference import ParityReference

    references: list[ParityReference] = []
    while (request := child.pipe.recv()) is not None:
        try:
            config, given = request["config"], unpickle_parts(payload)["given"]
            reference = ParityReference(without_techniques(config), given=given)
            cached = next((r for r in references if r.baseline == reference.baseline), None)
            if cached is None:
                references.append(reference)
            answer: tuple[str | None, str] = _judge_arm(cached or reference, **request)
        except Exception as error:
            answer = None, f"could not be judged: {error_text(error)}"
        child.pipe.send(answer)


def _judge_arm(
    reference: ParityReference, config: RunConfig, choices: Mapping[str, Any]
) -> tuple[str, str]:
    started = time.monotonic()
    result = reference.judge(config, choices)
    parts = [
        f"in {result.precision}, compared with {result.reference} over {result.steps} steps",
        *([] if result.first is None else [str(result.first)]),
        *result.notes,
        *(f"not judged: {omission}" for omission in result.not_judged),
        f"judged in {time.monotonic() - started:.0f} s",
    ]
    return result.verdict.value, "; ".join(parts)
