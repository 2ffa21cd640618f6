"""A table before it is trained on: columns that say nothing or too much, rows met twice.

What a model sees is judged, that is inputs as float32, over training rows; names and values are
those that were read.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.batch import Column, RowNames
from runner.checks.columns import MOST_COLUMNS, Floats, Ints, Told, tell
from runner.checks.config import Policy, TableConfig
from runner.checks.shared import Shared, shared_rows
from runner.errors import DataError
from runner.security.trust import Reason, Severity
from runner.technique import Choice

NEARLY_ALL = {True: 0.98, False: 0.99}  # errors saved by a leak: of a class, of a rank's variance
NEXT_BEST = 0.9  # where an honest column saves so much, the data are easy
NUMBERED = 0.9  # errors saved by a number of the row, which nobody has when predicting
TREND = 0.9  # errors saved by a time, from which it is worth a word
OF_ALL = 1 / 3  # columns that each give the label are no leak any more: the data are easy
ENOUGH_ROWS = 20  # below which a column may be of one value by chance
SHOWN = 5
KINDS = ("constant", "leak", "shared")


@dataclass(frozen=True)
class Table:
    """A table as a model gets it."""

    inputs: Floats  # [rows, features]
    target: NDArray[np.generic]  # [rows] labels, or quantities [rows] or [rows, targets]
    columns: tuple[Column, ...]
    train: Ints
    validation: Ints
    rows: RowNames = field(default_factory=RowNames)
    classes: int | None = None  # None: quantities
    ignore: str = ""  # the key that leaves a column out, where there is one


@dataclass
class Looked:
    """What was found in a table, and what is to be left out for it."""

    reasons: list[Reason] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)  # what was done about each of the reasons
    drop: list[int] = field(default_factory=list)  # columns
    leave_out: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of validation
    choices: list[Choice] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for debug/table.json
    seconds: float = 0.0

    def add(self, reason: Reason, action: str = "") -> None:
        """Take note of something, and of what was done about it."""
        self.reasons.append(reason)
        self.actions.append(action)


def check_table(table: Table, config: TableConfig) -> Looked:
    """Look at columns and rows once, in about a second at most unless something is to be dropped.

    Raises DataError, which names every finding, where the policy for one of them is `stop`, and
    where nothing would be left to learn from or to validate with.
    """
    started, looked = time.perf_counter(), Looked()
    strict = {kind: getattr(config, kind).value in ("drop", "stop") for kind in KINDS}
    told, seen = tell(
        table.inputs, table.target, table.columns, table.train, table.classes,
        strict["constant"] or table.inputs.size <= 3e8,
    )  # fmt: skip
    if config.constant is not Policy.off and len(table.train) >= ENOUGH_ROWS:
        _constants(looked, table, told, config)
    if config.leak is not Policy.off:
        _leaks(looked, table, told, config.leak)
    if looked.drop and len(looked.drop) == len(told):
        raise DataError(
            "checks.table: every column of the table is constant or gives the label away, so "
            f"nothing would be left to learn from: {_listed(looked.reasons)}"
        )
    shared = None
    if config.shared is not Policy.off:
        shared = _shared(looked, table, told, config.shared, strict["shared"])
    looked.seconds = time.perf_counter() - started
    looked.facts = {
                "rows": len(table.inputs),
        "columns_judged": min(len(told), MOST_COLUMNS),
        "columns_judged_by_rows": seen, "seconds": looked.seconds,
        "rows_compared": shared and {"train": shared.train, "validation": shared.validation},
        "columns": [dict(vars(fact)) for fact in told[:MOST_COLUMNS]],
        "findings": [
            {**asdict(reason), "severity": reason.severity.word, "action": action}
            for reason, action in zip(looked.reasons, looked.actions, strict=True)
        ],
    }  # fmt: skip
    _stop(looked, config)
    return looked


def _stop(looked: Looked, config: TableConfig) -> None:
    codes = {f"table.{kind}" for kind in KINDS if getattr(config, kind) is Policy.stop}
    found = [reason for reason in looked.reasons if reason.code in codes]
    if not found:
        return
    first, *others = found
    named = [f"{reason.code} {reason.where}".strip() for reason in others]
    more = f"; and {len(named)} more: {', '.join(named[:SHOWN])}" if named else ""
    more += ", …" if len(named) > SHOWN else ""
    keys = " ".join(dict.fromkeys(f"checks.{reason.code}=warn" for reason in found))
    raise DataError(f"{first}{more}; to go on all the same: {keys}")


def _listed(reasons: list[Reason]) -> str:
    shown = "; ".join(str(reason) for reason in reasons[:SHOWN])
    more = len(reasons) - SHOWN
    return shown + (f"; and {more:,} findings more" if more > 0 else "")


def _constants(looked: Looked, table: Table, told: list[Told], config: TableConfig) -> None:
    n = len(table.train)
    for number, fact in enumerate(told):
        where = f"column {fact.name!r}"
        if fact.constant:
            evidence = f"is {fact.value} in all {n:,} training rows"
            way_out = _leave_out(table, fact, "constant")
            _note(looked, "constant", config.constant, number, fact,
                  Reason("table.constant", Severity.NOTE, where, evidence, way_out))  # fmt: skip
        elif fact.share >= config.nearly:
            evidence = f"is {fact.value} in {_share(fact.share)} of the training rows"
            # it may tell the rare rows that matter, so no policy takes it away
            looked.add(Reason("table.nearly_constant", Severity.NOTE, where, evidence), "kept")


def _leaks(looked: Looked, table: Table, told: list[Told], policy: Policy) -> None:
    enough = NEARLY_ALL[table.classes is not None]
    for fact in told:
        if fact.trend and (fact.skill or 0.0) >= TREND:
            looked.add(_trend(fact), "kept")
    judged = [f for f in told if f.skill is not None and not (f.constant or f.trend)]
    strong = {f for f in judged if (f.skill or 0.0) >= enough or f.rare or f.same or f.sorts}
    others = [fact for fact in judged if fact not in strong]
    best = max(others, key=lambda fact: fact.skill or 0.0, default=None)
    next_best = best.skill or 0.0 if best is not None else 1.0
    easy = next_best >= NEXT_BEST or (len(strong) > 1 and len(strong) >= OF_ALL * len(judged))
    for number, fact in enumerate(told):
        skill = fact.skill or 0.0
        numbered = fact.counts_rows and skill >= NUMBERED
        certain = fact.same or fact.sorts or numbered
        if fact.trend or not (certain or (fact in strong and not easy)):
            continue
        if table.classes is not None:
            evidence = f"alone saves {_share(skill)} of the errors that are made without it"
        else:
            evidence = f"alone explains {_share(skill)} of how the target's values are ordered"
        if best is not None:
            evidence += f"; the next best column, {best.name!r}, {_share(next_best)}"
        if numbered:
            evidence += "; it is a number of the row, and the rows are sorted by the label"
        elif fact.same:
            evidence += "; it is the label itself, under other names or in another unit"
        elif fact.sorts:
            evidence += "; sorted by it, the target's values only rise or only fall"
        way_out = f"if it is not known before the label is, {_leave_out(table, fact, 'leak')}"
        where = f"column {fact.name!r}"
        _note(looked, "leak", policy, number, fact,
              Reason("table.leak", Severity.WARNING, where, evidence, way_out))  # fmt: skip


def _trend(fact: Told) -> Reason:
    evidence = (
        f"goes one way along the rows and alone explains {_share(fact.skill or 0.0)} of how the "
        "target's values are ordered: a trend. Validation rows lie between those of training, so "
        "they do not say how it goes on"
    )
    # a time is known beforehand, so no policy takes it away
    return Reason("table.trend", Severity.NOTE, f"column {fact.name!r}", evidence)


def _note(
    looked: Looked, kind: str, policy: Policy, number: int, fact: Told, reason: Reason
) -> None:
    if policy is not Policy.drop:
        looked.add(reason)
        return
    looked.drop.append(number)
    looked.add(replace(reason, way_out=""), "left out of the inputs")
    looked.choices.append(
        Choice(f"checks.table.{kind}", f"without {fact.name}", f"it {reason.evidence}")
    )


def _leave_out(table: Table, fact: Told, kind: str) -> str:
    key = f"{table.ignore}=[{fact.name}]" if table.ignore else ""
    return f"leave it out with {' or '.join(filter(None, (key, f'checks.table.{kind}=drop')))}"


def _shared(
    looked: Looked, table: Table, told: list[Told], policy: Policy, whole: bool
) -> Shared | None:
    """Rows of validation that training has seen, over the columns that stay and are no number."""
    numbers = [fact.name for fact in told if fact.counts_rows]
    used = [
        slice(fact.first, fact.first + fact.width)
        for number, fact in enumerate(told)
        if not (number in looked.drop or fact.counts_rows or fact.constant)
    ]
    if not used:
        return None
    found = shared_rows(
        table.inputs, table.target, table.train, table.validation, used, whole,
        quantities=table.classes is None,
    )  # fmt: skip
    if not found.count:
        return found
    exact, other = len(found.exact), len(found.other)
    part = _share(found.count / found.validation)
    looked_at = "" if found.validation == len(table.validation) else "of the sample looked at "
    evidence = (
        f"{found.count:,} of {found.validation:,} validation rows {looked_at}({part}) are in "
        f"training too: {exact - found.both:,} with their label"
    )
    if table.classes is not None:
        evidence += f", {other:,} with another one"
    if found.both:
        evidence += f", {found.both:,} with both"
    pairs = ", ".join(f"{table.rows(ours)} is {table.rows(twin)}" for ours, twin in found.pairs[:3])
    evidence += f" ({pairs}, …)" if found.count > len(found.pairs) else f" ({pairs})"
    if numbers:
        evidence += f", row numbers ({', '.join(map(repr, numbers[:3]))}) not counted"
    evidence += f"; of the training rows {found.among_train:,} are repeated"
    if found.few_distinct:
        few = f"few distinct rows, {found.distinct:,} among {found.train:,} of training"
        # they are no copies, so no policy takes them away
        note = Reason("table.few_distinct", Severity.NOTE, "", f"{few}, so that {evidence}")
        looked.add(note, "kept")
        return found
    reason = Reason(
        "table.shared", Severity.WARNING, "", evidence,
        "validation says more than it knows; leave them out of it with checks.table.shared=drop",
    )  # fmt: skip
    if policy is not Policy.drop:
        looked.add(reason)
        return found
    looked.leave_out = np.concatenate([found.exact, found.other])
    if len(looked.leave_out) == len(table.validation):
        raise DataError(
            f"checks.table.shared=drop leaves nothing to validate with: {evidence}; "
            "use checks.table.shared=warn, or mend the table"
        )
    looked.add(replace(reason, way_out=""), "left out of validation")
    count = len(looked.leave_out)
    looked.choices.append(
        Choice("checks.table.shared", f"{count:,} rows not validated with", "training has them too")
    )
    return found


def _share(value: float) -> str:
    """In percent, and neither 0 % nor 100 % where that is not the whole truth."""
    for digits in (1, 2, 3, 4):
        text = f"{value:.{digits}%}"
        if value in (0, 1) or float(text[:-1]) not in (0, 100):
            return text
    return "nearly 100%" if value > 0.5 else "next to 0%"
