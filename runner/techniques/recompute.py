"""Activations that are computed again in the backward instead of being held until then.

A block's input is held in place of all its activations; a third more work, the same numbers. Worth
it where a step does not fit, or a larger batch is worth more than a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from runner.device import memory
from runner.models.preserved_state import NotRestorable
from runner.record.text import shorten
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Recompute, RecomputePolicy
from runner.techniques.memory_prediction import Prediction, predict
from runner.techniques.probe import dry_run_step, repeated_blocks
from runner.training.run import Run

KEY = "optimization.recompute.what"
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
"""What the selective policy holds."""


def apply(knobs: Recompute, draft: RunBuilder) -> str | None:
    """Give each chosen block a forward that forgets; its keys stay as they are."""
    if knobs.what is RecomputePolicy.none:
        return f"{KEY}=none"
    blocks = repeated_blocks(draft.model)
    if not blocks:
        return "the model has no repeated blocks to recompute one by one"
    _drop_caches(draft)
    what: RecomputePolicy = RecomputePolicy(knobs.what)
    if what is RecomputePolicy.auto:
        what = RecomputePolicy(draft.choose(KEY, lambda: _decide(knobs, draft, blocks)))
        if what is RecomputePolicy.none:
            return draft.choices[-1].reason
    chosen = blocks[:: knobs.every] if what is RecomputePolicy.every else blocks
    recomputed = Recomputed(what, chosen, len(blocks))
    try:  # once a traced step has gone through
        without, with_it = predict(draft), _predict(draft, recomputed)
    except NotRestorable:
        raise
    except Exception as error:  # whatever a model raises whose blocks can run only once
        gist = shorten(str(error), 200)
        return f"its blocks cannot be computed twice: {type(error).__name__}: {gist}"
    recomputed.held, recomputed.held_without = with_it.saved, without.saved
    recomputed.wrap(draft.scope)
    draft.recompute = recomputed
    draft.predicted_bytes = with_it.peak_on(draft.device)
    return None


def _decide(knobs: Recompute, draft: RunBuilder, blocks: list[nn.Module]) -> tuple[str, str]:
    """As little as fits the memory, and why."""
    free = memory.room(draft.device)
    for what in (RecomputePolicy.none, RecomputePolicy.selective):
        of = blocks if what is RecomputePolicy.selective else []
        try:
            prediction = _predict(draft, Recomputed(what, of, len(blocks)))
        except Exception as error:
            reason = f"the memory cannot be predicted ({type(error).__name__})"
            return RecomputePolicy.full.value, reason
        if prediction.fits(draft.device, free, knobs.share):
            draft.predicted_bytes = prediction.peak_on(draft.device)
            return what.value, f"it fits: {prediction.beside(free)}"
    return RecomputePolicy.full.value, f"it would not fit: {prediction.beside(free)}"


def _predict(draft: RunBuilder, recomputed: Recomputed) -> Prediction:
    with ExitStack() as scope:
        recomputed.wrap(scope)
        return predict(draft)


def _drop_caches(draft: RunBuilder) -> None:
    """Language models of others keep keys and values for generation, which would fill up twice."""
    for module in draft.model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", None) is True:
            draft.scope.callback(setattr, config, "use_cache", True)
            config.use_cache = False


def engaged(knobs: Recompute, run: Run) -> Evidence:
    """How many blocks ran again in one step, and what is held with and without."""
    recomputed = run.recompute
    if recomputed is None:
        return Evidence(False, "nothing was recomputed")
    facts: dict[str, Any] = {
        "what": recomputed.what.value,
        "blocks": len(recomputed.blocks),
        "of": recomputed.of,
        "held_bytes": recomputed.held,
        "held_bytes_without": recomputed.held_without,
    }
    if run.compilation is not None and run.compilation.mode:
        facts["compiled_held_bytes"] = held = _held_bytes(run)
        # a graph in which nothing is recomputed holds about what eager does without it
        saved = recomputed.held_without - recomputed.held
        took = 0 < held < recomputed.held_without - saved / 4
        return Evidence(took, "" if took else "the compiled graph holds no less", facts)
    recomputed.again.clear()
    dry_run_step(run)
    facts["recomputed_blocks"] = again = len(recomputed.again)
    of = "blocks ran again in the backward"
    return Evidence.of_share(again, len(recomputed.blocks), of, **facts)


@dataclass
class Recomputed:
    """The blocks that forget, and what that saves."""

    what: RecomputePolicy
    blocks: list[nn.Module]
    of: int  # blocks that there are
    held: int = 0  # bytes between forward and backward, predicted for an eager step
    held_without: int = 0
    again: set[nn.Module] = field(default_factory=set, compare=False)  # ran for the backward too

    def wrap(self, scope: ExitStack) -> None:
        """Put a forward in place of each block's own, until `scope` closes."""
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
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if not torch.compiler.is_compiling():
                return checkpoint(forward, *args, use_reentrant=False, context_fn=eager, **kwargs)
            if contexts is None:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return forget

    @contextmanager
    def _again(self, block: nn.Module, around: AbstractContextManager[Any]) -> Iterator[None]:
        """The second run of a block: BatchNorm has counted this batch already."""
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


def _held_bytes(run: Run) -> int:
    """Bytes that a step saves for the backward, weights left out."""
    ours = {t.untyped_storage()._cdata for t in run.model.state_dict(keep_vars=True).values()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dry_run_step(run)
    return sum(sizes.values())
