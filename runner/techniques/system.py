"""The process around the model: threads, memory that is kept, numbers too small to count."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.cost import describe_forward, forward_mflop
from runner.techniques.probe import dry_run_step
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@dataclass
class System(Technique):
    """Settings of the process and of the device's libraries that cost nothing.

    On a CPU: one thread for a model too small to share out, and one fewer for each core that
    somebody else keeps busy; denormals are zero; freed memory stays for the next step. On a GPU:
    cuDNN tries its kernels (unless device.deterministic), and segments of memory grow. The
    knobs of the `device` group go before all of this.
    """

    small_mflop: float = 30.0  # a forward below this is not worth sharing out
    neighbours: bool = True  # leave cores that are busy to those who are there
    flush_denormals: bool = True  # numbers below 1e-38 are zero
    keep_memory: bool = True  # what is freed is not given back to the system at each step
    cudnn_benchmark: bool = True
    expandable_segments: bool = True

    def __post_init__(self) -> None:
        if self.small_mflop < 0:
            raise ConfigError("optimization.system.small_mflop", "is negative", "use 0 or more")

    def unavailable(self, device: Device) -> str | None:
        """Metal has none of these switches, and its kernels do not run in the CPU's threads."""
        return "there is nothing to set on mps" if device.kind == "mps" else None

    def apply(self, draft: RunBuilder) -> str | None:
        """Set what is not named in the `device` group, and note what could not be had."""
        from runner.device import allocator, denormals, numerics

        notes: dict[str, str | None] = {}
        if draft.device.kind == "cpu":
            if draft.threads_asked is None:
                self._set_threads(draft)
            if self.flush_denormals:
                notes["denormals"] = denormals.flush(draft.scope)
            if self.keep_memory:
                notes["allocator"] = allocator.keep_freed_memory(draft.scope)
        else:
            if self.expandable_segments:
                notes["expandable_segments"] = allocator.expand_segments(draft.scope)
            if self.cudnn_benchmark and _deterministic():
                notes["cudnn_benchmark"] = "device.deterministic: it picks kernels by timing"
            elif self.cudnn_benchmark:
                numerics.set_cudnn_benchmark(True, draft.scope)
        if not notes and draft.threads_asked is not None:
            return "device.threads decides, and the rest of it is switched off"
        draft.remarks["system"] = {
            f"{name}_left_alone": why for name, why in notes.items() if why is not None
        }
        return None

    def _set_threads(self, draft: RunBuilder) -> None:
        import torch

        before = torch.get_num_threads()
        threads = draft.choose("device.threads", lambda: self._threads(draft, before))
        if threads != before:
            draft.scope.callback(torch.set_num_threads, before)
            torch.set_num_threads(threads)

    def _threads(self, draft: RunBuilder, most: int) -> tuple[int, str]:
        """Threads wait for each other by spinning: where operators are tiny they only wait.

        And the slowest is waited for, which is the one that shares its core with a neighbour.
        """
        from runner.device import capabilities, process

        size = describe_forward(draft)
        if forward_mflop(draft) < self.small_mflop:
            return 1, f"{size}, too little to share out"
        reason = f"{size}, enough to share out"
        if not self.neighbours:
            return most, reason
        if _deterministic():  # the number of threads decides the last bits of a sum
            return most, f"{reason}; device.deterministic: other processes are not considered"
        if most == 1:
            return 1, f"{reason}, but torch has only one thread here"
        busy = process.busy_cores()
        threads = process.free_threads(most, busy)
        if threads < most:
            cores = len(capabilities.allowed_cores() or ()) or most
            reason += f"; there are {cores} cores, {busy:.1f} of them busy with other processes"
        return threads, reason

    def engaged(self, run: Run) -> Evidence:
        """What is set, read back from the process; page faults are those of a rehearsed step."""
        from runner.device import allocator, denormals

        settings = run.device.settings
        facts: dict[str, Any] = {
            key: settings[key] for key in ("threads", "interop_threads", "affinity", "priority")
        }
        facts["waiting"] = {key: os.environ[key] for key in WAITING if key in os.environ} or "spin"
        facts["allocator"] = allocator.name()
        facts |= run.remarks.get("system", {})
        missing, in_force = [], []
        if run.device.kind == "cpu":
            for choice in run.choices:
                if choice.key == "device.threads":
                    in_force.append("threads")
                    if choice.value != facts["threads"]:
                        missing.append(f"{facts['threads']} threads, not the {choice.value} chosen")
            if self.flush_denormals:
                facts["denormals_are_zero"] = denormals.flushed()
                if facts["denormals_are_zero"]:
                    in_force.append("denormals")
                elif "denormals_left_alone" not in facts:
                    missing.append("denormals are not zero in every thread")
            if self.keep_memory and "allocator_left_alone" not in facts:
                in_force.append("memory")
            for _ in range(2):  # what is kept settles
                dry_run_step(run)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            dry_run_step(run)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            facts["page_faults_per_step"] = after - before
        else:
            facts["cudnn_benchmark"] = settings["cudnn_benchmark"]
            if self.cudnn_benchmark and "cudnn_benchmark_left_alone" not in facts:
                in_force.append("cudnn_benchmark")
                if not facts["cudnn_benchmark"]:
                    missing.append("cudnn.benchmark is off")
            facts["memory_fraction"] = settings["memory_fraction"]
            growing, segments = allocator.expandable_segments()
            facts["expandable_segments"], facts["segments"] = growing, segments
            if growing:
                in_force.append("expandable_segments")
        if not in_force:
            missing.append("none of its settings is in force")
        return Evidence(not missing, "; ".join(missing), facts)


def _deterministic() -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled()
