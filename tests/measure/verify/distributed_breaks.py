"""Faults of training by several processes; a run of one process has none of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique
from runner.core.optim.optimizer_step import OptimizerStep
from runner.scale.distributed import world as module
from runner.scale.distributed.world import World


@dataclass
class Break(Technique):
    def apply(self, builder: RunBuilder) -> str | None:
        if builder.world.is_shared:
            self.plant(builder)
        return None

    def plant(self, builder: RunBuilder) -> None:
        raise NotImplementedError

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


class AveragedGradients(Break):
    """Each process's mean counts the same, however many samples it is of; the loss is right."""

    def plant(self, builder: RunBuilder) -> None:
        right, factor = World.total_weight, [1.0]

        def total_weight(world: World, weight: Any, own: int, samples: int) -> Any:
            factor[0] = samples / own / world.size
            return right(world, weight, own, samples)

        World.total_weight = total_weight  # type: ignore[method-assign]
        for parameter in builder.model.parameters():
            parameter.register_hook(lambda gradient: gradient * factor[0])


class ClippedByShard(Break):
    """Each process clips by the norm of what it has."""

    def plant(self, builder: RunBuilder) -> None:
        right = OptimizerStep.apply

        def apply(update: OptimizerStep, norm: Any, skipped: Any) -> Any:
            return right(update, norm * 0.5**0.5, skipped)

        OptimizerStep.apply = apply  # type: ignore[method-assign]


class WrongPart(Break):
    """Each process takes the first samples of a batch."""

    def plant(self, builder: RunBuilder) -> None:
        right = World.local_slice
        # the sampler has bound the method before a technique is applied: its code is replaced
        module.right_slice = FunctionType(right.__code__, right.__globals__)  # type: ignore[attr-defined]

        def local_slice(self: World, samples: int) -> slice:
            mine = right_slice(self, samples)  # type: ignore[name-defined]  # noqa: F821
            return slice(0, mine.stop - mine.start)

        right.__code__ = local_slice.__code__  # type: ignore[attr-defined]
