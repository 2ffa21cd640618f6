"""A profile as tables, for TensorBoard's Text tab and debug/profile.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runner.debug.profile.kinds import shown
from runner.debug.profile.sections import Total, Totals
from runner.debug.profile.trace import Reading
from runner.record import markdown

SHOWN = 15  # rows of a table
LITTLE = 0.002  # of the operators' time, below which one is not shown
MIB = 2**20


def operators(reading: Reading, most: int = SHOWN) -> str:
    """The operators that take the most, without those that they call."""
    whole, steps = reading.operator_seconds or 1.0, max(1, reading.steps)
    rows: list[list[str]] = []
    for operator in reading.operators[:most]:
        if rows and reading.spent(operator) < LITTLE * whole:
            break
        row = [shown(operator.name)]
        if any(o.shapes for o in reading.operators):
            row.append(operator.shapes)
        spent = reading.spent(operator)
        row += [f"{operator.calls / steps:,.4g}", _ms(spent / steps), f"{spent / whole:.1%}"]
        row.append(f"{spent / operator.calls * 1e6:,.1f}" if operator.calls else "")
        if reading.on_device:
            row.append(_ms(operator.seconds / steps))
        if any(o.allocated for o in reading.operators):
            row.append(f"{operator.allocated / steps / MIB:,.2f}")
        rows.append(row)
    header = ["operator"]
    header += ["inputs"] if any(o.shapes for o in reading.operators) else []
    header += ["calls a step", "ms a step", "share", "µs a call"]
    header += ["host ms a step"] if reading.on_device else []
    header += ["MiB a step"] if any(o.allocated for o in reading.operators) else []
    told = f"{reading.calls / steps:,.0f} operators a step, {_ms(whole / steps)} ms in them"
    return f"{markdown.table(header, rows)}\n\n{told}; each without those that it calls.\n"


def modules(reading: Reading, most: int = SHOWN) -> str:
    """The modules in which the operators take the most, each without those inside it."""
    whole, steps = reading.operator_seconds or 1.0, max(1, reading.steps)
    rows = [
        (
            module.name, f"{module.calls / steps:,.4g}" if module.calls else "",
            f"{module.operators / steps:,.4g}",
            _ms(module.forward / steps), _ms(module.backward / steps),
            f"{module.seconds / whole:.1%}",
        )
        for module in reading.modules[:most]
        if module.seconds
    ]  # fmt: skip
    header = ("module", "calls a step", "operators", "forward, ms", "backward, ms", "share")
    where = "kernels" if reading.on_device else "operators"
    return (
        f"{markdown.table(header, rows)}\n\nTime in {where}, a step; outside the modules are the "
        "loss, the update and the rest.\n"
    )


def sections(totals: Totals, seconds: float) -> str:
    """The user's own sections; `seconds` is how long they were collected."""
    rows = [
        (t.name, t.category, f"{t.calls:,}", f"{t.seconds:.3f}", _ms(t.mean),
         f"{t.seconds / seconds:.1%}")
        for t in totals.by_time()
    ]  # fmt: skip
    table = markdown.table(("section", "category", "calls", "s", "ms a call", "of the run"), rows)
    sums = [
        (name or "(none)", f"{x:.3f}", f"{x / seconds:.1%}")
        for name, x in totals.by_category().items()
    ]
    by = markdown.table(("category", "s", "of the run"), sums)
    return f"{table}\n\n{by}\n\nOf this process; sections in data workers are not seen.\n"


def window(reading: Reading) -> list[tuple[str, str]]:
    """Facts of a window, by name."""
    steps = max(1, reading.steps)
    rows = [("step, profiled", f"{_ms(reading.seconds / steps)} ms")]
    rows.append(("operators a step", f"{reading.calls / steps:,.0f}"))
    rows += [(f"in {what}", f"{x:.0%} of the operators' time")
             for what, x in reading.kinds.items() if x >= 0.005]  # fmt: skip
    if reading.busy is not None:
        rows.append(("device busy", f"{reading.busy:.0%}"))
    if reading.tensor_cores is not None:
        rows.append(
            ("tensor cores", f"{reading.tensor_cores:.0%} of the kernels' time, by their names")
        )
    for way, copies in sorted(reading.copies.items()):
        told = f"{copies.count / steps:,.4g} a step, {_ms(copies.seconds / steps)} ms"
        if copies.bytes:
            told += f", {copies.bytes / steps / MIB:,.3g} MiB"
            told += f" at {copies.bytes / copies.seconds / 1e9:,.3g} GB/s" if copies.seconds else ""
        rows.append((f"copies {way}", told))
    return rows


def as_rows(reading: Reading, most: int = 50) -> dict[str, Any]:
    """A window in plain values, for debug/profile.json; seconds are those of all its steps."""
    return {
        "steps": reading.steps,
        "seconds": reading.seconds,
        "operator_calls": reading.calls,
        "operator_seconds": reading.operator_seconds,
        "products": reading.products,
        "kinds": reading.kinds,
        "calling": reading.calling,
        "device_busy": reading.busy,
        "tensor_cores": reading.tensor_cores,
        "copies": {way: vars(copies) for way, copies in reading.copies.items()},
        "operators": [vars(operator) for operator in reading.operators[:most]],
        "modules": [vars(module) for module in reading.modules[:most]],
    }


def section_rows(totals: Iterable[Total]) -> list[dict[str, Any]]:
    """Sections in plain values."""
    return [vars(total) | {"mean": total.mean} for total in totals]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}"
