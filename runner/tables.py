"""Checks of the table that a run trains on, once before training, and their record."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.checks.config import TableConfig
from runner.data.batch import RowNames
from runner.data.dataset import Dataset, Tensors
from runner.findings import Severity
from runner.record.storage import replace_text
from runner.record.text import json_safe
from runner.techniques.base import Choice
from runner.training.hook import Hook
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.checks.table import TableFindings

log = logging.getLogger("runner")

FILE = "debug/table.json"
NO_ROWS = np.zeros(0, np.int64)


def check_data_table(
    data: Dataset, config: TableConfig, parts: dict[str, Dataset] | None = None
) -> tuple[Dataset, list[Hook]]:
    """The data without what `config` leaves out, and the hook that records it, if there is one.

    Validation rows that lie apart, in `parts`, are checked with them; columns are left out of all
    parts in place. Data that are no table pass unchanged. Raises DataError where a finding stops
    the run.
    """
    parts = parts or {}
    if not config.enabled or not isinstance(data, Tensors) or not data.named_columns():
        report = TableReport(None, data.choices)
        return data, [report] if report.bad else []
    from runner.checks.table import CheckedTable, check_table  # only where there is a table

    classes = data.sizes.classes if data.sizes.task == "classification" else None
    whole = _with_validation(data, parts.get("validation"))
    table = CheckedTable(
        whole.inputs.numpy(),
        whole.target.numpy(),
        data.named_columns(),
        whole.train,
        whole.validation,
        whole.rows,
        classes,
        data.ignore,
    )
    findings = check_table(table, config)
    if findings.drop_columns or len(findings.drop_rows):
        for name, part in parts.items():
            if isinstance(part, Tensors):
                rows = findings.drop_rows - len(data.inputs) if name == "validation" else NO_ROWS
                parts[name] = part.without(findings.drop_columns, rows, ())
        data = data.without(findings.drop_columns, findings.drop_rows, findings.choices)
    return data, [TableReport(findings, data.choices)]


def _with_validation(data: Tensors, part: Dataset | None) -> Tensors:
    """The table, followed by validation rows that lie apart."""
    if not isinstance(part, Tensors):
        return data
    first = len(data.inputs)
    inputs = torch.cat([data.inputs, part.inputs])
    indices = data.train, first + np.arange(len(part.inputs))
    rows = RowNames(names=_JoinedNames(data.rows, part.rows, (first, len(inputs))))
    return Tensors(inputs, torch.cat([data.target, part.target]), data.sizes, indices, rows=rows)


@dataclass(frozen=True)
class _JoinedNames(Sequence[str]):
    train: RowNames
    validation: RowNames
    ends: tuple[int, int]  # of the rows of each

    def __len__(self) -> int:
        return self.ends[1]

    def __getitem__(self, index: Any) -> Any:
        if index < self.ends[0]:
            return self.train(index)
        return f"{self.validation(index - self.ends[0])} of data.validation_path"


class TableReport(Hook):
    """Records findings in the history and `debug/table.json`."""

    def __init__(self, findings: TableFindings | None, choices: Sequence[Choice]) -> None:
        self.findings = findings
        self.bad = [choice for choice in choices if choice.key == "data.bad_samples"]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record the findings as the run begins; a resumed run has them already."""
        for choice in self.bad:
            # the count comes first: it is what must not be cut off
            message = f"{choice.value} as bad samples: {choice.reason}"
            count = int(str(choice.value).partition(" ")[0].replace(",", ""))
            self._record(run, "bad_samples", message, count=count)
        if self.findings is not None:
            for reason, action in zip(self.findings.reasons, self.findings.actions, strict=True):
                severity = "info" if reason.severity is Severity.NOTE else "warning"
                kind = reason.code.replace(".", "_")
                self._record(run, kind, f"table: {reason}", severity, action=action)
            if run.folder is not None:
                _write(run.folder / FILE, self.findings)
        yield

    def _record(
        self, run: Run, kind: str, message: str, severity: str = "warning", **how: Any
    ) -> None:
        if any(f.kind == kind and f.message == message for f in run.history.faults.values()):
            return
        step = run.progress.step
        run.history.add(kind, message, step=step, category="data", severity=severity, **how)


def _write(path: Path, findings: TableFindings) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        content = json.dumps(json_safe(findings.facts), indent=2, allow_nan=False)
        replace_text(path, content + "\n")
    except OSError as error:
        log.warning("no %s: %s", FILE, error)
