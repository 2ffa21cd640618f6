"""Checks of a table before training: constant columns, label leaks, rows shared with validation.

Inputs are checked as the model gets them, in float32, over training rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.order import splitmix
from runner.core.errors import DataError
from runner.core.findings import Choice, Reason, Severity
from runner.core.interfaces.batch import Column, RowNames
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.record.column_overrides import list_override
from runner.core.record.storage import write_or_log
from runner.core.record.text import json_safe, shorten
from runner.core.schemas.checks import CheckPolicy, TableConfig

TABLE_FILE = "debug/table.json"
MIN_ROWS = 20  # fewer rows may have a constant column by chance
MIN_JUDGED = 100  # fewer rows may have a column that predicts the label by chance
MIN_ERRORS = 20  # fewer rows outside the most common class, likewise
LEAK_SKILL = {True: 0.98, False: 0.99}  # least skill of a leak, for classes and for quantities
MAX_CELLS = 5_000_000  # values times classes of a column that is judged by value
EXACT_SKILL = 0.9999  # skill of a quantity that follows a column without noise
TIME_NAME = re.compile(
    r"(?i)(^|[^a-z])(time|date|day|week|month|quarter|year|hour|minute|timestamp|epoch)s?([^a-z]|$)"
)
REPEATED_SHARE = 0.5  # rows whose value occurs again, from which a column is judged by value, too
SAMPLE_CELLS, SAMPLE_ROWS, MAX_COLUMNS = 1_500_000, 50_000, 2_048  # take 0.1 s
MAX_SHOWN = 5
MAX_CELL_CHARS = 80  # of a cell in a finding
PERFECT = "alone predicts the target in every row: it may contain the target"


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
        no_rows = np.zeros(0, np.int64)
        for name, split in splits.items():
            if isinstance(split, TensorsDataset):
                rows = findings.drop_rows - row_count if name == "validation" else no_rows
                splits[name] = split.without(findings.drop_columns, rows, ())
        table = table.without(findings.drop_columns, findings.drop_rows, findings.choices)
    return table, [TableReport(findings, table.choices)]


@dataclass(frozen=True)
class CheckedTable:
    """A table as the model gets it."""

    inputs: NDArray[np.float32]  # [rows, features]
    target: NDArray[Any]  # [rows] labels, or quantities [rows] or [rows, targets]
    columns: tuple[Column, ...]
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    row_name: Callable[[int], str] = RowNames()  # index -> name in messages
    classes: int | None = None  # None: quantities
    ignore: str = ""  # the key that leaves a column out, where there is one

    def values(self, rows: Any = slice(None)) -> Iterator[NDArray[np.float32]]:
        """Yield each column, float32 [rows]: values, or indices of categories (-1: none)."""
        end = 0
        for column in self.columns:
            block, end = self.inputs[rows, end : end + column.width], end + column.width
            codes = np.where(block.any(1), block.argmax(1), -1) if column.width > 1 else block[:, 0]
            yield np.ascontiguousarray(codes, np.float32)


@dataclass
class TableFindings:
    """The findings about a table, and the columns and rows to drop."""

    reasons: list[Reason] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)  # per reason; empty: none was taken
    drop_columns: list[int] = field(default_factory=list)
    drop_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    choices: list[Choice] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for debug/table.json

    def add(self, reason: Reason, action: str, choice: str) -> None:
        """Record a finding, and its `choice` if there is an action."""
        self.reasons.append(reason)
        self.actions.append(action)
        if action:
            self.choices.append(Choice(f"checks.{reason.code}", choice, reason.evidence))

    def add_column(self, kind: str, table: CheckedTable, index: int, text: str, drop: bool) -> None:
        """Record a finding about a column."""
        name, title = table.columns[index].name, table.columns[index].title
        severity = Severity.NOTE if kind == "constant" else Severity.WARNING
        key = f"{list_override(table.ignore, [name])} or " if table.ignore else ""
        condition = "if it is unknown at prediction time, " if kind == "leak" else ""
        way_out = "" if drop else f"{condition}leave it out with {key}checks.table.{kind}=drop"
        reason = Reason(f"table.{kind}", severity, f"column {title!r}", text, way_out)
        self.add(reason, "left out of the inputs" if drop else "", f"without {title}")
        self.drop_columns += [index] if drop else []


def check_table(table: CheckedTable, config: TableConfig) -> TableFindings:
    """Return the findings of one pass over columns and rows.

    Raises DataError for findings under the policy `stop`, and if dropping would leave no columns or
    no validation rows.
    """
    findings, sample = TableFindings(), _sample_rows(table)
    skills: list[float | None] = []
    if config.leak is not CheckPolicy.off:
        skills = _label_skills(table, sample)
    if config.constant is not CheckPolicy.off and len(table.train) >= MIN_ROWS:
        for number, values in enumerate(table.values(table.train)):
            if (values == values[0]).all():
                value = shorten(_format_value(table.columns[number], values[0]), MAX_CELL_CHARS)
                text = f"is {value} in all {len(values):,} training rows"
                drop = config.constant is CheckPolicy.drop
                findings.add_column("constant", table, number, text, drop)
    for number, text in _find_leaks(table, skills):
        findings.add_column("leak", table, number, text, config.leak is CheckPolicy.drop)
    if findings.drop_columns and len(findings.drop_columns) == len(table.columns):
        names = "; ".join(map(str, findings.reasons[:MAX_SHOWN]))
        raise DataError(f"checks.table: no input columns would be left: {names}")
    if config.shared is not CheckPolicy.off:
        _check_shared(findings, table, config.shared)
    findings.facts = {
        "rows": len(table.inputs),
        "rows_judged": len(sample),
        "columns": [
            {"name": column.title, "skill": skill}
            for column, skill in zip(table.columns, skills, strict=False)
        ],
        "findings": [
            {**asdict(reason), "severity": reason.severity.word, "action": action}
            for reason, action in zip(findings.reasons, findings.actions, strict=True)
        ],
    }
    _raise_stopped(findings, config)
    return findings


def _raise_stopped(findings: TableFindings, config: TableConfig) -> None:
    kinds = [k for k in ("constant", "leak", "shared") if getattr(config, k) is CheckPolicy.stop]
    reasons = [reason for reason in findings.reasons if reason.code.partition(".")[2] in kinds]
    if reasons:
        shown = "; ".join(map(str, reasons[:MAX_SHOWN])) + "; …" * (len(reasons) > MAX_SHOWN)
        keys = " ".join(dict.fromkeys(f"checks.{reason.code}=warn" for reason in reasons))
        raise DataError(f"{shown}; to continue anyway: {keys}")


def _format_value(column: Column, value: np.float32) -> str:
    if column.values:
        return repr(dict(enumerate(column.values)).get(int(value), "a category not in training"))
    return f"{value * column.deviation + column.mean:.6g}"


def _sample_rows(table: CheckedTable) -> NDArray[np.int64]:
    """Return evenly spaced training rows, few enough for bounded time; the same after a resume."""
    max_rows = min(SAMPLE_ROWS, max(1_000, SAMPLE_CELLS // max(1, table.inputs.shape[1])))
    if len(table.train) <= max_rows:
        return table.train
    return table.train[np.linspace(0, len(table.train) - 1, max_rows).astype(np.int64)]


def _find_leaks(table: CheckedTable, skills: list[float | None]) -> Iterator[tuple[int, str]]:
    """Yield the number of each column that leaks the label, and the evidence."""
    limit = LEAK_SKILL[table.classes is not None]
    best, name = max(
        ((s, c.title) for s, c in zip(skills, table.columns, strict=False) if s and s < limit),
        default=(0.0, ""),
    )
    text = "alone explains {:.2%} of the target's order"
    if table.classes is not None:
        text = "alone avoids {:.2%} of the errors of always predicting the most frequent class"
    for number, skill in enumerate(skills):
        if skill is not None and skill >= limit:
            # rounded down to 0.01 %, so that less than all is never shown as 100 %
            evidence, other = text.format(math.floor(skill * 1e4) / 1e4), f"{best:.1%}"
            if table.classes is not None and skill == 1:
                evidence, other = PERFECT, f"avoids {other} of the errors"
            yield number, evidence + (f"; the next best column, {name!r}, {other}" if name else "")


def _label_skills(table: CheckedTable, sample: NDArray[np.int64]) -> list[float | None]:
    """Return the skill of each column alone (share of errors or variance); None: not judged."""
    target = np.asarray(table.target[sample])
    skills: list[float | None] = []
    for column, values in zip(table.columns[:MAX_COLUMNS], table.values(sample), strict=False):
        skill = None
        if len(sample) >= MIN_JUDGED and (values != values[0]).any():
            if table.classes is not None:
                skill = _class_skill(values, target)
            else:
                skill = _quantity_skill(values, target)
                is_time = column.part not in ("", "missing") or TIME_NAME.search(column.name)
                skill = None if is_time and skill < EXACT_SKILL else skill  # a trend is no leak
        skills.append(skill)
    return skills


def _class_skill(values: NDArray[Any], target: NDArray[Any]) -> float | None:
    _, labels, counts = np.unique(target, return_inverse=True, return_counts=True)
    classes, base_errors = len(counts), len(labels) - int(counts.max())  # errors without any column
    if base_errors < MIN_ERRORS or 2 * classes > len(labels):  # each column tells rows apart
        return None
    _, codes = np.unique(values, return_inverse=True)
    # sorted by a perfect column, labels change `classes - 1` times
    order = np.lexsort((splitmix(np.arange(len(codes))), codes))  # ties in random order
    errors = (int((np.diff(labels[order]) != 0).sum()) - classes + 1) / 2
    skill = 1 - max(0.0, errors) / base_errors
    return max(0.0, skill, _repeated_skill(codes, labels))


def _repeated_skill(codes: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the skill of predicting each row's class by the other rows of the same value.

    Rows whose value occurs once are left out; 0 if too few are left.
    """
    rows = np.bincount(codes)[codes] > 1
    (_, codes), labels = np.unique(codes[rows], return_inverse=True), labels[rows]
    if len(labels) < max(MIN_JUDGED, REPEATED_SHARE * len(rows)):
        return 0.0
    values, classes = int(codes.max()) + 1, max(2, int(labels.max()) + 1)
    base_errors = len(labels) - int(np.bincount(labels).max())
    if base_errors < MIN_ERRORS or values * classes > MAX_CELLS:
        return 0.0
    counts = np.bincount(codes * classes + labels, minlength=values * classes)
    counts = counts.reshape(values, classes)
    second, first = np.partition(counts, classes - 2, axis=1)[:, -2:].T
    own = counts[codes, labels]
    rival = np.where(own == first[codes], second[codes], first[codes])  # of another class
    right = (own - 1 > rival).sum() + (own - 1 == rival).sum() / 2
    return 1 - (len(labels) - float(right)) / base_errors


def _quantity_skill(values: NDArray[Any], target: NDArray[Any]) -> float:
    """Return the share of the target ranks' variance explained by the order of the column."""
    order = np.lexsort((splitmix(np.arange(len(values))), values))
    skill = 0.0
    for quantity in np.asarray(target, np.float64).reshape(len(target), -1).T[:4]:
        _, inverse, counts = np.unique(quantity, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - counts / 2)[inverse]
        steps = np.diff(ranks[order])
        skill = max(skill, 1 - float((steps * steps).mean()) / max(1e-9, 2 * float(ranks.var())))
        skill = max(skill, _repeated_variance(values, ranks))
    return skill


def _repeated_variance(values: NDArray[Any], ranks: NDArray[Any]) -> float:
    """Return the share of variance explained by the mean of the other rows of the same value.

    Rows whose value occurs once are left out; 0 if too few are left.
    """
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    size = counts[codes]
    rows = size > 1
    if rows.sum() < max(MIN_JUDGED, REPEATED_SHARE * len(rows)):
        return 0.0
    means = np.bincount(codes, ranks) / counts
    residuals = (ranks - means[codes])[rows] * (size / (size - 1.0 + (size == 1)))[rows]
    return 1 - float((residuals**2).mean()) / max(1e-9, float(ranks[rows].var()))


def _check_shared(findings: TableFindings, table: CheckedTable, policy: CheckPolicy) -> None:
    """Add a finding of validation rows that are in training too, except in row-number columns."""
    hashes, shuffled = np.zeros((2, len(table.inputs)), np.uint64)
    rng = np.random.default_rng(0)
    for number, values in enumerate(table.values()):
        rising = np.diff(values)
        if number not in findings.drop_columns and not ((rising > 0).all() or (rising < 0).all()):
            bits = (values + np.float32(0)).view(np.uint32).astype(np.uint64)
            column = splitmix(bits + np.uint64(number << 32))
            hashes, shuffled = hashes + column, shuffled + rng.permutation(column)  # wraps around
    if table.classes is None:  # equal inputs with different targets are noise, and usual
        labels = np.ascontiguousarray(table.target.reshape(len(hashes), -1), np.float64) + 0.0
        hashes = hashes + splitmix(labels.view(np.uint64)).sum(axis=1, dtype=np.uint64)
    rows = table.validation[np.isin(hashes[table.validation], hashes[table.train])]
    # matches that remain with each column shuffled are chance: few distinct rows
    chance = np.isin(shuffled[table.validation], shuffled[table.train]).sum()
    if not len(rows) or 2 * chance >= len(rows):
        return
    twin = table.train[np.flatnonzero(hashes[table.train] == hashes[rows[0]])[0]]
    share = f"{len(rows):,} of {len(table.validation):,} validation rows"
    share += f" ({len(rows) / len(table.validation):.1%})"
    pair = f"{table.row_name(int(rows[0]))}, equal to {table.row_name(int(twin))}"
    evidence = f"{share} are also in training, such as {pair}"
    drops = policy is CheckPolicy.drop
    if drops and len(rows) == len(table.validation):
        problem = f"checks.table.shared=drop leaves no validation rows: {evidence}"
        raise DataError(f"{problem}; use checks.table.shared=warn, or correct the table")
    way_out = "" if drops else "leave them out of validation with checks.table.shared=drop"
    reason = Reason("table.shared", Severity.WARNING, "", evidence, way_out)
    action, choice = "left out of validation", f"{len(rows):,} validation rows left out"
    findings.add(reason, action if drops else "", choice)
    findings.drop_rows = np.sort(rows) if drops else findings.drop_rows


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
