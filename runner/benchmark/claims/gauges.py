"""What is asked of an arm's run once it has ended, to judge what is said about memory and int8."""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median

from runner import modes
from runner.batch import call
from runner.device import memory, phases
from runner.run import Run
from runner.techniques.probe import rehearse
from runner.techniques.quantization import latency_ratio

ROUNDS, SETTLING = 9, 2  # of forwards that are timed, and before
TIMES = 6  # least to largest of six hold the median with 97 %


def step_bytes(run: Run) -> float:
    """The most that one step holds beyond what is held between steps, its gradients included.

    Of the device, or of the process on a CPU: forward and backward of a micro-batch as the run
    makes them, compiled or not. Free memory is given back before.
    """
    memory.clean(run.device)
    with phases.peak(run.device) as peak:
        rehearse(run)
        run.device.synchronize()
    if run.device.kind == "cpu":
        return float(peak.process - peak.process_before)
    return float(peak.on_device - peak.on_device_before)


def state_bytes(run: Run) -> float:
    """Weights, buffers and the optimizer's state: what is held between steps."""
    held = [*run.model.parameters(), *run.model.buffers()]
    states = run.update.optimizer.state.values()
    held += [value for state in states for value in state.values() if hasattr(value, "nbytes")]
    return float(sum(tensor.nbytes for tensor in held))


def int8_speedup(run: Run) -> float:
    """The time of a forward in float over one in int8; ValueError without an int8 model."""
    if run.quantized is None:
        raise ValueError("there is no int8 model")
    return 1 / latency_ratio(run, run.quantized.model)


def compiled_latency(run: Run) -> float:
    """The time of a compiled forward over an eager one; ValueError where nothing is compiled.

    Both are without gradients, over the first validation batch, in turn; medians of the rounds.
    """
    import torch

    if run.compilation is None or not run.compilation.mode:
        raise ValueError("the model is not compiled")
    seconds: dict[str, list[float]] = {"default": [], "force_eager": []}
    with ExitStack() as stack:
        stack.enter_context(modes.evaluating(run.model))
        stack.enter_context(torch.no_grad())
        for context in run.contexts:
            stack.enter_context(context())
        inputs = run.validation.peek()[0]
        for number in range(ROUNDS + SETTLING):
            for stance, times in seconds.items():
                with torch.compiler.set_stance(stance):
                    run.device.synchronize()
                    begun = time.perf_counter()
                    call(run.forward, inputs)
                    run.device.synchronize()
                    if number >= SETTLING:  # the first ones compile
                        times.append(time.perf_counter() - begun)
    return median(seconds["default"]) / median(seconds["force_eager"])


GAUGES = {
    "state_bytes": state_bytes,
    **{f"step_bytes {number}": step_bytes for number in range(TIMES)},
}
LATENCY = {f"compiled_latency {number}": compiled_latency for number in range(TIMES)}
INT8 = {f"int8_speedup {number}": int8_speedup for number in range(TIMES)}
