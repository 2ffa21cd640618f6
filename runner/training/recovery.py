"""What becomes of a step that does not fit the memory: it is cut smaller and tried again."""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runner.data.batch import largest_part, split
from runner.device import memory
from runner.errors import ConfigError, OutOfMemory, RunnerError
from runner.techniques.base import Choice
from runner.training.run import Run

log = logging.getLogger("runner")

MICRO_BATCH = "training.micro_batch"
SIGNS = re.compile(
    r"DefaultCPUAllocator|not enough memory|out of memory|std::bad_alloc|"
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|[Cc]annot allocate memory"
)
ONEDNN = re.compile(r"could not (create|execute) a primitive")
SIZE = re.compile(r"tried to allocate ([\d.,]+ ?\w+)|you tried to allocate (\d+) bytes", re.I)
SMALLER_MODEL = (
    "weights and what is kept for each of them take the memory, whatever the batch: make the model "
    "smaller, or keep less for each weight (optimizer=sgd, optimizer.ema=null, "
    "checkpoint.enabled=false)"
)
NOTHING_SMALLER = (
    "make the model smaller, or keep less for each weight (optimizer=sgd, optimizer.ema=null); if "
    "the weights fit, lower training.micro_batch"
)
FEWER_ACTIVATIONS = (
    "use optimization=memory_efficient or optimization.recompute.enabled=true, or make the samples "
    "or the model smaller"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what was missing, on the device or the host."""
    if isinstance(error, RunnerError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if ONEDNN.search(text):  # says so for lack of memory too, and nothing more
        return memory.limit_left() is not None
    return SIGNS.search(text) is not None


def halve_micro_batch(run: Run, error: Exception) -> bool:
    """Halve the micro-batch, if it was the memory; the batch and its gradient stay the same.

    Raises OutOfMemory where one sample is too much already, and ConfigError where BatchNorm got a
    single one.
    """
    samples = run.train.samples(run.progress.step)
    size = largest_part(samples, run.micro_batch)
    at = f"step {run.progress.step + 1}"
    starved = "Expected more than 1 value per channel" in str(error)
    if starved and not (size < samples and run.history.counts.get("out_of_memory")):
        _refuse_single_sample(at, samples, run.micro_batch)
        return False
    if not is_out_of_memory(error) and not starved:
        return False
    _let_go(run, error)
    if starved:
        raise OutOfMemory(
            f"{at}: out of memory with more than {size} samples at a time, and BatchNorm needs "
            f"more; {FEWER_ACTIVATIONS}"
        ) from None
    if size == 1:
        _note(run, f"ran out of memory{_asked(error)} with one sample", "the run ends", error)
        raise OutOfMemory(
            f"{at}: out of memory{_asked(error)} with one sample; {_advice(run)}"
        ) from None
    run.micro_batch = largest_part(run.train.samples(0), (size + 1) // 2)
    reason = f"{at} ran out of memory{_asked(error)} with {size}"
    choice = Choice(MICRO_BATCH, run.micro_batch, reason)
    run.choices[:] = [c for c in run.choices if c.key != MICRO_BATCH] + [choice]
    # replaced, not changed: a checkpoint may be on its way out
    run.checkpointer.choices = {**run.checkpointer.choices, MICRO_BATCH: run.micro_batch}
    _note(run, f"ran out of memory{_asked(error)} with {size} samples at a time",
          f"the same batch again, {run.micro_batch} at a time", error)  # fmt: skip
    return True


def _refuse_single_sample(at: str, samples: int, micro_batch: int) -> None:
    """Raise ConfigError where a batch, or the smallest part of it, is one sample."""
    part = split(samples, micro_batch)[-1]
    if part.stop - part.start > 1:
        return
    key, what, fix = MICRO_BATCH, "micro-batch", "use a larger one"
    if samples == 1:
        key, what, fix = "training.batch_size", "batch", "use another size, or data.drop_last=true"
    raise ConfigError(key, f"{at} has a {what} of one sample, and BatchNorm needs 2 or more", fix)


def halve_evaluation_batch(run: Run, error: Exception, samples: int) -> bool:
    """Halve the `samples` that a validation puts through the model, if it was the memory."""
    size = min(run.evaluation_batch or samples, samples)
    if not is_out_of_memory(error):
        return False
    _let_go(run, error)
    if size == 1:
        _note(run, f"validation ran out of memory{_asked(error)} with one sample", "the run ends",
              error)  # fmt: skip
        raise OutOfMemory(
            f"validation: out of memory{_asked(error)} with one sample; {_advice(run)}"
        ) from None
    run.evaluation_batch = (size + 1) // 2
    _note(run, f"validation ran out of memory{_asked(error)} with {size} samples at a time",
          f"{run.evaluation_batch} from here on", error)  # fmt: skip
    return True


def _note(run: Run, message: str, action: str, error: Exception) -> None:
    step = run.progress.step + 1
    run.history.add(
        "out_of_memory", message, step=step, category="memory", action=action, error=error
    )


@contextmanager
def translate_oom(doing: str) -> Iterator[None]:
    """Nothing can be cut smaller here: say that memory ran out `doing` this, and what helps."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = _asked(error)
        release_references(error)
    else:
        return
    raise OutOfMemory(f"out of memory{asked} {doing}; {NOTHING_SMALLER}")


def _advice(run: Run) -> str:
    """What helps where one sample does not fit, by whether gradients and optimizer state would."""
    trained = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    state = 0 if run.update.optimizer.state else 2 * trained  # of Adam, made in the first update
    needed = trained + state
    return FEWER_ACTIVATIONS if needed < memory.room(run.device) else SMALLER_MODEL


def _let_go(run: Run, error: Exception) -> None:
    """Free what the failed step holds: its traceback has the activations, the weights gradients."""
    release_references(error)
    for parameter in run.model.parameters():
        parameter.grad = None
    if run.device.kind == "cpu" and "out_of_memory" not in run.history.counts:
        from runner.device import allocator

        allocator.give_back_at_once(run.scope)
    memory.clean(run.device)


def release_references(error: BaseException | None) -> None:
    """Free what the frames hold that an error came through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _asked(error: Exception) -> str:
    """How much it was that could not be had, where the message says."""
    found = SIZE.search(str(error))
    if found is None:
        return ""
    size = found[1]
    if found[2] is not None:
        size = f"{int(found[2]) / 2**20:,.0f} MiB"
    return f" ({size} more)"
