"""FSDP2: each process has a shard of every weight, gradient and optimizer state.

Blocks are gathered for forward and backward. Else a process has only its rows, as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _BatchNorm

from runner.core.checkpoint.shards import has_rows
from runner.core.checkpoint.snapshot import DTYPES
from runner.core.errors import ConfigError, UsageError
from runner.core.interfaces.batch import Batch, slice_rows
from runner.core.interfaces.technique import Evidence, Technique
from runner.core.optim.optimizer import is_torch_class
from runner.core.schemas.training import MICRO_BATCH
from runner.core.techniques.model_calls import enter_contexts
from runner.core.techniques.probe import repeated_blocks
from runner.scale.distributed.process_stats import count_collectives
from runner.scale.distributed.world import World, world_of

if TYPE_CHECKING:
    from runner.core.interfaces.run import Run
    from runner.core.interfaces.technique import RunBuilder

T = TypeVar("T")

KEY = "distributed"
ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD",
    "Rprop",
}  # fmt: skip
"""Optimizers with an elementwise update."""

FULL_PRECISION = (nn.Embedding, nn.EmbeddingBag, _BatchNorm)
"""Layers with weights that stay in 32 bits under autocast, as does the block around them."""
BF16_POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
"""Policy of blocks under bf16 AMP: gathered in 16 bits (half the bytes), gradients summed in 32.

With autocast alone, a 16-bit copy of each gathered weight would live until its backward, so that
each process would hold the whole model after all. Tensors between a block's layers that autocast
keeps in 32 bits are in 16 here; fp16 lacks the range for that.
"""


@dataclass(frozen=True)
class RowRange:
    """The rows of a weight that a process holds."""

    shape: torch.Size  # of the full weight
    start: int
    rows: int

    def select(self, tensor: Tensor) -> Tensor:
        """Return these rows of a full tensor; a tensor of just these rows is returned unchanged."""
        if tensor.shape == self.shape:
            return tensor[self.start : self.start + self.rows]
        if tensor.shape == (self.rows, *self.shape[1:]):
            return tensor
        raise ValueError(f"a tensor of {list(tensor.shape)} for a weight of {list(self.shape)}")


class Shards:
    """This process's rows of every weight, sharing memory with the sharded model."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.weights = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
        parts: list[Any] = [weight.detach() for weight in self.weights]
        self.local_rows = nn.ParameterList(
            nn.Parameter(part.to_local(), weight.requires_grad)
            for part, weight in zip(parts, self.weights, strict=True)
        )
        self.row_ranges = [_row_range(weight) for weight in self.weights]
        self._indices = {id(weight): n for n, weight in enumerate(self.weights)}
        state = model.state_dict(keep_vars=True)
        self.names = {name for name, value in state.items() if id(value) in self._indices}

    @property
    def is_lost(self) -> bool:
        """Whether those of a process that has ended are missing."""
        return self.world.lost

    def by_name(self, remove_duplicate: bool = True) -> dict[str, Tensor]:
        """Return the rows of each weight by the model's parameter names."""
        named = nn.Module.named_parameters(self.model, remove_duplicate=remove_duplicate)
        numbers = ((n, self._indices.get(id(p))) for n, p in named)
        return {name: self.local_rows[number] for name, number in numbers if number is not None}

    def clear_gradients(self) -> None:
        """Clear the sharded gradients before a step."""
        for weight in self.weights:
            weight.grad = None

    def set_local_gradients(self) -> None:
        """Set the rows' gradients after the backward."""
        for weight, own in zip(self.weights, self.local_rows, strict=True):
            gradient: Any = weight.grad
            own.grad = None if gradient is None else gradient.to_local()

    def all_agree(self, sound: bool) -> bool:
        """Whether `sound` is true on all processes."""
        return not self.world.all_reduce_max(int(not sound))[0]  # host sync: none, a bool

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state_dict, with this process's rows of sharded weights."""
        state = self.model.state_dict(keep_vars=True)
        rows = {name: self.local_rows[self._indices[id(state[name])]] for name in self.names}
        return {**state, **{name: own.detach() for name, own in rows.items()}}

    @torch.no_grad()
    def load(self, model: Mapping[str, Any]) -> None:
        """Load a state of the full model or of these rows. Raises if it does not fit."""
        state = self.model.state_dict(keep_vars=True)
        if model.keys() != state.keys():
            differing = sorted(model.keys() ^ state.keys())
            raise KeyError(f"the model's weights differ: {differing[0]}")
        others = {name: value for name, value in model.items() if name not in self.names}
        self.model.load_state_dict(others, strict=False)
        for name in self.names:
            number = self._indices[id(state[name])]
            self.local_rows[number].copy_(self.row_ranges[number].select(model[name]))

    def select_update_rows(
        self, update: Mapping[str, Any], trained: list[Tensor]
    ) -> dict[str, Any]:
        """Return an update's state with only these rows of full tensors."""
        number = {id(own): n for n, own in enumerate(self.local_rows)}
        row_ranges = [self.row_ranges[number[id(weight)]] for weight in trained]
        optimizer = update["optimizer"]
        state = {
            n: {k: row_ranges[n].select(v) if has_rows(v) else v for k, v in entries.items()}
            for n, entries in optimizer["state"].items()
        }
        pairs = zip(row_ranges, update["average"], strict=False)
        average = [row_range.select(tensor) for row_range, tensor in pairs]
        return {**update, "optimizer": {**optimizer, "state": state}, "average": average}

    def map_micro_batches(
        self, batch: Batch, samples: int, size: int, own: int, compute: Callable[[Batch], T]
    ) -> list[T]:
        """Return the results of `compute` on each micro-batch of this process's `own` samples.

        `own` is at most its part of `samples`; it is smaller if samples were left out.
        `compute` is called equally often by all processes, since each provides its shards; a call
        without samples of its own gets a stand-in, and its result is dropped.
        """
        parts = self.world.micro_batch_slices(samples, size, own)
        filled = [part.stop > part.start for part in parts]
        results = [
            compute(slice_rows(batch, part if has_samples else slice(0, 1)))
            for part, has_samples in zip(parts, filled, strict=True)
        ]
        return [each for each, has_samples in zip(results, filled, strict=True) if has_samples]

    def count_moved(self) -> int:
        """Return how many shards no longer share memory with the updated rows."""
        pairs = zip(self.model.parameters(), self.local_rows, strict=True)
        return sum(
            not isinstance(weight, DTensor) or weight.to_local().data_ptr() != own.data_ptr()
            for weight, own in pairs
        )


@dataclass
class FsdpTechnique(Technique):
    """Shards the repeated blocks one by one, and the rest of the model as one more unit.

    Of several micro-batches only the last backward sends gradients; until then a process holds
    those of the whole model, but for `distributed.no_sync=false` and after out of memory.
    """

    modules: int = 0
    modules_in_bf16: int = 0  # of these, modules gathered in 16 bits

    def apply(self, builder: RunBuilder) -> None:
        """Shard the model in place; parameter names are unchanged."""
        world, model = world_of(builder), builder.model
        if world is None:
            return
        _check_shardable(builder)
        if world.config.sync_batchnorm:
            from runner.scale.distributed.batchnorm import synchronise_batchnorm

            synchronise_batchnorm(builder)
        kind = builder.device.kind
        with enter_contexts(builder.contexts):
            bf16 = torch.is_autocast_enabled(kind)
            bf16 = bf16 and torch.get_autocast_dtype(kind) is torch.bfloat16
        self.modules_in_bf16 = shard(model, init_device_mesh(kind, (world.size,)), bf16)
        self.modules = sum(isinstance(module, FSDPModule) for module in model.modules())
        world.shards = Shards(model, world)
        world.validation_forward = partial(_validate_forward, model, world)
        if world.config.no_sync and MICRO_BATCH not in builder.recorded:  # else memory has run out
            world.no_sync = partial(_without_reduction, model)

    def engaged(self, run: Run) -> Evidence:
        """Compare the bytes that a process keeps with its expected share."""
        shards, update = cast("Shards | None", run.shards), run.update
        if shards is None:
            return Evidence(False, "there is one process")
        tensors_kept, full_bytes, expected_bytes = list(update.average), 0, 0
        for weight, own in zip(shards.weights, shards.local_rows, strict=True):
            gradient: Any = weight.grad
            moments = [t for t in update.optimizer.state.get(own, {}).values() if has_rows(t)]
            tensors = [own, *moments, *([] if gradient is None else [gradient.to_local()])]
            tensors_kept += tensors
            averaged = len(update.average) > 0 and own.requires_grad
            row_bytes = weight[0].numel() * weight.itemsize * (len(tensors) + averaged)
            full_bytes += len(weight) * row_bytes
            # as FSDP assigns rows: the last processes may have fewer, or none
            rows_per_rank = -(-len(weight) // shards.world.size)
            rows_left = max(0, len(weight) - shards.world.rank * rows_per_rank)
            expected_bytes += min(rows_per_rank, rows_left) * row_bytes
        moved = shards.count_moved()
        problem = f"{moved} weights are not in the memory that is updated" if moved else ""
        evidence = {
            "sharded_bytes": sum(t.nbytes for t in tensors_kept),
            "predicted_bytes": expected_bytes,
            **count_collectives(run),
            "whole_bytes": full_bytes,
            "modules": self.modules,
            "modules_in_16_bits": self.modules_in_bf16,
        }
        return Evidence(not moved, problem, evidence)


def shard(model: nn.Module, mesh: DeviceMesh, bf16: bool) -> int:
    """Shard the model by its blocks; return how many are gathered in 16 bits (if `bf16`)."""
    count = 0
    for block in repeated_blocks(model):
        policy = MixedPrecisionPolicy()
        if bf16 and not any(isinstance(each, FULL_PRECISION) for each in block.modules()):
            policy, count = BF16_POLICY, count + 1
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    return count


def _validate_forward(model: Any, world: World, *args: Any, **kwargs: Any) -> Any:
    """Call the model for validation; gathered weights are freed, since the weights will change."""
    with world.translate_lost():
        output = model(*args, **kwargs)
    model.reshard()
    return output


@contextmanager
def _without_reduction(model: Any) -> Iterator[None]:
    """While entered, backward accumulates full gradients and sends nothing."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _row_range(weight: DTensor) -> RowRange:
    local, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return RowRange(weight.shape, min(offset[0], weight.shape[0]), local[0])


def _check_shardable(builder: RunBuilder) -> None:
    cls = builder.optimizer_class
    if cls.__name__ not in ELEMENTWISE or not is_torch_class(cls):
        problem = f"{cls.__name__} may need whole weights, but fsdp shards them"
        raise ConfigError("optimizer", problem, "use AdamW, or distributed=ddp")
    if builder.forward is not builder.model:
        raise UsageError("distributed: a technique has replaced the model's forward; disable it")
    for name, weight in builder.model.named_parameters():
        if weight.ndim == 0 or weight.dtype not in DTYPES:
            problem = f"fsdp cannot shard {name}, {list(weight.shape)} of {weight.dtype}"
            raise ConfigError(KEY, problem, "use distributed=ddp")
