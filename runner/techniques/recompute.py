"""Activation checkpointing: activations are recomputed in the backward instead of being stored.

Only a block's input is stored; a third more work, the same results. Worth it if a step does not
fit in memory, or if a larger batch gains more than a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from runner.models.preserved_state import NotRestorable
from runner.record.text import shorten
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Recompute, RecomputePolicy
from runner.techniques.probe import dry_run_step, repeated_blocks, saved_bytes, trial_step
from runner.training.run import Run

SAMPLES = 4  # in the trial steps that are compared
NOTABLY = 0.9  # of the bytes saved without it: less counts as a saving
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
aten = torch.ops.aten
COSTLY = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
"""Operators with outputs that the selective policy saves."""


def apply(knobs: Recompute, draft: RunBuilder) -> str | None:
    """Replace each block's forward by a checkpointed one; state_dict keys do not change."""
    blocks = repeated_blocks(draft.model)
    if not blocks:
        return "the model has no repeated blocks to recompute one by one"
    _drop_caches(draft)
    recomputed = Recomputed(knobs.what, blocks)
    try:
        with ExitStack() as scope:
            recomputed.wrap(scope)
            trial_step(draft, min(draft.micro_batch, SAMPLES))
    except NotRestorable:
        raise
    except Exception as error:  # such as a model with blocks that can run only once
        gist = shorten(str(error), 200)
        return f"its blocks cannot be computed twice: {type(error).__name__}: {gist}"
    recomputed.wrap(draft.scope)
    draft.recompute = recomputed
    return None


def _drop_caches(draft: RunBuilder) -> None:
    """Switch off `use_cache` of Hugging Face models: recomputing would fill caches twice."""
    for module in draft.model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", None) is True:
            draft.scope.callback(setattr, config, "use_cache", True)
            config.use_cache = False


def engaged(knobs: Recompute, run: Run) -> Evidence:
    """Return the share of blocks recomputed in one step, and the saved bytes with and without."""
    recomputed = run.recompute
    if recomputed is None:
        return Evidence(False, "nothing was recomputed")
    blocks, samples = len(recomputed.blocks), min(run.micro_batch, SAMPLES)

    def count_saved(most: int | None) -> int:
        return saved_bytes(run.model, lambda: dry_run_step(run, most))

    recomputed.again.clear()
    with torch.compiler.set_stance("force_eager"):  # few samples, as a step may not fit
        held_bytes = count_saved(samples) * run.micro_batch // samples
        again = len(recomputed.again)
        recomputed.off = True
        try:
            without = count_saved(samples) * run.micro_batch // samples
        finally:
            recomputed.off = False
    facts: dict[str, Any] = {"what": recomputed.what.value}
    if recomputed.what is RecomputePolicy.full:  # hooks do not see what selective saves
        facts["held_bytes"] = held_bytes
    facts |= {"held_bytes_without": without, "blocks": blocks}
    if run.compilation is not None and run.compilation.mode:
        facts["compiled_held_bytes"] = compiled = count_saved(None)
        # a graph without recomputation saves about as much as eager without it
        took = 0 < compiled < NOTABLY * without
        return Evidence(took, "" if took else "the compiled graph saves no memory", facts)
    facts["recomputed_blocks"] = again
    return Evidence.of_share(again, blocks, "blocks ran again in the backward", **facts)


@dataclass
class Recomputed:
    """The checkpointed blocks, and those that were recomputed."""

    what: RecomputePolicy
    blocks: list[nn.Module]
    off: bool = False  # True: everything is saved
    again: set[nn.Module] = field(default_factory=set, compare=False)  # recomputed in a backward

    def wrap(self, scope: ExitStack) -> None:
        """Replace each block's forward until `scope` closes."""
        for block in self.blocks:
            scope.callback(_unwrap, block, vars(block).get("forward"))
            block.forward = self._checkpointed_forward(block, block.forward)

    def _checkpointed_forward(
        self, block: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        selective = self.what is RecomputePolicy.selective
        contexts = partial(create_selective_checkpoint_contexts, _policy) if selective else None

        def eager() -> Contexts:
            first, again = (nullcontext(), nullcontext()) if contexts is None else contexts()
            return first, self._again(block, again)

        def forget(*args: Any, **kwargs: Any) -> Any:
            if self.off or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if not torch.compiler.is_compiling():
                return checkpoint(forward, *args, use_reentrant=False, context_fn=eager, **kwargs)
            if contexts is None:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return forget

    @contextmanager
    def _again(self, block: nn.Module, around: AbstractContextManager[Any]) -> Iterator[None]:
        """Restore a block's buffers after recomputing: BatchNorm has counted the batch."""
        self.again.add(block)
        owners = [(m._buffers, dict(m._buffers)) for m in block.modules() if m._buffers]
        for now, before in owners:
            now.update({name: b if b is None else b.clone() for name, b in before.items()})
        try:
            with around:
                yield
        finally:
            for now, before in owners:
                now.update(before)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in COSTLY:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _unwrap(block: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        del block.forward
    else:
        block.forward = own
