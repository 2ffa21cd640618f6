"""Whether a model is in order: its weights, what it is made of, and how it behaves on samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runner.batch import Inputs
from runner.checks.model.answers import OUTPUTS, Expected
from runner.checks.model.look import look
from runner.checks.model.report import ModelReport
from runner.errors import UsageError
from runner.library import batches
from runner.library.assembly import check_module, device_of
from runner.library.optimize import Optimized
from runner.security.trust import Severity

WHO = "check_model"


def check_model(
    model: nn.Module | Optimized,
    probes: Inputs | None = None,
    *,
    targets: Tensor | None = None,
    trusted: Sequence[str] = (),
    outputs: str | None = None,
    classes: int | None = None,
    trained: bool | None = None,
) -> ModelReport:
    """What is wrong with a model, with reasons; `print` shows it, `.ok` says whether to go on.

    Weights and buffers: NaN, Inf, absurd size, negative variances, dead, constant and duplicated
    layers, types. Structure: hooks, replaced methods, classes that are neither torch's nor the
    runner's nor of a package in `trusted`, tensors and layers that torch does not know of. On
    `probes`, inputs as the model is called with (16 or more tell most): answers not finite, out of
    range, constant, uniform, random, or that a tiny change of float inputs throws about.

    `outputs` says what the answers are: logits, probabilities, ids or values; `classes` how many
    there are (or words), `targets` which class each probe has. Zero layers, copies and constant
    answers are what fresh models have too: they are warnings with `trained=True`, and else notes.
    A class of a package that is not trusted is a note
    as long as `trusted` is empty, and then a warning.

    The model is as it was afterwards (`look` says what is put back). Raises UsageError. It makes
    the host wait for the device.
    """
    if outputs is not None and outputs not in OUTPUTS:
        raise UsageError(f"{WHO}: outputs={outputs!r}; use one of {', '.join(OUTPUTS)}")
    if isinstance(trusted, str):
        raise UsageError(f"{WHO}: trusted is one string; give a list: [{trusted!r}]")
    module = model.model if isinstance(model, Optimized) else model
    check_module(WHO, module)
    if probes is not None:
        batches.samples(probes, f"{WHO}: probes")
        probes = batches.moved(probes, device_of(module))
    return look(
        module,
        probes,
        trusted=trusted,
        foreign=Severity.WARNING if trusted else Severity.NOTE,
        expected=Expected(outputs, classes, targets, trained),
    )
