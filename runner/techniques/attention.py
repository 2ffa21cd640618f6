"""Which kernel computes attention, for any model that calls scaled_dot_product_attention.

A kernel asked for by name is never replaced by another: what it cannot take is an error. `auto`
times a forward and a backward of the model's own calls, takes about a second, and leaves torch's
choice alone where nothing is clearly faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.device.device import Device
from runner.techniques import kernels, probe
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Attention, Kernel
from runner.techniques.kernels import Call
from runner.training.run import Run

KEY = "optimization.attention.kernel"
MARGIN = 0.05  # a kernel less than this much faster is not worth a choice that may not repeat
SAMPLES = 8  # that the calls are looked at, and timed, with

OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}
PRODUCTS = ("aten::bmm", "aten::baddbmm")


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
    with probe.untouched(draft):
        draft.model.train()
        try:
            calls = kernels.calls_of(lambda: probe.forward(draft, inputs))
        except Exception as error:  # such as a model that knows its batch size
            return f"the model does not take {samples} samples ({type(error).__name__})"
        if not calls:
            return "the model does not call scaled_dot_product_attention"
        draft.remarks["attention"] = {"calls": sum(call.times for call in calls)}
        name, strictly = knobs.kernel.value, knobs.kernel is not Kernel.auto
        with probe.entered(draft.contexts):
            if strictly and (reason := kernels.refusal(name, calls, draft.model)) is not None:
                return reason
            if not strictly:
                matrix_mb = sum(call.matrix_bytes() for call in calls) / 2**20
                matrix_mb *= draft.micro_batch / samples
                name = draft.choose(KEY, lambda: _choose(knobs, draft, calls, matrix_mb))
    if name != kernels.DEFAULT:
        draft.scope.enter_context(kernels.use(name, draft.model, strictly))
    return None


def _choose(
    knobs: Attention, draft: RunBuilder, calls: list[Call], matrix_mb: float
) -> tuple[str, str]:
    too_large = matrix_mb > knobs.matrix_mb
    note = f"; matrices of {matrix_mb:,.0f} MB rule out math and plain" if too_large else ""
    others = [
        kernel.value
        for kernel in Kernel
        if kernel is not Kernel.auto
        and not (too_large and kernel.value in kernels.HOLDING_MATRICES)
        and unavailable(Attention(True, kernel), draft.device) is None
        and kernels.refusal(kernel.value, calls, draft.model) is None
    ]
    if not others:
        return kernels.DEFAULT, f"torch's choice, and the only one here{note}"
    seconds = kernels.race([kernels.DEFAULT, *others], calls, draft.model, draft.device.synchronize)
    ratios = {name: seconds[name] / seconds[kernels.DEFAULT] for name in others}
    best = min(others, key=lambda name: ratios[name])
    times = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    dtype = str(calls[0].query.dtype).removeprefix("torch.")
    shape = "x".join(map(str, calls[0].query.shape))
    reason = f"time of {times} against torch's choice at {shape} ({dtype}){note}"
    return (best if ratios[best] < 1 - MARGIN else kernels.DEFAULT), reason


def engaged(knobs: Attention, run: Run) -> Evidence:
    """The kernels that ran in one step, by the operators' names."""
    wanted = knobs.kernel.value
    if knobs.kernel is Kernel.auto:
        wanted = next(str(c.value) for c in reversed(run.choices) if c.key == KEY)
    seen = probe.operators(run)
    ran = {name: n for name, start in OPERATORS.items() if (n := _count(seen, start))}
    products = sum(seen.get(name, 0) for name in PRODUCTS)
    facts: dict[str, Any] = {"kernel": wanted, "ran": ran or {"bmm": products}}
    calls = int(run.remarks["attention"]["calls"])
    if wanted == kernels.DEFAULT:
        return _share(sum(ran.values()), calls, facts)
    others = [name for name in ran if name != wanted]
    if others:
        return Evidence(False, f"{' and '.join(others)} ran in its place", facts)
    # compiled, math and plain are taken apart, and only their two products keep their names
    apart = products // 2 if wanted in ("math", "plain") else 0
    return _share(ran.get(wanted, apart), calls, facts)


def _share(ran: int, calls: int, facts: dict[str, Any]) -> Evidence:
    """Of the calls that the model made when it was built; recomputed ones run twice a step."""
    shown = Evidence.of_share(min(ran, calls), calls, "calls ran in an attention kernel", **facts)
    return shown if ran else replace(shown, reason="no attention kernel was seen")


def _count(seen: Mapping[str, int], start: str) -> int:
    """Calls of the operators that start so, forward only."""
    return sum(
        n for name, n in seen.items() if name.startswith(start) and not name.endswith("_backward")
    )
