"""The kernel of scaled_dot_product_attention, for any model that calls it.

A kernel requested by name is never replaced: a call that it cannot take is an error. `auto` follows
a rule, and otherwise leaves the choice to torch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from runner.core.device.device import Device
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.models.modes import enter_training
from runner.core.record.text import shorten
from runner.core.schemas.optimization import Attention, Kernel
from runner.core.techniques import model_calls, probe

KEY = "optimization.attention.kernel"
TORCH_CHOICE = "default"  # torch's own choice
SAMPLES = 8  # in the forward that records the calls
MAX_MATRIX_MB = 1024  # limit of the attention matrices [query, key] of all layers
OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}
PRODUCT_OPERATORS = ("aten::bmm", "aten::baddbmm")
UNFUSED = ("math", "plain")  # decomposed by the compiler


def unavailable(config: Attention, device: Device) -> str | None:
    """Return a reason for kernels that the device lacks, or None."""
    if config.kernel in (Kernel.efficient, Kernel.cudnn) and device.kind != "cuda":
        return f"{config.kernel.value} runs on NVIDIA GPUs only"
    if device.kind == "mps" and config.kernel not in (Kernel.math, Kernel.plain):
        return "MPS has its own kernel, math and plain only"
    return None


def apply(config: Attention, builder: RunBuilder) -> str | None:
    """Record the model's calls, choose a kernel, and use it until the run closes."""
    samples = min(builder.micro_batch, SAMPLES)
    inputs, _ = model_calls.sample_batch(builder, samples)
    forward = partial(model_calls.forward, builder, inputs)
    with model_calls.preserve_builder_state(builder):
        enter_training(builder.model)
        try:
            calls = record_calls(forward, builder.model)
        except Exception as error:  # such as a model with a fixed batch size
            return f"the model does not take {samples} samples ({type(error).__name__})"
        if not calls:
            return "the model does not call scaled_dot_product_attention"
        builder.technique_facts["attention"] = {
            "calls": len(calls),
            "torch_choices": [call.torch_choice for call in calls],
        }
        name = config.kernel.value
        is_named = config.kernel is not Kernel.auto
        if is_named and (reason := _unsupported_reason(name, forward, builder)):
            return reason
    if config.kernel is Kernel.auto:
        matrix_mb = sum(c.matrix_bytes for c in calls) / 2**20 * builder.micro_batch / samples
        dtypes = {call.dtype for call in calls}
        name = builder.choose(KEY, lambda: _choose_kernel(builder.device, dtypes, matrix_mb))
        if name == TORCH_CHOICE:
            reason = next(c.reason for c in reversed(builder.choices) if c.key == KEY)
            return f"kernel {name}: {reason}"
        # a kernel asked for by name is used
        if reason := builder.skip_reason("attention"):
            return reason
    stack = builder.scope.enter_context(ExitStack())

    def set_enabled(run: Run, on: bool) -> None:
        stack.close()
        if on:
            stack.enter_context(use_kernel(name, run.model))

    stack.enter_context(use_kernel(name, builder.model))
    builder.add_switch("attention", set_enabled)
    return None


def _unsupported_reason(
    name: str, forward: Callable[[], object], builder: RunBuilder
) -> str | None:
    """Try the kernel in a forward; return why it cannot take the model's calls, or None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with use_kernel(name, builder.model):
                forward()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            messages = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
            message = shorten(" ".join([*messages, str(error).splitlines()[0]]), 300)
            return f"{name} does not support the model's calls: {message}"
    return None


def _choose_kernel(device: Device, dtypes: set[torch.dtype], matrix_mb: float) -> tuple[str, str]:
    """Choose `plain` for 16 bits on a CPU (0.85 of flash's time, 8 x 4 x 256 x 64), or default."""
    size = f"matrices of {matrix_mb:,.0f} MB"
    if device.kind != "cpu" or not dtypes <= {torch.float16, torch.bfloat16}:
        return TORCH_CHOICE, "torch's choice is fastest except 16 bits on a CPU"
    if matrix_mb > MAX_MATRIX_MB:
        return TORCH_CHOICE, f"torch's choice: {size} rule out math and plain"
    return "plain", f"the fastest for 16 bits on a CPU, with {size}"


def engaged(config: Attention, run: Run) -> Evidence:
    """Return which kernels ran in the forward of one step, by operator name."""
    requested = config.kernel.value
    if config.kernel is Kernel.auto:
        requested = next(str(c.value) for c in reversed(run.choices) if c.key == KEY)
    operators = probe.count_operators(run)
    forward = {name: n for name, n in operators.items() if not name.endswith("_backward")}
    counts = {
        name: sum(n for operator, n in forward.items() if operator.startswith(start))
        for name, start in OPERATORS.items()
    }
    kernels = {name: n for name, n in counts.items() if n}
    products = sum(operators.get(name, 0) for name in PRODUCT_OPERATORS)
    unfused_calls = 0
    if not kernels and requested in UNFUSED:
        # the compiler decomposes math and plain, and only their two products keep their names;
        # other layers have products as well, so at most the number of calls is counted
        step = partial(probe.dry_run_step, run, run.micro_batch)  # with recomputed ones
        with torch.compiler.set_stance("force_eager"):
            unfused_calls = min(len(record_calls(step, run.model)), products // 2)
    unfused = {"bmm": products} if unfused_calls else {}
    facts: dict[str, Any] = {"kernel": requested, "ran": kernels or unfused}
    other_kernels = [name for name in kernels if name != requested]
    if other_kernels:
        return Evidence(False, f"{' and '.join(other_kernels)} ran instead", facts)
    # share of the calls recorded at build time; recomputed ones run twice a step
    calls = int(run.technique_facts["attention"]["calls"])
    calls_in_kernel = sum(kernels.values()) or unfused_calls
    counted = "calls ran in an attention kernel"
    evidence = Evidence.of_share(min(calls_in_kernel, calls), calls, counted, **facts)
    if not calls_in_kernel:
        return replace(evidence, reason="no attention kernel ran")
    if set(run.technique_facts["attention"]["torch_choices"]) == {requested}:
        return Evidence(False, f"torch's own choice is {requested}, too", facts, status="skipped")
    return evidence


# -- the kernels -----------------------------------------------------------------------------------

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ARGUMENT_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
AttentionFunction = Callable[..., Tensor]
TORCH_ATTENTION: AttentionFunction = torch.nn.functional.scaled_dot_product_attention


class AttentionCall(NamedTuple):
    """One attention call of a model."""

    dtype: torch.dtype  # of the query
    matrix_bytes: int  # of its attention matrices [query, key]
    torch_choice: str  # the kernel that torch takes by itself; "" if unknown


class _CallRecorder(TorchFunctionMode):
    """Records every call of scaled_dot_product_attention, however the model imported it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is TORCH_ATTENTION:
            self.record(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a call with these arguments."""
        arguments = dict(zip(ARGUMENT_NAMES, args, strict=False)) | dict(kwargs)
        query, key = arguments["query"], arguments["key"]
        elements = prod(query.shape[:-1]) * key.shape[-2]
        size = elements * query.element_size()
        self.calls.append(AttentionCall(query.dtype, size, _torch_choice(arguments)))

    def plain_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `plain_attention`, and record the call."""
        self.record(args, kwargs)
        return plain_attention(*args, **kwargs)


def _torch_choice(arguments: Mapping[str, Any]) -> str:
    """Return the kernel that torch takes for a call, as autocast passes it on; "" if unknown."""
    kind = arguments["query"].device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else None
    values: dict[str, Any] = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    try:
        number = torch._fused_sdp_choice(**values)
    except (RuntimeError, TypeError):
        return ""
    return next((name for name, backend in BACKENDS.items() if backend.value == number), "")


def record_calls(run: Callable[[], object], model: nn.Module) -> list[AttentionCall]:
    """Return the attention calls that `run` makes, in order, with those of `plain_attention`."""
    recorder = _CallRecorder()
    with ExitStack() as stack, recorder:
        _replace_function(plain_attention, recorder.plain_attention, model, stack)
        run()
    return recorder.calls


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Matmul, softmax, matmul: what scaled_dot_product_attention computes, written out.

    The keys are scaled. If the product were scaled, as is usual, inductor would recognise the
    pattern and substitute a fused kernel.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, (key * scale).transpose(-2, -1))
    masked_score = torch.finfo(scores.dtype).min / 2  # -inf would make a fully masked row NaN
    if is_causal:
        causal_mask = scores.new_full(scores.shape[-2:], masked_score)
        # in place: the backward of a product needs only its factors
        scores.add_(causal_mask.triu(1))
    attends = None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attends = attn_mask.any(-1, keepdim=True)
        scores.masked_fill_(~attn_mask, masked_score)
    elif attn_mask is not None:
        attends = (attn_mask > masked_score).any(-1, keepdim=True)
        scores.add_(attn_mask.clamp(min=masked_score))
    weights = F.dropout(scores.softmax(-1), dropout_p) if dropout_p else scores.softmax(-1)
    out = torch.matmul(weights, value)
    return out if attends is None else out.masked_fill(~attends, 0.0)  # as in torch


@contextmanager
def use_kernel(name: str, model: nn.Module) -> Iterator[None]:
    """Compute all attention by this kernel while entered.

    This includes recomputation in the backward, which a context around the forward would not
    reach. A call that the kernel cannot take raises RuntimeError.
    """
    with ExitStack() as stack:
        if name == "plain":
            _replace_function(TORCH_ATTENTION, plain_attention, model, stack)
        else:
            config: Any = torch.compiler.config  # the cache key does not contain the kernel
            stack.callback(setattr, config, "cache_key_tag", config.cache_key_tag)
            config.cache_key_tag = f"{config.cache_key_tag}attention={name}"
            stack.enter_context(sdpa_kernel([BACKENDS[name]]))
        yield


def _replace_function(
    old: AttentionFunction, new: AttentionFunction, model: nn.Module, scope: ExitStack
) -> None:
    """Replace `old` in F and in the modules of the model's classes until `scope` closes."""
    for module in {sys.modules[type(m).__module__] for m in model.modules()} | {F}:
        for name, value in list(vars(module).items()):
            if value is old:
                scope.callback(setattr, module, name, value)
                setattr(module, name, new)
