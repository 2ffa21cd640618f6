"""The fourteen checks, in the order of what they prove in a second."""

from __future__ import annotations

from gpu_checks.base import Check

CHECKS = (
    Check("doctor", "commands", 60, "the doctor finds the GPU and what it can do"),
    Check("sync_free", "training", 120, "no step waits for the GPU, and a bad one changes nothing"),
    Check(
        "speed", "speed", 190,
        "reported rates are true; ultra is 5 times as fast as none, at 50 % MFU or more",
        alone=True,
    ),
    Check(
        "graphs", "training", 180,
        "steps as CUDA graphs have the losses of eager ones, and new dropout masks",
    ),
    Check(
        "micro_batches", "commands", 90,
        "CUDA graphs are refused where a step has several backward passes",
    ),
    Check("device_assert", "commands", 90, "an assert in a kernel ends a run as failed"),
    Check("resume", "commands", 150, "a killed and resumed run ends in the same bits"),
    Check("out_of_memory", "training", 120, "a batch that does not fit is halved, and no more"),
    Check("gpu_tests", "commands", 120, "all tests marked gpu pass"),
    Check("kernels", "training", 90, "requested kernels run; optimization=none computes in fp32"),
    Check("group_of_one", "commands", 90, "one process trains through NCCL as without it"),
    Check("debug_full", "commands", 60, "the profile and the allocator's snapshot are consistent"),
    Check("sweep", "commands", 60, "two jobs of a sweep train side by side"),
    Check(
        "evaluate_and_predict", "commands", 90,
        "a checkpoint gives the same metrics and predictions on a CPU",
    ),
)  # fmt: skip
