"""The ways to compute attention: which there are, which calls a model makes, how to choose one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ARGUMENTS = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
Attend = Callable[..., Tensor]
DISPATCHED: Attend = torch.nn.functional.scaled_dot_product_attention


class Call(NamedTuple):
    """One attention call that a model makes."""

    dtype: torch.dtype  # of the query
    matrix_bytes: int  # of its attention matrices [query, key]


class _Recorder(TorchFunctionMode):
    """Notes every call of scaled_dot_product_attention, however the model got hold of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DISPATCHED:
            self.note(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add a call with these arguments."""
        arguments = dict(zip(ARGUMENTS, args, strict=False)) | dict(kwargs)
        query, key = arguments["query"], arguments["key"]
        elements = prod(query.shape[:-1]) * key.shape[-2]
        self.calls.append(Call(query.dtype, elements * query.element_size()))

    def plain(self, *args: Any, **kwargs: Any) -> Tensor:
        """`plain`, and noted."""
        self.note(args, kwargs)
        return plain(*args, **kwargs)


def calls_of(run: Callable[[], object], model: nn.Module) -> list[Call]:
    """The attention calls in it, in order; those of `plain`, too, where it is in use."""
    recorder = _Recorder()
    with ExitStack() as stack, recorder:
        _replace(plain, recorder.plain, model, stack)
        run()
    return recorder.calls


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
    if is_causal:
        wall = torch.full(scores.shape[-2:], never, dtype=scores.dtype, device=scores.device)
        scores.add_(wall.triu(1))  # in place: the backward of a product needs only its factors
    seen = None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = attn_mask.any(-1, keepdim=True)
        scores.masked_fill_(~attn_mask, never)
    elif attn_mask is not None:
        seen = (attn_mask > never).any(-1, keepdim=True)
        scores.add_(attn_mask.clamp(min=never))
    shares = F.dropout(scores.softmax(-1), dropout_p) if dropout_p else scores.softmax(-1)
    out = torch.matmul(shares, value)
    return out if seen is None else out.masked_fill(~seen, 0.0)  # as torch's own


@contextmanager
def use(name: str, model: nn.Module) -> Iterator[None]:
    """While it is open, attention is computed this way alone, wherever it is called.

    Also in a backward that recomputes, which no context around the forward would reach. A call
    that the kernel cannot take is a RuntimeError.
    """
    with ExitStack() as stack:
        if name == "plain":
            _replace(DISPATCHED, plain, model, stack)
        else:
            config: Any = torch.compiler.config  # whose cache's key knows nothing of kernels
            stack.callback(setattr, config, "cache_key_tag", config.cache_key_tag)
            config.cache_key_tag = f"{config.cache_key_tag}attention={name}"
            stack.enter_context(sdpa_kernel([BACKENDS[name]]))
        yield


def _replace(old: Attend, new: Attend, model: nn.Module, scope: ExitStack) -> None:
    """Put it in torch, and in modules of the model's classes that imported torch's by name."""
    for module in {sys.modules[type(m).__module__] for m in model.modules()} | {F}:
        for name, value in list(vars(module).items()):
            if value is old:
                scope.callback(setattr, module, name, value)
                setattr(module, name, new)
