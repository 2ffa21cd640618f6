"""The ways to compute attention: which there are, which calls a model makes, how fast each is."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from runner.record.text import shorten

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HOLDING_MATRICES = ("math", "plain")  # [query, key] for each head, kept for the backward
BUDGET_S = 0.8  # for timing
ROUNDS = 3, 12  # at least, at most
LAP_S = 1e-3  # what is shorter is repeated, the clock and the machine are not that exact
SHAPES = 4  # kinds of calls that are timed; a model has one or two
ARGUMENTS = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
DISPATCHED = torch.nn.functional.scaled_dot_product_attention
DEFAULT = "default"  # what torch takes by itself


@dataclass
class Call:
    """One kind of attention call that a model makes, and how often."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    times: int = 1

    def matrix_bytes(self) -> int:
        """Of the attention matrices of these calls."""
        element = self.query.element_size() * self.times
        return prod(self.query.shape[:-1]) * self.key.shape[-2] * element

    def run(self) -> None:
        """Forward and backward."""
        wanted = [t for t in (self.query, self.key, self.value) if t.requires_grad]
        out = F.scaled_dot_product_attention(self.query, self.key, self.value, **self.options)
        torch.autograd.grad(out, wanted, torch.ones_like(out))


class _Recorder(TorchFunctionMode):
    """Notes every call of scaled_dot_product_attention, however the model got hold of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DISPATCHED:
            self._note(dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, given: dict[str, Any]) -> None:
        kind = str({name: _describe(value) for name, value in given.items()})
        if kind in self.calls:
            self.calls[kind].times += 1
            return
        if (mask := given.get("attn_mask")) is not None:
            given["attn_mask"] = mask.detach().requires_grad_(mask.requires_grad)
        q, k, v = (given.pop(name).detach().requires_grad_() for name in ARGUMENTS[:3])
        self.calls[kind] = Call(q, k, v, given)


def _describe(value: Any) -> Any:
    tensor = isinstance(value, Tensor)
    return (value.shape, value.stride(), value.dtype, value.requires_grad) if tensor else value


def calls_of(run: Callable[[], object]) -> list[Call]:
    """The attention calls in it, the commonest first."""
    recorder = _Recorder()
    with recorder:
        run()
    return sorted(recorder.calls.values(), key=lambda call: -call.times)[:SHAPES]


def plain(
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

    The scale goes into the keys. After the product, where it is usually written, inductor would
    recognise the pattern and put a fused kernel in its place.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, (key * scale).transpose(-2, -1))
    never = torch.finfo(scores.dtype).min / 2  # Inf would make NaN of a row that sees nothing
    seen = None
    if is_causal:
        wall = torch.full(scores.shape[-2:], never, dtype=scores.dtype, device=scores.device)
        scores.add_(wall.triu(1))  # in place: the backward of a product needs only its factors
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = attn_mask.any(-1, keepdim=True)
        scores.masked_fill_(~attn_mask, never)
    elif attn_mask is not None:
        seen = (attn_mask > never).any(-1, keepdim=True)
        scores.add_(attn_mask.clamp(min=never))
    shares = scores.softmax(-1)
    if dropout_p:
        shares = F.dropout(shares, dropout_p)
    out = torch.matmul(shares, value)
    return out if seen is None else out.masked_fill(~seen, 0.0)  # as torch's own


@contextmanager
def use(name: str, model: nn.Module, strictly: bool) -> Iterator[None]:
    """While it is open, attention is computed this way, wherever it is called.

    Also in a backward that recomputes, which no context around the forward would reach. Strictly:
    nothing else may be taken, so a call that the kernel cannot take is an error; otherwise math
    takes it.
    """
    with ExitStack() as stack:
        if name == "plain":
            _replace(model, stack)
        else:
            config: Any = torch.compiler.config  # whose cache's key knows nothing of kernels
            stack.callback(setattr, config, "cache_key_tag", config.cache_key_tag)
            config.cache_key_tag = f"{config.cache_key_tag}attention={name}"
            others = [] if strictly else [SDPBackend.MATH]
            stack.enter_context(sdpa_kernel([BACKENDS[name], *others]))
        yield


def _replace(model: nn.Module, scope: ExitStack) -> None:
    """Put `plain` in torch, and in modules of the model's classes that imported torch's by name."""
    for module in {sys.modules[type(m).__module__] for m in model.modules()} | {F}:
        for name, value in list(vars(module).items()):
            if value is DISPATCHED:
                scope.callback(setattr, module, name, value)
                setattr(module, name, plain)


def refusal(name: str, calls: Iterable[Call], model: nn.Module) -> str | None:
    """Why this kernel cannot take these calls, or None; found out by trying."""
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with use(name, model, strictly=True):
                    call.run()
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                dtype = str(call.query.dtype).removeprefix("torch.")
                why = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
                gist = shorten(" ".join([*why, str(error).splitlines()[0]]), 300)
                shape = list(call.query.shape)
                return f"{name} does not take queries of {shape} in {dtype} here: {gist}"
    return None


def race(
    names: Sequence[str], calls: Sequence[Call], model: nn.Module, wait: Callable[[], None]
) -> dict[str, float]:
    """Seconds of a forward and backward of the calls by each kernel, medians of rounds.

    Every other round runs backwards, so that a machine which slows down slows all of them.
    """
    repeats = 1

    def time_kernel(name: str) -> float:
        total = 0.0
        with ExitStack() as stack:
            if name != DEFAULT:
                stack.enter_context(use(name, model, strictly=True))
            for call in calls:
                start = perf_counter()
                for _ in range(repeats):
                    call.run()
                wait()
                total += (perf_counter() - start) / repeats * call.times
        return total

    began = perf_counter()
    for _ in range(2):  # the first time is never the usual time
        fastest = min(time_kernel(name) for name in names)
    repeats = max(1, min(50, round(LAP_S / fastest)))
    laps: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS[1]):
        if number >= ROUNDS[0] and perf_counter() - began > BUDGET_S:
            break
        for name in names if number % 2 else reversed(names):
            laps[name].append(time_kernel(name))
    return {name: median(times) for name, times in laps.items()}
