"""Recovery from out of memory: the step is repeated with a smaller micro-batch."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from math import ceil
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from runner.core.device import memory
from runner.core.device.device_errors import is_out_of_memory, missing_memory, release_references
from runner.core.errors import ConfigError, OutOfMemory
from runner.core.findings import Choice
from runner.core.format import count_noun
from runner.core.interfaces.batch import (
    Batch,
    batch_size_of,
    call_model,
    largest_slice,
    slice_rows,
    split_batch,
)
from runner.core.interfaces.nested import DeferredLogits, find_logits, tensors, tree_map
from runner.core.interfaces.objective import Objective
from runner.core.interfaces.run import Run
from runner.core.models.modes import evaluation_mode
from runner.core.preserved_state import preserve_random_state
from runner.core.schemas.training import MICRO_BATCH

log = logging.getLogger("runner")

NO_MEAN = "the loss is not a mean over samples, and each micro-batch has a loss of its own"
SMALLER_MODEL_FIX = (
    "weights, gradients and optimizer state alone do not fit: use a smaller model, or less state "
    "per weight (optimizer=sgd, optimizer.ema=null, checkpoint.enabled=false)"
)
FEWER_ACTIVATIONS_FIX = (
    "use optimization=memory_efficient or optimization.recompute.enabled=true, or smaller samples "
    "or a smaller model"
)


def halve_micro_batch(run: Run, error: Exception) -> bool:
    """Halve the micro-batch after out of memory; the record says whether the gradient is the same.

    Raises OutOfMemory if a single sample does not fit, and ConfigError if BatchNorm got one sample.
    """
    samples = run.largest_local_batch(run.train.samples(run.progress.step))
    size = largest_slice(samples, run.micro_batch)
    step_label = f"step {run.progress.step + 1}"
    batchnorm_failed = "Expected more than 1 value per channel" in str(error)
    if batchnorm_failed and run.train.usable is not None and run.train.usable.last.bad:
        problem = "one sample left of its batch or micro-batch, and BatchNorm needs 2 or more"
        raise ConfigError("data.bad_samples", f"{step_label} has {problem}", "use a larger batch")
    if batchnorm_failed and not (size < samples and run.history.counts.get("out_of_memory")):
        _refuse_single_sample(step_label, samples, run.micro_batch)
        return False
    if not is_out_of_memory(error) and not batchnorm_failed:
        return False
    _release_step_memory(run, error)
    if batchnorm_failed:
        problem = f"out of memory with more than {count_noun(size, 'sample')} at a time"
        fix = f"but BatchNorm needs more; {FEWER_ACTIVATIONS_FIX}"
        raise OutOfMemory(f"{step_label}: {problem}, {fix}") from None
    if size == 1:
        if _drop_graphs(run, f"{step_label} ran out of memory as a graph"):
            return True  # uncompiled, or without CUDA graphs, it takes less
        raise _single_sample_error(run, error, step_label) from None
    run.micro_batch = largest_slice(run.largest_local_batch(run.train.batch_size), (size + 1) // 2)
    missing, obstacle = missing_memory(error), find_split_obstacle(run)
    effect = f"the step is another one: {obstacle}" if obstacle else "its gradient is the same"
    reason = f"{step_label} ran out of memory{missing} with {size} at a time; {effect}"
    choice = Choice(MICRO_BATCH, run.micro_batch, reason)
    run.choices[:] = [c for c in run.choices if c.key != MICRO_BATCH] + [choice]
    # a new dict: a checkpoint of the old one may be in the making
    run.checkpointer.choices = {**run.checkpointer.choices, MICRO_BATCH: run.micro_batch}
    message = f"ran out of memory{missing} with {count_noun(size, 'sample')} at a time"
    action = f"retrying the batch with {run.micro_batch} at a time; {effect}"
    _record_oom(run, message, action, error)
    _drop_graphs(run, f"{step_label} ran out of memory, and micro-batches exclude graphs")
    return True


def find_split_obstacle(run: Run) -> str:
    """Return why micro-batches do not give the gradient of a batch, by a part that fits, or ""."""
    if any(isinstance(m, _BatchNorm) and m.training for m in run.model.modules()):
        return "BatchNorm normalises each micro-batch by itself"
    if run.shards is not None:  # a forward needs all processes
        return "it is not known whether the loss is a mean over samples"
    try:
        with preserve_random_state(), torch.no_grad(), evaluation_mode(run.model), ExitStack() as s:
            s.enter_context(torch.compiler.set_stance("force_eager"))  # of another size
            for context in run.contexts:
                s.enter_context(context())
            batch = run.validation.peek()
            stride = ceil(batch_size_of(batch[1]) / max(2, run.micro_batch))  # all over the batch
            part: Batch = slice_rows(batch, slice(None, None, stride))
            output = call_model(run.model, part[0])
        return "" if _is_mean_over_samples(run.objective, output, part[1]) else NO_MEAN
    except Exception as error:  # the user's model and loss raise any type
        release_references(error)
        return f"it is not known whether the loss is a mean over samples ({type(error).__name__})"


def _is_mean_over_samples(objective: Objective, output: Any, target: Any) -> bool:
    """Whether the loss is that of two halves of the samples, weighted by their items."""
    samples, found = batch_size_of(target), find_logits(output)
    if isinstance(found, DeferredLogits):
        output = found = found.compute()
    if not all(x.ndim and len(x) == samples for x in tensors(output)):
        output = found  # of a structure that also holds other tensors
    try:
        double = tree_map(output, lambda x: x.double() if x.is_floating_point() else x)
        return _equals_halves(objective, double, target, samples, rtol=1e-9)
    except RuntimeError:  # its weights are of another dtype
        return _equals_halves(objective, output, target, samples, rtol=1e-4)


def _equals_halves(
    objective: Objective, output: Any, target: Any, samples: int, rtol: float
) -> bool:
    whole, total = objective(output, target).double(), torch.zeros((), dtype=torch.float64)
    for half in split_batch(samples, (samples + 1) // 2):
        rows, labels = slice_rows((output, target), half)
        part, all_ = (torch.as_tensor(objective.weight(t)).double() for t in (labels, target))
        share = part / all_
        total = total.to(whole.device) + objective(rows, labels).double() * share
    return bool(torch.isclose(whole, total, rtol=rtol, atol=rtol))


def _drop_graphs(run: Run, reason: str) -> bool:
    dropped = run.drop_graphs is not None and run.drop_graphs(run, reason)
    if dropped:
        memory.free_caches(run.device)
    return dropped


def _refuse_single_sample(step_label: str, samples: int, micro_batch: int) -> None:
    """Raise ConfigError if a batch or its smallest micro-batch is one sample."""
    part = split_batch(samples, micro_batch)[-1]
    if part.stop - part.start > 1:
        return
    key, unit, fix = MICRO_BATCH, "micro-batch", "use a larger one"
    if samples == 1:
        key, unit, fix = "training.batch_size", "batch", "use another size, or data.drop_last=true"
    problem = f"{step_label} has a {unit} of one sample, and BatchNorm needs 2 or more"
    raise ConfigError(key, problem, fix)


def halve_evaluation_batch(run: Run, error: Exception, samples: int) -> bool:
    """Halve the `samples` of a validation forward after out of memory; False for other errors."""
    size = min(run.evaluation_batch or samples, samples)
    if not is_out_of_memory(error):
        return False
    _release_step_memory(run, error)
    if size == 1:
        raise _single_sample_error(run, error, "validation") from None
    run.evaluation_batch = (size + 1) // 2
    message = f"validation ran out of memory{missing_memory(error)} with {size} samples at a time"
    _record_oom(run, message, f"{run.evaluation_batch} at a time from now on", error)
    return True


def _single_sample_error(run: Run, error: Exception, where: str) -> OutOfMemory:
    """Return the error for one sample that does not fit, with a fix by what takes the memory."""
    missing = missing_memory(error)
    _record_oom(run, f"{where} ran out of memory{missing} with one sample", "the run ends", error)
    trained = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    state = 0 if run.update.optimizer.state else 2 * trained  # Adam's, made in the first update
    fits = trained + state < memory.allocatable_bytes(run.device)
    fix = FEWER_ACTIVATIONS_FIX if fits else SMALLER_MODEL_FIX
    return OutOfMemory(f"{where}: out of memory{missing} with one sample; {fix}")


def _record_oom(run: Run, message: str, action: str, error: Exception) -> None:
    kind, step = "out_of_memory", run.progress.step + 1
    run.history.add(kind, message, step=step, category="memory", action=action, error=error)


def _release_step_memory(run: Run, error: Exception) -> None:
    """Free gradients, and activations that the traceback of the failed step references."""
    release_references(error)
    for parameter in run.model.parameters():
        parameter.grad = None
    if run.device.kind == "cpu" and "out_of_memory" not in run.history.counts:
        from runner.core.device import allocator

        allocator.return_freed_memory(run.scope)
    memory.free_caches(run.device)
