"""Which kernel computes attention, for any model that calls scaled_dot_product_attention.

A kernel asked for by name is never replaced by another: what it cannot take is an error. `auto`
goes by a rule, and leaves torch's choice alone everywhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from runner.device.device import Device
from runner.record.text import shorten
from runner.techniques import kernels, probe
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Attention, Kernel
from runner.training.run import Run

KEY = "optimization.attention.kernel"
DEFAULT = "default"  # what torch takes by itself
SAMPLES = 8  # that the calls are looked at with
MATRIX_MB = 1024  # of the matrices [query, key] of all layers, up to which they may be held
OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}
PRODUCTS = ("aten::bmm", "aten::baddbmm")
UNFUSED = ("math", "plain", DEFAULT)  # what may be taken apart; torch's choice may be math


def unavailable(knobs: Attention, device: Device) -> str | None:
    """Some kernels are for NVIDIA's GPUs only."""
    if knobs.kernel in (Kernel.efficient, Kernel.cudnn) and device.kind != "cuda":
        return f"{knobs.kernel.value} runs on NVIDIA GPUs only"
    if device.kind == "mps" and knobs.kernel not in (Kernel.math, Kernel.plain):
        return "MPS has one kernel of its own (and math, plain)"
    return None


def apply(knobs: Attention, draft: RunBuilder) -> str | None:
    """Look at the model's calls, choose, and switch over until the run closes."""
    samples = min(draft.micro_batch, SAMPLES)
    inputs, _ = probe.sample_batch(draft, samples)

    def forward() -> object:
        return probe.forward(draft, inputs)

    with probe.untouched(draft):
        draft.model.train()
        try:
            calls = kernels.calls_of(forward, draft.model)
        except Exception as error:  # such as a model that knows its batch size
            return f"the model does not take {samples} samples ({type(error).__name__})"
        if not calls:
            return "the model does not call scaled_dot_product_attention"
        draft.remarks["attention"] = {"calls": len(calls)}
        name = knobs.kernel.value
        if knobs.kernel is not Kernel.auto and (reason := _refusal(name, forward, draft)):
            return reason
    if knobs.kernel is Kernel.auto:
        matrix_mb = sum(c.matrix_bytes for c in calls) / 2**20 * draft.micro_batch / samples
        dtypes = {call.dtype for call in calls}
        name = draft.choose(KEY, lambda: _choose(draft.device, dtypes, matrix_mb))
    if name != DEFAULT:
        stack = draft.scope.enter_context(ExitStack())

        def turn(run: Run, on: bool) -> None:
            stack.close()
            if on:
                stack.enter_context(kernels.use(name, run.model))

        stack.enter_context(kernels.use(name, draft.model))
        draft.measure("attention", turn)
    return None


def _refusal(name: str, forward: Callable[[], object], draft: RunBuilder) -> str | None:
    """Why this kernel cannot take the model's calls, or None; found out by trying."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with kernels.use(name, draft.model):
                forward()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            why = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
            gist = shorten(" ".join([*why, str(error).splitlines()[0]]), 300)
            return f"{name} does not take the model's calls here: {gist}"
    return None


def _choose(device: Device, dtypes: set[torch.dtype], matrix_mb: float) -> tuple[str, str]:
    """In 16 bits on a CPU the form written out takes 0.85 of flash's time (8 x 4 x 256 x 64)."""
    size = f"matrices of {matrix_mb:,.0f} MB"
    if device.kind != "cpu" or not dtypes <= {torch.float16, torch.bfloat16}:
        return DEFAULT, "torch's choice is the fastest but for 16 bits on a CPU"
    if matrix_mb > MATRIX_MB:
        return DEFAULT, f"torch's choice: {size} rule out math and plain"
    return "plain", f"the fastest for 16 bits on a CPU, with {size}"


def engaged(knobs: Attention, run: Run) -> Evidence:
    """The kernels that ran in one step, by the operators' names."""
    wanted = knobs.kernel.value
    if knobs.kernel is Kernel.auto:
        wanted = next(str(c.value) for c in reversed(run.choices) if c.key == KEY)
    seen = probe.operators(run)
    ran = {name: n for name, start in OPERATORS.items() if (n := _count(seen, start))}
    products = sum(seen.get(name, 0) for name in PRODUCTS)
    apart = 0
    if not ran and wanted in UNFUSED:
        # compiled, math and plain are taken apart, and only their two products keep their names;
        # other layers have products, too, so no more of them count than there are calls
        apart = min(_step_calls(run), products // 2)
    facts: dict[str, Any] = {"kernel": wanted, "ran": ran or ({"bmm": products} if apart else {})}
    calls = int(run.remarks["attention"]["calls"])
    others = [name for name in ran if name != wanted and wanted != DEFAULT]
    if others:
        return Evidence(False, f"{' and '.join(others)} ran in its place", facts)
    return _share(sum(ran.values()) or apart, calls, facts)


def _step_calls(run: Run) -> int:
    """Attention calls of a training micro-batch, recomputed ones too; by an uncompiled step."""
    with torch.compiler.set_stance("force_eager"):
        step = partial(probe.dry_run_step, run, run.micro_batch)
        return len(kernels.calls_of(step, run.model))


def _share(ran: int, calls: int, facts: dict[str, Any]) -> Evidence:
    """Of the calls that the model made when it was built; recomputed ones run twice a step."""
    shown = Evidence.of_share(min(ran, calls), calls, "calls ran in an attention kernel", **facts)
    return shown if ran else replace(shown, reason="no attention kernel was seen")


def _count(seen: Mapping[str, int], start: str) -> int:
    """Calls of the operators that start so, forward only."""
    return sum(
        n for name, n in seen.items() if name.startswith(start) and not name.endswith("_backward")
    )
