"""Checks of a run's table before training, and their record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.findings import Choice, Severity
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.record.storage import write_or_log
from runner.core.record.text import json_safe
from runner.core.schemas.checks import TableConfig

if TYPE_CHECKING:
    from runner.datasets.table_checks import TableFindings

TABLE_FILE = "debug/table.json"
NO_ROWS = np.zeros(0, np.int64)


def check_data_table(
    data: Dataset, config: TableConfig, splits: dict[str, Dataset] | None = None
) -> tuple[Dataset, list[Hook]]:
    """Check a table; return it without dropped columns and rows, and hooks that record findings.

    A separate validation set in `splits` is included; columns are dropped from each in place.
    Other data is returned unchanged. Raises DataError if a finding stops the run.
    """
    splits = splits or {}
    if not config.enabled or not isinstance(data, TensorsDataset) or not data.named_columns():
        report = TableReport(None, data.choices)
        return data, [report] if report.bad_sample_choices else []
    from runner.datasets.table_checks import CheckedTable, check_table  # imported only if used

    inputs, target = data.inputs.numpy(), data.target.numpy()
    table, validation_data = data, splits.get("validation")
    validation, row_count = table.validation, len(inputs)

    def name_row(index: int) -> str:
        if index < row_count or not isinstance(validation_data, TensorsDataset):
            return table.rows(index)
        return f"{validation_data.rows(index - row_count)} of data.validation_path"

    if isinstance(validation_data, TensorsDataset):
        inputs = np.concatenate([inputs, validation_data.inputs.numpy()])
        target = np.concatenate([target, validation_data.target.numpy()])
        validation = np.arange(row_count, len(inputs))
    classes = table.sizes.classes if table.sizes.task == "classification" else None
    indices = table.train, validation
    checked_table = CheckedTable(
        inputs, target, table.named_columns(), *indices, name_row, classes, table.ignore
    )
    findings = check_table(checked_table, config)
    if findings.drop_columns or len(findings.drop_rows):
        for name, split in splits.items():
            if isinstance(split, TensorsDataset):
                rows = findings.drop_rows - row_count if name == "validation" else NO_ROWS
                splits[name] = split.without(findings.drop_columns, rows, ())
        table = table.without(findings.drop_columns, findings.drop_rows, findings.choices)
    return table, [TableReport(findings, table.choices)]


class TableReport(Hook):
    """Records findings in the history and `debug/table.json`."""

    def __init__(self, findings: TableFindings | None, choices: Sequence[Choice]) -> None:
        self.findings = findings
        self.bad_sample_choices = [choice for choice in choices if choice.key == "data.bad_samples"]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record the findings at the start, except those that a resumed run has already."""
        for choice in self.bad_sample_choices:
            # the count comes first, so that it is not cut off
            message = f"{choice.value} as bad samples: {choice.reason}"
            count = int(str(choice.value).partition(" ")[0].replace(",", ""))
            self._record(run, "bad_samples", message, count=count)
        if self.findings is not None:
            for reason, action in zip(self.findings.reasons, self.findings.actions, strict=True):
                severity = "info" if reason.severity is Severity.NOTE else "warning"
                kind = reason.code.replace(".", "_")
                self._record(run, kind, f"table: {reason}", severity, action=action)
            if run.folder is not None:
                path = run.folder / TABLE_FILE
                content = json.dumps(json_safe(self.findings.facts), indent=2, allow_nan=False)
                write_or_log(path, content + "\n")
        yield

    def _record(
        self, run: Run, kind: str, message: str, severity: str = "warning", **details: Any
    ) -> None:
        if any(f.kind == kind and f.message == message for f in run.history.faults.values()):
            return
        step = run.progress.step
        run.history.add(kind, message, step=step, category="data", severity=severity, **details)
