"""Int8 linear layers, for evaluation and inference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from runner.data.batch import call
from runner.errors import ConfigError
from runner.models import modes
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Quantized, Run

if TYPE_CHECKING:
    from torch import nn

    from runner.device.device import Device

KEY = "optimization.quantization"
ROUNDS = 5  # of forwards, one each in turn, on each machine as many


class QuantizationMode(Enum):
    """What is in int8: weights and the inputs as they come, or weights alone."""

    dynamic = "dynamic"
    weight_only = "weight_only"


class QuantizationBackend(Enum):
    """Whose int8 products: torch's own operators (auto is the same), or torchao's tensors."""

    auto = "auto"
    torch = "torch"
    torchao = "torchao"


@dataclass
class Quantization(Technique):
    """An int8 copy of the trained model's large linear layers; training never sees it."""

    mode: QuantizationMode = QuantizationMode.dynamic
    backend: QuantizationBackend = QuantizationBackend.auto
    max_drop: float = 0.01  # share of the monitored metric that may be lost
    min_features: int = 64  # linear layers with fewer inputs or outputs stay float

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < math.inf:
            raise ConfigError(f"{KEY}.max_drop", f"{self.max_drop} is no share", "use 0 or more")
        if self.min_features < 1:
            raise ConfigError(
                f"{KEY}.min_features", f"{self.min_features} is no count", "use 1 or more"
            )

    def unavailable(self, device: Device) -> str | None:
        """A backend that is asked for by name has to be there."""
        if self.backend is QuantizationBackend.torchao and find_spec("torchao") is None:
            return "torchao is not installed: pip install 'runner[quantization]', or backend=auto"
        if self.mode is QuantizationMode.dynamic and device.kind == "mps":
            return "there is no int8 product on MPS: use mode=weight_only"
        return None

    def apply(self, draft: RunBuilder) -> str | None:
        """Change nothing yet: the copy is made of the trained model."""
        from runner.techniques.int8 import candidates

        if not candidates(draft.model, self.min_features, self._multiple(draft.device.kind)):
            return (
                f"no linear layer with {self.min_features} inputs and outputs or more "
                "that shares its weights with none (min_features)"
            )
        return None

    def engaged(self, run: Run) -> Evidence:
        """The copy's layers, and what it is worth: metric, bytes and time against the float one."""
        from runner.techniques.int8 import model_bytes
        from runner.training.evaluation import evaluate, standalone

        plain = standalone(run)
        bytes_before, kinds_before = model_bytes(plain), _kinds(plain)
        torchao = self.backend is QuantizationBackend.torchao
        model = self._quantize(plain, run.device.kind)
        progress = run.progress
        seen = progress.validated_step == progress.step and run.monitor in progress.metrics
        metrics = progress.metrics if seen else evaluate(run).metrics
        evaluation = evaluate(run, model)
        before, after = metrics[run.monitor], evaluation.metrics[run.monitor]
        drop = _drop(before, after, run.higher_is_better)
        kinds = _kinds(model)
        facts: dict[str, Any] = {
            "mode": self.mode.value,
            "backend": "torchao" if torchao else "torch",
            "layers": dict(kinds - kinds_before),
            "left_float": kinds["Linear"] + kinds["Conv1D"],
            "metric": run.monitor,
            "float": before,
            "int8": after,
            "relative_drop": drop,
            "float_metrics": {k: x for k, x in metrics.items() if k.count("/") == 1},
            "float_bytes": bytes_before,
            "int8_bytes": model_bytes(model),
            "latency_ratio": round(latency_ratio(run, model), 3),
        }
        told = f"{run.monitor} {after:.4g} in int8, {before:.4g} in float"
        if not drop <= self.max_drop:  # NaN too
            return Evidence(False, f"{told}: more is lost than max_drop={self.max_drop:g}", facts)
        share = facts["int8_bytes"] / bytes_before
        told += f"; {share:.0%} of the bytes, {facts['latency_ratio']:.2f} of the time"
        quantized = sum((kinds - kinds_before).values())
        told += f"; {quantized} of {quantized + facts['left_float']} linear layers"
        if share >= 1:
            return Evidence(False, f"{told}: the int8 copy is no smaller", facts)
        run.quantized = Quantized(model, evaluation)
        return Evidence(True, told, facts)

    def _multiple(self, kind: str) -> int:
        """What both sizes of a weight must be a multiple of."""
        return 8 if kind == "cuda" and self.mode is QuantizationMode.dynamic else 1

    def _quantize(self, model: nn.Module, kind: str) -> nn.Module:
        from runner.techniques import int8

        layers = int8.candidates(model, self.min_features, self._multiple(kind))
        dynamic = self.mode is QuantizationMode.dynamic
        if self.backend is not QuantizationBackend.torchao:
            return int8.replace_layers(model, layers, dynamic)
        from torchao import quantization as ao

        scheme = ao.Int8DynamicActivationInt8WeightConfig if dynamic else ao.Int8WeightOnlyConfig
        ao.quantize_(model, scheme(), filter_fn=lambda module, name: module in layers)
        return model


def _kinds(model: nn.Module) -> Counter[str]:
    """How many modules there are of each class; of torchao's, which stay Linear, their weight's."""
    names: Counter[str] = Counter()
    for module in model.modules():
        weight = type(module._parameters.get("weight"))
        foreign = weight.__module__.startswith("torchao.")
        names[weight.__name__ if foreign else type(module).__name__] += 1
    return names


def _drop(before: float, after: float, higher_is_better: bool) -> float:
    """The share of the metric that is lost; below zero when it got better."""
    if before == after:
        return 0.0
    lost = before - after if higher_is_better else after - before
    return lost / abs(before) if before else math.copysign(math.inf, lost)


def latency_ratio(run: Run, model: nn.Module) -> float:
    """The time of a forward in int8 over one in float, both uncompiled; medians of rounds."""
    import torch

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
            for forward, taken in zip(forwards, times, strict=True):
                run.device.synchronize()
                begun = perf_counter()
                call(forward, inputs)
                run.device.synchronize()
                if number:  # the first one settles
                    taken.append(perf_counter() - begun)
    return median(times[0]) / median(times[1])
