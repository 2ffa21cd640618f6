"""Cost estimates: FLOP of a forward, seconds of a step, break-even steps of compiling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.core.device.device_errors import is_out_of_memory, release_references
from runner.core.interfaces.batch import batch_size_of, call_model
from runner.core.interfaces.technique import ForwardCost, RunBuilder
from runner.core.models import modes
from runner.core.models.modes import enter_training
from runner.core.preserved_state import NotRestorable
from runner.core.techniques import model_calls

COLD_COMPILE_S = 30.0  # cold compile time of a small transformer
AUTOTUNE_S = 300.0  # assumed: cold max-autotune of a small transformer takes minutes
MAX_COMPILE_SHARE = 0.1  # share of a run that futile compiling may cost
TIMED_FORWARDS = 6  # the same on each machine; the first ones are never the fastest
ASSUMED_STEP_S = 0.01  # per step, of a model that cannot be timed
SAMPLES = 8  # counted, and scaled up to a micro-batch
MIN_RUN_FLOP = {"cpu": 4e12}  # of a run in which compiling pays: minutes on a CPU with few cores
MIN_RUN_FLOP_ACCELERATOR = 4e15  # and on an accelerator


def forward_cost(builder: RunBuilder) -> ForwardCost:
    """Return the FLOP of a forward over a micro-batch, counted once per run.

    Rules use counts because they are reproducible, which timings are not. A model that must not be
    called before training counts as infinitely large.
    """
    if builder.forward_cost is None:
        try:
            builder.forward_cost = _count_any_flop(builder)
        except NotRestorable as error:
            builder.forward_cost = ForwardCost(inf, 1, str(error))
    return builder.forward_cost


def _count_any_flop(builder: RunBuilder) -> ForwardCost:
    try:
        return _count_flop(builder, SAMPLES)
    except NotRestorable:
        raise
    except Exception:  # such as a model with a fixed batch size
        return _count_flop(builder, builder.micro_batch)


def _count_flop(builder: RunBuilder, samples: int) -> ForwardCost:
    if any(isinstance(module, torch.jit.ScriptModule) for module in builder.model.modules()):
        raise NotRestorable("the operations of a scripted model are not seen from Python")
    inputs, target = model_calls.sample_batch(builder, samples)
    with ExitStack() as stack:
        stack.enter_context(model_calls.preserve_builder_state(builder))
        stack.enter_context(modes.evaluation_mode(builder.model))
        flop, products = count_flops(partial(call_model, builder.model, inputs))
    return ForwardCost(flop / 1e6 * builder.micro_batch / batch_size_of(target), products)


def compile_break_even(builder: RunBuilder, cold: bool = False) -> tuple[int, str]:
    """Return the least number of steps for which compiling is tried, and the reason.

    If gains are measured, those of an earlier run decide, or a timed step: compiling without gain
    takes at most MAX_COMPILE_SHARE more. Else the FLOP count decides, always alike.
    """
    if not builder.measure_gains:
        return _compile_rule(builder)
    known = None if builder.gains is None or cold else builder.gains.compile_seconds()
    compile_s = COLD_COMPILE_S if known is None else known
    compiling = f"{compile_s:.3g} s of compiling{'' if known is None else ', as the last time,'}"
    if builder.gains is not None and not cold:
        gains = [builder.gains.gain(name) for name in ("compile", "whole_step")]
        saved_ms = max([g.without_ms - g.with_ms for g in gains if g and g.faster], default=0.0)
        if saved_ms > 0:
            reason = f"an earlier run saved {saved_ms:.3g} ms a step; {compiling} must pay back"
            return _two_digits(1e3 * compile_s / saved_ms), reason
    try:
        seconds = step_seconds(builder)
        measured = f"forward and backward take about {1e3 * seconds:.3g} ms"
    except NotRestorable as error:
        seconds = ASSUMED_STEP_S
        measured = f"the model is not timed: {error}; assuming {1e3 * seconds:.3g} ms a step"
    if seconds <= 0:
        seconds = ASSUMED_STEP_S
        measured = f"the clock does not advance; assuming {seconds} s"
    share = f"{compiling} may take {MAX_COMPILE_SHARE:.0%} of the run"
    return _two_digits(compile_s / MAX_COMPILE_SHARE / seconds), f"{measured}; {share}"


def autotuning_mode(builder: RunBuilder) -> tuple[str, str]:
    """Return the compiler's mode on a GPU and the reason: it autotunes only in a long run.

    AUTOTUNE_S may take at most MAX_COMPILE_SHARE of the run, as COLD_COMPILE_S of default mode.
    """
    steps, reason = compile_break_even(builder, cold=True)
    required = _two_digits(steps * AUTOTUNE_S / COLD_COMPILE_S)
    pays = builder.total_steps >= required
    mode = "max-autotune-no-cudagraphs" if pays else "default"
    return mode, f"{builder.total_steps:,} steps; autotuning from {required:,} on ({reason})"


def _compile_rule(builder: RunBuilder) -> tuple[int, str]:
    cost = forward_cost(builder)
    if cost.unknown:
        steps = COLD_COMPILE_S / MAX_COMPILE_SHARE / ASSUMED_STEP_S
    else:
        flop = 3e6 * cost.mflop * builder.batch_size / builder.micro_batch
        steps = MIN_RUN_FLOP.get(builder.device.kind, MIN_RUN_FLOP_ACCELERATOR) / max(flop, 1.0)
    return _two_digits(steps), f"by rule: {cost}"


def _two_digits(steps: float) -> int:
    return int(float(f"{steps:.1e}"))  # the inputs are no more precise


def step_seconds(builder: RunBuilder) -> float:
    """Estimate the seconds of forward and backward over a micro-batch: three times a forward.

    Takes the fastest of TIMED_FORWARDS: disturbances (cold caches, other processes) only add time.
    Raises NotRestorable.
    """
    inputs, _ = model_calls.sample_batch(builder, builder.micro_batch)
    seconds: list[float] = []
    with model_calls.preserve_builder_state(builder), torch.no_grad():
        enter_training(builder.model)
        for _ in range(TIMED_FORWARDS):
            try:
                forward = partial(model_calls.forward, builder, inputs)
                seconds.append(builder.device.seconds_of(forward))
            except Exception as error:
                if is_out_of_memory(error):
                    release_references(error)
                    raise NotRestorable("a forward does not fit in memory") from None
                if not seconds:
                    raise
                break  # training will raise it, with its context
    return 3 * min(seconds)


# -- FLOP of matrix products, convolutions, attention and recurrent layers -------------------------


def count_flops(call: Callable[[], Any]) -> tuple[int, int]:
    """Return FLOP (a multiply-add is two) and number of products of a forward, uncompiled.

    Counted from the arguments of the functions in `FLOP_FORMULAS` that Python calls; NotRestorable
    if a formula does not fit one of them. Torch's own counter sees all operators and backward
    passes, but takes 2 s to import.
    """
    compiled = "torch._dynamo" in sys.modules
    uncompiled = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with uncompiled, torch.no_grad(), _ProductCounter() as counter:
        call()
    if counter.unknown:
        raise NotRestorable(f"the FLOP of {counter.unknown} cannot be counted")
    return counter.flop, counter.products


def _matmul_flop(operand: int) -> Callable[[Sequence[Any], Tensor], int]:
    """Return the FLOP formula of `[…, n, k] @ […, k, m]`; args[operand] has k as last dimension."""
    return lambda args, out: 2 * out.numel() * int(args[operand].shape[-1])


def _convolution_flop(operand: Tensor, weight: Tensor) -> int:
    return 2 * operand.numel() * weight[0].numel()


def _attention_flop(args: Sequence[Any], out: Tensor) -> int:
    query, key, value = args[:3]  # […, length, width]
    width = query.shape[-1] + value.shape[-1]
    return 2 * int(query.numel() // query.shape[-1] * key.shape[-2] * width)


def _multi_head_flop(args: Sequence[Any], out: Any) -> int:
    """Projections of query, key, value and output, and the attention itself."""
    query, key, value = args[:3]  # [length, …, width]
    rows = 2 * query.numel() + key.numel() + value.numel()
    return int(2 * query.shape[-1] * rows + 4 * query.numel() * key.shape[0])


def _recurrent_flop(args: Sequence[Any], out: Any) -> int:
    """Each weight multiplies each position; a cell has its weights as arguments, a layer a list."""
    weights = next((arg for arg in args if isinstance(arg, list)), args[2:4])
    positions = args[0].numel() // args[0].shape[-1]
    return int(2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _einsum_flop(args: Sequence[Any], out: Tensor) -> int:
    """Operands are multiplied one after the other, with the indices that are still needed."""
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    inputs, arrow, kept = str(args[0]).replace(" ", "").replace("...", ".").partition("->")
    terms, sizes = inputs.split(","), dict[str, int]()
    for term, operand in zip(terms, operands, strict=True):
        first, dots, last = term.partition(".")
        sizes |= zip(first, operand.shape, strict=False)
        sizes |= zip(reversed(last), reversed(operand.shape), strict=False)
        if dots:
            shared = operand.shape[len(first) : operand.dim() - len(last)]
            sizes["."] = max(sizes.get(".", 1), prod(shared))
    if not arrow:
        kept = "".join(index for index in sizes if index == "." or inputs.count(index) == 1)
    flop, product = 0, {*terms[0]}
    for number, term in enumerate(terms[1:], start=2):
        indices = product | {*term}
        flop += 2 * prod(sizes[index] for index in indices)
        product = indices & {*kept, *"".join(terms[number:])}
    return flop


FLOP_FORMULAS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm", "bmm", "mv", "dot"), _matmul_flop(0)),
    "inner": _matmul_flop(0),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv", "__rmatmul__"), _matmul_flop(1)),
    **{f"conv{n}d": lambda args, out: _convolution_flop(out, args[1]) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": lambda args, _: _convolution_flop(*args[:2]) for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention_flop,
    "multi_head_attention_forward": _multi_head_flop,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell"), _recurrent_flop),
    **dict.fromkeys(("gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _recurrent_flop),
    "einsum": _einsum_flop,
}
UNKNOWN_FLOP = {"bilinear", "cdist", "chain_matmul", "linalg_multi_dot", "tensordot"}
OPERANDS = ("input", "query", "key", "value", "weight", "mat2", "other", "vec", "tensor")


class _ProductCounter(TorchFunctionMode):
    """Counts functions called from Python; `unknown` is one whose FLOP are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.flop, self.products, self.unknown = 0, 0, ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name in UNKNOWN_FLOP:
            self.unknown = name
        elif name in FLOP_FORMULAS:
            operands = [*args, *(kwargs[key] for key in OPERANDS if key in kwargs)]
            try:
                self.flop += FLOP_FORMULAS[name](operands, result)
                self.products += 1
            except (AttributeError, IndexError, TypeError, ValueError):
                self.unknown = name
        return result
