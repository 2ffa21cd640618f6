"""One look at a model: its weights, what it is made of, and how it behaves on probes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from runner import modes
from runner.batch import Inputs
from runner.checks.model.answers import Expected
from runner.checks.model.behaviour import Seen, behaviour
from runner.checks.model.inventory import Held, held, plain, tied
from runner.checks.model.report import ModelReport
from runner.checks.model.structure import structure
from runner.checks.model.weights import weights
from runner.nest import mapped, tensors
from runner.record.text import shorten
from runner.security.trust import Reason, Severity
from runner.untouched import large_parameters, untouched

WORK = 2**29  # parameters times samples times places of a forward: some 10 ms on four cores
LEAST = 16  # samples of a model that is too large for that: one class for all says something …
HALVED = 16  # places of an image or a signal that come down to one, as strides have it
INPUTS = 2**22  # … unless they hold more values than this; never fewer than two
Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]


def look(
    model: nn.Module,
    probes: Inputs | None = None,
    *,
    trusted: Sequence[str] = (),
    foreign: Severity = Severity.NOTE,
    expected: Expected | None = None,
    contexts: Contexts = (),
) -> ModelReport:
    """What is to be said of the model, which stays as it is.

    With probes it is called up to four times, in eval mode, without gradients and uncompiled, on
    as many of them as WORK, LEAST and INPUTS say. Buffers, modes, attributes and random states
    are put back; so are parameters up to KEPT bytes, beyond which a forward that writes to them is
    only told of. The host waits for the device a few times.
    """
    start = time.perf_counter()
    expected = expected or Expected()
    found = held(model)
    parameters = [one for one in found if one.is_parameter]
    reasons = [
        *weights(model, found, expected.trained),
        *structure(model, found, trusted, foreign),
    ]
    facts: dict[str, Any] = {
        "parameters": sum(one.tensor.numel() for one in parameters if plain(one.tensor)),
        "trained": expected.trained,
        "layers": sum(1 for _ in model.modules()) - 1,
        "tensors": len(found),
        "types": dict(Counter(str(one.tensor.dtype).removeprefix("torch.") for one in parameters)),
        "tied": tied(model),
        "not_looked_at": [one.name for one in found if not plain(one.tensor)],
    }
    if probes is not None:
        probes, count = _fewer(probes, facts["parameters"])
        seen = _behave(model, probes, expected, found, contexts)
        reasons += seen.reasons
        facts |= {"probes": count, **seen.facts}
    facts["seconds"] = time.perf_counter() - start
    return ModelReport(reasons, facts)


def _behave(
    model: nn.Module,
    probes: Inputs,
    expected: Expected,
    found: Sequence[Held],
    contexts: Contexts,
) -> Seen:
    """Behaviour, with nothing left behind; a model that raises says so."""
    device = next((one.tensor.device for one in found), torch.device("cpu"))
    with ExitStack() as stack:
        stack.enter_context(untouched(model, device=device, safe=large_parameters(model)))
        stack.enter_context(modes.evaluating(model))
        if "torch._dynamo" in sys.modules:  # another number of samples would be compiled anew
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in contexts:
            stack.enter_context(context())
        try:
            return behaviour(model, probes, expected, found)
        except Exception as error:
            gist = shorten(str(error), 200)
            return Seen([Reason(
                "behaviour.raises", Severity.WARNING, "", f"{type(error).__name__}: {gist}",
                "are the probes what it is called with?",
            )])  # fmt: skip


def _fewer(probes: Inputs, parameters: int) -> tuple[Inputs, int]:
    """The first samples of the probes, as many as may be, and how many these are."""
    inside = tensors(probes)
    if not inside or not inside[0].ndim:
        return probes, 0
    first = inside[0]
    samples = len(first)
    places = 1
    if first.ndim > 2:
        places = -(-first.shape[2:].numel() // HALVED)
    elif first.ndim == 2 and not first.is_floating_point():
        places = first.shape[1]  # tokens
    most = max(LEAST, WORK // max(1, parameters * places))
    most = max(2, min(most, INPUTS // max(1, first[0].numel())))
    if samples <= most:
        return probes, samples
    cut = mapped(probes, lambda t: t[:most] if t.ndim and len(t) == samples else t)
    return cut, most
