"""A finding together with what the config says is to be done about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.checks.config import Policy
from runner.checks.inputs.finding import Finding, follows
from runner.checks.inputs.look import Look

LEAST = 2  # samples that must stay of a batch: BatchNorm has no variance of one


@dataclass
class Told:
    """A finding in words, and what was done."""

    check: str
    message: str
    action: str


@dataclass
class Admitted:
    """The batch of a step, as it was looked at on the CPU."""

    number: int
    seen: Look
    told: list[Told]
    veto: bool


@dataclass
class Case:
    """A finding, what the config says is to be done, and which samples are at fault."""

    finding: Finding
    policy: Policy
    bad: Tensor | None  # one flag a sample; None: the batch as a whole
    words: str

    @property
    def check(self) -> str:
        """Which check found it."""
        return self.finding.check


def at_once(cases: list[Case], samples: int) -> list[Case]:
    """Those to act on now: what may go with samples that are left out is looked for again then."""
    drops = [
        case
        for case in cases
        if case.policy is Policy.drop and case.bad is not None and bool(case.bad.any())
    ]
    if kept(drops, samples) is None:  # there is no "then"
        return cases
    return [c for c in cases if not any(follows(c.finding, drop.finding) for drop in drops)]


def kept(cases: list[Case], samples: int) -> Tensor | None:
    """Which samples stay; None where the batch as a whole is to go, or too little stays."""
    keep = torch.ones(samples, dtype=torch.bool)
    for case in cases:
        if case.policy is Policy.drop:
            if case.bad is None:
                return None
            keep &= ~case.bad
    return keep if int(keep.sum()) >= min(LEAST, samples) else None


def action(case: Case, skip: bool) -> str:
    """What is done about it, in a word."""
    if skip:
        return "skipped"
    return "left out" if case.policy is Policy.drop else ""
