"""Faults of a run and the actions taken: `debug/history.json`."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from runner.core.masking import mask_secrets
from runner.core.record import markdown
from runner.core.record.storage import read_record, write_or_log
from runner.core.record.text import LONGEST_TRACE, limit_length, shorten

log = logging.getLogger("runner")

HISTORY_FILE = "debug/history.json"
MAX_FAULTS = 500  # distinct faults; later ones are only counted
MAX_STEPS = 20  # per fault, that are stored
SHOWN_STEPS = 4  # of a fault, in a report
MAX_MESSAGE_CHARS = 90  # characters, in a report
SHOWN_ACTIONS = 3  # of a kind of fault, in a report
MAX_CAUSES = 256  # steps for which a cause is stored
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# digits within a name, such as `blocks.3.norm1`, do not match
NUMBER = re.compile(r"(?<![\w.'])[-+]?\d[\d.,e+-]*|(?<=step_)\d+")


def normalize_message(text: str) -> str:
    """Replace numbers in a message by `#`, so that repeats compare equal."""
    return NUMBER.sub("#", text)


@dataclass
class Fault:
    """A distinct fault, with its steps and count."""

    kind: str  # non_finite | spike | weights | buffers | out_of_memory | leak | slow | …
    category: str  # numerics | memory | data | performance | resources | compile | storage
    severity: str  # info | warning | error
    message: str
    action: str  # taken in response
    steps: list[int] = field(default_factory=list)  # the first MAX_STEPS
    last_step: int = 0
    count: int = 0
    traceback: str = ""  # of the first occurrence
    capture: str = ""  # capture folder for job=replay, relative to the run's


class History:
    """All faults of a run. Repeats that differ only in numbers are counted and logged once."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.faults: dict[tuple[str, str, str], Fault] = {}
        self.counts: dict[str, int] = {}  # by kind, including faults beyond MAX_FAULTS
        self.unwritten = False
        self.explained_steps: set[int] = set()  # steps for which a tool has named the fault
        self.logged_keys: set[tuple[str, str, str]] = set()  # keys of logged faults
        self.causes: dict[int, str] = {}  # step → cause; see `explain`

    def add(
        self,
        kind: str,
        message: str,
        *,
        step: int,
        category: str,
        severity: str = "warning",
        action: str = "",
        error: BaseException | None = None,
        capture: str = "",
        say: bool = True,
        count: int = 1,
    ) -> Fault:
        """Count a fault and log it the first time; `write` stores it."""
        message, action = limit_length(mask_secrets(message)), mask_secrets(action)
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.unwritten = True
        key = (kind, action, normalize_message(message))
        fault = self.faults.get(key)
        if fault is None:
            fault = Fault(kind, category, severity, message, action)
            if error is not None:
                trace = mask_secrets("".join(traceback.format_exception(error)))
                fault.traceback = limit_length(trace, LONGEST_TRACE)
            if len(self.faults) < MAX_FAULTS:
                self.faults[key] = fault
        if say and key in self.faults and key not in self.logged_keys:
            self.logged_keys.add(key)
            suffix = f"; {action}" if action else ""
            log.log(LEVELS[severity], "step %d: %s%s", step, message, suffix)
        fault.count += count
        fault.last_step = step
        if len(fault.steps) < MAX_STEPS:
            fault.steps.append(step)
        fault.capture = fault.capture or capture
        return fault

    def withdraw(self, fault: Fault) -> None:
        """Remove a fault that later steps have disproved."""
        self.faults = {key: other for key, other in self.faults.items() if other is not fault}
        self.counts[fault.kind] -= fault.count
        self.counts = {kind: count for kind, count in self.counts.items() if count}
        self.unwritten = True

    def explain(self, step: int, cause: str) -> None:
        """Store the cause of a bad step for tools that find it later; keeps `MAX_CAUSES`."""
        self.causes[step] = cause
        self.explained_steps.add(step)
        if len(self.causes) > MAX_CAUSES:
            del self.causes[next(iter(self.causes))]

    def write(self, **facts: Any) -> None:
        """Replace `debug/history.json` if there is anything new; an OSError is only logged."""
        if not (self.unwritten or facts) or self.folder is None:
            return
        path = self.folder / HISTORY_FILE
        text = json.dumps({"counts": self.counts, "faults": self._rows()} | facts, indent=2)
        write_or_log(path, text + "\n", logging.DEBUG)
        self.unwritten = False

    @staticmethod
    def read(folder: Path) -> list[Fault]:
        """Return the recorded faults; [] if the file is missing or damaged."""
        field_names = {x.name for x in fields(Fault)}
        try:
            rows = json.loads(read_record(folder / HISTORY_FILE))["faults"]
            return [Fault(**{k: v for k, v in row.items() if k in field_names}) for row in rows]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        causes = dict(self.causes)  # of steps whose reports are still in flight
        return {"counts": dict(self.counts), "faults": self._rows(), "causes": causes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.counts = dict(state["counts"])
        rows = [Fault(**row) for row in state["faults"]]
        self.faults = {(f.kind, f.action, normalize_message(f.message)): f for f in rows}
        self.logged_keys = set(self.faults)
        self.causes = dict(state.get("causes", {}))
        self.explained_steps = set(self.causes)
        self.unwritten = bool(rows)

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(fault) for fault in self.faults.values()]


def fault_rows(counts: Mapping[str, int], faults: Sequence[Fault]) -> list[tuple[str, str]]:
    """Return (kind, description) rows; some faults, of writing, are in `counts` alone."""
    by_kind = {kind: [fault for fault in faults if fault.kind == kind] for kind in counts}
    return [(kind, _describe_faults(by_kind[kind], n)) for kind, n in counts.items() if n]


def _describe_faults(faults: list[Fault], count: int) -> str:
    """Describe faults of one kind in one line, by the most frequent message."""
    if not faults:
        return f"{count:,}"
    faults.sort(key=lambda fault: -fault.count)
    steps = format_steps(sorted({step for fault in faults for step in fault.steps}), count)
    text = f"{count:,}, {steps}: {shorten(faults[0].message, MAX_MESSAGE_CHARS)}"
    actions = Counter[str]()
    for fault in faults:
        actions[fault.action] += fault.count
    del actions[""]
    texts = [f"{action} ({n:,})" if len(actions) > 1 else action for action, n in actions.items()]
    return "; ".join([text, *texts[:SHOWN_ACTIONS]])


def fault_table(faults: Iterable[Fault]) -> str:
    """Return all faults as a Markdown table."""
    header = ("kind", "severity", "count", "steps", "what", "done about it", "capture")
    rows = []
    for f in faults:
        steps = format_steps(f.steps, f.count)
        rows.append((f.kind, f.severity, f.count, steps, f.message, f.action, f.capture))
    return markdown.table(header, rows)


def format_steps(steps: Sequence[int], count: int) -> str:
    """Format the first few of `count` steps."""
    shown = ", ".join(f"{step:,}" for step in steps[:SHOWN_STEPS]) + ", …" * (count > SHOWN_STEPS)
    return f"steps {shown}" if len(steps) > 1 else f"step {shown}"


def first_capture(faults: Iterable[Fault]) -> str:
    """Return the capture folder of the earliest captured fault; "" if there is none."""
    captured = [fault for fault in faults if fault.capture]
    return min(captured, key=lambda fault: fault.steps[:1]).capture if captured else ""
