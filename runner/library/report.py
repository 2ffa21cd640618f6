"""A model's profile for a terminal; made for 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from runner.record.console import plain_text

if TYPE_CHECKING:
    from runner.library.profile import Profile


def show(profile: Profile) -> RenderableType:
    """Time, operations and memory, then the operators that take the time."""
    ms, memory, parameters = profile.latency_ms, profile.memory, profile.parameters
    what = "forward and backward" if profile.backward else "forward"
    rows = [
        ("latency", f"p50 {ms.p50:.3f}  p90 {ms.p90:.3f}  p95 {ms.p95:.3f}  p99 {ms.p99:.3f} ms"),
        ("throughput", f"{profile.samples_per_second:,.0f} samples/s"),
        ("operations", f"{count(profile.flops)}FLOP, {count(profile.flops_per_second)}FLOP/s"),
        ("parameters", f"{parameters.all:,} ({parameters.trainable:,} trainable), "
                       f"{size(parameters.bytes)}"),
        ("memory", f"{size(memory.peak)} at most, {size(memory.activations)} kept for backward"),
    ]  # fmt: skip
    if profile.peak is not None and profile.mfu is not None:
        of = f"{count(profile.peak.flops_per_second)}FLOP/s in {profile.peak.dtype}"
        rows.append(("MFU", f"{profile.mfu:.1%} of {of} ({profile.peak.source})"))
    rows += [("note", note) for note in profile.notes]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in rows:
        facts.add_row(name, plain_text(value))
    operators = Table(box=None, padding=(0, 2), pad_edge=False)
    operators.add_column("operator", overflow="fold")
    for heading in ("calls", "ms", "share"):
        operators.add_column(heading, justify="right")
    for row in profile.operators:
        operators.add_row(plain_text(row.name), str(row.calls), f"{row.ms:.3f}", f"{row.share:.0%}")
    title = f"{profile.model}: {what} of {profile.samples} samples in {profile.dtype}, "
    title += f"{profile.runs} runs on {profile.device}"
    return Group(
        plain_text(title, "bold"), Padding(facts, (0, 0, 1, 2)), Padding(operators, (0, 0, 0, 2))
    )


def size(value: float) -> str:
    """Bytes with their prefix, such as `9.7 KiB`."""
    prefixes = iter(("Ki", "Mi", "Gi", "Ti"))
    prefix = ""
    while value >= 1024:
        value, prefix = value / 1024, next(prefixes)
    return f"{value:.4g} {prefix}B"


def count(value: float) -> str:
    """A number of operations with its prefix, such as `1.3 G`."""
    prefixes = iter("kMGTP")
    prefix = ""
    while abs(value) >= 1000:
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}"
