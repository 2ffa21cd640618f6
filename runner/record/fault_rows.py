"""The faults of a run in words: for the end of a run, its report and TensorBoard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten

from runner.record import markdown
from runner.record.history import Fault

STEPS = 4  # of a fault, that are named
LONGEST = 90  # letters of what it was
DONE = 3  # different things that were done about a kind


def by_kind(counts: Mapping[str, int], faults: Sequence[Fault]) -> list[tuple[str, str]]:
    """How often each kind was, its first steps, what it was and what was done.

    Those of the recorder and the checkpointer are only in `counts`.
    """
    rows = []
    for kind, count in counts.items():
        these = sorted((f for f in faults if f.kind == kind), key=lambda f: -f.count)
        if these:
            steps = named(sorted({step for fault in these for step in fault.steps}), count)
            done: Counter[str] = Counter()
            for fault in these:
                done[fault.action] += fault.count if fault.action else 0
            many = len(+done) > 1
            acts = [f"{act} ({times:,})" if many else act for act, times in (+done).items()]
            told = "; ".join([shorten(these[0].message, LONGEST, placeholder=" …"), *acts[:DONE]])
            rows.append((kind, f"{count:,}, {steps}: {told}"))
        elif count:
            rows.append((kind, f"{count:,}"))
    return rows


def table(faults: Iterable[Fault]) -> str:
    """All of them, as markdown."""
    header = ("kind", "severity", "count", "steps", "what", "done about it", "capture")
    return markdown.table(header, (
        (f.kind, f.severity, f.count, named(f.steps, f.count), f.message, f.action, f.capture)
        for f in faults
    ))  # fmt: skip


def named(steps: Sequence[int], count: int) -> str:
    """The first few of `count` steps."""
    shown = ", ".join(f"{step:,}" for step in steps[:STEPS]) + ", …" * (count > STEPS)
    return f"steps {shown}" if len(steps) > 1 else f"step {shown}"


def first_capture(faults: Iterable[Fault]) -> str:
    """The folder of the first bad step that was kept, relative to the run's; else nothing."""
    kept = [fault for fault in faults if fault.capture]
    return min(kept, key=lambda fault: fault.steps[:1]).capture if kept else ""
