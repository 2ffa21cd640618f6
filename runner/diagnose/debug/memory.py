"""The memory of a run by module, and the objects that grow in a leak."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy

from runner.core.device import memory, resources
from runner.core.device.leaks import describe_leaks
from runner.core.errors import OutOfMemory
from runner.core.format import count_noun
from runner.core.interfaces.hook import Report
from runner.core.interfaces.nested import tensors
from runner.core.interfaces.run import Run
from runner.core.record import markdown
from runner.core.record.history import Fault
from runner.core.record.library_files import private_folder
from runner.core.record.storage import make_folder, replace_text
from runner.core.schemas.debug import DebugConfig
from runner.diagnose.debug.tool import DebugTool

log = logging.getLogger("runner")

FILE = "debug/memory.json"
SNAPSHOT, OOM_FILE = "debug/memory_snapshot.pickle", "debug/out_of_memory.md"
BATCH, LOSS = "(batch)", "(loss)"
MIB = 2**20
ROWS = 30  # of a table, the largest modules
PARTS = ("parameters", "gradients", "optimizer", "average", "buffers", "activations")
LEAKS_NOT_WATCHED = "leaks are not watched for (stability.watch.leaks)"
MAX_EVENTS = 100_000  # allocator events to keep
MAX_REPORTED = 8  # growing kinds that are reported
MAX_POINTS = 256  # of the time line; of more, every other one is dropped
MIN_GROWTH = 16  # minimum increase that counts as growth


class MemoryTool(DebugTool):
    """Breaks down a step's memory by module, and names growing objects after a leak.

    It inspects a step of a full batch, which runs uncompiled, and counts the tensors saved for
    backward by module. The next inspection follows at twice the step, or when the micro-batch
    changes. Numbers change only in the last bits, where the run's own steps are compiled.
    """

    name = "memory"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.memory.every)
        self.breakdown: MemoryBreakdown | None = None
        self.micro_batch = 0  # of the breakdown
        self.run: Run | None = None
        self.next_inspection = 0  # the first full batch from this step on is inspected
        self.object_counts: ObjectCounts | None = None  # at the first inspection
        self.leak = ""  # verdict at the end of the run
        self.growth: list[Growth] = []
        self.fault_counts: dict[str, int] = {}  # counts at the last check
        self.timeline: list[dict[str, int]] = []  # bytes at the end of a report, by step
        self.timeline_stride = 1  # reports between two points

    def state(self) -> dict[str, Any]:
        """Return the last inspection, and the step of the next one."""
        breakdown = None if self.breakdown is None else asdict(self.breakdown)
        return {
            "account": breakdown,
            "grown": [asdict(growth) for growth in self.growth],
            "next": self.next_inspection,
            "micro_batch": self.micro_batch,
            "stride": self.timeline_stride,
            "timeline": self.timeline,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Inspect at the same steps."""
        if (account := state["account"]) is not None:
            rows = [ModuleMemory(**row) for row in account["rows"]]
            self.breakdown = MemoryBreakdown(**{**account, "rows": rows})
        self.growth = [Growth(**growth) for growth in state["grown"]]
        self.next_inspection, self.micro_batch = state["next"], state["micro_batch"]
        self.timeline, self.timeline_stride = state.get("timeline", []), state.get("stride", 1)

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record the allocator's history; write the findings at the end."""
        self.run, self.fault_counts = run, dict(run.history.counts)
        if self.breakdown is None:  # a resumed run knows when the next one is
            following = (run.progress.step // self.every + 1) * self.every
            self.next_inspection = min(following, run.total_steps)
        snapshots = run.device.kind == "cuda" and self.config.memory.snapshot
        if snapshots:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
        try:
            yield
        except OutOfMemory as error:
            self._dump_snapshot(run)
            write_oom_report(run, str(error), self.breakdown)
            raise
        finally:
            self._write_verdict(run)
            if snapshots:
                torch.cuda.memory._record_memory_history(enabled=None)

    def due(self, step: int) -> bool:
        """Whether to inspect the step: a full batch from `next_inspection` on, or a run's last."""
        if self.run is None or step < self.next_inspection or self.is_resting(step):
            return False
        train = self.run.train
        last = step == self.run.total_steps and self.breakdown is None
        return last or train.samples(step - 1) >= train.batch_size

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Count the tensors that forward and backward hold."""
        weights = [*run.model.parameters(), *run.model.buffers(), *run.update.average]
        saved, micro_batch = SavedTensors(run.model, weights), run.micro_batch
        with memory.peak_memory(run.device) as peak, saved.count_saved():
            yield
        if run.micro_batch != micro_batch:  # out of memory and retried: two steps in one
            return
        breakdown = measure_breakdown(run, saved)
        breakdown.peak = peak.on_device - peak.on_device_before
        self.inspections += 1
        self.object_counts = self.object_counts or count_objects()
        self.breakdown, self.micro_batch = breakdown, run.micro_batch
        self.next_inspection = max(2 * breakdown.step // self.every, 1) * self.every
        totals = {part: breakdown.total(part) / MIB for part in PARTS}
        sizes = ", ".join(f"{part} {size:.3g}" for part, size in totals.items() if size)
        samples, full = run.train.samples(breakdown.step - 1), run.train.batch_size
        largest = max(breakdown.rows, key=lambda row: row.activations)
        most = f" (most in {largest.name})" if largest.activations else ""
        self.finding = f"MiB: {sizes}{most}, in a batch of {samples} of {full} samples"
        run.recorder.text("memory/account", breakdown.table(), breakdown.step)
        run.recorder.show(breakdown.step, "memory/account", totals)
        self._dump_snapshot(run)
        self._write(run)

    def on_report(self, run: Run, report: Report) -> None:
        """Add to the time line; name growing objects if a leak was found since the last report."""
        if report.last // run.report_every % self.timeline_stride == 0:
            self.timeline.append({"step": report.last, **_sizes(run)})
        if len(self.timeline) > MAX_POINTS:
            del self.timeline[::2]
            self.timeline_stride *= 2
        if self.breakdown is not None:  # also of a process before this one
            self.object_counts = self.object_counts or count_objects()
        if self.breakdown is not None and run.micro_batch != self.micro_batch:
            self.next_inspection = 0  # the breakdown is outdated
        if self._has_new_fault(run, "leak"):
            self.inspections += 1
            self._report_growth(run, report.last)
        if self._has_new_fault(run, "out_of_memory"):
            reason = "A step ran out of memory; its micro-batch was reduced and the run continues."
            self.inspections += 1
            write_oom_report(run, reason, self.breakdown)

    def _has_new_fault(self, run: Run, kind: str) -> bool:
        """Whether the history counts more faults of that kind than at the last call."""
        before, now = self.fault_counts.get(kind, 0), run.history.counts.get(kind, 0)
        self.fault_counts[kind] = now
        return now > before

    # -- findings ------------------------------------------------------------------------------

    def _report_growth(self, run: Run, step: int) -> None:
        if self.object_counts is None:
            return
        gc.collect()
        self.growth = find_growth(self.object_counts, count_objects())
        text = "no Python object count grew: a library leaks, or the heap is fragmented"
        if all(kind == "workers" for kind, detector in run.leaks.items() if detector.leaking):
            self.growth = []
            text = "objects of data workers are not counted; with data.workers=0 they are"
        if self.growth:
            text = "growing objects: " + "; ".join(map(str, self.growth[:2]))
        fault = _last_leak(run)
        if fault is not None:
            fault.action = text
        log.warning("step %d: leak: %s", step, text)
        run.history.unwritten = True
        run.recorder.text("memory/grown", "\n".join(f"- {g}" for g in self.growth) or text, step)
        self._dump_snapshot(run)
        self._write(run)

    def _write_verdict(self, run: Run) -> None:
        self.leak = describe_leaks(run.leaks) if run.leaks else LEAKS_NOT_WATCHED
        fault = _last_leak(run)
        if fault is not None:
            rate = fault.message.partition(" (")[0]
            self.finding = self.leak = "; ".join([rate, *map(str, self.growth[:1])])
        else:
            self.finding = "; ".join(filter(None, [self.finding, self.leak]))
        self._write(run)

    def _dump_snapshot(self, run: Run) -> None:
        """Write the CUDA allocator's history, for pytorch.org/memory_viz."""
        if run.device.kind != "cuda" or not self.config.memory.snapshot or run.folder is None:
            return
        try:
            with private_folder((run.folder / SNAPSHOT).parent, owned=True) as folder:
                path = str(folder / Path(SNAPSHOT).name)
                torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            log.warning("no snapshot of the allocator: %s", error)

    def _write(self, run: Run) -> None:
        record = {
            "account": None if self.breakdown is None else asdict(self.breakdown),
            "leak": self.leak,
            "grown": [asdict(growth) for growth in self.growth],
            "timeline": self.timeline,
        }
        self.write_json(run.folder, FILE, record)


def _sizes(run: Run) -> dict[str, int]:
    """Return the memory in use, in bytes; of an accelerator without a host sync."""
    sizes = {
        "process": memory.process_bytes(),
        "virtual": memory.status_bytes("VmSize") or 0,
        "swap": memory.status_bytes("VmSwap") or 0,
    }
    if run.device.kind != "cpu":
        sizes["device_peak"] = memory.peak_device_bytes(run.device)
    if run.device.kind == "cuda":
        sizes["device"] = torch.cuda.memory_allocated(run.device.torch)
        sizes["device_reserved"] = torch.cuda.memory_reserved(run.device.torch)
    return sizes


def _last_leak(run: Run) -> Fault | None:
    return next((f for f in reversed(run.history.faults.values()) if f.kind == "leak"), None)


ObjectCounts = tuple[Counter[str], Counter[str]]
"""Number of live objects by kind, as tracked by the garbage collector; bytes of tensors."""


@dataclass(frozen=True)
class Growth:
    """A kind of objects whose number has grown."""

    kind: str
    more: int
    bytes: int = 0  # of tensors

    def __str__(self) -> str:
        size = f", {self.bytes / MIB:,.1f} MiB" if self.bytes else ""
        return f"{self.more:,} more {self.kind}{size}"


def count_objects() -> ObjectCounts:
    """Count tensors by shape and dtype, other objects by class; 50 ms for 200,000."""
    from torch._subclasses.fake_tensor import FakeTensor  # not to be imported when memory is short

    number, size = Counter[str](), Counter[str]()
    for item in gc.get_objects():
        # a lazy parameter has no shape yet; the compiler's fake tensors hold no memory, and their
        # sizes may be symbols
        if not issubclass(type(item), Tensor):
            number[f"objects of type {type(item).__qualname__}"] += 1
        elif type(item) is not FakeTensor and not is_lazy(item):
            with suppress(RuntimeError):  # one that is not defined has no dtype
                dtype = str(item.dtype).removeprefix("torch.")
                kind = f"tensors {list(item.shape)} {dtype} on {item.device}"
                number[kind] += 1
                size[kind] += item.numel() * item.element_size()
    return number, size


def find_growth(before: ObjectCounts, now: ObjectCounts) -> list[Growth]:
    """Return the kinds that grew most: tensors by bytes, then others by number."""
    more, size = (new - old for new, old in zip(now, before, strict=True))
    grown = [Growth(kind, count, size[kind]) for kind, count in more.items() if count >= MIN_GROWTH]
    return sorted(grown, key=lambda growth: (-growth.bytes, -growth.more))[:MAX_REPORTED]


# -- a step by module -----------------------------------------------------------------------------


@dataclass
class ModuleMemory:
    """Bytes of one module's own tensors, excluding its children."""

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0  # averaged weights (optimizer.ema)
    buffers: int = 0  # and their copies for the guard
    activations: int = 0  # saved for backward, of one micro-batch

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, part) for part in PARTS)


@dataclass
class MemoryBreakdown:
    """A step's memory in bytes, by module; shared storages count at the first module."""

    step: int
    samples: int  # of a micro-batch
    rows: list[ModuleMemory] = field(default_factory=list)
    peak: int = 0  # peak device memory in the step, beyond that before it

    def total(self, part: str) -> int:
        """Bytes of one part over all modules."""
        return sum(getattr(row, part) for row in self.rows)

    def table(self) -> str:
        """Return a Markdown table in MiB of the largest modules and the total."""
        total = ModuleMemory("all", "", **{part: self.total(part) for part in PARTS})
        cells = []
        ranked = sorted(self.rows, key=lambda row: -row.total_bytes)
        for row in (*(row for row in ranked[:ROWS] if row.total_bytes), total):
            sizes = [*(getattr(row, part) for part in PARTS), row.total_bytes]
            cells.append((row.name, row.kind, *(f"{n / MIB:.3f}" if n else "" for n in sizes)))
        return markdown.table(("module", "class", *PARTS, "MiB in all"), cells)


class SavedTensors:
    """Counts tensors saved for backward, by the innermost running module.

    Only the root module's first forward and its loss count: the first micro-batch, since one is
    held at a time.
    """

    def __init__(self, model: nn.Module, excluded: Iterable[Tensor]) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.counted_storages = {storage_key(tensor) for tensor in excluded}
        self.bytes: dict[str, int] = {}
        self.samples = 0
        self.module_stack: list[str] = []
        self.forward_began = self.forward_done = False

    @contextmanager
    def count_saved(self) -> Iterator[None]:
        """Count within this context; model and graph are not changed."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self.model:
            self.forward_done = self.forward_done or self.forward_began
            if not self.forward_done:
                self.forward_began = True
                for tensor in tensors(inputs):
                    self.samples = self.samples or (len(tensor) if tensor.ndim else 0)
                    self._count(tensor, BATCH)
        if id(module) in self.names:
            self.module_stack.append(self.names[id(module)])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) in self.names and self.module_stack:
            self.module_stack.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.forward_done:
            self._count(tensor, self.module_stack[-1] if self.module_stack else LOSS)
        return tensor

    def _count(self, tensor: Tensor, name: str) -> None:
        key = storage_key(tensor)
        if key not in self.counted_storages:
            self.counted_storages.add(key)
            self.bytes[name] = self.bytes.get(name, 0) + storage_bytes(tensor)


def measure_breakdown(run: Run, saved: SavedTensors | None = None) -> MemoryBreakdown:
    """Return the memory of a step that still has gradients; without `saved`, no activations."""
    update, activations = run.update, {} if saved is None else saved.bytes
    result = MemoryBreakdown(run.progress.step + 1, saved.samples if saved else 0)
    averages = dict(zip(map(id, update.parameters), update.average, strict=False))
    seen: set[int] = set()

    def count(values: Iterable[Any]) -> int:
        total = 0
        for tensor in values:
            if isinstance(tensor, Tensor) and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                total += storage_bytes(tensor)
        return total

    for name, module in run.model.named_modules():
        row = ModuleMemory(name or "(model)", type(module).__name__)
        params = list(module.parameters(recurse=False))
        row.parameters = count(params)
        row.gradients = count(p.grad for p in params)
        row.optimizer = count(v for p in params for v in update.optimizer.state.get(p, {}).values())
        row.average = count(averages.get(id(p)) for p in params)
        row.buffers = count(module.buffers(recurse=False))
        row.activations = activations.get(name, 0)
        result.rows.append(row)
    for name, kind in ((BATCH, "inputs"), (LOSS, type(run.objective).__name__)):
        if size := activations.get(name, 0):
            result.rows.append(ModuleMemory(name, kind, activations=size))
    if copies := count(update.buffers.saved):
        result.rows.append(ModuleMemory("(guard)", "copies of buffers", buffers=copies))
    return result


def storage_key(tensor: Tensor) -> int:
    """Return an identity of its storage, valid while the storage lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of its storage; of a sparse tensor, of its values."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.element_size() * tensor._nnz()


def write_oom_report(run: Run, reason: str, breakdown: MemoryBreakdown | None = None) -> None:
    """Write debug/out_of_memory.md: memory by module, largest first.

    Errors here are logged, since the run's own error matters. Without the breakdown of an earlier
    step, the current memory is shown.
    """
    if run.folder is None:
        return
    try:
        text = _oom_page(run, reason, breakdown)
        make_folder((run.folder / OOM_FILE).parent)
        replace_text(run.folder / OOM_FILE, text)
        run.recorder.text("memory/out_of_memory", text, run.progress.step)
        log.warning("what holds the memory is in %s", run.folder / OOM_FILE)
    except Exception as error:  # memory is short, and models vary
        log.warning("no %s: %s: %s", OOM_FILE, type(error).__name__, error)


def _oom_page(run: Run, reason: str, breakdown: MemoryBreakdown | None) -> str:
    room = resources.tightest_memory_limit()
    limit = f"Limit: {room.limit / MIB:,.0f} MiB ({markdown.escape(room.name)}); "
    limit += f"{room.left / MIB:,.0f} MiB free after the step was aborted."
    if run.device.kind != "cpu":
        limit += f" The device has {run.device.memory_bytes / MIB:,.0f} MiB."
    title = "## By module, MiB"
    if breakdown is not None:
        title += f", at step {breakdown.step} with {count_noun(breakdown.samples, 'sample')}"
    table = (breakdown or measure_breakdown(run)).table()
    parts = ["# Out of memory", markdown.escape(reason), limit, title, table]
    return "\n\n".join(parts) + "\n"
