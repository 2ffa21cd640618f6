"""Single samples of a batch in which something was found."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.checks.inputs.finding import Finding
from runner.checks.inputs.look import Look
from runner.checks.inputs.measure import Labels, bad_samples

BY_SAMPLE = ("not_finite", "range", "labels")  # a single sample can be at fault


def culprits(seen: Look, finding: Finding, known: Labels) -> Tensor | None:
    """Which samples are at fault, one flag each; None: the batch as a whole. Waits."""
    if finding.check not in BY_SAMPLE:
        return None
    of_labels = finding.leaf == seen.plan.labels
    tensor = seen.found[finding.leaf]
    if len(tensor) != seen.samples:
        return None
    if finding.check == "not_finite":
        return (~tensor.isfinite()).reshape(len(tensor), -1).any(1).cpu()
    ignored = known.ignored if of_labels else None
    return bad_samples(tensor, finding.low, finding.high, ignored).cpu()


def harmless(seen: Look, known: Labels) -> dict[str, Tensor]:
    """Labels and tokens that point nowhere, made to point somewhere; nothing is read."""
    safe: dict[str, Tensor] = {}
    for leaf, below in ((seen.plan.labels, known.classes), (seen.plan.tokens, known.vocab)):
        if leaf is None or below is None:
            continue
        tensor = seen.found[leaf]
        bad = (tensor < 0) | (tensor >= below)
        if leaf == seen.plan.labels and known.ignored is not None:
            bad &= tensor != known.ignored
        safe[leaf] = torch.where(bad, 0, tensor)
    return safe
