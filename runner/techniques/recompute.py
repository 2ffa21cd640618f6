"""Activations that are computed again in the backward instead of being held until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.record.text import shorten
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.probe import dry_run_step, repeated_blocks
from runner.training.run import Run

if TYPE_CHECKING:
    from torch import nn

    from runner.techniques.memory_prediction import Prediction

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class RecomputePolicy(Enum):
    """What is computed again; auto is as little as fits the memory, and nothing if all does."""

    auto = "auto"
    none = "none"
    full = "full"  # every block: the least memory, a forward more of work
    every = "every"  # each n-th block
    selective = "selective"  # all but products of matrices, convolutions and attention
    budget = "budget"  # as many blocks as a share of the memory asks for


@dataclass
class Recompute(Technique):
    """Holds a block's input in place of all its activations; a third more work, the same numbers.

    Blocks are the largest group of repeated modules, in a model of anybody's. Worth it where a
    step does not fit, or a larger batch is worth more than a third of the speed.
    """

    what: RecomputePolicy = RecomputePolicy.auto
    every: int = 2  # what=every: each so manyth block
    budget: float = 0.5  # what=budget: share of the activations that may be held
    share: float = 0.8  # what=auto: share of the free memory that a step may take

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                "optimization.recompute.every", f"{self.every} is no count", "use 1 or more"
            )
        for key, least in (("budget", 0.0), ("share", 1e-9)):
            value = getattr(self, key)
            if not least <= value <= 1:
                raise ConfigError(
                    f"optimization.recompute.{key}", f"{value} is not a share", "use 0 to 1"
                )

    def apply(self, draft: RunBuilder) -> str | None:
        """Give each chosen block a forward that forgets; its keys stay as they are."""
        from runner.models.preserved_state import NotRestorable

        if self.what is RecomputePolicy.none:
            return "optimization.recompute.what=none"
        found = repeated_blocks(draft.model)
        if not found:
            return "the model has no repeated blocks to recompute one by one"
        name = self.what.value
        if self.what is RecomputePolicy.auto:
            name = draft.choose("optimization.recompute.what", lambda: self._decide(draft, found))
            if name == RecomputePolicy.none.value:
                return draft.choices[-1].reason
        try:
            draft.recompute = self._apply(draft, found, RecomputePolicy(name))
        except NotRestorable:
            raise
        except Exception as error:  # whatever a model raises whose blocks can run only once
            gist = shorten(str(error), 200)
            return f"its blocks cannot be computed twice: {type(error).__name__}: {gist}"
        return None

    def _decide(self, draft: RunBuilder, found: list[nn.Module]) -> tuple[str, str]:
        from runner.device import memory
        from runner.techniques.memory_prediction import predict

        free = memory.room(draft.device)
        for what in (RecomputePolicy.none, RecomputePolicy.selective):
            try:
                with ExitStack() as scope:
                    if what is not RecomputePolicy.none:
                        Recomputed(what, found, len(found)).wrap(scope)
                    prediction = predict(draft)
            except Exception as error:
                return (
                    RecomputePolicy.full.value,
                    f"the memory cannot be predicted ({type(error).__name__})",
                )
            if prediction.fits(draft.device, free, self.share):
                draft.predicted_bytes = prediction.peak_on(draft.device)
                return what.value, f"it fits: {prediction.beside(free)}"
        return RecomputePolicy.full.value, f"it would not fit: {prediction.beside(free)}"

    def _apply(
        self, draft: RunBuilder, found: list[nn.Module], what: RecomputePolicy
    ) -> Recomputed:
        """Wrap the blocks until the run closes, once a traced step has gone through."""
        import torch._functorch.config as functorch

        from runner.techniques.memory_prediction import predict

        _drop_caches(draft)
        without = predict(draft)
        if what is RecomputePolicy.budget:
            blocks, with_it = self._meet(draft, found, without)
        else:
            blocks = found[:: self.every] if what is RecomputePolicy.every else found
            with_it = _predict(draft, Recomputed(what, blocks, len(found)))
        if not blocks:
            raise ValueError(f"budget={self.budget}: nothing has to be recomputed to meet it")
        if what is RecomputePolicy.budget:  # of a compiled graph
            draft.scope.callback(
                setattr, functorch, "activation_memory_budget", functorch.activation_memory_budget
            )
            functorch.activation_memory_budget = self.budget
        recomputed = Recomputed(what, blocks, len(found), with_it.saved, without.saved)
        recomputed.wrap(draft.scope)
        draft.predicted_bytes = with_it.peak_on(draft.device)
        return recomputed

    def _meet(
        self, draft: RunBuilder, found: list[nn.Module], without: Prediction
    ) -> tuple[list[nn.Module], Prediction]:
        """The fewest blocks, from the first on, that bring what is held down to the budget."""
        few, many, best = 0, len(found), without
        at_most = self.budget * without.saved
        while few < many:
            middle = (few + many) // 2
            prediction = _predict(
                draft, Recomputed(RecomputePolicy.budget, found[:middle], len(found))
            )
            if prediction.saved <= at_most:
                many, best = middle, prediction
            else:
                few = middle + 1
        if best.saved > at_most or len(found) == many:
            best = _predict(draft, Recomputed(RecomputePolicy.budget, found[:many], len(found)))
        return found[:many], best

    def engaged(self, run: Run) -> Evidence:
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
        compiled = run.compilation is not None and bool(run.compilation.mode)
        if compiled:
            facts["compiled_held_bytes"] = held = _held(run)
            # a graph in which nothing is recomputed holds about what eager does without it
            saved = recomputed.held_without - recomputed.held
            took = 0 < held < recomputed.held_without - saved / 4
            return Evidence(took, "" if took else "the compiled graph holds no less", facts)
        recomputed.again.clear()
        dry_run_step(run)
        facts["recomputed_blocks"] = again = len(recomputed.again)
        whole = len(recomputed.blocks)
        return Evidence.of_share(again, whole, "blocks ran again in the backward", **facts)


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
            own = vars(block).get("forward")
            scope.callback(_unwrap, block, own)
            block.forward = self._checkpointed_forward(block, block.forward)

    def _checkpointed_forward(
        self, block: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        import torch
        from torch.utils.checkpoint import checkpoint

        by_compiler = self.what is RecomputePolicy.budget
        selective = _selective() if self.what is RecomputePolicy.selective else None

        def eager() -> Contexts:
            first, again = (nullcontext(), nullcontext()) if selective is None else selective()
            return first, self._again(block, again)

        def forget(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if not torch.compiler.is_compiling():
                return checkpoint(forward, *args, use_reentrant=False, context_fn=eager, **kwargs)
            if by_compiler:  # the graph's own budget decides
                return forward(*args, **kwargs)
            if selective is None:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=selective, **kwargs)

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


def _predict(draft: RunBuilder, recomputed: Recomputed) -> Prediction:
    from runner.techniques.memory_prediction import predict

    with ExitStack() as scope:
        recomputed.wrap(scope)
        return predict(draft)


def _unwrap(block: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        del block.forward
    else:
        block.forward = own


def _selective() -> Callable[[], Contexts]:
    """Contexts that keep what takes long to compute: products, convolutions, attention."""
    from functools import partial

    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    costly = {
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

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in costly:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def _drop_caches(draft: RunBuilder) -> None:
    """Language models of others keep keys and values for generation, which would fill up twice."""
    for module in draft.model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", None) is True:
            draft.scope.callback(setattr, config, "use_cache", True)
            config.use_cache = False


def _held(run: Run) -> int:
    """Bytes that a compiled step's graph saves for the backward, weights left out."""
    from torch import Tensor

    from runner.data.batch import call, rows

    try:
        batch = rows(run.train.peek(), slice(run.micro_batch))
        run.update.begin()
        with ExitStack() as stack:
            for context in run.contexts:
                stack.enter_context(context())
            loss = run.objective(call(run.forward, batch[0]), batch[1])
        ours = {t.untyped_storage()._cdata for t in run.model.state_dict(keep_vars=True).values()}
        sizes: dict[int, int] = {}
        todo, seen = [loss.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            for name in ("saved_tensors", *(n for n in dir(node) if n.startswith("_saved_"))):
                value = getattr(node, name, None)
                for tensor in value if isinstance(value, tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        storage = tensor.untyped_storage()
                        if storage._cdata not in ours:
                            sizes[storage._cdata] = storage.nbytes()
        return sum(sizes.values())
    finally:
        run.update.abandon()
