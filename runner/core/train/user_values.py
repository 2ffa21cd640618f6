"""Numbers that hooks, objectives, techniques and own loops log: rows of split `user`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from runner.core.device.device import copy_to_host
from runner.core.errors import UsageError
from runner.core.interfaces.hook import Evaluation, Hook, Verdict
from runner.core.interfaces.objective import rises_by_name
from runner.core.record.recorder import Recorder
from runner.core.record.storage import make_folder
from runner.core.record.summary import SUMMARY_FILE
from runner.core.schemas.monitoring import MonitoringConfig
from runner.core.train.step import call_hooks

if TYPE_CHECKING:
    from runner.core.interfaces.run import Run

SPLIT = "user"
OUR_COLUMNS = set(
    "step split nonfinite loss grad_norm lr epoch skipped samples_per_second tokens_per_second "
    "step_ms process_gib device_peak_gib cpu_percent ram_percent disk_free_gib swap_gib "
    "gpu_percent gpu_gib gpu_celsius gpu_mhz gpu_watt gpu_alloc_retries gpu_ooms".split()
)
# fields of the progress that a comparison with the best one changes
CRITERION_FIELDS = "best best_loss best_step stale_validations validated_step metrics".split()
OUR_SPLITS = ("train", "val", "test", "system", "usage", SPLIT)

Row = tuple[int, dict[str, Any]]  # step, and values by name: floats or 0-d tensors


class _Copy(NamedTuple):
    """Rows whose tensors are being copied to the host."""

    rows: list[Row]
    values: Tensor | None  # of the tensors in the rows, in order; None: they have none
    ready: torch.Event | None


class UserValues:
    """Collects logged numbers; those on a device are copied and read without a host wait."""

    def __init__(self) -> None:
        self.rows: list[Row] = []  # logged since the last copy
        self.copies: deque[_Copy] = deque()
        self.last: dict[str, float | Tensor] = {}  # latest values since the last validation
        self.names: set[str] = set()  # of all values so far
        self.open_step = 0  # the last step that has logged before its update; 0: none
        self.open_start = 0  # its first row in `rows`
        self.last_before: dict[str, float | Tensor] = {}  # `last` before that row

    def log(self, run: Run, values: Mapping[str, float | Tensor], step: int | None) -> None:
        """Add a row for `Run.log`."""
        if run.reader.ended:
            raise UsageError("log: the training has ended; log in a hook or objective")
        begun = run.progress.step == run.resumed_step + run.stopwatch.count
        number = run.progress.step + (begun and run.stopwatch.running)
        if run.progress.step < number != self.open_step:
            self.open_step, self.open_start = number, len(self.rows)
            self.last_before = dict(self.last)
        taken = run.objective.metric_names() or ()
        self.add(values, number if step is None else step, taken, keep=run.writes)

    def discard_open_step(self, made: int) -> None:
        """Discard what the step after `made`, which is tried again, has logged so far."""
        if self.open_step == made + 1:
            del self.rows[self.open_start :]
            self.last, self.open_step = self.last_before, 0

    def write(self, recorder: Recorder, wait: bool = False) -> None:
        """Record the rows that have arrived; with `wait`, all."""
        if wait:
            self.start_copy()
        for step, values in self.read(wait):
            recorder.scalars(step, SPLIT, values)

    def add(self, values: Any, step: Any, taken: Collection[str] = (), keep: bool = True) -> None:
        """Add a row, written with `keep`. UsageError for no number, a name of ours or `taken`."""
        if torch.compiler.is_compiling():
            raise UsageError("log: not from a compiled step; optimization.whole_step.enabled=false")
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise UsageError(f'log: takes names and numbers, {{"name": 0.5}}, got {values!r}')
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"log: step must be a whole number ≥ 0, got {step!r}")
        row = {name: _as_number(name, value) for name, value in values.items()}
        for name in row:
            _check_name(name, taken)
        if row:
            self.rows += [(step, row)] if keep else []
            self.last |= row
            self.names |= row.keys()

    def start_copy(self) -> None:
        """Start the copy of the rows so far to the host."""
        if not self.rows:
            return
        tensors = [x for _, row in self.rows for x in row.values() if isinstance(x, Tensor)]
        values = ready = None
        if tensors:
            device = tensors[0].device
            dtype = torch.float32 if device.type == "mps" else torch.float64
            stacked = torch.stack([x.to(device, dtype, non_blocking=True) for x in tensors])
            values, ready = copy_to_host(stacked)
        self.copies.append(_Copy(self.rows, values, ready))
        self.rows, self.open_start = [], 0

    def read(self, wait: bool = False) -> list[Row]:
        """Return the rows that have arrived, each once; with `wait`, all that were copied."""
        arrived: list[Row] = []
        while self.copies:
            copy = self.copies[0]
            if not (wait or copy.ready is None or copy.ready.query()):
                break
            self.copies.popleft()
            if copy.ready is not None:
                copy.ready.synchronize()  # host sync: a wait at the end or a validation alone
            # host sync: none, they have arrived
            numbers = iter([] if copy.values is None else copy.values.tolist())
            for step, row in copy.rows:
                values = {k: next(numbers) if isinstance(x, Tensor) else x for k, x in row.items()}
                arrived.append((step, values))
        return arrived

    def monitored(self, run: Run) -> dict[str, float]:
        """Return the monitored value at a validation, the same in all processes. Host sync.

        The latest since the validation before, else NaN, which is not the best; {} if it was never
        logged, not even by the `on_validation` of the first one.
        """
        name = run.monitor.removeprefix(f"{SPLIT}/")
        latest = self.last.get(name, math.nan)
        value = float(latest)  # host sync: once a validation
        is_late = run.progress.validated_step > 0 or run.progress.step >= run.total_steps
        is_known = name in self.names or not is_late
        value, is_known = run.gather((value, is_known))[0]
        return {run.monitor: value} if is_known else {}

    def end_validation(self) -> None:
        """Call after the hooks of a validation: later values are the next one's."""
        self.last = {}

    def state(self, made: int) -> dict[str, Any]:
        """Return what is not written yet, without the open step after `made`. Host sync."""
        open_rows: list[Row] = []
        last = self.last
        if self.open_step == made + 1:
            open_rows, last = self.rows[self.open_start :], self.last_before
            del self.rows[self.open_start :]
        self.start_copy()
        rows = self.read(wait=True)
        self.copies.appendleft(_Copy(rows, None, None))
        self.rows, self.open_start = open_rows, 0
        values = {name: float(x) for name, x in last.items()}  # host sync: a checkpoint
        return {"rows": rows, "last": values, "names": sorted(self.names)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with that state. Raises TypeError for one that `state` has not made."""
        numbered = [(step, dict(row)) for step, row in state["rows"]]
        for step, row in [*numbered, (0, dict(state["last"])), (0, dict.fromkeys(state["names"]))]:
            if type(step) is not int or step < 0 or not all(type(name) is str for name in row):
                raise TypeError("user: a row must have a whole number as its step, and names")
        for _, row in [*numbered, (0, dict(state["last"]))]:
            if not all(type(value) is float for value in row.values()):
                raise TypeError("user: the values of a row must be floats")
        self.copies.append(_Copy(numbered, None, None))
        self.last, self.names = dict(state["last"]), set(state["names"])


def call_logging_hooks(
    run: Run, evaluation: Evaluation, compare: Callable[[Run, Evaluation], Evaluation]
) -> tuple[Evaluation, list[Hook], Verdict]:
    """Call the user's `on_validation`, which may log the monitored value of this validation.

    They see a comparison with what is logged so far, which is reverted. Returns the evaluation with
    the value, if known, the hooks left to call, and the verdict of the others.
    """
    values, progress, measured = run.reader.user_values(), run.progress, evaluation.metrics
    ours = [hook for hook in run.hooks if type(hook).__module__.startswith("runner.")]
    before = replace(progress)
    metrics = {run.monitor: math.nan, **measured, **values.monitored(run)}
    provisional = compare(run, replace(evaluation, metrics=metrics))
    users = [hook for hook in run.hooks if hook not in ours]
    verdict = call_hooks(users, "on_validation", run, provisional)
    for name in CRITERION_FIELDS:
        setattr(progress, name, getattr(before, name))
    evaluation = replace(evaluation, metrics={**measured, **values.monitored(run)})
    values.end_validation()
    return evaluation, ours, verdict


class LoopRecord:
    """Rows that an own training loop logs, written to a folder after those of an earlier one.

    Raises UsageError without a folder, and for that of a run.
    """

    def __init__(self, caller: str, folder: Path | None, closed: bool = False) -> None:
        if folder is None or closed:
            problem = "it is closed" if closed else f"it has no folder; give {caller}(…, folder=…)"
            raise UsageError(f"log: {problem}")
        if (folder / SUMMARY_FILE).exists():
            raise UsageError(f"{caller}: folder={folder} is that of a run; log into another one")
        make_folder(folder)
        self.values, self.closed = UserValues(), False
        self.recorder = Recorder(folder, MonitoringConfig())
        self.recorder.open(append=True)

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        """Add a row. Raises UsageError for what `UserValues.add` refuses, and once closed."""
        if self.closed:
            raise UsageError("log: it is closed")
        self.values.add(values, step)

    def write(self, wait: bool = False) -> None:
        """Write the rows that have arrived; with `wait`, all."""
        self.values.start_copy()
        self.values.write(self.recorder, wait)

    def close(self) -> None:
        """Write all rows, and close the files."""
        self.write(wait=True)
        self.recorder.close()
        self.closed = True


def _as_number(name: str, value: Any) -> float | Tensor:
    """Return the value, detached and copied; a tensor of the host is read at once."""
    if isinstance(value, Tensor) and not value.ndim and not value.is_complex():
        value = value.detach()
        # host sync: none, a tensor of the host is read
        return float(value) if value.device.type == "cpu" else value.clone()
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            raise UsageError(f"log: {name} is too large for a float") from None
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise UsageError(f"log: {name} must be a number or a 0-d tensor, got {got}")


def _check_name(name: str, taken: Collection[str]) -> None:
    is_ours = name in OUR_COLUMNS or name in taken or rises_by_name(name) is not None
    if is_ours or name.partition("/")[0] in OUR_SPLITS or not name.strip("/ "):
        fix = f"{SPLIT}/ is added to it; use another one, such as my_{name.rpartition('/')[2]}"
        raise UsageError(f"log: {name!r} is a name of the run's own record; {fix}")
