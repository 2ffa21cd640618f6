"""Checks of the table that a run trains on, once before training, and their record."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runner.checks.config import TableConfig
from runner.data.dataset import KEY, Dataset
from runner.data.tensors import Tensors
from runner.record import markdown
from runner.record.storage import replace_text
from runner.record.text import json_safe
from runner.security.trust import Severity
from runner.techniques.base import Choice
from runner.training.hook import Hook
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.checks.table import TableFindings

log = logging.getLogger("runner")

FILE = "debug/table.json"


def check_data_table(data: Dataset, config: TableConfig) -> tuple[Dataset, list[TableReport]]:
    """The data without what `config` leaves out, and the hook that records it, if there is one.

    Data that are no table pass unchanged. Raises DataError where a finding stops the run.
    """
    if not config.enabled or not isinstance(data, Tensors) or not data.named_columns():
        report = TableReport(None, data.choices)
        return data, [report] if report.bad else []
    from runner.checks.table import CheckedTable, check_table  # only where there is a table

    classes = data.sizes.classes if data.sizes.task == "classification" else None
    table = CheckedTable(
        data.inputs.numpy(),
        data.target.numpy(),
        data.named_columns(),
        data.train,
        data.validation,
        data.rows,
        classes,
        data.ignore,
    )
    findings = check_table(table, config)
    if findings.drop_columns or len(findings.drop_rows):
        data = data.without(findings.drop_columns, findings.drop_rows, findings.choices)
    return data, [TableReport(findings, data.choices)]


class TableReport(Hook):
    """Records findings in the history, `debug/table.json` and TensorBoard."""

    def __init__(self, findings: TableFindings | None, choices: Sequence[Choice]) -> None:
        self.findings = findings
        self.bad = [choice for choice in choices if choice.key == KEY]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record the findings as the run begins; a resumed run has them already."""
        for choice in self.bad:
            # the count comes first: it is what must not be cut off
            self._tell(run, "bad_samples", f"{choice.value} as bad samples: {choice.reason}", "")
        if self.findings is not None:
            for reason, action in zip(self.findings.reasons, self.findings.actions, strict=True):
                note = reason.severity is Severity.NOTE
                kind = reason.code.replace(".", "_")
                self._tell(run, kind, f"table: {reason}", action, "info" if note else "warning")
            self._write(run, self.findings)
        yield

    def _tell(
        self, run: Run, kind: str, message: str, action: str, severity: str = "warning"
    ) -> None:
        if any(f.kind == kind and f.message == message for f in run.history.faults.values()):
            return
        run.history.add(
            kind, message, step=run.progress.step, category="data", severity=severity, action=action
        )

    def _write(self, run: Run, findings: TableFindings) -> None:
        if findings.reasons:
            rows = [
                (reason.code, reason.where, reason.evidence, action or reason.way_out)
                for reason, action in zip(findings.reasons, findings.actions, strict=True)
            ]
            text = markdown.table(("finding", "where", "what", "what to do, or was done"), rows)
            run.recorder.text("data/table", text, run.progress.step)
        if run.folder is None:
            return
        path = run.folder / FILE
        try:
            path.parent.mkdir(exist_ok=True)
            content = json.dumps(json_safe(findings.facts), indent=2, allow_nan=False)
            replace_text(path, content + "\n")
        except OSError as error:
            log.warning("no %s: %s", FILE, error)
