"""What is done about a batch before its step is made: let in, cut, vetoed, or the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.batch import Batch
from runner.checks.config import Policy
from runner.checks.inputs.beforehand import Beforehand
from runner.checks.inputs.cases import Admitted, Case, Told, action, at_once, kept
from runner.checks.inputs.finding import WAYS_OUT, Finding
from runner.checks.inputs.here import numbers
from runner.checks.inputs.look import InputChecks, Look
from runner.checks.inputs.measure import exchanged, leaves
from runner.checks.inputs.samples import culprits, harmless
from runner.checks.inputs.there import There, Underway, vetoes
from runner.errors import DataError
from runner.record.history import History
from runner.record.text import resume_argument

log = logging.getLogger("runner")

LATE = 2  # steps after which the numbers of a batch that came on an accelerator are read
IN_A_ROW = 100  # batches that were skipped or cut to nothing: then the run ends
NAMED = 20  # samples that a message names


class Inputs:
    """The checks of a run's batches.

    A batch is looked at where it lies. Ours lie on the CPU until they are moved to the device:
    they are looked at before, so that no step is made of a bad one. What somebody else's loader
    puts on an accelerator is reduced there: the flag that vetoes the update never leaves the
    device, and the words follow two steps later. There the host waits, if at all, for the start
    of the step before the last, when the device has a step in hand and one to come.
    """

    def __init__(
        self,
        checks: InputChecks,
        history: History,
        folder: Path | None,
        device: torch.device,
        steps_per_epoch: int,
    ) -> None:
        self.checks, self.history, self.folder = checks, history, folder
        self.steps_per_epoch = steps_per_epoch
        self.always = torch.ones((), device=device)
        self.indices: Callable[[int], list[int]] | None = None  # samples of a batch, step from 0
        self.stand_in: Callable[[], Batch] | None = None  # a batch of the usual form
        self.at_once = "cpu"  # the kind of device whose batches are read there and then
        self.there = There(device)
        self.beforehand: Beforehand | None = None  # where it can speak for batches
        self.admitted: Admitted | None = None
        self.cleared = 0  # the step, instead, whose batch needs no look
        self.veto: Tensor | None = None  # 1 where the update of the step at hand is not to be made
        self.vetoed: list[int] = []  # steps, until the guardian has taken them
        self.refusal: DataError | None = None  # found late; the run ends at the next step
        self.in_a_row = 0

    # -- what the loader calls, on the CPU -----------------------------------------------------

    def inspect(self, step: int, batch: Batch) -> Batch:
        """The batch of that step (0 is the first), as it may go on; DataError where none may."""
        number = step + 1
        if self.beforehand is not None and self.beforehand.clears(step, batch, self.checks):
            self.cleared = number
            return batch
        told: list[Told] = []
        places: list[int] = []  # of what is left, in the batch as it came
        while True:  # each round with fewer samples
            seen = self._seen(batch, number)
            if not seen.findings:
                break
            places = places or list(range(seen.samples))
            found = [self._case(finding, seen, places, step) for finding in seen.findings]
            cases = at_once(found, len(places))
            for case in cases:
                if case.policy is Policy.stop:
                    self._stop(number, case.check, case.words)
            keep = kept(cases, len(places))
            skip = keep is None or any(case.policy is Policy.skip for case in cases)
            told += [Told(case.check, case.words, action(case, skip)) for case in cases]
            if skip:
                self.admitted = Admitted(number, seen, told, True)
                return self._harmless(seen, batch)
            if keep is None or bool(keep.all()):
                break
            batch = exchanged(batch, {name: t[keep] for name, t in seen.found.items()})
            places = [place for place, stays in zip(places, keep.tolist(), strict=True) if stays]
        self.admitted = Admitted(number, seen, told, False)
        return batch

    def pruned(self, batch: Batch) -> Batch:
        """The same batch as its step had it: without the samples that are left out."""
        while True:
            seen = self._seen(batch, 0)
            cases = [self._case(finding, seen, [], -1) for finding in seen.findings]
            keep = kept(at_once(cases, seen.samples), seen.samples) if cases else None
            if keep is None or bool(keep.all()):
                break
            batch = exchanged(batch, {name: t[keep] for name, t in seen.found.items()})
        return batch

    # -- what the loop calls -------------------------------------------------------------------

    def admit(self, number: int, batch: Batch) -> Batch:
        """The batch that the step is made of; sets `veto`. Raises DataError by policy: stop."""
        if self.there.underway or self.refusal is not None:
            self._catch_up(number - LATE)
        if self.cleared == number:
            self.veto, self.in_a_row = None, 0
            return batch
        if self.admitted is None or self.admitted.number != number:
            if any(t.device.type != self.at_once for t in leaves(batch).values()):
                return self._admit_there(number, batch)
            batch = self.inspect(number - 1, batch)
        admitted, self.admitted = self.admitted, None
        if admitted is None:
            raise RuntimeError("a batch was looked at, and nothing was noted")
        self.veto = self.always if admitted.veto else None
        if admitted.veto:
            self.vetoed.append(number)
        for told in admitted.told:
            self._note(number, told)
        self._learn(admitted.seen, number)
        self._count_skipped(number, admitted.veto)
        return batch

    def read(self, last: int) -> None:
        """Take in the numbers of steps up to that one which came from an accelerator."""
        for entry in self.there.arrived(last):
            self._take(entry)

    def take_vetoed(self) -> list[int]:
        """The steps whose update a check kept from being made, each of them once."""
        vetoed, self.vetoed = self.vetoed, []
        return vetoed

    def settle(self) -> None:
        """At the end: what is on its way, and the refusal that may come of it."""
        self._catch_up(2**62)

    # -- on the CPU ----------------------------------------------------------------------------

    def _seen(self, batch: Batch, number: int) -> Look:
        checks = self.checks
        seen = checks.see(batch)
        if seen.plan.entries:
            row = numbers(checks.measure, seen.found, seen.plan)
            checks.judge(seen, row, number, self._epoch(number))
        return seen

    def _harmless(self, seen: Look, batch: Batch) -> Batch:
        """The batch of a step that is computed and not made, so that computing it does no harm."""
        if self.checks.lost(seen):
            if self.stand_in is None:
                raise DataError(
                    "a batch of another form cannot be skipped: there is none to compute in its "
                    "place; use checks.inputs.form=stop"
                )
            batch = self.stand_in()
            seen = self.checks.see(batch)
            if self.checks.lost(seen):
                raise DataError(f"the first batch of the data: {seen.findings[0].evidence}")
        return exchanged(batch, harmless(seen, self.checks.known))

    def _case(self, finding: Finding, seen: Look, places: list[int], step: int) -> Case:
        """What is to be done about it, and to which samples."""
        policy, bad = self.checks.policy(finding.check), culprits(seen, finding, self.checks.known)
        words = f"{finding.leaf}: {finding.evidence}" if finding.leaf else finding.evidence
        if bad is not None and step >= 0:
            which = [place for place, flag in zip(places, bad.tolist(), strict=True) if flag]
            words += f", in {len(which)} of {len(bad)} samples{self._names(which, step)}"
        return Case(finding, policy, bad, words)

    def _names(self, places: list[int], step: int) -> str:
        """Which samples of the data set; without blanks, so that repeats are known as such."""
        if self.indices is None:
            return ""
        every = self.indices(step)
        chosen = [str(every[place]) for place in places[:NAMED] if place < len(every)]
        more = ",…" if len(places) > NAMED else ""
        return f" (of the data set: {','.join(chosen)}{more})"

    # -- on an accelerator ---------------------------------------------------------------------

    def _admit_there(self, number: int, batch: Batch) -> Batch:
        """Nothing is read: flags go into the update, numbers to the host, two steps late."""
        checks = self.checks
        seen = checks.see(batch)
        if checks.lost(seen):  # the form is known without reading
            batch = self.inspect(number - 1, batch)
            return self.admit(number, batch)
        self.veto = None
        if not seen.plan.entries:
            return batch
        row = checks.measure.row(seen.found, seen.plan)
        self.veto = self.there.veto(row, seen, checks)
        self.there.send(number, seen, row, self.veto)
        if vetoes(checks, "labels"):
            batch = exchanged(batch, harmless(seen, checks.known))
        return batch

    def _catch_up(self, last: int) -> None:
        self.read(last)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal

    def _take(self, entry: Underway) -> None:
        """The numbers of an earlier step: say what they mean, learn from them."""
        *row, flag = entry.row.tolist()
        skipped = flag > 0  # as it was there, where what takes the host to find comes too late
        if skipped:
            self.vetoed.append(entry.number)
        seen = Look({}, entry.plan, entry.samples, entry.values)
        self.checks.judge(seen, row, entry.number, self._epoch(entry.number))
        for finding in seen.findings:
            words = f"{finding.leaf}: {finding.evidence}" if finding.leaf else finding.evidence
            if self.checks.policy(finding.check) is Policy.stop and self.refusal is None:
                self.refusal = self._refusal(entry.number, finding.check, words)
            self._note(entry.number, Told(finding.check, words, "skipped" if skipped else ""))
        self._learn(seen, entry.number)
        self._count_skipped(entry.number, skipped)

    # -- what is said and kept -----------------------------------------------------------------

    def _learn(self, seen: Look, number: int) -> None:
        checks = self.checks
        if checks.remember(seen, number, self._epoch(number)) and self.folder is not None:
            try:
                checks.schema.write(
                    self.folder, checks.baseline, seen.plan.main, checks.known.classes
                )
            except OSError as error:
                log.warning("no debug/schema.json: %s", error)

    def _note(self, number: int, told: Told) -> None:
        if told.check == "not_finite":
            self.history.explain(number, told.message)
        ends = told.action == "the run ends"
        key = f"checks.inputs.{told.check}={self.checks.policy(told.check).value}"
        used = f"the batch is trained on all the same ({key}); {WAYS_OUT[told.check]}"
        self.history.add(
            f"input_{told.check}", told.message, step=number, category="data",
            severity="error" if ends else "warning", action=told.action or used,
            say=not ends,  # the error that it ends with says it
        )  # fmt: skip

    def _stop(self, number: int, check: str, words: str) -> None:
        """Raise DataError; the step is not made, and the checkpoint is of before it."""
        self._note(number, Told(check, words, "the run ends"))
        raise self._refusal(number, check, words)

    def _refusal(self, number: int, check: str, words: str) -> DataError:
        then = "" if self.folder is None else f"; to go on: {resume_argument(self.folder)}"
        return DataError(
            f"step {number}: {words} (checks.inputs.{check}=stop); {WAYS_OUT[check]}{then}"
        )

    def _count_skipped(self, number: int, skipped: bool) -> None:
        """A run of which no batch is let in comes to an end."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= IN_A_ROW:
            self.in_a_row = 0
            raise DataError(
                f"step {number}: {IN_A_ROW} batches in a row were skipped by checks.inputs; "
                "debug/history.json says what is wrong with them"
            )

    def _epoch(self, number: int) -> int | None:
        """Of that step; None in which batches cannot repeat, or for a look besides."""
        return None if number < 1 else (number - 1) // max(1, self.steps_per_epoch)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; waits for the device, as a checkpoint does anyway."""
        own = {"checks": self.checks.state(), "in_a_row": self.in_a_row}
        return {**own, "underway": self.there.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.checks.load(state["checks"])
        self.in_a_row, self.admitted, self.cleared = state["in_a_row"], None, 0
        self.there.load(state["underway"], self.checks.known)
        if self.beforehand is not None:
            self.beforehand.settled = None  # as where the run is started from there
