"""What a debugger has counted: operations and faults, as a table and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from runner.record import markdown
from runner.record.history import Fault

MIB = 2**20


@dataclass
class Operation:
    """All calls of one name."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    failures: int = 0  # calls that raised
    not_finite: int = 0  # tensors with a NaN or an Inf in them
    memory: int = 0  # bytes that the process grew by, in all calls

    @property
    def mean(self) -> float:
        """Seconds a call."""
        return self.seconds / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class Summary:
    """What was called and what went wrong; `print` shows it as a table."""

    operations: list[Operation]  # those with faults first, then the longest
    faults: list[Fault] = field(default_factory=list)

    @property
    def worst(self) -> Operation | None:
        """The one to look at first: with the most faults, else the one that took longest."""
        return self.operations[0] if self.operations else None

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "operations": [asdict(o) | {"mean": o.mean} for o in self.operations],
            "faults": [asdict(fault) for fault in self.faults],
        }

    def markdown(self) -> str:
        """Two tables."""
        rows = [_cells(operation) for operation in self.operations]
        text = markdown.table(HEADER, rows)
        if self.faults:
            found = [(f.kind, f"{f.count:,}", f.message) for f in self.faults]
            text += "\n\n" + markdown.table(("fault", "times", "what"), found)
        return text + "\n"

    def __str__(self) -> str:
        rows = [HEADER, *(_cells(operation) for operation in self.operations)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines += [f"{f.kind} ({f.count:,}×): {f.message}" for f in self.faults]
        return "\n".join(lines)


HEADER = ("operation", "calls", "seconds", "mean, ms", "longest, ms", "failed", "not finite", "MiB")


def _cells(operation: Operation) -> tuple[str, ...]:
    return (
        operation.name, f"{operation.calls:,}", f"{operation.seconds:.3f}",
        f"{operation.mean * 1e3:.3f}", f"{operation.longest * 1e3:.3f}",
        f"{operation.failures:,}", f"{operation.not_finite:,}", f"{operation.memory / MIB:+.1f}",
    )  # fmt: skip
