"""Numbers that no training leaves behind, seen in one pass at the speed of memory.

`aminmax` reads each value once and hands on NaN; an infinity or an absurd size is at either end.
It is about nine times as fast as asking for each value whether it is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from runner.security.gate.threads import at_once
from runner.security.gate.walk import Place
from runner.security.trust import Reason, Severity

ABSURD = 1e10  # weights and their statistics are many powers of ten smaller
MOST = 20  # tensors that are named
WAY_OUT = "check where it comes from before you use it; check_model looks closer"


def value_reasons(tensors: Iterable[tuple[Place, Tensor]]) -> list[Reason]:
    """A warning for each tensor with such values; none for whole numbers. No tensor of truth
    values may have others than two.
    """
    each = at_once(_look, tensors, lambda placed: placed[1].nbytes)
    found = [reason for reason in each if reason is not None]
    found.sort(key=lambda reason: -reason.severity)
    if len(found) > MOST:
        more = len(found) - MOST
        found[MOST:] = [
            Reason("weights.more", Severity.WARNING, "", f"{more:,} more tensors like these")
        ]
    return found


def array_reasons(content: np.ndarray | dict[str, np.ndarray]) -> list[Reason]:
    """The same for numpy's arrays, which may be data: of these any finite size is usual."""
    arrays = content if isinstance(content, dict) else {"": content}
    tensors = []
    for name, array in arrays.items():
        if array.dtype.kind in "fc":
            known = array.dtype.isnative and array.dtype.char in "efdFD"
            wide = array if known else array.astype("c16" if array.dtype.kind == "c" else "f8")
            tensors.append((Place(Place(), name), torch.as_tensor(wide)))
    return [reason for reason in value_reasons(tensors) if reason.code != "weights.magnitude"]


def _look(placed: tuple[Place, Tensor]) -> Reason | None:
    place, tensor = placed[0], placed[1].detach()
    if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        return Reason(
            "tensor.bool", Severity.REFUSAL, str(place),
            "has truth values other than 0 and 1, which are read in two ways",
            "save it with .to(torch.uint8).bool()",
        )  # fmt: skip
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # float8 has no such kernel
        tensor = tensor.to(torch.float32)
    low, high = (float(end) for end in torch.aminmax(tensor))
    if math.isnan(low) or math.isnan(high):
        what, code = "holds NaN", "weights.not_finite"
    elif math.isinf(low) or math.isinf(high):
        what, code = "holds an infinity", "weights.not_finite"
    elif max(-low, high) > ABSURD:
        what, code = f"goes from {low:.3g} to {high:.3g}", "weights.magnitude"
    else:
        return None
    return Reason(code, Severity.WARNING, str(place), what, WAY_OUT)
