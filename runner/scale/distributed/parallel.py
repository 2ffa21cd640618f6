"""Wrap a run's model in DistributedDataParallel, and collect evidence that it is in effect."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from runner.core.errors import RestartRequired, UsageError
from runner.core.execution.recovery import halve_micro_batch
from runner.core.interfaces.technique import Evidence, Technique
from runner.core.schemas.device import Compression, DistributedKind
from runner.core.schemas.training import MICRO_BATCH
from runner.core.techniques.cost import forward_cost
from runner.scale.distributed.process_stats import count_collectives
from runner.scale.distributed.world import refuse_lost, world_of

if TYPE_CHECKING:
    from runner.core.interfaces.run import Run
    from runner.core.interfaces.technique import RunBuilder
    from runner.scale.distributed.world import World

NamedTechniques = list[tuple[str, Technique]]


def parallelise(builder: RunBuilder) -> NamedTechniques:
    """Set up the model for training by all processes; return the techniques by name."""
    builder.recoveries[:] = [refuse_lost, restart_smaller, restart_uncompiled]
    if builder.forward is not builder.model:
        raise UsageError("distributed: a technique has replaced the model's forward; disable it")
    world = cast("World", builder.world)
    world.shards = world.validation_forward = world.usable_samples = None
    world.no_sync, world.trained_weights = nullcontext, []
    world.sample_flop = _sample_flop(builder)
    if world.config.kind is DistributedKind.ddp:
        ddp = DdpTechnique(True)
        ddp.apply(builder)
        techniques: NamedTechniques = [("ddp", ddp)]
        if world.config.compression is not Compression.none:
            techniques.append(("gradient_compression", GradientCompression(True, ddp=ddp)))
        return techniques
    from runner.scale.distributed.sharded import FsdpTechnique

    fsdp = FsdpTechnique(True)
    fsdp.apply(builder)
    return [("fsdp", fsdp)]


def _sample_flop(builder: RunBuilder) -> float | None:
    """Return FLOPs per sample of forward and backward (3 × forward), without recomputation."""
    try:
        forward = forward_cost(builder).mflop * 1e6 / builder.micro_batch
    except Exception:  # a model may not run on a few samples
        return None
    return 3 * forward if isfinite(forward) else None


def restart_smaller(run: Run, error: Exception) -> bool:
    """After out of memory, restart all processes with a smaller micro-batch.

    The others wait in the middle of this step; only the end of this process can stop them.
    """
    if not halve_micro_batch(run, error):
        return False
    reason = next(choice.reason for choice in run.choices if choice.key == MICRO_BATCH)
    raise RestartRequired(reason, {MICRO_BATCH: run.micro_batch})


def restart_uncompiled(run: Run, error: Exception) -> bool:
    """After a compiler failure, restart all processes uncompiled, for the same reason."""
    if run.compilation is None or not run.compilation.mode:
        return False
    from runner.core.techniques import compile, compiler

    if not compiler.is_compiler_error(error):
        return False
    reason = f"the compiler failed: {compiler.log_compiler_error(error)}"
    raise RestartRequired(f"{reason}; set {compile.ENABLED}=false", {compile.ENABLED: False})


@dataclass
class DdpTechnique(Technique):
    """DDP: each process has the whole model; gradients are averaged during backward."""

    module: DistributedDataParallel | None = None

    def apply(self, builder: RunBuilder) -> None:
        """Wrap the model's call; its parameter names are unchanged."""
        world = world_of(builder)
        if world is None:
            return
        if world.config.sync_batchnorm:
            from runner.scale.distributed.batchnorm import synchronise_batchnorm

            synchronise_batchnorm(builder)
        # harmless for 1x1 convolutions in channels_last, whose two strides describe one layout
        builder.scope.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
        cuda, unused = builder.device.kind == "cuda", world.config.unused_parameters
        self.module = DistributedDataParallel(
            builder.model,
            device_ids=[builder.device.torch.index] if cuda else None,
            bucket_cap_mb=world.config.bucket_mb,  # floats are accepted
            gradient_as_bucket_view=True,
            find_unused_parameters=unused,
        )
        if world.config.compression is Compression.bf16:
            self.module.register_comm_hook(None, bf16_compress)
        builder.forward = self.module
        parameters = builder.model.named_parameters()
        world.trained_weights = [(n, p) for n, p in parameters if p.requires_grad and not unused]
        world.validation_forward = builder.model
        if world.config.no_sync:
            world.no_sync = self.module.no_sync

    def engaged(self, run: Run) -> Evidence:
        """Return the bucket statistics, and whether all processes have equal gradients."""
        if self.module is None or not run.is_shared:
            return Evidence(False, "there is one process")
        facts: Any = self.module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        sums = [gradient.double().sum() for gradient in gradients]
        values = torch.stack(sums).tolist() if sums else []  # host sync: evidence, once per run
        same = all(other == values for other in run.world.all_gather(values))
        sizes = str(facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes", ""))
        # host sync: none, text
        buckets = [int(size) for size in sizes.split(",") if size.strip()]
        comm_ns = facts.get("avg_backward_comm_time", 0)
        overlap_ns = facts.get("avg_backward_compute_comm_overlap_time", 0)
        evidence = {
            "buckets": len(buckets),
            "backward_comm_ms": round(comm_ns / 1e6, 2),
            "overlap_ms": round(overlap_ns / 1e6, 2),
            "bucket_bytes": sum(buckets),
            **count_collectives(run),
        }
        return Evidence(same, "" if same else "gradients differ between processes", evidence)


@dataclass
class GradientCompression(Technique):
    """Gradients are sent and summed in bfloat16, with half the bytes."""

    ddp: DdpTechnique | None = None

    def apply(self, builder: RunBuilder) -> None:
        """No-op: `DdpTechnique` registers the hook."""

    def engaged(self, run: Run) -> Evidence:
        """Return the name of DDP's communication hook."""
        module = None if self.ddp is None else self.ddp.module
        facts: Any = {} if module is None else module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        hook = facts.get("comm_hook", "")
        engaged = "bf16" in hook
        return Evidence(engaged, "" if engaged else "no hook is registered", {"hook": hook})


def bf16_compress(state: Any, bucket: Any) -> Any:
    """Torch's hook under another name, which DDP accepts without CUDA; gloo can sum bf16."""
    return default_hooks.bf16_compress_hook(state, bucket)


bf16_compress.__annotations__.clear()  # DDP compares annotations with classes; these are strings
