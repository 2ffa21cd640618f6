"""A table before it is trained on: constant columns, label leaks, rows shared with validation.

Inputs are judged as the model gets them, float32, over training rows; names are those of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.checks.config import Policy, TableConfig
from runner.data.batch import Column, RowNames
from runner.errors import DataError
from runner.security.trust import Reason, Severity
from runner.techniques.base import Choice

MIN_ROWS = 20  # below which a column may be of one value by chance
MIN_JUDGED = 100  # rows below which a column may give the label by chance
MIN_ERRORS = 20  # rows that are not of the commonest class, likewise
RARE = 50  # of so few such rows, one that is missed is more than a leak's share
LEAK = {True: 0.98, False: 0.99}  # errors saved by a leak: of a class, of a rank's variance
MANY_VALUES = 256  # above which a column is judged by its order, and not by its single values
SAMPLE_CELLS, SAMPLE_ROWS, MAX_COLUMNS = 1_500_000, 50_000, 2_048  # a tenth of a second
CHUNK = 1 << 18  # cells compared at once
NAMED = 3
SHOWN = 5
KINDS = ("constant", "leak", "shared")


@dataclass(frozen=True)
class Table:
    """A table as a model gets it."""

    inputs: NDArray[np.float32]  # [rows, features]
    target: NDArray[Any]  # [rows] labels, or quantities [rows] or [rows, targets]
    columns: tuple[Column, ...]
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    rows: RowNames = field(default_factory=RowNames)
    classes: int | None = None  # None: quantities
    ignore: str = ""  # the key that leaves a column out, where there is one

    def spans(self) -> list[slice]:
        """The inputs of each column."""
        ends = np.cumsum([column.width for column in self.columns]).tolist()
        return [slice(b - c.width, b) for b, c in zip(ends, self.columns, strict=True)]


@dataclass(frozen=True)
class LabelSkill:
    """What one column alone predicts."""

    skill: float | None = None  # errors it saves, of those made without it; None: not judged
    strong: bool = False  # enough for a leak
    same: bool = False  # it is the label under other names, or sorts the quantity


@dataclass
class TableFindings:
    """The findings about a table, and what is to be left out for them."""

    reasons: list[Reason] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)  # taken for each of the reasons
    drop_columns: list[int] = field(default_factory=list)
    drop_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    choices: list[Choice] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for debug/table.json

    def add(self, reason: Reason, action: str) -> None:
        """Take note of something, and of what was done about it."""
        self.reasons.append(reason)
        self.actions.append(action)

    def drop_column(self, table: Table, number: int, kind: str, evidence: str) -> None:
        """Leave a column out of the inputs."""
        name = table.columns[number].name
        self.drop_columns.append(number)
        self.choices.append(Choice(f"checks.table.{kind}", f"without {name}", f"it {evidence}"))


def check_table(table: Table, config: TableConfig) -> TableFindings:
    """The findings of one pass over columns and rows.

    Raises DataError, which names every finding, where the policy for one of them is `stop`, and
    where nothing would be left to learn from or to validate with.
    """
    findings = TableFindings()
    constant = _constant_columns(table)
    skills = []
    if config.leak is not Policy.off:
        skills = _label_skills(table)
    if config.constant is not Policy.off and len(table.train) >= MIN_ROWS:
        for number in np.flatnonzero(constant).tolist():
            evidence = f"is {_value(table, number)} in all {len(table.train):,} training rows"
            _report_column(findings, table, config, number, "constant", evidence)
    for number, evidence in _leak_evidence(table, skills, constant):
        _report_column(findings, table, config, number, "leak", evidence)
    if findings.drop_columns and len(findings.drop_columns) == len(table.columns):
        raise DataError(
            "checks.table: every column of the table is constant or gives the label away, so "
            f"nothing would be left to learn from: {'; '.join(map(str, findings.reasons[:SHOWN]))}"
        )
    if config.shared is not Policy.off:
        _check_shared(findings, table, constant, config.shared)
    findings.facts = _facts(table, findings, skills)
    _stop(findings, config)
    return findings


def _report_column(
    findings: TableFindings,
    table: Table,
    config: TableConfig,
    number: int,
    kind: str,
    evidence: str,
) -> None:
    name, drops = table.columns[number].name, getattr(config, kind) is Policy.drop
    severity = Severity.NOTE if kind == "constant" else Severity.WARNING
    key = f"{table.ignore}=[{name}] or " if table.ignore else ""
    way_out = "" if drops else f"leave it out with {key}checks.table.{kind}=drop"
    if kind == "leak" and way_out:
        way_out = f"if it is not known before the label is, {way_out}"
    reason = Reason(f"table.{kind}", severity, f"column {name!r}", evidence, way_out)
    findings.add(reason, "left out of the inputs" if drops else "")
    if drops:
        findings.drop_column(table, number, kind, evidence)


def _facts(table: Table, findings: TableFindings, skills: list[LabelSkill]) -> dict[str, Any]:
    return {
        "rows": len(table.inputs),
        "rows_judged": len(_sample(table)),
        "columns": [
            {"name": column.name, "skill": skill.skill}
            for column, skill in zip(table.columns, skills, strict=False)
        ],
        "findings": [
            {**asdict(reason), "severity": reason.severity.word, "action": action}
            for reason, action in zip(findings.reasons, findings.actions, strict=True)
        ],
    }


def _stop(findings: TableFindings, config: TableConfig) -> None:
    codes = {f"table.{kind}" for kind in KINDS if getattr(config, kind) is Policy.stop}
    reasons = [reason for reason in findings.reasons if reason.code in codes]
    if not reasons:
        return
    first, *others = reasons
    named = [f"{reason.code} {reason.where}".strip() for reason in others]
    more = f"; and {len(named)} more: {', '.join(named[:SHOWN])}" if named else ""
    more += ", …" if len(named) > SHOWN else ""
    keys = " ".join(dict.fromkeys(f"checks.{reason.code}=warn" for reason in reasons))
    raise DataError(f"{first}{more}; to go on all the same: {keys}")


def _constant_columns(table: Table) -> NDArray[np.bool_]:
    """Which columns have one value in every training row."""
    first = table.inputs[table.train[0]]
    varies = np.zeros(table.inputs.shape[1], np.bool_)
    step = max(1, CHUNK // len(varies))
    for start in range(0, len(table.train), step):
        varies |= (table.inputs[table.train[start : start + step]] != first).any(axis=0)
    return np.array([not varies[span].any() for span in table.spans()])


def _value(table: Table, number: int) -> str:
    """The first value of a column as it was read."""
    column, row = table.columns[number], table.inputs[table.train[0], table.spans()[number]]
    if column.values:
        return repr(column.values[int(row.argmax())])
    return f"{row[0] * column.deviation + column.mean:.6g}"


def _leak_evidence(
    table: Table, skills: list[LabelSkill], constant: NDArray[np.bool_]
) -> Iterator[tuple[int, str]]:
    """The columns that give the label away, with what speaks for it."""
    judged = [n for n, s in enumerate(skills) if s.skill is not None and not constant[n]]
    others = [n for n in judged if not skills[n].strong]
    best = max(others, key=lambda n: skills[n].skill or 0.0, default=None)
    next_best = 1.0 if best is None else skills[best].skill or 0.0
    strong = len(judged) - len(others)
    easy = next_best >= 0.9 or (strong > 1 and 3 * strong >= len(judged))  # an easy data set
    for number in judged:
        skill = skills[number]
        if not (skill.same or (skill.strong and not easy)):
            continue
        evidence = f"alone saves {share(skill.skill or 0)} of the errors that are made without it"
        if table.classes is None:
            evidence = f"alone explains {share(skill.skill or 0)} of how the target is ordered"
        if best is not None:
            named = repr(table.columns[best].name)
            evidence += f"; the next best column, {named}, {share(next_best)}"
        yield number, evidence + ("; it is the label itself or sorts it" if skill.same else "")


def share(value: float) -> str:
    """In percent, and neither 0 % nor 100 % where that is not the whole truth."""
    text = f"{value:.1%}"
    return text if value in (0, 1) or float(text[:-1]) not in (0, 100) else f"{value:.4%}"


def _sample(table: Table) -> NDArray[np.int64]:
    """Evenly spaced training rows, few enough for a bounded time; a resumed run has the same."""
    most = min(SAMPLE_ROWS, max(1_000, SAMPLE_CELLS // max(1, table.inputs.shape[1])))
    if len(table.train) <= most:
        return table.train
    return table.train[np.linspace(0, len(table.train) - 1, most).astype(np.int64)]


def _label_skills(table: Table) -> list[LabelSkill]:
    """The skill of each column over a sample of training rows."""
    in_order = _sample(table)
    rows = in_order[np.argsort(_mixed(in_order), kind="stable")]  # equal values in no order
    target = np.asarray(table.target[rows])
    judge = _class_skill if table.classes is not None else _quantity_skill
    skills = []
    for span in table.spans()[:MAX_COLUMNS]:
        block = table.inputs[rows, span]
        values = block[:, 0] if block.shape[1] == 1 else block.argmax(axis=1)
        skill = LabelSkill() if len(rows) < MIN_JUDGED else judge(values, target)
        if table.classes is None and block.shape[1] == 1 and not skill.same:
            steps = np.diff(table.inputs[in_order, span.start])
            if (steps >= 0).all() or (steps <= 0).all():
                skill = LabelSkill()  # a time is known beforehand: a trend, and no leak
        skills.append(skill)
    return skills


def _class_skill(values: NDArray[Any], target: NDArray[Any]) -> LabelSkill:
    found, labels, counts = np.unique(target, return_inverse=True, return_counts=True)
    classes, wrong = len(found), len(labels) - int(counts.max())  # without any column
    if wrong < MIN_ERRORS:
        return LabelSkill()
    distinct, codes = np.unique(values, return_inverse=True)
    # in the order of a perfect column, labels change as often as there are other classes
    changes = (np.diff(labels[np.argsort(codes, kind="stable")]) != 0).sum()
    errors, same = (int(changes) - classes + 1) / 2, False
    if len(distinct) <= MANY_VALUES:
        # the commonest class of each value, learned on the other half of the rows
        pairs = codes * classes + labels
        size = len(distinct) * classes
        halves = [np.bincount(pairs[k::2], minlength=size).reshape(-1, classes) for k in (0, 1)]
        places, right = np.arange(len(distinct)), 0
        for learned, held in (halves, halves[::-1]):
            guess = np.where(learned.any(1), learned.argmax(1), counts.argmax())
            right += int(held[places, guess].sum())
        errors = min(errors, len(labels) - right)
        same = len(np.unique(pairs)) == len(distinct) == classes
    skill = max(0.0, 1 - errors / wrong)
    return LabelSkill(skill, skill >= LEAK[True] or (wrong < RARE and errors < 1.5), same)


def _quantity_skill(values: NDArray[Any], target: NDArray[Any]) -> LabelSkill:
    order, skill, sorts = np.argsort(values, kind="stable"), 0.0, False
    for quantity in np.asarray(target, np.float64).reshape(len(target), -1).T[:4]:
        _, place, count = np.unique(quantity, return_inverse=True, return_counts=True)
        if len(count) < 2:
            continue
        ranks = (np.cumsum(count) - count / 2)[place]
        steps = np.diff(ranks[order])
        skill = max(skill, 1 - float((steps * steps).mean()) / (2 * float(ranks.var())))
        sorts = sorts or bool((steps >= 0).all() or (steps <= 0).all())
    return LabelSkill(skill, sorts or skill >= LEAK[False], sorts)


# -- rows ------------------------------------------------------------------------------------------


def _check_shared(
    findings: TableFindings, table: Table, constant: NDArray[np.bool_], policy: Policy
) -> None:
    """Rows of validation that training has seen, over the columns that stay and number no rows."""
    used = [
        span
        for number, span in enumerate(table.spans())
        if not (number in findings.drop_columns or constant[number] or _is_row_number(table, span))
    ]
    if not used:
        return
    inputs, by_chance = _row_hashes(table, used)
    labels = np.ascontiguousarray(table.target.reshape(len(inputs), -1), np.float64) + 0.0
    labelled = inputs + _mixed(labels.view(np.uint64)).sum(axis=1, dtype=np.uint64)
    exact = table.validation[_found_in(labelled, table)]
    other = exact[:0]
    if table.classes is not None:  # another quantity for the same inputs is noise, and usual
        other = np.setdiff1d(table.validation[_found_in(inputs, table)], exact)
    rows = np.sort(np.concatenate([exact, other]))
    # what columns shuffled one by one have in common, too, is chance: few different rows
    if not len(rows) or 2 * _found_in(by_chance, table).sum() >= len(rows):
        return
    twin = {int(h): int(r) for h, r in zip(inputs[table.train], table.train, strict=True)}
    pairs = ", ".join(
        f"{table.rows(row)} is {table.rows(twin[int(inputs[row])])}"
        for row in rows[:NAMED].tolist()
    )
    evidence = (
        f"{len(rows):,} of {len(table.validation):,} validation rows "
        f"({share(len(rows) / len(table.validation))}) are in training too: {len(exact):,} with "
        f"their label, {len(other):,} with another one ({pairs}{', …' * (len(rows) > NAMED)})"
    )
    if policy is not Policy.drop:
        way_out = "leave them out of validation with checks.table.shared=drop"
        findings.add(Reason("table.shared", Severity.WARNING, "", evidence, way_out), "")
        return
    if len(rows) == len(table.validation):
        raise DataError(
            f"checks.table.shared=drop leaves nothing to validate with: {evidence}; "
            "use checks.table.shared=warn, or correct the table"
        )
    findings.drop_rows = rows
    findings.add(Reason("table.shared", Severity.WARNING, "", evidence), "left out of validation")
    count = f"{len(rows):,} rows not validated with"
    findings.choices.append(Choice("checks.table.shared", count, "training has them too"))


def _is_row_number(table: Table, span: slice) -> bool:
    """Whether a column strictly rises or falls along the rows, as an id or a time does."""
    if span.stop - span.start > 1:
        return False
    steps = np.diff(table.inputs[:, span.start])
    return bool((steps > 0).all() or (steps < 0).all())


def _row_hashes(table: Table, used: list[slice]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """64-bit hashes of all rows over those columns, and with each column shifted by itself."""
    n = len(table.inputs)
    hashes, shifted = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
    order = np.argsort(_mixed(np.arange(n)), kind="stable")  # of no meaning, and always the same
    for number, span in enumerate(used, 1):
        column = np.zeros(n, np.uint64)
        for at in range(span.start, span.stop):
            bits = np.ascontiguousarray(table.inputs[:, at] + np.float32(0)).view(np.uint32)
            column += _mixed(bits.astype(np.uint64) + np.uint64(at << 32))  # wraps around
        hashes += column
        shifted[order] += np.roll(column[order], int(_mixed(np.array([number]))[0] % n))
    return hashes, shifted


def _found_in(hashes: NDArray[np.uint64], table: Table) -> NDArray[np.bool_]:
    """Which validation rows have the hash of a training row."""
    return np.isin(hashes[table.validation], hashes[table.train])


def _mixed(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Whole numbers hashed by SplitMix64's last step."""
    state: NDArray[np.uint64] = values.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58_476D_1CE4_E5B9)
    state ^= state >> np.uint64(27)
    return state
