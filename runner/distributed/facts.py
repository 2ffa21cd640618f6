"""What the processes of a run took, for its summary."""

from __future__ import annotations

from typing import Any

from runner.device import memory
from runner.distributed.world import World
from runner.training.run import Run


def describe_processes(run: Run, world: World) -> dict[str, Any]:
    """What each process took, and the share of the time that they waited for each other."""
    step = run.watch.throughput(None)
    own = {
        "rank": world.rank,
        "host": world.host,
        "device": str(run.device.torch),
        "peak_process_bytes": memory.peak_process_bytes(),
        "peak_device_bytes": memory.peak_device_bytes(run.device),
        "step_ms": step.step_ms.p50,
        "split": step.split,
        "waited_s": world.seconds,
        "faults": dict(run.history.counts),
    }
    ranks = world.gather(own)
    return {
        "kind": world.kind,
        "world_size": world.size,
        "backend": world.backend,
        "attempt": world.place.attempt,
        "ranks": ranks,
    }
