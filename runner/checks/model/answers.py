"""What a model answers: finite, in range, and not the same to everything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.batch import Inputs
from runner.nest import tensors
from runner.security.trust import Reason, Severity

SAME = 1e-6  # relative spread over samples at which answers are one and the same
EVEN = 1.01  # largest probability times classes, at which a prediction says nothing
MANY = 16  # samples from which on one class for all of them means something
FEW = 3  # samples of other classes that it must have missed, where targets are known
HUGE = 1e6  # |logit|
VALUES = 2**20  # of an output that answers are compared by; NaN is looked for in all of them
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
    trained: bool | None = True  # long enough to tell samples apart; None: nobody knows


def not_finite(found: dict[str, Tensor]) -> Iterator[Reason]:
    """NaN and Inf, by tensor; -Inf passes where it stands for what may not be chosen."""
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor)
        if math.isfinite(float(low)) and math.isfinite(float(high)):  # waits
            continue
        if float(high) < math.inf and not bool(tensor.isnan().any()) and tensor.ndim > 1:
            if bool((tensor > -math.inf).any(-1).all()):
                continue  # logits of what may not be chosen
        bad = ~torch.isfinite(tensor)
        samples = int(torch.flatten(bad, 1).any(1).sum()) if tensor.ndim > 1 else int(bad.sum())
        nans = int(tensor.isnan().sum())
        yield Reason(
            "behaviour.not_finite", Severity.REFUSAL, name,
            f"{nans:,} NaN and {int(bad.sum()) - nans:,} Inf of {tensor.numel():,} values, in "
            f"{samples:,} of {len(tensor) if tensor.ndim else 1:,} samples",
            "debug=anomaly names the layer in which they come up",
        )  # fmt: skip


def out_of_range(found: dict[str, Tensor], expected: Expected) -> Iterator[Reason]:
    """Probabilities, ids and sizes that cannot be."""
    for name, tensor in found.items():
        if not tensor.numel():
            continue
        last = name.rpartition(".")[2]
        main = last in ("output", "logits", "0")
        kind = expected.outputs if main and expected.outputs else None
        if last in PROBABILITIES or kind == "probabilities":
            yield from _probabilities(name, tensor)
        elif not tensor.is_floating_point() and not tensor.is_complex():
            if (last in IDS or kind == "ids") and tensor.dtype is not torch.bool:
                yield from _ids(name, tensor, expected.classes)
        elif tensor.is_floating_point() and kind == "logits":
            low, high = (float(x) for x in torch.aminmax(tensor))
            if HUGE < max(-low if low > -math.inf else 0.0, high) < math.inf:
                yield Reason(
                    "behaviour.out_of_range", Severity.WARNING, name,
                    f"logits from {low:.3g} to {high:.3g}",
                    "scale its inputs, or look for a layer with very large weights",
                )  # fmt: skip


def _probabilities(name: str, tensor: Tensor) -> Iterator[Reason]:
    tolerance = 1e-2 if tensor.dtype in HALVES else 1e-4
    low, high = (float(x) for x in torch.aminmax(tensor))
    if low < -tolerance or high > 1 + tolerance:
        yield Reason(
            "behaviour.out_of_range", Severity.WARNING, name,
            f"from {low:.3g} to {high:.3g}, and a probability is from 0 to 1",
            "are they logits? end with a softmax, or say outputs='logits'",
        )  # fmt: skip


def _ids(name: str, tensor: Tensor, classes: int | None) -> Iterator[Reason]:
    low, high = (int(x) for x in torch.aminmax(tensor))
    if low < 0 or (classes is not None and high >= classes):
        most = "" if classes is None else f" to {classes - 1:,}"
        yield Reason(
            "behaviour.out_of_range", Severity.WARNING, name,
            f"ids from {low:,} to {high:,}, and there are those from 0{most}",
            "size its last layer by the data",
        )  # fmt: skip


# -- the same for all -----------------------------------------------------------------------------


def constant(main: Tensor, answers: Tensor, probes: Inputs, expected: Expected) -> Iterator[Reason]:
    """One and the same answer to different samples, or answers that prefer nothing."""
    if _all_alike(probes):
        return
    spread, size = float((answers.amax(0) - answers.amin(0)).max()), float(answers.abs().max())
    severity = Severity.WARNING if expected.trained else Severity.NOTE
    if spread <= SAME * size:
        yield Reason(
            "behaviour.constant", severity, "",
            f"the same output for all of {len(main):,} samples, to 1 in {1 / SAME:,.0f}",
            "does its input reach its output? look for dead layers",
        )  # fmt: skip
        return
    if expected.outputs not in ("logits", "probabilities") or main.ndim < 2:
        return
    classes = expected.classes
    second = main.ndim > 2 and classes == main.shape[1] and classes != main.shape[-1]
    rows = torch.flatten(main.movedim(1, -1) if second else main, 0, -2)
    if rows.shape[1] < 2:
        return
    rows = rows[: max(1, VALUES // rows.shape[1])].float()
    shares = rows if expected.outputs == "probabilities" else rows.softmax(1)
    largest, even = float(shares.max()), 1 / rows.shape[1]
    if largest < EVEN * even:
        yield Reason(
            "behaviour.uniform", severity, "",
            f"no probability is above {largest:.4g}, and with {even:.4g} for each of "
            f"{rows.shape[1]:,} it would say nothing at all",
            "train it longer, or with a higher learning rate",
        )  # fmt: skip
    elif main.ndim == 2:
        yield from _one_class(rows.argmax(1), expected, severity)


def _one_class(said: Tensor, expected: Expected, severity: Severity) -> Iterator[Reason]:
    """A class for all samples, though there are others among them."""
    first = int(said[0])
    if len(said) < MANY or bool((said != first).any()):
        return
    truth, others = expected.targets, ""
    if truth is not None and truth.shape == said.shape and not truth.is_floating_point():
        missed = int((truth.to(said.device) != first).sum())
        if missed < FEW:
            return
        others = f", of which {missed:,} are of others"
    yield Reason(
        "behaviour.constant", severity, "", f"class {first} for all of {len(said):,} samples"
        + others, "train it longer; are the classes very unequal, or the inputs not scaled?",
    )  # fmt: skip


def _all_alike(probes: Inputs) -> bool:
    return all(bool((t == t[:1]).all()) for t in tensors(probes) if t.ndim and len(t) > 1)
