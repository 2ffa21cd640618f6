"""Measurements of the processes of a run, for its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from runner.core.device import memory
from runner.core.interfaces.hook import Evaluation, Hook
from runner.core.interfaces.run import Run
from runner.core.techniques.flops import peak_flops
from runner.core.techniques.model_calls import enter_contexts
from runner.core.techniques.probe import OperatorObserver
from runner.core.train.step import forward_backward
from runner.core.train.timing import Stopwatch
from runner.scale.distributed.world import World, world_of

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}
"""Collective by name of the dispatcher's operator."""


class ProcessStats(Hook):
    """Measures waiting within steps, and describes the processes at the end."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Measure during the session; after an error describe this process alone."""
        world = world_of(run)
        if world is None:
            raise ValueError("a run of one process")
        world.clock = partial(_count_waiting, run.stopwatch)
        try:
            yield
        except BaseException:
            run.distributed = describe_processes(run, world, gathered=False)
            raise
        run.distributed = describe_processes(run, world)

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """Write waiting and memory of each process to TensorBoard's group `ranks`."""
        if run.is_shared:
            memories = memory.peak_process_bytes(), memory.peak_device_bytes(run.device) or 0
            by_rank = run.world.all_gather((_waiting_share(run), *(n / 2**20 for n in memories)))
            names = ("waiting", "peak_process_mib", "peak_device_mib")
            for rank, values in enumerate(by_rank):
                scalars = {f"{rank}/{name}": x for name, x in zip(names, values, strict=True) if x}
                run.recorder.show(evaluation.step, "ranks", scalars)


@contextmanager
def _count_waiting(watch: Stopwatch) -> Iterator[None]:
    """Count the time within as waiting, and exclude it from the enclosing phase."""
    if not watch.running:
        yield
        return
    start = perf_counter()
    watch.mark_wait("")  # the enclosing phase ends later
    try:
        yield
    finally:
        seconds = perf_counter() - start
        watch.phase_seconds["waiting"] += seconds
        watch.now += seconds
        watch.mark_wait("waiting")


def describe_processes(run: Run, world: World, gathered: bool = True) -> dict[str, Any]:
    """Return measurements of each process, and totals.

    `communication` is the mean share of a step spent waiting: in calls of `World` within steps
    (host clock on a CPU, device clock on CUDA), and under DDP in the part of the all-reduce that
    backward does not overlap (DDP's clock). Waiting of fsdp and synchronised BatchNorm within
    forward and backward counts there. `imbalance` is max / mean of the time for data and forward,
    which usually precede the first wait. `mfu` is the share of the data sheet's peak FLOP/s
    (Chowdhery et al. 2022), without recomputation; None on a CPU.

    With `gathered=False` a process describes only itself.
    """
    own = _describe_process(run, world)
    ranks = world.all_gather(own) if gathered else [own]
    work = [rank["work_ms"] for rank in ranks]
    communication = mean(rank["communication"] for rank in ranks)
    stats = {**world.describe(), "communication": communication, "ranks": ranks}
    if gathered:
        stats["imbalance"] = max(work) / mean(work) if any(work) else None
        for key in ("samples_per_second", "peak_process_bytes", "peak_device_bytes"):
            stats[key] = sum(rank[key] for rank in ranks)
        for key in ("flops_per_second", "peak_flops_per_second"):
            known = [rank[key] for rank in ranks if rank[key]]
            stats[key] = sum(known) if len(known) == len(ranks) else None
        stats["mfu"] = _mfu(stats)
    return stats


def _describe_process(run: Run, world: World) -> dict[str, Any]:
    """Describe this process; its throughput counts its own part of each batch."""
    communication = _waiting_share(run)
    step, batch = run.stopwatch.throughput(None), run.train.batch_size
    part, step_ms = world.local_slice(batch), _mean_step_ms(run)
    work = step.split.get("data", 0.0) + step.split.get("forward", 0.0)
    speed = step.samples_per_second * (part.stop - part.start) / batch
    peak = peak_flops(run.device, _matmul_dtype(run), measure=False)
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
        "mfu": _mfu(flops),
        "step_ms": step.step_ms.p50,
        "work_ms": work * step_ms,
        "communication": communication,
        "exposed_ms": run.stopwatch.exposed_share * step_ms,
        "split": step.split,
        "peak_process_bytes": memory.peak_process_bytes(),
        "peak_device_bytes": memory.peak_device_bytes(run.device),
        "faults": dict(run.history.counts),
    }


def _mfu(flops: Mapping[str, float | None]) -> float | None:
    achieved, peak = flops["flops_per_second"], flops["peak_flops_per_second"]
    return achieved / peak if achieved and peak else None


def _matmul_dtype(run: Run) -> torch.dtype:
    with enter_contexts(run.contexts):
        if torch.is_autocast_enabled(run.device.kind):
            return torch.get_autocast_dtype(run.device.kind)
    return next(run.model.parameters()).dtype


def _mean_step_ms(run: Run) -> float:
    """Return the mean of the timed steps; 0 before the first was read."""
    seconds = run.stopwatch.settled_step_seconds()
    return 1e3 * float(seconds.mean()) if len(seconds) else 0.0


def _waiting_share(run: Run) -> float:
    """Return the share of a step spent waiting; updates the stopwatch's exposed share."""
    step_ms = _mean_step_ms(run)
    run.stopwatch.exposed_share = _exposed_ms(run) / step_ms if step_ms else 0.0
    return run.stopwatch.throughput(None).split.get("waiting", 0.0)


def _exposed_ms(run: Run) -> float:
    """Return the milliseconds of DDP's backward that only wait for communication."""
    if not isinstance(run.forward, DistributedDataParallel):
        return 0.0
    facts: Any = run.forward._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    communication_ns: int = facts.get("avg_backward_comm_time", 0)
    overlapped_ns: int = facts.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, communication_ns - overlapped_ns) / 1e6


def count_collectives(run: Run) -> dict[str, dict[str, int]]:
    """Count the calls of each collective in a step, and the bytes of their results.

    All processes make the step on the current batch, without the update.
    """
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def count_call(operator: Any, output: Any) -> None:
        namespace, _, name = operator.name().partition("::")
        if namespace == "c10d":
            name = COLLECTIVES.get(name, name)
            calls[name] += 1
            sizes[name] += _output_bytes(output)

    compiled = run.compilation is not None
    parameters = [*run.model.parameters(), *run.update.parameters]
    gradients = [parameter.grad for parameter in parameters]
    phase_seconds = dict(run.stopwatch.phase_seconds)
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            with OperatorObserver(count_call):
                forward_backward(run, run.train.at(run.progress.step))
    finally:
        run.update.abandon()
        run.stopwatch.phase_seconds = phase_seconds  # this step does not count
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return {"collectives": dict(calls), "collective_bytes": dict(sizes)}


def _output_bytes(output: Any) -> int:
    if isinstance(output, Tensor):
        return output.nbytes
    return sum(map(_output_bytes, output)) if isinstance(output, list | tuple) else 0
