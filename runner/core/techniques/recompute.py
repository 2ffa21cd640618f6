"""Activation checkpointing: activations are recomputed in the backward instead of being stored.

Only a block's input is stored; a third more work, the same results. Worth it if a step does not
fit in memory, or if a larger batch gains more than a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, NotNeeded, RunBuilder
from runner.core.preserved_state import NotRestorable
from runner.core.record.text import shorten
from runner.core.schemas.optimization import Recompute, RecomputePolicy
from runner.core.techniques.accumulation import MIB, step_bytes, usable_bytes
from runner.core.techniques.model_calls import probe_step
from runner.core.techniques.probe import dry_run_step, repeated_blocks, saved_bytes

KEY = "optimization.recompute"
NOTHING = "nothing"  # recomputed, as the step fits
SAMPLES = 4  # in the steps that are compared
SAVING_RATIO = 0.9  # of the bytes saved without it: less counts as a saving
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
aten = torch.ops.aten
SAVED_OPERATORS = {
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


def apply(config: Recompute, builder: RunBuilder) -> str | None:
    """Replace each block's forward by a checkpointed one; state_dict keys do not change."""
    blocks = repeated_blocks(builder.model)
    if not blocks:
        return "the model has no repeated blocks to recompute one by one"
    what = config.what
    if what is RecomputePolicy.auto:
        value = builder.choose(f"{KEY}.what", lambda: _choose_policy(config, builder, blocks))
        if value == NOTHING:
            return NotNeeded(next(x.reason for x in builder.choices if x.key == f"{KEY}.what"))
        what = RecomputePolicy(value)
    _disable_caches(builder)
    if what is RecomputePolicy.every:
        blocks = blocks[:: config.every]
    recomputed = RecomputedBlocks(what, blocks)
    try:
        with ExitStack() as scope:
            recomputed.wrap(scope)
            probe_step(builder, min(builder.micro_batch, SAMPLES))
    except NotRestorable:
        raise
    except Exception as error:  # such as a model with blocks that can run only once
        message = shorten(str(error), 200)
        return f"its blocks cannot be computed twice: {type(error).__name__}: {message}"
    recomputed.wrap(builder.scope)
    builder.recompute = recomputed
    return None


def _choose_policy(
    config: Recompute, builder: RunBuilder, blocks: list[nn.Module]
) -> tuple[str, str]:
    """Return the policy that recomputes least of those whose step fits, and the reason."""
    usable = usable_bytes(builder, config.share)
    texts = []
    for policy in (None, RecomputePolicy.selective):
        outputs, name = None, NOTHING
        with ExitStack() as scope:
            if policy is not None:
                recomputed = RecomputedBlocks(policy, blocks)
                recomputed.wrap(scope)
                outputs, name = recomputed.saves_output, policy.value
            try:
                fixed, per_sample = step_bytes(builder, outputs)
            except NotRestorable:
                raise
            except Exception as error:  # such as a model with a fixed batch size
                reason = f"the memory of a step cannot be estimated: {shorten(str(error), 200)}"
                return RecomputePolicy.full.value, reason
        needed = fixed + builder.micro_batch * per_sample
        texts.append(f"{needed / MIB:,.0f} MiB with {name}")
        if needed <= usable:
            return name, f"{', '.join(texts)}: it fits in {usable / MIB:,.0f} MiB"
    reason = f"{', '.join(texts)}, more than {usable / MIB:,.0f} MiB ({KEY}.share)"
    return RecomputePolicy.full.value, reason


def _disable_caches(builder: RunBuilder) -> None:
    """Switch off `use_cache` of Hugging Face models: recomputing would fill caches twice."""
    for module in builder.model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", None) is True:
            builder.scope.callback(setattr, config, "use_cache", True)
            config.use_cache = False


def engaged(config: Recompute, run: Run) -> Evidence:
    """Return the share of blocks recomputed in one step, and the saved bytes with and without."""
    recompute = run.recompute
    if recompute is None:
        return Evidence(False, "nothing was recomputed")
    block_count, samples = len(recompute.blocks), min(run.micro_batch, SAMPLES)

    # hooks do not see what the selective policy saves
    outputs = recompute.saves_output if recompute.what is RecomputePolicy.selective else None

    def measure_saved(max_samples: int) -> int:
        step = partial(dry_run_step, run, max_samples)
        return saved_bytes(run.model, step, outputs=outputs) * run.micro_batch // max_samples

    recompute.recomputed.clear()
    with torch.compiler.set_stance("force_eager"):  # few samples, as a step may not fit
        saved = measure_saved(samples)
        recomputed = len(recompute.recomputed)
        recompute.disabled = True
        try:
            saved_without = measure_saved(samples)
        finally:
            recompute.disabled = False
    facts: dict[str, Any] = {"what": recompute.what.value, "held_bytes": saved}
    facts |= {"held_bytes_without": saved_without, "blocks": block_count}
    if run.compilation is not None and run.compilation.mode:
        facts["compiled_held_bytes"] = compiled = saved_bytes(run.model, partial(dry_run_step, run))
        # a graph without recomputation saves about as much as eager without it
        share = block_count / len(repeated_blocks(run.model))
        smaller = 0 < compiled < (1 - (1 - SAVING_RATIO) * share) * saved_without
        return Evidence(smaller, "" if smaller else "the compiled graph saves no memory", facts)
    facts["recomputed_blocks"] = recomputed
    counted = "blocks ran again in the backward"
    evidence = Evidence.of_share(recomputed, block_count, counted, **facts)
    if evidence.engaged and saved >= saved_without:
        reason = f"{saved:,} bytes are held for the backward, and {saved_without:,} without it"
        return replace(evidence, engaged=False, reason=reason)
    return evidence


@dataclass
class RecomputedBlocks:
    """The checkpointed blocks, and those that were recomputed."""

    what: RecomputePolicy
    blocks: list[nn.Module]
    disabled: bool = False  # True: everything is saved
    recomputed: set[nn.Module] = field(default_factory=set, compare=False)  # in a backward
    depth: int = field(default=0, compare=False)  # forwards entered whose products are saved

    def wrap(self, scope: ExitStack) -> None:
        """Replace each block's forward until `scope` closes."""
        for block in self.blocks:
            scope.callback(_restore_forward, block, vars(block).get("forward"))
            block.forward = self._checkpointed_forward(block, block.forward)

    def _checkpointed_forward(
        self, block: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        selective = self.what is RecomputePolicy.selective
        contexts = (
            partial(create_selective_checkpoint_contexts, _selective_policy) if selective else None
        )

        def eager_contexts() -> Contexts:
            if contexts is None:
                return nullcontext(), self._preserve_buffers(block, nullcontext())
            forward_context, recompute_context = contexts()
            recompute_context = self._preserve_buffers(block, recompute_context)
            return self._mark_saving(forward_context), recompute_context

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if self.disabled or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if not torch.compiler.is_compiling():
                return checkpoint(
                    forward, *args, use_reentrant=False, context_fn=eager_contexts, **kwargs
                )
            if contexts is None:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return checkpointed

    def saves_output(self, operator: Any) -> bool:
        """Whether the selective policy saves the output of an operator that runs now."""
        return self.depth > 0 and operator in SAVED_OPERATORS

    @contextmanager
    def _mark_saving(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        self.depth += 1
        try:
            with context:
                yield
        finally:
            self.depth -= 1

    @contextmanager
    def _preserve_buffers(
        self, block: nn.Module, context: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Record a recomputation; restore the buffers after it: BatchNorm has counted the batch."""
        self.recomputed.add(block)
        buffer_dicts = [(m._buffers, dict(m._buffers)) for m in block.modules() if m._buffers]
        for current, saved in buffer_dicts:
            current.update({name: b if b is None else b.clone() for name, b in saved.items()})
        try:
            with context:
                yield
        finally:
            for current, saved in buffer_dicts:
                current.update(saved)


def _selective_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _restore_forward(block: nn.Module, original: Callable[..., Any] | None) -> None:
    if original is None:
        del block.forward
    else:
        block.forward = original
