"""Handling of bad batches before their step: the update is vetoed, or the run stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core.checks.batch import (
    FORM,
    VETO_POLICIES,
    BatchChecks,
    BatchFinding,
    Limit,
    NamedTensors,
    find_problems,
    is_clean_table,
)
from runner.core.device.device import copy_to_host
from runner.core.errors import DataError
from runner.core.interfaces.batch import Batch
from runner.core.record.history import History
from runner.core.record.text import resume_argument
from runner.core.schemas.checks import CheckPolicy

LAG = 2  # steps after which the numbers of a batch on an accelerator are read
MAX_SKIPPED = 100  # consecutive batches, then the run ends
MAX_NAMED_SAMPLES = 20  # samples that a message names
LAST_STEP = 2**62  # later than any step
FIXES = {
    FORM: "correct the data, or use checks.inputs.form=warn",
    "not_finite": "correct these samples, or use checks.inputs.not_finite=skip",
    "range": "scale the data, or change checks.inputs.schema.low and high",
    "labels": "correct these labels, or use checks.inputs.labels=skip",
    "constant": "correct the data, or use checks.inputs.constant=off if it is expected",
}


@dataclass(frozen=True)
class BatchOutcome:
    """The findings about a step's batch, and whether its update is vetoed."""

    number: int
    problems: tuple[tuple[str, str], ...] = ()  # check and message
    veto: bool = False


@dataclass(frozen=True)
class PendingValues:
    """The measured values of a batch on an accelerator, while they are copied to the host."""

    number: int
    limits: list[Limit]
    values: Tensor  # the measured values, then the veto
    ready: torch.Event | None


class BatchValidator:
    """Checks each batch of a run and applies the policies of `checks.inputs`.

    A batch on the CPU is checked before it is moved; small data in memory are checked once, as a
    whole, and then only if they were written to. A batch that a data set puts on an accelerator
    is reduced there: the flag that vetoes its update stays on the device, and the host reads the
    values two steps later.
    """

    def __init__(
        self,
        checks: BatchChecks,
        history: History,
        folder: Path | None,
        device: torch.device,
        *,
        first_batch: Callable[[], Batch],  # of the data, as fetched on the CPU
        indices: Callable[[int], list[int]],  # data-set indices of a batch, by step from 0
        table: tuple[Tensor, Tensor] | None = None,  # all inputs and targets, in memory
        rows: Sequence[int] | np.ndarray = (),  # of the table that are trained on
        smallest: int = 1,  # rows in a batch
    ) -> None:
        self.checks, self.history, self.folder = checks, history, folder
        self.first_batch, self.indices = first_batch, indices
        self.table, self.rows, self.smallest = table, torch.as_tensor(rows), smallest
        self.clean_versions: list[int] | None = None  # of the table, if no batch needs a check
        self.host_type = "cpu"  # device type of tensors that are read without a sync
        self.veto_flag = torch.ones((), dtype=torch.float32, device=device)
        self.pass_flag = torch.zeros((), dtype=torch.float32, device=device)
        self.outcome: BatchOutcome | None = None  # of the loader's latest batch
        self.veto: Tensor | None = None  # 1: do not apply the current step's update
        self.vetoed: list[int] = []  # steps, until the stability controller takes them
        self.pending: deque[PendingValues] = deque()
        self.deferred_error: DataError | None = None
        self.skipped_in_a_row = 0

    def inspect(self, step: int, batch: Batch) -> Batch:
        """Return the loader's batch of `step` (from 0), or a harmless one. Raises DataError."""
        if self.table is not None and self._is_clean(self.table):
            self.outcome = BatchOutcome(step + 1)
            return batch
        tensors, self.outcome = self.checks.checkable_tensors(batch), None
        if self._on_host(tensors):
            batch, self.outcome = self._validate(step + 1, batch, tensors)
        return batch

    def admit(self, number: int, batch: Batch) -> Batch:
        """Return the batch for the loop's step `number`, and set `veto`. Raises DataError."""
        if self.pending or self.deferred_error is not None:
            self._catch_up(number - LAG)
        outcome, self.outcome = self.outcome, None
        if outcome is None or outcome.number != number:
            tensors = self.checks.checkable_tensors(batch)
            if not self._on_host(tensors) and self.checks.form_finding(tensors) is None:
                return self._admit_on_device(number, batch, tensors)
            batch, outcome = self._validate(number, batch, tensors)
        self.veto = self.veto_flag if outcome.veto else None
        for check, message in outcome.problems:
            self._record_problem(outcome.number, check, message, "skipped" if outcome.veto else "")
        self._count_skipped(outcome.number, outcome.veto)
        return batch

    def read(self, last: int) -> None:
        """Record the findings of batches on an accelerator, up to step `last`."""
        while self.pending and self.pending[0].number <= last:
            entry = self.pending.popleft()
            if entry.ready is not None:
                entry.ready.synchronize()  # host sync: recorded LAG steps ago: rarely waits
            self._record_pending(entry)

    def take_vetoed(self) -> list[int]:
        """Return the steps whose update was vetoed since the last call."""
        vetoed, self.vetoed = self.vetoed, []
        return vetoed

    def settle(self) -> None:
        """Read pending values at the end of a run; raises DataError if they stop it."""
        self._catch_up(LAST_STEP)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; reads pending values, which is a host sync."""
        self.read(LAST_STEP)
        return {"in_a_row": self.skipped_in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.skipped_in_a_row = int(state["in_a_row"])  # host sync: none, a count
        self.outcome, self.deferred_error = None, None
        self.pending.clear()

    def _is_clean(self, table: tuple[Tensor, Tensor]) -> bool:
        """Whether no batch of the table can have a finding; scans it at the first call."""
        versions = [tensor._version for tensor in table]
        if self.clean_versions is None:
            is_clean = is_clean_table(self.checks, *table, self.rows, self.smallest)
            self.clean_versions = versions if is_clean else []
        return versions == self.clean_versions

    def _on_host(self, tensors: NamedTensors) -> bool:
        return all(tensor.device.type == self.host_type for tensor in tensors.values())

    def _validate(
        self, number: int, batch: Batch, tensors: NamedTensors
    ) -> tuple[Batch, BatchOutcome]:
        """Apply the policies; return the batch, a harmless one if it is vetoed, and the outcome."""
        if self.checks.reference is None:  # a resumed run may begin with a bad batch
            self.checks.form_finding(self.checks.checkable_tensors(self.first_batch()))
        findings = find_problems(self.checks, tensors)
        if not findings:
            return batch, BatchOutcome(number)
        problems = tuple((f.check, self._message(f, number - 1)) for f in findings)
        for check, message in problems:
            if self.checks.policy(check) is CheckPolicy.stop:
                self._record_problem(number, check, message, "the run ends")
                raise self._stop_error(number, check, message)
        veto = any(self.checks.policy(check) in VETO_POLICIES for check, _ in problems)
        outcome = BatchOutcome(number, problems, veto)
        if not veto:
            return batch, outcome
        if findings[0].check == FORM:
            batch = self.first_batch()
        return self.checks.make_harmless(batch), outcome

    def _message(self, finding: BatchFinding, step: int) -> str:
        """Return the message and the bad samples, without blanks so that repeats are recognised."""
        if finding.bad is None:
            return finding.message
        # host sync: none, `_bad_samples` has moved it
        bad = finding.bad.nonzero().flatten().tolist()
        indices = self.indices(step)
        names = ",".join(str(indices[i]) for i in bad[:MAX_NAMED_SAMPLES] if i < len(indices))
        count = f"{len(bad)} of {len(finding.bad)} samples"
        more = ",…" * (len(bad) > MAX_NAMED_SAMPLES)
        return f"{finding.message}, in {count} (of the data set: {names}{more})"

    def _admit_on_device(self, number: int, batch: Batch, tensors: NamedTensors) -> Batch:
        """Set `veto` and queue the values for the host, without a host sync; return the batch."""
        checks, self.veto = self.checks, None
        if not (limits := checks.limits(tensors)):
            return batch
        values = checks.measure(tensors, limits)
        self.veto = checks.veto(limits, values)
        veto = self.pass_flag if self.veto is None else self.veto
        packed = torch.cat([values.reshape(-1), veto.reshape(1).to(values.dtype)])
        self.pending.append(PendingValues(number, limits, *copy_to_host(packed)))
        return checks.make_harmless(batch) if checks.policy("labels") in VETO_POLICIES else batch

    def _catch_up(self, last: int) -> None:
        self.read(last)
        if self.deferred_error is not None:
            error, self.deferred_error = self.deferred_error, None
            raise error

    def _record_pending(self, entry: PendingValues) -> None:
        *values, veto = entry.values.tolist()  # host sync: none, copied while the step ran
        rows = list(zip(values[::2], values[1::2], strict=True))
        for finding in self.checks.findings(entry.limits, rows, {}):
            stops = self.checks.policy(finding.check) is CheckPolicy.stop
            if stops and self.deferred_error is None:
                self.deferred_error = self._stop_error(entry.number, finding.check, finding.message)
            action = "skipped" if veto else ""
            self._record_problem(entry.number, finding.check, finding.message, action)
        self._count_skipped(entry.number, veto > 0)

    def _record_problem(self, number: int, check: str, message: str, action: str) -> None:
        if check == "not_finite":
            self.history.explain(number, message)
        stops = action == "the run ends"
        key = f"checks.inputs.{check}={self.checks.policy(check).value}"
        action = action or f"the batch is trained on anyway ({key}); {FIXES[check]}"
        self.history.add(
            f"input_{check}", message, step=number, category="data", action=action,
            severity="error" if stops else "warning",
            say=not stops,  # the error that ends the run has the text
        )  # fmt: skip

    def _stop_error(self, number: int, check: str, message: str) -> DataError:
        resume_hint = "" if self.folder is None else f"; to resume: {resume_argument(self.folder)}"
        problem = f"step {number}: {message} (checks.inputs.{check}=stop)"
        return DataError(f"{problem}; {FIXES[check]}{resume_hint}")

    def _count_skipped(self, number: int, skipped: bool) -> None:
        """Count consecutive skipped batches; raises DataError at MAX_SKIPPED of them."""
        if skipped:
            self.vetoed.append(number)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            self.skipped_in_a_row = 0
            problem = f"{MAX_SKIPPED} batches in a row were skipped by checks.inputs"
            raise DataError(f"step {number}: {problem}; debug/history.json lists why")
