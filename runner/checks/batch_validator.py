"""Acts on bad batches before their step: samples dropped, the update vetoed, or the run stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.checks.batch_stats import (
    VETOES,
    BatchChecks,
    BatchView,
    DeviceVeto,
    Finding,
    select_samples,
)
from runner.checks.config import Policy
from runner.data.batch import Batch
from runner.errors import DataError
from runner.record.history import History
from runner.record.text import resume_argument

LAG = 2  # steps after which the numbers of a batch on an accelerator are read
MAX_SKIPPED = 100  # batches in a row, then the run ends
MIN_SAMPLES = 2  # that must stay of a batch: BatchNorm has no variance of one
NAMED = 20  # samples that a message names
PRESCAN_VALUES = 1 << 24  # of data in memory that are scanned at once: 0.02 s
PRESCAN_PART = 1 << 22
WAYS_OUT = {
    "form": "correct the data, or give checks.inputs.schema.shape or dtype (or form: warn)",
    "not_finite": "correct these samples, or leave them out: checks.inputs.not_finite=drop",
    "range": "scale the data, or change checks.inputs.schema.low and high",
    "labels": "correct these labels, or leave the samples out: checks.inputs.labels=drop",
    "constant": "correct the data, or use checks.inputs.constant=off where it may be so",
}


@dataclass
class Outcome:
    """What was found in a step's batch and done about it."""

    number: int
    notes: list[tuple[Finding, str, str]] = field(default_factory=list)  # with message and action
    veto: bool = False


@dataclass(frozen=True)
class Pending:
    """The numbers of a batch on an accelerator, on their way to the host."""

    number: int
    view: BatchView
    values: Tensor
    veto: Tensor
    ready: torch.Event | None


class Prescan:
    """One pass over data in memory, after which no batch of sound data needs a check of its own."""

    def __init__(self, inputs: Tensor, target: Tensor, rows: np.ndarray, batch_size: int) -> None:
        self.inputs, self.target, self.rows = inputs, target, rows
        self.smallest = len(rows) % batch_size or batch_size
        self.versions: tuple[int, int] | None = None
        self.clean = False

    def is_clean(self, checks: BatchChecks) -> bool:
        """Whether no batch can have a finding, until a value is written into the data."""
        versions = (self.inputs._version, self.target._version)
        if self.versions is None:
            self.versions, self.clean = versions, self._scan(checks)
        return self.clean and versions == self.versions

    def _scan(self, checks: BatchChecks) -> bool:
        width = max(1, self.inputs[0].numel())
        if width * len(self.rows) > PRESCAN_VALUES:
            return False
        constant = 0
        for part in np.array_split(self.rows, -(-width * len(self.rows) // PRESCAN_PART)):
            rows = torch.from_numpy(part)
            batch = self.inputs.index_select(0, rows), self.target.index_select(0, rows)
            view = checks.view(batch)
            if checks.form_finding(view) or checks.findings(view, checks.measure(view).tolist()):
                return False
            samples = batch[0].reshape(len(part), -1)
            constant += int((samples == samples[:, :1]).all(1).sum()) if width > 1 else 0
        return constant < self.smallest or self.smallest == 1


class BatchValidator:
    """Checks each batch of a run and applies the policies of `checks.inputs`.

    A batch on the CPU is checked before it is moved, so no step is made of a bad one. One that a
    data set puts on an accelerator is reduced there: the flag that vetoes its update stays on the
    device, and the host reads the numbers two steps later.
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
        prescan: Prescan | None = None,
    ) -> None:
        self.checks, self.history, self.folder, self.device = checks, history, folder, device
        self.first_batch, self.indices, self.prescan = first_batch, indices, prescan
        self.host_type = "cpu"  # of devices whose values are read without waiting
        self.always, self.never = torch.ones((), device=device), torch.zeros((), device=device)
        self.outcome: Outcome | None = None  # of the batch that the loader handed over last
        self.veto: Tensor | None = None  # 1 where the current step's update must not be made
        self.vetoed: list[int] = []  # steps, until the guardian takes them
        self.pending: deque[Pending] = deque()
        self.device_veto: DeviceVeto | None = None
        self.late_stop: DataError | None = None
        self.skipped_in_a_row = 0

    # -- called by the loader ------------------------------------------------------------------

    def inspect(self, step: int, batch: Batch) -> Batch:
        """The batch of that step (0 is the first) as it goes on; DataError under policy: stop."""
        self.outcome = Outcome(step + 1)
        if self.prescan is not None and self.prescan.is_clean(self.checks):
            return batch
        if not self._on_host(batch):
            self.outcome = None
            return batch
        return self._validate(step, batch, self.outcome)

    def pruned(self, batch: Batch) -> Batch:
        """The batch without the samples that its step left out."""
        kept, keep = self._drop_samples(batch, self._find(batch))
        return batch if keep is None else self.pruned(kept)

    # -- called by the loop --------------------------------------------------------------------

    def admit(self, number: int, batch: Batch) -> Batch:
        """The batch that the step is made of; sets `veto`. DataError under policy: stop."""
        if self.pending or self.late_stop is not None:
            self._catch_up(number - LAG)
        if self.outcome is None or self.outcome.number != number:
            if not self._on_host(batch):
                return self._admit_on_device(number, batch)
            self.outcome = Outcome(number)
            batch = self._validate(number - 1, batch, self.outcome)
        outcome, self.outcome = self.outcome, None
        self.veto = self.always if outcome.veto else None
        for finding, message, action in outcome.notes:
            self._note(number, finding, message, action)
        self._count(number, outcome.veto)
        return batch

    def read(self, last: int) -> None:
        """Record the findings of batches on an accelerator, up to that step."""
        while self.pending and self.pending[0].number <= last:
            entry = self.pending.popleft()
            if entry.ready is not None:
                entry.ready.synchronize()  # waits for the start of that step, long since made
            self._record(entry)

    def take_vetoed(self) -> list[int]:
        """The steps whose update a check prevented, each once."""
        vetoed, self.vetoed = self.vetoed, []
        return vetoed

    def settle(self) -> None:
        """At the end of a run: read what is pending, and raise the stop that it may hold."""
        self._catch_up(2**62)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint; reads what is pending, which waits for the device."""
        self.read(2**62)
        return {"in_a_row": self.skipped_in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; what older versions kept beside it is not used."""
        self.skipped_in_a_row = int(state["in_a_row"])
        self.outcome, self.late_stop = None, None
        self.pending.clear()

    # -- on the host ---------------------------------------------------------------------------

    def _on_host(self, batch: Batch) -> bool:
        tensors = self.checks.view(batch).tensors.values()
        return all(tensor.device.type == self.host_type for tensor in tensors)

    def _find(self, batch: Batch) -> list[Finding]:
        view = self.checks.view(batch)
        if self.checks.reference is None:  # the first batch after a checkpoint may be a bad one
            self.checks.form_finding(self.checks.view(self.first_batch()))
        form = self.checks.form_finding(view)
        values = self.checks.measure(view).tolist() if view.plan.leaves else []
        findings = self.checks.findings(view, values) if values else []
        return [form, *findings] if form else findings

    def _validate(self, step: int, batch: Batch, outcome: Outcome) -> Batch:
        places: list[int] | None = None  # of the samples that are left, in the batch as it came
        while findings := self._find(batch):  # what is dropped may hide other findings
            messages = [(f, self._message(f, step, places)) for f in findings]
            batch, keep = self._drop_samples(batch, findings)
            if keep is None:
                return self._judge(step, batch, messages, outcome)
            dropped = [(f, message) for f, message in messages if self._drops(f)]
            outcome.notes += [(f, message, "left out") for f, message in dropped]
            stays = keep.nonzero().flatten().tolist()
            places = stays if places is None else [places[place] for place in stays]
        return batch

    def _judge(
        self, step: int, batch: Batch, messages: list[tuple[Finding, str]], outcome: Outcome
    ) -> Batch:
        """Stop, skip or warn; for a step to skip, a batch that can be computed without harm."""
        for finding, message in messages:
            if self.checks.policy(finding.check) is Policy.stop:
                self._note(step + 1, finding, message, "the run ends")
                raise self._stop_error(step + 1, finding.check, message)
        outcome.veto = any(self.checks.policy(f.check) in VETOES for f, _ in messages)
        action = "skipped" if outcome.veto else ""
        outcome.notes += [(finding, message, action) for finding, message in messages]
        if not outcome.veto:
            return batch
        if messages[0][0].check == "form":
            batch = self.first_batch()
            if self.checks.form_finding(self.checks.view(batch)) is not None:
                raise DataError(f"the first batch of the data: {messages[0][1]}")
        return self.checks.make_harmless(batch)

    def _drops(self, finding: Finding) -> bool:
        return self.checks.policy(finding.check) is Policy.drop and finding.bad is not None

    def _drop_samples(self, batch: Batch, findings: list[Finding]) -> tuple[Batch, Tensor | None]:
        """The batch without the bad samples, and which stay; None where none or too few would."""
        flags = [f.bad for f in findings if self._drops(f) and f.bad is not None]
        if not flags:
            return batch, None
        keep = ~torch.stack(flags).any(0)
        if bool(keep.all()) or int(keep.sum()) < min(MIN_SAMPLES, len(keep)):
            return batch, None
        return select_samples(batch, keep), keep

    def _message(self, finding: Finding, step: int, places: list[int] | None = None) -> str:
        """The finding with the samples at fault; without blanks, so that repeats are recognised."""
        if finding.bad is None:
            return finding.message
        bad = finding.bad.nonzero().flatten().tolist()
        every = self.indices(step)
        chosen = [place if places is None else places[place] for place in bad[:NAMED]]
        names = ",".join(str(every[place]) for place in chosen if place < len(every))
        more = ",…" if len(bad) > NAMED else ""
        return (
            f"{finding.message}, in {len(bad)} of {len(finding.bad)} samples "
            f"(of the data set: {names}{more})"
        )

    # -- on an accelerator ---------------------------------------------------------------------

    def _admit_on_device(self, number: int, batch: Batch) -> Batch:
        """Nothing is read: the flag goes into the update, the numbers to the host later."""
        checks, view = self.checks, self.checks.view(batch)
        if checks.form_finding(view) is not None:  # known from the shapes; this one is read
            self.outcome = Outcome(number)
            return self.admit(number, self._validate(number - 1, batch, self.outcome))
        self.veto = None
        if not view.plan.leaves:
            return batch
        values = checks.measure(view)
        if self.device_veto is None or self.device_veto.plan is not view.plan:
            self.device_veto = DeviceVeto(checks, view.plan, values.device, values.dtype)
        self.veto = self.device_veto(values, checks.may_be_constant(view))
        self._send(number, view, values)
        return checks.make_harmless(batch) if checks.policy("labels") in VETOES else batch

    def _send(self, number: int, view: BatchView, values: Tensor) -> None:
        veto = self.never if self.veto is None else self.veto
        packed, ready = torch.cat([values.reshape(-1), veto.reshape(1).to(values.dtype)]), None
        if packed.device.type != "cpu":
            pinned = packed.device.type == "cuda"
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=pinned)
            packed = host.copy_(packed, non_blocking=True)
            ready = torch.Event(values.device)
            ready.record()
        bare = BatchView({}, view.plan, view.samples, view.numel)
        self.pending.append(Pending(number, bare, packed[:-1], packed[-1:], ready))

    def _catch_up(self, last: int) -> None:
        self.read(last)
        if self.late_stop is not None:
            error, self.late_stop = self.late_stop, None
            raise error

    def _record(self, entry: Pending) -> None:
        skipped = bool(entry.veto.item() > 0)
        for finding in self.checks.findings(entry.view, entry.values.reshape(-1, 2).tolist()):
            if self.checks.policy(finding.check) is Policy.stop and self.late_stop is None:
                self.late_stop = self._stop_error(entry.number, finding.check, finding.message)
            self._note(entry.number, finding, finding.message, "skipped" if skipped else "")
        self._count(entry.number, skipped)

    # -- what is recorded ----------------------------------------------------------------------

    def _note(self, number: int, finding: Finding, message: str, action: str) -> None:
        check = finding.check
        if check == "not_finite":
            self.history.explain(number, message)
        stops = action == "the run ends"
        key = f"checks.inputs.{check}={self.checks.policy(check).value}"
        self.history.add(
            f"input_{check}",
            message,
            step=number,
            category="data",
            severity="error" if stops else "warning",
            action=action or f"the batch is trained on all the same ({key}); {WAYS_OUT[check]}",
            say=not stops,  # the error that ends the run says it
        )

    def _stop_error(self, number: int, check: str, message: str) -> DataError:
        then = "" if self.folder is None else f"; to go on: {resume_argument(self.folder)}"
        return DataError(
            f"step {number}: {message} (checks.inputs.{check}=stop); {WAYS_OUT[check]}{then}"
        )

    def _count(self, number: int, skipped: bool) -> None:
        """Count skipped batches in a row; a run that skips all of them ends."""
        if skipped:
            self.vetoed.append(number)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            self.skipped_in_a_row = 0
            raise DataError(
                f"step {number}: {MAX_SKIPPED} batches in a row were skipped by checks.inputs; "
                "debug/history.json lists what is wrong with them"
            )
