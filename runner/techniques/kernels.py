"""The ways to compute attention: which there are, which calls a model makes, how fast each is."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
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
HOPELESS = 2.5  # times slower than the fastest at first sight: not timed any further
SHAPES = 4  # kinds of calls that are timed; a model has one or two

DISPATCHED = torch.nn.functional.scaled_dot_product_attention


@dataclass
class Call:
    """One kind of attention call that a model makes, and how often."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    times: int = 1

    def matrices(self) -> int:
        """Bytes of the attention matrices of these calls."""
        *heads, queries, _ = self.query.shape
        size = queries * self.key.shape[-2] * self.query.element_size()
        for n in heads:
            size *= n
        return size * self.times

    def run(self) -> None:
        """Forward and backward."""
        wanted = [t for t in (self.query, self.key, self.value) if t.requires_grad]
        out = F.scaled_dot_product_attention(self.query, self.key, self.value, **self.options)
        torch.autograd.grad(out, wanted, torch.ones_like(out))


@dataclass
class _Recorder(TorchFunctionMode):
    """Notes every call of scaled_dot_product_attention, however the model got hold of it."""

    calls: dict[tuple[Any, ...], Call] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DISPATCHED:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        mask = None
        if attn_mask is not None:
            mask = attn_mask.detach().requires_grad_(attn_mask.requires_grad)
        options = {
            "attn_mask": mask,
            "dropout_p": dropout_p,
            "is_causal": bool(is_causal),
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        looks = [
            (t.shape, t.stride(), t.dtype, t.requires_grad)
            for t in (query, key, value, mask)
            if t is not None
        ]
        kind = (*looks, mask is None, dropout_p, bool(is_causal), scale, enable_gqa)
        if kind in self.calls:
            self.calls[kind].times += 1
        else:
            q, k, v = (t.detach().requires_grad_() for t in (query, key, value))
            self.calls[kind] = Call(q, k, v, options)


def calls_of(run: Callable[[], object]) -> list[Call]:
    """The attention calls in it, the commonest first."""
    recorder = _Recorder()
    with recorder:
        run()
    return sorted(recorder.calls.values(), key=lambda call: -call.times)[:SHAPES]


def default_of(calls: Sequence[Call]) -> str:
    """The kernel that torch takes by itself for these, or `default` where it takes several."""
    found = {_dispatch(call) for call in calls}
    return found.pop() if len(found) == 1 else "default"


def _dispatch(call: Call) -> str:
    kind = call.query.device.type

    def cast(tensor: Tensor) -> Tensor:  # as autocast does, before the choice is made
        low = torch.is_autocast_enabled(kind) and tensor.dtype not in (torch.bool, torch.float64)
        return tensor.to(torch.get_autocast_dtype(kind)) if low else tensor

    mask = call.options["attn_mask"]
    options = {**call.options, "attn_mask": mask if mask is None else cast(mask)}
    chosen = torch._fused_sdp_choice(cast(call.query), cast(call.key), cast(call.value), **options)
    backend = SDPBackend(chosen)
    return next((name for name, b in BACKENDS.items() if b == backend), "default")


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


def xformers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The memory-efficient kernel of xFormers, which has the heads last but one."""
    ops = import_module("xformers.ops")
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias: Any = ops.LowerTriangularMask() if is_causal else None
    if attn_mask is not None:
        full = (*query.shape[:-1], key.shape[-2])
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, float("-inf")
            )
        bias = attn_mask.to(query.dtype).expand(full)
    out: Tensor = ops.memory_efficient_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_bias=bias,
        p=dropout_p,
        scale=scale,
    )
    return out.transpose(1, 2)


WRITTEN = {"plain": plain, "xformers": xformers}


def use(name: str, model: nn.Module, strictly: bool) -> AbstractContextManager[Any]:
    """While it is open, attention is computed this way, wherever it is called.

    Also in a backward that recomputes, which no context around the forward would reach. Strictly:
    nothing else may be taken, so a call that the kernel cannot take is an error; otherwise math
    takes it.
    """
    if name in WRITTEN:
        return _replaced(WRITTEN[name], model)
    return _chosen(name, [BACKENDS[name], *([] if strictly else [SDPBackend.MATH])])


@contextmanager
def _chosen(name: str, backends: list[SDPBackend]) -> Iterator[None]:
    # What was compiled for another choice of kernels would be taken from the cache: its key knows
    # nothing of them.
    config: Any = torch.compiler.config
    before = config.cache_key_tag
    config.cache_key_tag = f"{before}attention={name}"
    try:
        with sdpa_kernel(backends):
            yield
    finally:
        config.cache_key_tag = before


@contextmanager
def _replaced(form: Callable[..., Tensor], model: nn.Module) -> Iterator[None]:
    """In torch, and in modules of the model's classes that imported the function by name."""
    modules = {sys.modules[type(m).__module__] for m in model.modules()} | {F}
    with ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if value is DISPATCHED:
                    stack.callback(setattr, module, name, value)
                    setattr(module, name, form)
        yield


def refusal(name: str, calls: Iterable[Call], model: nn.Module) -> str | None:
    """Why this kernel cannot take these calls, or None; found out by trying."""
    for call in calls:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with use(name, model, strictly=True):
                    call.run()
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                shape = list(call.query.shape)
                dtype = str(call.query.dtype).removeprefix("torch.")
                why = [str(w.message).partition(" (Triggered")[0] for w in said]
                gist = shorten(" ".join([*why, str(error).splitlines()[0]]), 300)
                return f"{name} does not take queries of {shape} in {dtype} here: {gist}"
    return None


def race(
    names: Sequence[str],
    first: str,
    calls: Sequence[Call],
    model: nn.Module,
    wait: Callable[[], None],
) -> dict[str, list[float]]:
    """Seconds of forward and backward relative to those of `first`, a number a round.

    The rounds are interleaved and every other one runs backwards, so that a machine which slows
    down slows all of them. `first` of `default` is what torch does by itself.
    """

    def lap(name: str, repeats: int) -> float:
        with ExitStack() as stack:
            if name != "default":
                stack.enter_context(use(name, model, strictly=True))
            total = 0.0
            for call in calls:
                start = perf_counter()
                for _ in range(repeats):
                    call.run()
                wait()
                total += (perf_counter() - start) / repeats * call.times
        return total

    began = perf_counter()
    for name in names:  # the first time is never the usual time
        lap(name, 1)
    sight = {name: lap(name, 1) for name in names}
    fastest = min(sight.values())
    left = [name for name in names if sight[name] <= HOPELESS * fastest or name == first]
    repeats = max(1, min(50, round(LAP_S / fastest)))
    ratios: dict[str, list[float]] = {
        n: [] if n in left else [sight[n] / sight[first]] for n in names
    }
    for number in range(ROUNDS[1]):
        if number >= ROUNDS[0] and perf_counter() - began > BUDGET_S:
            break
        order = left if number % 2 else left[::-1]
        seconds = {name: lap(name, repeats) for name in order}
        for name in left:
            ratios[name].append(seconds[name] / seconds[first])
    return ratios


def faster(ratios: dict[str, list[float]], first: str, margin: float) -> str:
    """The fastest, if it beats `first` by the margin in the middle and in most rounds."""
    best = min(ratios, key=lambda name: median(ratios[name]))
    laps = ratios[best]
    wins = sum(ratio < 1 for ratio in laps)
    return best if median(laps) < 1 - margin and wins >= 0.75 * len(laps) else first
