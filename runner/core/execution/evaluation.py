"""Evaluation on the validation or test set, and a standalone copy of the trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import nn

from runner.core.errors import UsageError
from runner.core.interfaces.batch import Batch, batch_size_of, call_model, slice_rows, split_batch
from runner.core.interfaces.hook import Evaluation
from runner.core.interfaces.nested import tree_map
from runner.core.interfaces.run import Run, check_run
from runner.core.models import modes
from runner.core.preserved_state import exclusive_random_state

T = TypeVar("T")


@exclusive_random_state("evaluate")
def evaluate(run: Run, model: nn.Module | None = None, test: bool = False) -> Evaluation:
    """Evaluate the run's model (with averaged weights, if any), or `model`, on the validation set.

    With `test`, on the test set; UsageError if the run has none, or while another thread trains.
    """
    check_run("evaluate", run)
    loader, split_name = (run.test, "test") if test else (run.validation, "val")
    if loader is None:
        raise UsageError("evaluate: the run has no test set; set data.test_path")
    totals: dict[str, Any] = {}
    run.world.broadcast_buffers(run.model)
    with inference(run, model) as forward:
        for number, batch in enumerate(loader.batches(0)):
            compute, samples = partial(_batch_sums, run, forward), loader.samples(number)
            if run.bad_samples is not None:
                run.bad_samples.record_batch(loader)
            if run.shards is None:
                part_sums = apply_in_parts(run, batch, compute)
            else:
                own, size = 0 if loader.empty else batch_size_of(batch[1]), run.micro_batch
                part_sums = run.shards.map_micro_batches(batch, samples, size, own, compute)
            own_rows = run.world.local_slice(samples)
            if not loader.empty and own_rows.stop > own_rows.start:  # not only a stand-in
                totals = reduce(_add_sums, part_sums, totals)
    if run.is_shared:
        totals = tree_map(totals, lambda x: x.cpu())  # host sync: once per validation, to pickle
        totals = reduce(_add_sums, run.gather(totals), {})
    values = run.objective.all_metrics(totals)
    metrics = {f"{split_name}/{name}": x for name, x in values.items()}
    confusion = run.objective.confusion(totals)
    if confusion is not None:
        confusion = confusion.cpu()  # host sync: once per validation
    is_constant = run.objective.has_constant_output(totals, confusion)
    return Evaluation(run.progress.step, metrics, confusion, constant_output=is_constant)


def _batch_sums(run: Run, forward: Callable[..., Any], part: Batch) -> dict[str, Any]:
    return run.objective.all_batch_sums(call_model(forward, part[0]), part[1])


def _add_sums(totals: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
    return {k: totals[k] + x for k, x in sums.items()} if totals and sums else totals or sums


@contextmanager
def inference(run: Run, model: nn.Module | None = None) -> Iterator[Callable[..., Any]]:
    """Yield a forward in evaluation mode: of `model`, or of the run's with averaged weights."""
    evaluated = run.model if model is None else model
    with ExitStack() as stack:
        stack.enter_context(run.own_random_state())
        stack.enter_context(torch.no_grad())
        stack.enter_context(modes.evaluation_mode(evaluated))
        if "torch._dynamo" in sys.modules:  # importing it takes a second
            # compiling a second graph, for eval mode, would take as long as the first
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if model is None:
            stack.enter_context(run.update.averaged())
        for context in run.contexts:
            stack.enter_context(context())
        local_forward = run.world.validation_forward
        yield (local_forward or run.forward) if model is None else model


def apply_in_parts(run: Run, batch: Batch, compute: Callable[[Batch], T]) -> list[T]:
    """Apply `compute` to parts of a batch that fit in memory; return the results."""
    samples = batch_size_of(batch[1])
    while True:
        size = run.evaluation_batch or samples
        parts = split_batch(samples, size)
        try:
            return [compute(slice_rows(batch, part) if size < samples else batch) for part in parts]
        except Exception as error:
            from runner.core.execution.recovery import halve_evaluation_batch  # when one fails

            if not halve_evaluation_batch(run, error, samples):
                raise


def copy_standalone_model(run: Run) -> nn.Module:
    """Return a copy of the model with the evaluated (averaged) weights, free of techniques.

    It is not compiled, and forwards that a technique replaced are restored: a copied closure would
    call the layers of the original. UsageError if no process has all of the weights.
    """
    if run.shards is not None:
        problem = "with distributed=fsdp no process holds the full model"
        raise UsageError(f"standalone: {problem}; use runner.load(its folder)")
    with run.update.averaged():
        copy = deepcopy(run.model)  # without the compiled forward
    for parameter in copy.parameters():
        parameter.grad = None
    for module in copy.modules():
        forward = vars(module).get("forward")
        function = getattr(forward, "func", forward)  # of a partial
        is_ours = str(getattr(function, "__module__", "")).startswith("runner.")
        if is_ours and type(module).forward is not nn.Module.forward:
            del module.forward
    return copy.eval().requires_grad_(False)
