"""Batches that lie on an accelerator: flags stay there, and numbers come to the host later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.checks.config import Policy
from runner.checks.inputs.limits import DRIFT
from runner.checks.inputs.look import InputChecks, Look
from runner.checks.inputs.measure import Labels, Plan, key_in, plan_of

VETOES = (Policy.drop, Policy.skip, Policy.stop)  # policies under which no update is made there


@dataclass
class Underway:
    """The numbers of a batch that lies on an accelerator, on their way to the host."""

    number: int
    plan: Plan
    samples: int
    values: int
    row: Tensor
    ready: torch.Event | None


class There:
    """What is on its way from one device. Nothing is waited for but in `arrived`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.never = torch.zeros((), device=device)
        self.always = torch.ones((), device=device)
        self.underway: deque[Underway] = deque()
        self.limits: tuple[Tensor, ...] | None = None
        self.limits_of: object = None

    def send(self, number: int, seen: Look, row: Tensor, veto: Tensor | None) -> None:
        """Let the numbers of that step's batch follow, and last of them whether it was vetoed."""
        ready, flag = None, self.never if veto is None else veto
        row = torch.cat((row, flag.reshape(1)))
        if row.device.type != "cpu":
            cuda = row.device.type == "cuda"
            host = torch.empty(row.shape, dtype=row.dtype, pin_memory=cuda)
            row = host.copy_(row, non_blocking=True)
            ready = torch.Event(self.device)
            ready.record()
        self.underway.append(Underway(number, seen.plan, seen.samples, seen.values, row, ready))

    def arrived(self, last: int) -> Iterator[Underway]:
        """Those of steps up to that one; waits for the start of that step, long since made."""
        while self.underway and self.underway[0].number <= last:
            entry = self.underway.popleft()
            if entry.ready is not None:
                entry.ready.synchronize()
            yield entry

    def veto(self, row: Tensor, seen: Look, checks: InputChecks) -> Tensor | None:
        """1.0 if a number is outside limits whose policy keeps the update from being made, or all
        values are one; None where nothing is kept from being made.
        """
        good = self._within(row, checks)
        if vetoes(checks, "constant"):
            at = checks.main_at(seen)
            if at is not None and not checks.may_be_constant(seen):
                varied = row[at] != row[at + 1]
                good = varied if good is None else good & varied
        return None if good is None else torch.where(good, self.never, self.always)

    def _within(self, row: Tensor, checks: InputChecks) -> Tensor | None:
        """Whether every number is between limits whose policy keeps an update from being made."""
        if self.limits_of is not checks.limits:
            self.limits_of, self.limits = checks.limits, None
        wanted = [x for x in checks.limits + checks.usual if vetoes(checks, x.check)]
        if not wanted:
            return None
        if self.limits is None:  # once, and once more when the baseline is complete
            columns = [[x.at for x in wanted], [x.low for x in wanted], [x.high for x in wanted]]
            columns.append([x.check == DRIFT for x in wanted])
            self.limits = tuple(torch.tensor(column).to(row.device) for column in columns)
        at, low, high, drift = self.limits
        values = row.index_select(0, at)
        within = (values >= low) & (values <= high)
        return (within | (drift & ~values.isfinite())).all()

    def state(self) -> list[list[Any]]:
        """What a checkpoint keeps; waits for the device, as a checkpoint does anyway."""
        for entry in self.underway:
            if entry.ready is not None:
                entry.ready.synchronize()
        return [[e.number, e.plan.form, e.samples, e.values, e.row.tolist()] for e in self.underway]

    def load(self, rows: list[list[Any]], known: Labels) -> None:
        """Go on from there; rows that are not of their form's numbers are left out."""
        self.underway.clear()
        for number, form, samples, values, row in rows:
            key = key_in(form)
            plan = None if key is None else plan_of(key, known)
            if plan is not None and len(row) == plan.length + 1:  # and the veto
                entry = Underway(number, plan, samples, values, torch.tensor(row), None)
                self.underway.append(entry)


def vetoes(checks: InputChecks, check: str) -> bool:
    """Whether a finding of this check keeps an update from being made."""
    return checks.policy(check) in VETOES
