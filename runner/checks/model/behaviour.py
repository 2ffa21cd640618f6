"""How a model behaves on probes: its answers, again, and after a tiny change of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.checks.model.report import make_reason
from runner.checks.model.weights import NamedTensor
from runner.data.batch import Inputs, call
from runner.data.nested import named_leaves, tensors, tree_map
from runner.objectives.deferred_logits import find_logits
from runner.security.trust import Reason, Severity

SAME = 1e-6  # relative spread over samples at which answers are one and the same
EVEN = 1.01  # largest probability times classes, at which a prediction says nothing
MANY = 16  # samples from which on one class for all of them means something
FEW = 3  # samples of other classes that it must have missed, where targets are known
HUGE_LOGIT = 1e6
MAX_VALUES = 2**20  # of an output that answers are compared by; NaN is looked for in all of them
CHANGE = 1e-4  # of each input value, upwards
MAX_GAIN = 1000.0  # relative change of the output for that of the input
MAX_DIFFERENCE = 1e-2  # of two answers to the same; 16 bits on a GPU stay below it
OUTPUTS = ("logits", "probabilities", "ids", "values")
PROBABILITIES = ("probabilities", "probability", "probs")
IDS = ("ids", "token_ids", "tokens", "labels", "predictions")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Expected:
    """What is known of the answers."""

    outputs: str | None = None  # one of OUTPUTS; None: what names and types tell
    classes: int | None = None  # ids lie below it
    targets: Tensor | None = None  # class indices of the probes
    trained: bool | None = True  # long enough to tell samples apart; None: unknown


@torch.no_grad()
def check_behaviour(
    forward: Callable[..., Any],
    probes: Inputs,
    expected: Expected,
    held: Sequence[NamedTensor],
    facts: dict[str, Any],
) -> Iterator[Reason]:
    """Up to four forwards of the probes; the caller restores modes, noise and buffers.

    The host waits for each. Adds `repeated` and `gain` to the facts.
    """
    versions = _versions(held)
    output = call(forward, probes)
    named = dict(_named(output))
    written = [o.name for o, a, b in zip(held, versions, _versions(held), strict=True) if a != b]
    if written:
        more = f" and to {len(written) - 1:,} more" if len(written) > 1 else ""
        evidence = f"a forward in evaluation mode writes to it{more}"
        yield make_reason("behaviour.writes", Severity.WARNING, written[0], evidence)
    bad = list(_not_finite(named))
    yield from [*bad, *_out_of_range(named, expected)]
    main = _main(output)
    if bad or main is None or not main.ndim or len(main) < 2:
        return
    first = _rows(main)
    if not bool(torch.isfinite(first).all()):
        return  # -Inf for what may not be chosen: there are no distances
    yield from _constant(main, first, probes, expected)
    size = torch.linalg.vector_norm(first, dim=1)
    size = torch.maximum(size, size.mean() * 1e-3).clamp(min=1e-30)
    facts["repeated"] = again = float(_difference(forward, probes, first, size).max())
    if again > MAX_DIFFERENCE:
        evidence = f"two answers to the same samples differ by {again:.2g} of their size"
        yield make_reason("behaviour.random", Severity.WARNING, "", evidence)
        return
    facts["gain"] = gain = _gain(forward, probes, first, size)
    if gain is not None and gain > MAX_GAIN:
        evidence = f"a change of {CHANGE:.0e} of the inputs comes out {gain:,.0f} times as large"
        yield make_reason("behaviour.sensitive", Severity.WARNING, "", evidence)


def _named(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output, by its place."""
    inside = getattr(output, "logits", None)
    if isinstance(inside, Tensor) and not isinstance(output, dict | tuple):
        output = {"logits": inside}
    return ((name, tensor.detach()) for name, tensor in named_leaves(output, "output"))


def _main(output: Any) -> Tensor | None:
    """The logits, or the first float there is: what answers are compared by."""
    main = find_logits(output)
    if not isinstance(main, Tensor):
        main = next((t for _, t in _named(output) if t.is_floating_point()), None)
    return main if main is not None and main.is_floating_point() else None


def _rows(main: Tensor) -> Tensor:
    """A row for each sample; its first values, where there are very many."""
    return main.reshape(len(main), -1)[:, : max(1, MAX_VALUES // len(main))].float()


def _versions(held: Sequence[NamedTensor]) -> list[int]:
    """How often each tensor was written to."""
    return [-1 if one.tensor.is_inference() else one.tensor._version for one in held]


# -- answers ---------------------------------------------------------------------------------------


def _not_finite(named: dict[str, Tensor]) -> Iterator[Reason]:
    """NaN and Inf, by tensor; -Inf passes where it stands for what may not be chosen."""
    for name, tensor in named.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        bad = ~torch.isfinite(tensor)
        if not bool(bad.any()):  # waits
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


def _out_of_range(named: dict[str, Tensor], expected: Expected) -> Iterator[Reason]:
    """Probabilities, ids and logits that cannot be."""
    for name, tensor in named.items():
        last = name.rpartition(".")[2]
        kind = expected.outputs if last in ("output", "logits", "0") else None
        if not tensor.numel() or tensor.dtype is torch.bool or tensor.is_complex():
            continue
        low, high = (float(x) for x in torch.aminmax(tensor))
        floating, evidence = tensor.is_floating_point(), ""
        if last in PROBABILITIES or kind == "probabilities":
            tolerance = 1e-2 if tensor.dtype in HALVES else 1e-4
            if low < -tolerance or high > 1 + tolerance:
                evidence = f"from {low:.3g} to {high:.3g}, and a probability is from 0 to 1"
        elif not floating and (last in IDS or kind == "ids"):
            most = math.inf if expected.classes is None else expected.classes - 1
            if low < 0 or high > most:
                evidence = f"ids from {low:,.0f} to {high:,.0f}, expected 0 to {most:,.0f}"
        elif floating and kind == "logits":
            if HUGE_LOGIT < max(-low if low > -math.inf else 0.0, high) < math.inf:
                evidence = f"logits from {low:.3g} to {high:.3g}"
        if evidence:
            yield make_reason("behaviour.out_of_range", Severity.WARNING, name, evidence)


def _constant(
    main: Tensor, answers: Tensor, probes: Inputs, expected: Expected
) -> Iterator[Reason]:
    """One and the same answer to different samples, or answers that prefer nothing."""
    if all(bool((t == t[:1]).all()) for t in tensors(probes) if t.ndim and len(t) > 1):
        return
    spread, size = float((answers.amax(0) - answers.amin(0)).max()), float(answers.abs().max())
    severity = Severity.WARNING if expected.trained else Severity.NOTE
    if spread <= SAME * size:
        evidence = f"the same output for all of {len(main):,} samples, to 1 in {1 / SAME:,.0f}"
        yield make_reason("behaviour.constant", severity, "", evidence)
        return
    if expected.outputs not in ("logits", "probabilities") or main.ndim < 2:
        return
    classes = expected.classes
    second = main.ndim > 2 and classes == main.shape[1] and classes != main.shape[-1]
    rows = torch.flatten(main.movedim(1, -1) if second else main, 0, -2)
    if rows.shape[1] < 2:
        return
    rows = rows[: max(1, MAX_VALUES // rows.shape[1])].float()
    shares = rows if expected.outputs == "probabilities" else rows.softmax(1)
    largest, even = float(shares.max()), 1 / rows.shape[1]
    if largest < EVEN * even:
        evidence = f"no probability is above {largest:.4g}; {even:.4g} for each says nothing at all"
        yield make_reason("behaviour.uniform", severity, "", evidence)
    elif main.ndim == 2 and (evidence := _one_class(rows.argmax(1), expected.targets)):
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


# -- again, and with inputs that are a little larger -----------------------------------------------


def _difference(forward: Callable[..., Any], inputs: Inputs, first: Tensor, size: Tensor) -> Tensor:
    """How far the answer to other inputs is from the first, for each sample in sizes."""
    main = _main(call(forward, inputs))
    answers = None if main is None else _rows(main)
    if answers is None or answers.shape != first.shape:
        return torch.full_like(size, math.inf)
    change = torch.nan_to_num(answers - first, nan=1e30, posinf=1e30, neginf=-1e30)
    relative: Tensor = torch.linalg.vector_norm(change, dim=1) / size
    return relative


def _gain(forward: Callable[..., Any], probes: Inputs, first: Tensor, size: Tensor) -> float | None:
    """The median over samples of how much a tiny change grows; None where no input is a float.

    The smaller of two draws, so that it is the model and not the draw. Zeros stay zero, and whole
    numbers are cut to the same; 16 bits hold no change that small.
    """

    def moves(tensor: Tensor) -> bool:
        wide = tensor.is_floating_point() and tensor.dtype not in HALVES
        return wide and tensor.ndim > 0 and len(tensor) == len(first)

    def move(tensor: Tensor) -> Tensor:
        return tensor * (1 + CHANGE * torch.rand_like(tensor)) if moves(tensor) else tensor

    def flat(inputs: Inputs) -> Tensor:
        return torch.cat([t.reshape(len(t), -1) for t in tensors(inputs) if moves(t)], dim=1)

    if not any(bool((t != 0).any()) for t in tensors(probes) if moves(t)):
        return None
    before, gains = flat(probes), []
    for _ in range(2):
        changed = tree_map(probes, move)
        moved = torch.linalg.vector_norm(flat(changed) - before, dim=1)
        way = (moved / torch.linalg.vector_norm(before, dim=1).clamp(min=1e-30)).float()
        grown = _difference(forward, changed, first, size)
        ratio = (grown / way.to(grown.device))[way.to(grown.device) > 0]
        gains.append(float(ratio.median()))
    return min(gains)
