"""How a model behaves on samples: its answers, again, and after a tiny change of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.batch import Inputs, call
from runner.checks.model.answers import (
    HALVES,
    VALUES,
    Expected,
    constant,
    not_finite,
    out_of_range,
)
from runner.checks.model.inventory import Held
from runner.deferred import logits_in
from runner.nest import mapped, placed, tensors
from runner.security.trust import Reason, Severity

CHANGE = 1e-4  # of each input value, upwards
GAIN = 1000.0  # relative change of the output for that of the input: a tenth for a ten-thousandth
AGAIN = 1e-2  # relative difference between two answers to the same; 16 bits on a GPU stay below it


@dataclass
class Seen:
    """What the probes came to."""

    reasons: list[Reason] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def behaviour(
    forward: Callable[..., Any], probes: Inputs, expected: Expected, held: Sequence[Held]
) -> Seen:
    """Up to four forwards of the probes; the caller has seen to modes, noise and what they change.

    The host waits for each.
    """
    seen = Seen()
    before = _versions(held)
    output = call(forward, probes)
    found = dict(_named(output))
    seen.reasons += _written(held, before)
    bad = list(not_finite(found))
    seen.reasons += [*bad, *out_of_range(found, expected)]
    main = _main(output)
    if bad or main is None or not main.ndim or len(main) < 2:
        return seen
    first = _compared(main)
    if not bool(torch.isfinite(first).all()):
        return seen  # -Inf for what may not be chosen: there are no distances
    seen.reasons += constant(main, first, probes, expected)
    size = _sizes(first)
    seen.facts["repeated"] = again = float(_difference(forward, probes, first, size).max())
    if again > AGAIN:
        seen.reasons.append(Reason(
            "behaviour.random", Severity.WARNING, "",
            f"two answers to the same samples differ by {again:.2g} of their size, in evaluation "
            "mode", "heed self.training, and draw nothing while it is false",
        ))  # fmt: skip
        return seen
    seen.facts["gain"] = gain = _gain(forward, probes, first, size)
    if gain is not None and gain > GAIN:
        seen.reasons.append(Reason(
            "behaviour.sensitive", Severity.WARNING, "",
            f"a change of {CHANGE:.0e} of the inputs comes out {gain:,.0f} times as large, as a "
            "share of the outputs", "scale its inputs, or look for a layer with very large weights",
        ))  # fmt: skip
    return seen


def _main(output: Any) -> Tensor | None:
    """The logits, or the first float there is: what answers are compared by."""
    main = logits_in(output)
    if not isinstance(main, Tensor):
        main = next((t for _, t in _named(output) if t.is_floating_point()), None)
    return main if main is not None and main.is_floating_point() else None


def _named(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output, by its place."""
    inside = getattr(output, "logits", None)
    if isinstance(inside, Tensor) and not isinstance(output, dict | tuple):
        output = {"logits": inside}
    return ((name, tensor.detach()) for name, tensor in placed(output, "output"))


def _compared(main: Tensor) -> Tensor:
    """A row for each sample; the first values of it, where there are very many."""
    return (
        torch.flatten(main, 1)[:, : max(1, VALUES // len(main))].float()
        if main.ndim > 1
        else (main.float().unsqueeze(1))
    )


def _sizes(answers: Tensor) -> Tensor:
    """How large each sample's answer is; where it is next to nothing, a share of the mean."""
    sizes = torch.linalg.vector_norm(answers, dim=1)
    return torch.maximum(sizes, sizes.mean() * 1e-3).clamp(min=1e-30)


def _difference(forward: Callable[..., Any], inputs: Inputs, first: Tensor, size: Tensor) -> Tensor:
    """How far the answer to other inputs is from the first, for each sample in sizes."""
    main = _main(call(forward, inputs))
    answers = None if main is None else _compared(main)
    if answers is None or answers.shape != first.shape:
        return torch.full_like(size, math.inf)
    change = torch.nan_to_num(answers - first, nan=1e30, posinf=1e30, neginf=-1e30)
    far: Tensor = torch.linalg.vector_norm(change, dim=1) / size
    return far


def _gain(forward: Callable[..., Any], probes: Inputs, first: Tensor, size: Tensor) -> float | None:
    """The median over samples of how much a tiny change grows; None where no input is a float.

    The smaller of two draws, so that it is the model and not the draw. Values grow by up to
    CHANGE: what is zero stays so, and what is a whole number is still cut to the same. 16 bits
    hold no change that small.
    """
    floats = [t for t in tensors(probes) if _is_moved(t, len(first))]
    if not any(bool((t != 0).any()) for t in floats):
        return None
    gains = []
    for _ in range(2):
        changed = mapped(probes, lambda t: _moved(t) if _is_moved(t, len(first)) else t)
        way = _way(floats, [t for t in tensors(changed) if _is_moved(t, len(first))])
        grown = _difference(forward, changed, first, size)
        ratio = (grown / way.to(grown.device))[way.to(grown.device) > 0]
        gains.append(float(ratio.median()))
    return min(gains)


def _is_moved(tensor: Tensor, samples: int) -> bool:
    wide = tensor.is_floating_point() and tensor.dtype not in HALVES
    return wide and tensor.ndim > 0 and len(tensor) == samples


def _moved(tensor: Tensor) -> Tensor:
    return tensor * (1 + CHANGE * torch.rand_like(tensor))


def _way(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """How far each sample was moved, as a share of its size."""
    rows = [
        (a.reshape(len(a), -1), b.reshape(len(b), -1)) for a, b in zip(before, after, strict=True)
    ]
    moved = torch.stack([(b - a).square().sum(1) for a, b in rows]).sum(0)
    size = torch.stack([a.square().sum(1) for a, _ in rows]).sum(0)
    return (moved / size.clamp(min=1e-30)).sqrt().float()


def _versions(held: Sequence[Held]) -> list[int]:
    """How often each tensor was written to; costs no look at it."""
    return [-1 if one.tensor.is_inference() else one.tensor._version for one in held]


def _written(held: Sequence[Held], before: list[int]) -> Iterator[Reason]:
    names = [o.name for o, a, b in zip(held, before, _versions(held), strict=True) if a != b]
    if names:
        more = f" and to {len(names) - 1:,} more" if len(names) > 1 else ""
        yield Reason(
            "behaviour.writes", Severity.WARNING, names[0],
            f"a forward in evaluation mode writes to it{more}",
            "update statistics only while self.training is true",
        )  # fmt: skip
