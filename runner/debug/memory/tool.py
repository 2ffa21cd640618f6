"""Where the memory of a run is: over time, by module, as predicted, and what grows."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch

from runner.debug.config import DebugConfig
from runner.debug.memory import account as accounts
from runner.debug.memory import census as censuses
from runner.debug.memory import plots as plots_memory
from runner.debug.memory import prediction
from runner.debug.memory.account import PARTS, Account, Saved
from runner.debug.memory.census import Census, Growth
from runner.debug.memory.timeline import Timeline
from runner.debug.oom_report import write_report
from runner.debug.tool import Tool
from runner.device import phases
from runner.device.leaks import describe_leaks
from runner.errors import OutOfMemory
from runner.hook import Evaluation, Report
from runner.predict import Live, Prediction
from runner.record import markdown
from runner.record.history import Fault
from runner.run import Run
from runner.storage import replace_text

log = logging.getLogger("runner")

FILE = "debug/memory.json"
SNAPSHOT = "debug/memory_snapshot.pickle"
MIB = 2**20
KINDS = ("tensors", "items", "objects")
NOT_WATCHED = "leaks are not watched for (stability.watch.leaks)"
SHOW_S = 0.5  # between two points in TensorBoard


class MemoryTool(Tool):
    """A time line, the account of a step by module, and what grows where there is a leak.

    At a look a step of a full batch runs uncompiled, and what it keeps for its backward is counted
    by module. The next one is at twice as many steps, or when steps are cut otherwise. Nothing of
    it changes a number of the run, but for last bits where the run's own steps are compiled.
    """

    name = "memory"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.memory.every)
        self.timeline = Timeline()
        self.account: Account | None = None
        self.predicted: Prediction | None = None
        self.micro_batch = 0  # that the account is of
        self.next_look = self.every  # the account is of the first full batch from this step on
        self.samples: Callable[[int], int] = lambda step: 0  # in the batch of a step, from 0 on
        self.partial = ""  # what to say where all of the run's batches are
        self.first: Census | None = None
        self.leak = ""  # what there is to say of one, once the run has ended
        self.grown: list[Growth] = []
        self.leaks = self.shortages = 0  # that were there when last looked
        self.shown = 0.0
        self.usual = 0.0  # seconds of a step
        self.snapshots = False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Follow the allocator; write down at the end what there was."""
        self.leaks = run.history.counts.get("leak", 0)
        self.shortages = run.history.counts.get("out_of_memory", 0)
        self._place(run)
        phases.restart(run.device)
        self.snapshots = run.device.kind == "cuda" and self.config.memory.snapshot
        if self.snapshots:
            torch.cuda.memory._record_memory_history(
                max_entries=self.config.memory.snapshot_entries, stacks="python"
            )
        try:
            yield
        except OutOfMemory as error:
            self._snapshot(run)
            write_report(run, str(error), self.account)
            raise
        finally:
            if self.snapshots:
                torch.cuda.memory._record_memory_history(enabled=None)
            self._conclude(run)

    def _place(self, run: Run) -> None:
        """Find the first look: a full batch from `every` on, else an earlier one, else any."""
        self.samples, begun, last = run.train.samples, run.progress.step, run.total_steps
        due = (begun // self.every + 1) * self.every
        later, earlier = range(due, last + 1), range(min(due, last), begun, -1)
        first = next((step for step in chain(later, earlier) if self._full(step)), None)
        if first is None:
            rows = f"{self.samples(last - 1)} of {self.samples(0)} samples"
            self.partial = f"of a partial batch, {rows}: the run has no full one"
        self.next_look = first or last

    def _full(self, step: int) -> bool:
        return self.samples(step - 1) >= self.samples(0)

    def due(self, step: int) -> bool:
        """A step of a full batch from `next_look` on."""
        if step < self.next_look or self.rests(step):
            return False
        return self._full(step) or bool(self.partial)

    def around(self, run: Run) -> AbstractContextManager[None]:
        """Count what forward and backward hold."""
        return self._counting(run)

    @contextmanager
    def _counting(self, run: Run) -> Iterator[None]:
        known = [*run.model.parameters(), *run.model.buffers(), *run.update.average]
        saved, live = Saved(run.model, known), Live()
        for gone in (p for p in run.update.parameters if p.grad is not None):
            gone.grad = None  # as the step itself begins; they would be counted as there already
        live.leave_out(iter(known))
        began, cut = time.perf_counter(), run.micro_batch
        with phases.peak(run.device) as peak, ExitStack() as stack:
            stack.enter_context(saved.counting())
            if run.device.kind == "cpu":  # the heap does not tell what it holds and what is free
                stack.enter_context(live)
            yield
        self.seconds += max(0.0, time.perf_counter() - began - self.usual)
        if run.micro_batch != cut:  # it did not fit and was tried again: two steps in one
            return
        with self.looking():
            try:
                account = accounts.take(run, saved)
            except Exception as error:  # tensors of a kind that keep no storage, perhaps
                log.warning("no account of the memory: %s: %s", type(error).__name__, error)
                self.next_look = run.total_steps + 1
                return
            on_device = peak.on_device - peak.on_device_before
            account.peak = live.peak if run.device.kind == "cpu" else on_device
            self._keep(run, account)

    def _keep(self, run: Run, account: Account) -> None:
        if self.account is None:
            self._predict(run)
            if self.config.memory.census:
                self.first = censuses.take(collect=False)
        self.account, self.micro_batch = account, run.micro_batch
        self.next_look = max(2 * account.step // self.every, 1) * self.every
        self._show_account(run, account)
        self._snapshot(run)
        self._write(run)

    def on_report(self, run: Run, report: Report) -> None:
        """A point of the time line; name what grows, where a leak was found since."""
        start = time.perf_counter()
        self.usual = report.seconds / len(report.loss)
        point = self.timeline.add(report.last, run.device, "training")
        if self.account is not None and run.micro_batch != self.micro_batch:
            self.next_look = 0  # the account is of other steps
        now = time.monotonic()
        if now - self.shown > SHOW_S and not self.rests(report.last):
            self.shown = now
            values = {"process_mib": point.process / MIB, "peak_mib": point.process_peak / MIB}
            if run.device.kind != "cpu":
                values |= {
                    "device_mib": point.device / MIB,
                    "device_peak_mib": point.device_peak / MIB,
                    "device_reserved_mib": point.reserved / MIB,
                }
            run.recorder.show(report.last, "memory", values)
        self.seconds += time.perf_counter() - start
        counts = run.history.counts
        if counts.get("leak", 0) > self.leaks:
            self.leaks = counts["leak"]
            with self.looking():
                self._name_leak(run, report.last)
        if counts.get("out_of_memory", 0) > self.shortages:
            self.shortages = counts["out_of_memory"]
            with self.looking():
                write_report(
                    run, "A step did not fit; it was cut smaller and the run goes on.", self.account
                )

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """The most that was held since the last report was, most likely, for this."""
        self.timeline.add(evaluation.step, run.device, "validation")

    # -- what was found --------------------------------------------------------------------------

    def _predict(self, run: Run) -> None:
        try:
            found = prediction.of_run(run)
            self.predicted = found if found.saved >= 0 else None  # too far extrapolated
        except Exception as error:  # whatever a model raises that cannot be traced
            log.debug("no prediction of the memory: %s", error)

    def _name_leak(self, run: Run, step: int) -> None:
        if self.first is None:
            return
        self.grown = censuses.compare(self.first, censuses.take())
        if not self.grown:
            told = "no Python object became more: it is in a library, or the heap has holes"
        else:
            foremost = {growth.kind: growth for growth in reversed(self.grown)}  # of each kind
            said = [str(foremost[kind]) for kind in KINDS if kind in foremost]
            told = "what grew: " + "; ".join(said)
        fault = _leak(run)
        if fault is not None:
            fault.action = told
        log.warning("step %d: leak: %s", step, told)
        run.history.unwritten = True
        rows = [(g.kind, g.what, f"{g.more:,}", _mib(g.bytes)) for g in self.grown]
        text = markdown.table(("", "what", "more", "MiB"), rows)
        run.recorder.text("memory/grown", f"{told}\n\n{text}", step)
        self._snapshot(run)
        self._write(run)

    def _show_account(self, run: Run, account: Account) -> None:
        header, rows = accounts.table(account, self.config.memory.rows)
        text = markdown.table(header, rows)
        rows = [
            (name, _mib(there), "" if said is None else _mib(said))
            for name, there, said in accounts.beside(account, self.predicted)
        ]
        text += "\n\n" + markdown.table(("MiB", "measured", "predicted"), rows)
        run.recorder.text("memory/account", text, account.step)
        values = {part: account.total(part) / MIB for part in PARTS}
        run.recorder.show(account.step, "memory/account", values)
        self._sum_up(account)

    def _sum_up(self, account: Account) -> None:
        parts = [f"{name} {account.total(name) / MIB:.3g}" for name in PARTS if account.total(name)]
        most = max(account.rows, key=lambda row: row.activations)
        self.finding = f"MiB: {', '.join(parts)}"
        if most.activations:
            self.finding += f" (most in {most.name})"
        self.finding += f" {self.partial}" if self.partial else ""

    def _conclude(self, run: Run) -> None:
        if not self.timeline.points:
            return
        self.leak = describe_leaks(run.leaks) if run.leaks else NOT_WATCHED
        if run.history.counts.get("leak"):
            fault = _leak(run)
            rate = "a leak" if fault is None else fault.message.partition(" (")[0]
            self.finding = self.leak = "; ".join([rate, *map(str, self.grown[:1])])
        else:
            self.finding = "; ".join(filter(None, [self.finding, self.leak]))
        start, last = time.perf_counter(), run.progress.step
        if self.account is not None:
            shown = plots_memory.modules(self.account.largest(10), PARTS)
            self._picture(run, "memory_modules", shown)
        self._picture(run, "memory", plots_memory.timeline(*self.timeline.lines(), last, "MiB"))
        rows = [(name, _mib(peak)) for name, peak in self.timeline.phases.items()]
        text = markdown.table(("phase", "MiB at most"), rows)
        run.recorder.text("memory/phases", text, run.progress.step)
        self._write(run)
        self.seconds += time.perf_counter() - start

    def _picture(self, run: Run, name: str, rgb: Any) -> None:
        run.recorder.image(f"memory/{name.removeprefix('memory_')}", rgb, run.progress.step)
        run.recorder.save_image(f"debug/plots/{name}.png", rgb)

    def _snapshot(self, run: Run) -> None:
        """What the CUDA allocator did lately; its picture is on pytorch.org/memory_viz."""
        if not self.snapshots or run.folder is None:
            return
        try:
            (run.folder / SNAPSHOT).parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(run.folder / SNAPSHOT))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            log.warning("no snapshot of the allocator: %s", error)
            self.snapshots = False

    def _write(self, run: Run) -> None:
        if run.folder is None:
            return
        found: dict[str, Any] = {
            "account": None if self.account is None else asdict(self.account),
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "leak": self.leak,
            "grown": [asdict(growth) for growth in self.grown],
            **self.timeline.as_dict(),
        }
        path = run.folder / FILE
        try:
            path.parent.mkdir(exist_ok=True)
            replace_text(path, json.dumps(found) + "\n")
        except OSError as error:
            log.warning("%s is not written: %s", FILE, error)


def _leak(run: Run) -> Fault | None:
    """The newest."""
    return next((f for f in reversed(run.history.faults.values()) if f.kind == "leak"), None)


def _mib(count: int) -> str:
    return f"{count / MIB:,.3f}" if count else ""
