"""Int8 linear layers, for evaluation and inference."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from runner.data.batch import call
from runner.device.device import Device
from runner.models import modes
from runner.techniques import int8
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Quantization, QuantizationMode
from runner.training.evaluation import evaluate, standalone
from runner.training.run import Quantized, Run

ROUNDS = 5  # of forwards, one each in turn, on each machine as many


def unavailable(knobs: Quantization, device: Device) -> str | None:
    """Metal has no int8 product."""
    if knobs.mode is QuantizationMode.dynamic and device.kind == "mps":
        return "there is no int8 product on MPS: use mode=weight_only"
    return None


def apply(knobs: Quantization, draft: RunBuilder) -> str | None:
    """Change nothing yet: the copy is made of the trained model."""
    if _layers(knobs, draft.model, draft.device):
        return None
    return (
        f"no linear layer with {knobs.min_features} inputs and outputs or more "
        "that shares its weights with none (min_features)"
    )


def _layers(knobs: Quantization, model: nn.Module, device: Device) -> dict[nn.Module, torch.Tensor]:
    dynamic = knobs.mode is QuantizationMode.dynamic
    multiple = 8 if device.kind == "cuda" and dynamic else 1  # what torch's product takes there
    return int8.candidates(model, knobs.min_features, multiple)


def engaged(knobs: Quantization, run: Run) -> Evidence:
    """The copy's layers, and what it is worth: metric, bytes and time against the float one."""
    plain = standalone(run)
    layers = _layers(knobs, plain, run.device)
    float_bytes, quantized = int8.model_bytes(plain), len(layers)
    model = int8.replace_layers(plain, layers, knobs.mode is QuantizationMode.dynamic)
    left_float = sum(int8.linear_weight(module) is not None for module in model.modules())
    progress = run.progress
    known = progress.validated_step == progress.step and run.monitor in progress.metrics
    metrics = progress.metrics if known else evaluate(run).metrics
    evaluation = evaluate(run, model)
    before, after = metrics[run.monitor], evaluation.metrics[run.monitor]
    drop = _relative_drop(before, after, run.higher_is_better)
    facts: dict[str, Any] = {
        "mode": knobs.mode.value,
        "layers": {"Int8Linear": quantized},
        "left_float": left_float,
        "metric": run.monitor,
        "float": before,
        "int8": after,
        "relative_drop": drop,
        "float_metrics": {k: x for k, x in metrics.items() if k.count("/") == 1},
        "float_bytes": float_bytes,
        "int8_bytes": int8.model_bytes(model),
        "latency_ratio": round(latency_ratio(run, model), 3),
    }
    compared = f"{run.monitor} {after:.4g} in int8, {before:.4g} in float"
    if not drop <= knobs.max_drop:  # NaN too
        reason = f"{compared}: more is lost than max_drop={knobs.max_drop:g}"
        return Evidence(False, reason, facts)
    run.quantized = Quantized(model, evaluation)
    share = facts["int8_bytes"] / float_bytes
    compared += f"; {share:.0%} of the bytes, {facts['latency_ratio']:.2f} of the time"
    layers_share = f"{quantized} of {quantized + left_float} linear layers"
    return Evidence(True, f"{compared}; {layers_share}", facts)


def _relative_drop(before: float, after: float, higher_is_better: bool) -> float:
    """The share of the metric that is lost; below zero when it got better."""
    if before == after:
        return 0.0
    lost = before - after if higher_is_better else after - before
    return lost / abs(before) if before else math.copysign(math.inf, lost)


def latency_ratio(run: Run, model: nn.Module) -> float:
    """The time of a forward in int8 over one in float, both uncompiled; medians of rounds."""
    forwards: tuple[Callable[..., Any], ...] = (model, run.forward)
    times: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        stack.enter_context(modes.evaluation_mode(run.model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in run.contexts:
            stack.enter_context(context())
        inputs = run.validation.peek()[0]
        for number in range(ROUNDS + 1):
            for forward, seconds in zip(forwards, times, strict=True):
                run.device.synchronize()
                start = perf_counter()
                call(forward, inputs)
                run.device.synchronize()
                if number:  # the first one settles
                    seconds.append(perf_counter() - start)
    return median(times[0]) / median(times[1])
