"""The table that a run trains on: looked at once, before training, and told of in its record."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runner.checks.config import TableConfig
from runner.checks.table import Looked, Table, check_table
from runner.data.bad import KEY
from runner.data.source import Source
from runner.data.tensors import Tensors
from runner.hook import Hook
from runner.record import markdown
from runner.record.text import json_safe
from runner.run import Run
from runner.security.trust import Severity
from runner.storage import replace_text
from runner.technique import Choice

log = logging.getLogger("runner")

FILE = "debug/table.json"


def look_at(data: Source, config: TableConfig) -> tuple[Source, list[TableReport]]:
    """The data without what `config` wants left out, and the hook that tells of it, if any.

    What is no table passes as it is. Raises DataError where a finding is to stop the run.
    """
    if not config.enabled or not isinstance(data, Tensors) or not data.named_columns():
        report = TableReport(None, data.choices)
        return data, [report] if report.bad else []
    classes = data.sizes.classes if data.sizes.task == "classification" else None
    table = Table(
        data.inputs.numpy(), data.target.numpy(), data.named_columns(), data.train,
        data.validation, data.rows, classes, data.ignore,
    )  # fmt: skip
    looked = check_table(table, config)
    if looked.drop or len(looked.leave_out):
        data = data.without(looked.drop, looked.leave_out, looked.choices)
    return data, [TableReport(looked, data.choices)]


class TableReport(Hook):
    """Puts what was found into the history, `debug/table.json` and TensorBoard."""

    def __init__(self, looked: Looked | None, choices: Sequence[Choice]) -> None:
        self.looked = looked
        self.bad = [choice for choice in choices if choice.key == KEY]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Tell of it when the run begins; one that goes on has told already."""
        for choice in self.bad:
            # the count comes first: it is what must not be cut off
            self._tell(run, "bad_samples", f"{choice.value} as bad samples: {choice.reason}", "")
        if self.looked is not None:
            for reason, action in zip(self.looked.reasons, self.looked.actions, strict=True):
                note = reason.severity is Severity.NOTE
                kind = reason.code.replace(".", "_")
                self._tell(run, kind, f"table: {reason}", action, "info" if note else "warning")
            self._write(run, self.looked)
        yield

    def _tell(
        self, run: Run, kind: str, message: str, action: str, severity: str = "warning"
    ) -> None:
        if any(f.kind == kind and f.message == message for f in run.history.faults.values()):
            return
        run.history.add(
            kind, message, step=run.progress.step, category="data", severity=severity, action=action
        )

    def _write(self, run: Run, looked: Looked) -> None:
        if looked.reasons:
            rows = [
                (reason.code, reason.where, reason.evidence, action or reason.way_out)
                for reason, action in zip(looked.reasons, looked.actions, strict=True)
            ]
            text = markdown.table(("finding", "where", "what", "what to do, or was done"), rows)
            run.recorder.text("data/table", text, run.progress.step)
        if run.folder is None:
            return
        path = run.folder / FILE
        try:
            path.parent.mkdir(exist_ok=True)
            content = json.dumps(json_safe(looked.facts), indent=2, allow_nan=False)
            replace_text(path, content + "\n")
        except OSError as error:
            log.warning("no %s: %s", FILE, error)
