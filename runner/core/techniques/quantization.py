"""Int8 linear layers, for evaluation and inference; the products are torch's own operators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core.device.device import Device
from runner.core.execution.evaluation import copy_standalone_model, evaluate
from runner.core.interfaces.batch import call_model
from runner.core.interfaces.run import Quantized, Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.models import modes
from runner.core.schemas.optimization import Quantization, QuantizationMode
from runner.core.techniques.model_calls import enter_contexts

MAX_LATENCY_RATIO = 1.05  # of int8 over float, within the noise of a short measurement
ROUNDS = 5  # of timed forwards, int8 and float in turn, the same number on each machine
INT8_LEVELS = 127  # on either side of zero
MIN_SCALE = 1e-12  # the smallest scale, for rows of zeros
MIN_CUDA_ROWS = 17  # the fewest that `torch._int_mm` takes on CUDA; other sizes: multiples of 8


def unavailable(config: Quantization, device: Device) -> str | None:
    """Return a reason for dynamic mode on MPS, which has no int8 product."""
    if config.mode is QuantizationMode.dynamic and device.kind == "mps":
        return "MPS has no int8 matrix product: use mode=weight_only"
    return None


def apply(config: Quantization, builder: RunBuilder) -> str | None:
    """Check that there are layers to quantize; the copy is made from the trained model."""
    if quantizable_layers(config, builder.model, builder.device.kind):
        return None
    sides = f"{config.min_features} or more inputs and outputs (min_features)"
    return f"no linear layer with {sides}, and weights of its own"


def engaged(config: Quantization, run: Run) -> Evidence:
    """Quantize a copy of the model; compare its metric, bytes and latency with the float model."""
    float_model = copy_standalone_model(run)
    layers = quantizable_layers(config, float_model, run.device.kind)
    float_bytes, quantized = model_bytes(float_model), len(layers)
    model = replace_layers(float_model, layers, config.mode is QuantizationMode.dynamic)
    left_float = sum(linear_weight(module) is not None for module in model.modules())
    progress = run.progress
    monitor, higher = run.monitor, bool(run.higher_is_better)
    if monitor.startswith("user/"):  # no evaluation of the copy gives it
        monitor, higher = run.objective.monitor, run.objective.higher_is_better
    validated = progress.validated_step == progress.step and monitor in progress.metrics
    metrics = progress.metrics if validated else evaluate(run).metrics
    evaluation = evaluate(run, model)
    float_metric, int8_metric = metrics[monitor], evaluation.metrics[monitor]
    drop = _relative_drop(float_metric, int8_metric, higher)
    facts: dict[str, Any] = {
        "mode": config.mode.value,
        "layers": {"Int8Linear": quantized},
        "left_float": left_float,
        "metric": monitor,
        "float": float_metric,
        "int8": int8_metric,
        "relative_drop": drop,
        "float_metrics": {k: x for k, x in metrics.items() if k.count("/") == 1},
        "float_bytes": float_bytes,
        "int8_bytes": model_bytes(model),
        "latency_ratio": round(_latency_ratio(run, model), 3),
    }
    comparison = f"{monitor} {int8_metric:.4g} in int8, {float_metric:.4g} in float"
    if not drop <= config.max_drop:  # NaN too
        reason = f"{comparison}: the drop exceeds max_drop={config.max_drop:g}"
        return Evidence(False, reason, facts)
    is_exported = run.settings.get("evaluate.export", "none") != "none"
    slower = config.mode is QuantizationMode.dynamic and facts["latency_ratio"] > MAX_LATENCY_RATIO
    if slower and not is_exported:
        reason = f"slower at this width: {facts['latency_ratio']:.2f} of the time in float"
        return Evidence(False, reason, facts, "skipped")
    run.quantized = Quantized(model, evaluation)
    share, latency = facts["int8_bytes"] / float_bytes, facts["latency_ratio"]
    comparison += f"; {share:.0%} of the bytes, {latency:.2f} of the time"
    coverage = f"{quantized} of {quantized + left_float} linear layers"
    return Evidence(True, f"{comparison}; {coverage}", facts)


def _relative_drop(float_metric: float, int8_metric: float, higher_is_better: bool) -> float:
    """Return the relative loss of the metric; negative if it improved."""
    if float_metric == int8_metric:
        return 0.0
    drop = float_metric - int8_metric if higher_is_better else int8_metric - float_metric
    return drop / abs(float_metric) if float_metric else math.copysign(math.inf, drop)


def _latency_ratio(run: Run, model: nn.Module) -> float:
    """Return the ratio of median forward times, int8 over float, both uncompiled."""
    forwards: tuple[Callable[..., Any], ...] = (model, run.forward)
    times: tuple[list[float], list[float]] = ([], [])
    with (
        modes.evaluation_mode(run.model),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        enter_contexts(run.contexts),
    ):
        inputs = run.validation.peek()[0]
        for _ in range(ROUNDS + 1):
            for forward, seconds in zip(forwards, times, strict=True):
                seconds.append(run.device.seconds_of(partial(call_model, forward, inputs)))
    return median(times[0][1:]) / median(times[1][1:])  # the first round warms up


# -- the layers ------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Replaces a linear layer: int8 weights with one scale per output.

    [..., in] -> [..., out], in the dtype of the input or autocast. `dynamic` quantises each input
    row at run time and multiplies in int8 (`torch._int_mm`); otherwise weights are dequantised for
    each product, which saves memory only.
    """

    quantized: Tensor  # [out, in]
    scale: Tensor  # [out]
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dynamic: bool) -> None:
        super().__init__()
        self.dynamic = dynamic
        float_weight = weight.detach().float()
        levels = product_levels(weight.device.type) if dynamic else INT8_LEVELS
        scale = float_weight.abs().amax(1).clamp(min=MIN_SCALE) / levels
        self.register_buffer("quantized", (float_weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def weight(self) -> Tensor:
        """The weights in fp32; torch's transformer layers read them directly."""
        return self.quantized * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [..., out], in the dtype of the input or of autocast."""
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
        if self.dynamic:
            product = self._int8_product(x)
        else:  # sums of unscaled weights overflow fp16
            product_dtype = torch.float32 if dtype is torch.float16 else dtype
            product = F.linear(x.to(product_dtype), self.quantized.to(product_dtype))
        y = product * self.scale
        return (y if self.bias is None else y + self.bias).to(dtype)

    def _int8_product(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        step = rows.abs().amax(1, keepdim=True).clamp(min=MIN_SCALE) / INT8_LEVELS
        levels = (rows / step).round().to(torch.int8)
        if x.is_cuda:  # unconditionally: a branch would fix the batch size of an exported model
            levels = F.pad(levels, (0, 0, 0, MIN_CUDA_ROWS - 1))
        product = torch._int_mm(levels, self.quantized.t())[: rows.shape[0]]
        return (product * step).reshape(*x.shape[:-1], -1)


@cache
def product_levels(device_type: str) -> int:
    """Return the weight levels on either side of zero for which int8 products are exact.

    A CPU without VNNI adds pairs of products in 16 bits, which saturate beyond 64 levels (oneDNN,
    "Nuances of int8 computations"). Tested by a product, as torch has no flag for it.
    """
    if device_type != "cpu":
        return INT8_LEVELS
    largest = torch.full((4, 64), INT8_LEVELS, dtype=torch.int8)
    is_exact = bool((torch._int_mm(largest, largest.t()) == 64 * INT8_LEVELS**2).all())
    return INT8_LEVELS if is_exact else 64


def linear_weight(module: nn.Module) -> Tensor | None:
    """Return the weight [out, in] of a plain nn.Linear or transformers' Conv1D without hooks."""
    weight, kind = module._parameters.get("weight"), type(module)
    if weight is None or module._forward_hooks or module._forward_pre_hooks:
        return None
    if kind is nn.Linear and weight.is_floating_point():
        return weight
    conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return weight.t() if conv1d and weight.is_floating_point() else None


def quantizable_layers(
    config: Quantization, model: nn.Module, kind: str
) -> dict[nn.Module, Tensor]:
    """Return the layers to quantise, with weights: wide enough (`min_features`) and unshared."""
    dynamic = config.mode is QuantizationMode.dynamic
    multiple = 8 if kind == "cuda" and dynamic else 1  # required by torch._int_mm
    use_counts = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    layers: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        weight = linear_weight(module)
        if weight is None or use_counts[id(module._parameters["weight"])] > 1:
            continue
        if min(weight.shape) >= config.min_features and not any(n % multiple for n in weight.shape):
            layers[module] = weight
    return layers


def replace_layers(model: nn.Module, layers: dict[nn.Module, Tensor], dynamic: bool) -> nn.Module:
    """Replace each of `layers` by an `Int8Linear` wherever it occurs; return the model."""
    replacements: dict[nn.Module, nn.Module] = {
        module: Int8Linear(weight, module._parameters.get("bias"), dynamic).eval()
        for module, weight in layers.items()
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
