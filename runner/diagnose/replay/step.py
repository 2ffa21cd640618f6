"""Repeat a captured step of a hand-written loop."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from runner.core.build.arguments import Loss, check_model_arguments, move_to_device
from runner.core.errors import CheckpointError
from runner.core.preserved_state import preserve_random_state
from runner.core.record.text import shorten
from runner.core.train.run_state import restore_random_state
from runner.diagnose.replay.reopen import open_capture
from runner.diagnose.replay.results import Cause
from runner.diagnose.replay.trace import trace_step
from runner.loops.optimize import LazyRun
from runner.loops.stability import device_random_state, set_device_random_state


def replay_step(path: str | Path, model: nn.Module, loss_fn: Loss) -> Cause:
    """Repeat a captured step with every operation traced, to find where it went bad.

    `path` is the capture's folder, `model` has the same architecture (a copy gets the step's
    weights, if the capture has them), `loss_fn(output, target)` is the loop's loss. Random
    generators start from their state at the end of the previous step, the device's too if the model
    is on the same kind of device. Raises CheckpointError, SecurityError or UsageError.
    """
    check_model_arguments("replay_step", model, loss_fn=loss_fn)
    capture = open_capture(Path(path))
    model_copy, (inputs, target) = deepcopy(model), capture.batch
    try:
        if capture.model is not None:
            model_copy.load_state_dict(dict(capture.model))
        for name, buffer in capture.buffers.items():
            model_copy.get_buffer(name).copy_(buffer)
    except (RuntimeError, AttributeError) as error:
        reason = shorten(str(error), 300)
        raise CheckpointError(f"{path}: does not fit this model: {reason}") from error
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs
    threads = [f"device.threads={capture.manifest.threads}"]
    trainable = [p for p in model_copy.parameters() if p.requires_grad]
    dummy = torch.optim.SGD(trainable, lr=0.0)
    lazy = LazyRun("replay_step", model_copy, "none", threads, None, {}, dummy, loss_fn)
    with preserve_random_state(), ExitStack() as scope:
        try:
            run = lazy.build_run(inputs, target)
            device, device_state = run.device.torch, capture.random.get("device")
            if device_state is not None and capture.manifest.device.get("kind") == device.type:
                if (before := device_random_state(device)) is not None:
                    scope.callback(set_device_random_state, device, before)
                set_device_random_state(device, device_state)
            restore_random_state(capture.random, run)
            return trace_step(run, move_to_device((inputs, target), run.device.torch))
        finally:
            lazy.close()
