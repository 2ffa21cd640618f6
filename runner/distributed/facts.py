"""Time, memory and throughput of the processes of a run, for its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from runner.device import memory
from runner.distributed.world import World
from runner.parity.flops import peak_flops
from runner.training.hook import Evaluation, Hook
from runner.training.run import Run
from runner.training.timing import Stopwatch


class Processes(Hook):
    """Hook that times waits within steps and describes the processes at the end."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Set `run.distributed` at the end; after an error, from this process alone."""
        world = run.world
        if world is None:
            raise ValueError("a run of one process")
        world.clock = partial(_waiting, run.watch)
        try:
            yield
        except BaseException:
            run.distributed = describe_processes(run, world, together=False)
            raise
        run.distributed = describe_processes(run, world)

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """Show waiting and peak memory of each process in TensorBoard's group `ranks`."""
        if run.world is not None:
            memories = memory.peak_process_bytes(), memory.peak_device_bytes(run.device) or 0
            each = run.world.gather((_waiting_share(run), *(size / 2**20 for size in memories)))
            names = ("waiting", "peak_process_mib", "peak_device_mib")
            for rank, values in enumerate(each):
                shown = {f"{rank}/{name}": x for name, x in zip(names, values, strict=True) if x}
                run.recorder.show(evaluation.step, "ranks", shown)


@contextmanager
def _waiting(watch: Stopwatch) -> Iterator[None]:
    """Count the time inside as the step's phase `waiting`, and in no other phase."""
    if not watch.running:
        yield
        return
    start = perf_counter()
    if watch.sampling:
        watch.marks.append(("", watch.mark()))  # the enclosing phase ends later
    try:
        yield
    finally:
        waited = perf_counter() - start
        watch.spent["waiting"] += waited
        watch.now += waited
        if watch.sampling:
            watch.marks.append(("waiting", watch.mark()))


def describe_processes(run: Run, world: World, together: bool = True) -> dict[str, Any]:
    """Return facts of each process, and their totals.

    `communication` is the share of a step spent waiting, averaged over processes: calls of `World`
    within steps, by the host's clock on a CPU and the device's on CUDA, and under DDP the part of
    the all-reduce that the backward does not hide, by DDP's own clock. Waits of fsdp and
    synchronised BatchNorm within forward and backward count as those phases. `imbalance` is the
    largest time of data and forward, which usually precede the first wait, over its mean. `mfu` is
    the reached share of the data sheet's peak FLOP/s (Chowdhery et al. 2022, without
    recomputation); None on a CPU, which has no such peak.

    Without `together` a process describes itself alone.
    """
    ranks = world.gather(_own(run, world)) if together else [_own(run, world)]
    work = [rank["work_ms"] for rank in ranks]
    facts = {
        **world.describe(),
        "communication": mean(rank["communication"] for rank in ranks),
        "ranks": ranks,
    }
    if together:
        facts["imbalance"] = max(work) / mean(work) if any(work) else None
        for key in ("samples_per_second", "peak_process_bytes", "peak_device_bytes"):
            facts[key] = sum(rank[key] for rank in ranks)
        for key in ("flops_per_second", "peak_flops_per_second"):
            known = [rank[key] for rank in ranks if rank[key]]
            facts[key] = sum(known) if len(known) == len(ranks) else None
        facts["mfu"] = _share(facts)
    return facts


def _own(run: Run, world: World) -> dict[str, Any]:
    """Return the facts of this process; throughput is that of its own part of each batch."""
    communication = _waiting_share(run)
    step, batch = run.watch.throughput(None), run.train.samples(0)
    part, usual_ms = world.part(batch), _usual_ms(run)
    work = step.split.get("data", 0.0) + step.split.get("forward", 0.0)
    speed = step.samples_per_second * (part.stop - part.start) / batch
    peak = peak_flops(run.device, _product_type(run), measure=False)
    flops = {
        "flops_per_second": world.sample_flop and world.sample_flop * speed,
        "peak_flops_per_second": None if peak is None else peak.flops_per_second,
    }
    return {
        "rank": world.rank,
        "host": world.host,
        "device": str(run.device.torch),
        "samples_per_second": speed,
        **flops,
        "mfu": _share(flops),
        "step_ms": step.step_ms.p50,
        "work_ms": work * usual_ms,
        "communication": communication,
        "exposed_ms": run.watch.exposed * usual_ms,
        "split": step.split,
        "peak_process_bytes": memory.peak_process_bytes(),
        "peak_device_bytes": memory.peak_device_bytes(run.device),
        "faults": dict(run.history.counts),
    }


def _share(flops: Mapping[str, float | None]) -> float | None:
    reached, peak = flops["flops_per_second"], flops["peak_flops_per_second"]
    return reached / peak if reached and peak else None


def _product_type(run: Run) -> torch.dtype:
    """Return the dtype of matrix products in a step."""
    with ExitStack() as stack:
        for context in run.contexts:
            stack.enter_context(context())
        if torch.is_autocast_enabled(run.device.kind):
            return torch.get_autocast_dtype(run.device.kind)
    return next(run.model.parameters()).dtype


def _usual_ms(run: Run) -> float:
    return 1e3 * float(run.watch.settled_laps().mean()) if run.watch.count else 0.0


def _waiting_share(run: Run) -> float:
    """Return the share of waiting in a step; sets `watch.exposed`, on which it depends."""
    usual_ms = _usual_ms(run)
    run.watch.exposed = _exposed_ms(run) / usual_ms if usual_ms else 0.0
    return run.watch.throughput(None).split.get("waiting", 0.0)


def _exposed_ms(run: Run) -> float:
    """Return the ms of all-reduce that a backward does not overlap; 0 without DDP."""
    if not isinstance(run.forward, DistributedDataParallel):
        return 0.0
    facts: Any = run.forward._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sending: int = facts.get("avg_backward_comm_time", 0)
    hidden: int = facts.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, sending - hidden) / 1e6
