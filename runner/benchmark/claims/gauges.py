"""What is asked of an arm's run once it has ended, to judge what is said about memory and int8."""

from __future__ import annotations

from runner.device import memory, phases
from runner.run import Run
from runner.techniques.probe import rehearse
from runner.techniques.quantization import latency_ratio

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


GAUGES = {
    "state_bytes": state_bytes,
    **{f"step_bytes {number}": step_bytes for number in range(TIMES)},
}
INT8 = {f"int8_speedup {number}": int8_speedup for number in range(TIMES)}
