"""Faults of a model's answers to probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from runner.checks.model.report import make_reason
from runner.checks.model.weights import NamedTensor
from runner.data.batch import Inputs, call
from runner.data.nested import named_leaves, tensors
from runner.objectives.deferred_logits import find_logits
from runner.security.trust import Reason, Severity

SAME = 1e-6  # relative spread over samples at which answers are one and the same
MANY = 16  # samples from which on one class for all of them means something
FEW = 3  # samples of other classes that it must have missed, where targets are known
HUGE_LOGIT = 1e6
MAX_VALUES = 2**20  # of an output that answers are compared by; NaN is looked for in all of them
MAX_DIFFERENCE = 1e-2  # of two answers to the same; 16 bits on a GPU stay below it
OUTPUTS = ("logits", "probabilities", "ids", "values")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Expected:
    """The facts known about the answers."""

    outputs: str | None = None  # one of OUTPUTS; None: unknown
    classes: int | None = None  # ids lie below it
    targets: Tensor | None = None  # class indices of the probes
    trained: bool | None = True  # long enough to tell samples apart; None: unknown


@torch.no_grad()
def check_behaviour(
    forward: Callable[..., Any],
    probes: Inputs,
    expected: Expected,
    named: Sequence[NamedTensor],
    facts: dict[str, Any],
) -> Iterator[Reason]:
    """One or two forwards of the probes; the caller restores modes, noise and buffers.

    The host waits for each. Adds `repeated` to the facts.
    """
    versions = _versions(named)
    output = call(forward, probes)
    changed = zip(named, versions, _versions(named), strict=True)
    if written := [one.name for one, before, now in changed if before != now]:
        evidence = f"a forward in evaluation mode writes to it (tensors so written: {len(written)})"
        yield make_reason("behaviour.writes", Severity.WARNING, written[0], evidence)
    main = _main(output)
    bad = list(_not_finite(dict(named_leaves(output, "output")) or {"output": main}))
    yield from bad
    if main is None:
        return
    yield from _out_of_range(main, expected)
    if bad or not main.is_floating_point() or not main.ndim or len(main) < 2:
        return
    first = _rows(main)
    if not bool(torch.isfinite(first).all()):
        return  # -Inf for what may not be chosen: there are no distances
    yield from _constant(main, first, probes, expected)
    facts["repeated"] = repeated = _difference(_main(call(forward, probes)), first)
    if repeated > MAX_DIFFERENCE:
        evidence = f"two answers to the same samples differ by {repeated:.2g} of their size"
        yield make_reason("behaviour.random", Severity.WARNING, "", evidence)


def _main(output: Any) -> Tensor | None:
    """The logits, or the first tensor there is: what answers are compared by."""
    main = find_logits(output)
    if not isinstance(main, Tensor):
        main = next(iter(tensors(output)), None)
    return None if main is None else main.detach()


def _rows(main: Tensor) -> Tensor:
    """A row for each sample; its first values, where there are very many."""
    return main.reshape(len(main), -1)[:, : max(1, MAX_VALUES // len(main))].float()


def _versions(named: Sequence[NamedTensor]) -> list[int]:
    """How often each tensor was written to."""
    return [-1 if one.tensor.is_inference() else one.tensor._version for one in named]


def _not_finite(leaves: dict[str, Tensor | None]) -> Iterator[Reason]:
    """NaN and Inf, by tensor; -Inf passes where it stands for what may not be chosen."""
    for name, tensor in leaves.items():
        if tensor is None or not bool((bad := ~torch.isfinite(tensor)).any()):  # waits
            continue
        masked = tensor.ndim > 1 and bool((tensor < math.inf).all())
        if masked and bool((tensor > -math.inf).any(-1).all()):
            continue
        nans, samples = int(tensor.isnan().sum()), int(bad.reshape(len(bad), -1).any(1).sum())
        evidence = (
            f"{nans:,} NaN and {int(bad.sum()) - nans:,} Inf of {tensor.numel():,} values, in "
            f"{samples:,} of {len(tensor):,} samples"
        )
        yield make_reason("behaviour.not_finite", Severity.REFUSAL, name, evidence)


def _out_of_range(main: Tensor, expected: Expected) -> Iterator[Reason]:
    """Probabilities, ids and logits that cannot be."""
    if not main.numel() or main.is_complex() or main.dtype is torch.bool:
        return
    most = math.inf if expected.classes is None else expected.classes - 1
    slack = 1e-2 if main.dtype in HALVES else 1e-4
    limits = {
        "probabilities": (-slack, 1 + slack),
        "ids": (0.0, most),
        "logits": (-HUGE_LOGIT, HUGE_LOGIT),
    }
    least, most = limits.get(expected.outputs or "", (-math.inf, math.inf))
    low, high = (float(x) for x in torch.aminmax(main))
    if -math.inf < low < least or most < high < math.inf:
        evidence = f"{expected.outputs} from {low:.3g} to {high:.3g}"
        evidence += f", expected {least:.3g} to {most:.3g}"
        yield make_reason("behaviour.out_of_range", Severity.WARNING, "", evidence)


def _constant(
    main: Tensor, answers: Tensor, probes: Inputs, expected: Expected
) -> Iterator[Reason]:
    """One and the same answer to different samples."""
    if all(bool((t == t[:1]).all()) for t in tensors(probes) if t.ndim and len(t) > 1):
        return
    evidence, scores = "", expected.outputs in ("logits", "probabilities")
    spread, size = float((answers.amax(0) - answers.amin(0)).max()), float(answers.abs().max())
    if spread <= SAME * size:
        evidence = f"the same output for all of {len(main):,} samples, to 1 in {1 / SAME:,.0f}"
    elif scores and main.ndim == 2 and main.shape[1] > 1:
        evidence = _one_class(main.argmax(1), expected.targets)
    if evidence:
        severity = Severity.WARNING if expected.trained else Severity.NOTE
        yield make_reason("behaviour.constant", severity, "", evidence)


def _one_class(predicted: Tensor, targets: Tensor | None) -> str:
    """A class for all samples, though there are others among them."""
    first = int(predicted[0])
    if len(predicted) < MANY or bool((predicted != first).any()):
        return ""
    evidence = f"class {first} for all of {len(predicted):,} samples"
    if targets is None or targets.shape != predicted.shape or targets.is_floating_point():
        return evidence
    missed = int((targets.to(predicted.device) != first).sum())
    return f"{evidence}, of which {missed:,} are of others" if missed >= FEW else ""


def _difference(main: Tensor | None, first: Tensor) -> float:
    """The most, over samples, by which an answer is off the first one, in sizes of that."""
    again = None if main is None else _rows(main)
    if again is None or again.shape != first.shape:
        return math.inf
    size = vector_norm(first, dim=1)
    size = torch.maximum(size, size.mean() * 1e-3).clamp(min=1e-30)
    change = torch.nan_to_num(again - first, nan=1e30, posinf=1e30, neginf=-1e30)
    return float((vector_norm(change, dim=1) / size).max())
