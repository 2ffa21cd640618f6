"""Verify that a killed and resumed run is bit-equal to an uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.config import RunConfig
from runner.errors import CheckpointError, RunnerError, UsageError
from runner.verify.end_state import ValueKey, Values, differing_keys, read_end_state, saved_steps
from runner.verify.processes import RunProbe, prepare_config, train_in_processes

STEPS = 20
OPTIMIZER_OPTIONS = "optimizer.param_groups."  # set by the config and the next step


@dataclass(frozen=True)
class ResumeEquality:
    """The comparison of an uninterrupted run with a killed and resumed one."""

    steps: int
    cut: int  # step of the checkpoint that was resumed
    killed: int  # the step after which a process was killed
    compared: dict[str, int]  # number of values by kind
    differing: list[str]  # values that are not bit-equal, in order of computation
    techniques: list[str]
    cause: str = ""  # likely cause of the first one
    processes: int = 1
    rank: int = 0  # the process that was killed
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether all values are bit-equal."""
        return not self.differing


def verify_resume(config: RunConfig, folder: Path, steps: int = STEPS) -> ResumeEquality:
    """Train `steps` steps, and again with a process killed in the second half.

    The resumed run saves its restored state, so that a part which was not restored is named even if
    no result depends on it. All runs are in a temporary folder.
    """
    checkpoint_every, size = steps // 2, config.distributed.processes or 1
    kill_step, rank = checkpoint_every + max(1, (steps - checkpoint_every) // 3), size - 1
    short_config = prepare_config(config, steps, checkpoint_every=checkpoint_every)
    short_config.monitoring.every = 3  # so that the checkpoint falls between two reports
    with TemporaryDirectory(dir=folder, prefix="verify-") as temporary:
        uninterrupted, resumed = Path(temporary) / "uninterrupted", Path(temporary) / "resumed"
        train_in_processes(short_config, resumed, RunProbe(kill_at=kill_step, kill_rank=rank))
        resume_step = max(saved_steps(resumed), default=0)
        if not resume_step:
            raise UsageError(f"the run killed after step {kill_step} left no checkpoint")
        # under ddp the remaining process saves when it has lost the other
        probe = RunProbe(save_at=resume_step if resume_step % checkpoint_every else 0)
        train_in_processes(short_config, uninterrupted, probe)
        return compare_resumed(short_config, uninterrupted, resumed, resume_step, kill_step)


def compare_resumed(
    config: RunConfig, uninterrupted: Path, resumed: Path, resume_step: int, kill_step: int
) -> ResumeEquality:
    """Resume the run in `resumed`, and compare it with the run in `uninterrupted`."""
    config.checkpoint.resume = "auto"
    expected = read_end_state(uninterrupted)
    try:
        train_in_processes(config, resumed, RunProbe(save_again=True))
        values = read_end_state(resumed).values
        names, cause = name_differences(expected.values, values, resume_step)
    except RunnerError as error:
        if error.exit_code != CheckpointError.exit_code:
            raise
        names, cause = [f"checkpoint of step {resume_step}"], str(error)
    size = config.distributed.processes or 1
    return ResumeEquality(
        steps=config.training.steps or 0,
        cut=resume_step,
        killed=kill_step,
        compared=expected.count(),
        differing=names,
        techniques=list(expected.facts["techniques"]),
        cause=cause,
        processes=size,
        rank=size - 1,
    )


def name_differences(expected: Values, resumed: Values, resume_step: int) -> tuple[list[str], str]:
    """Return the values that are not bit-equal, and the likely cause of the first."""
    keys = [
        key
        for key in differing_keys(expected, resumed)
        if key.step != resume_step or not key.name.startswith(OPTIMIZER_OPTIONS)
    ]
    return [str(key) for key in keys], _likely_cause(keys[0], resume_step) if keys else ""


def _likely_cause(first: ValueKey, resume_step: int) -> str:
    if first.step < resume_step or (first.step == resume_step and first.kind == "metric"):
        return (
            f"the runs differ before step {resume_step}, where one was resumed: the steps are "
            "nondeterministic; try device.deterministic=true"
        )
    if first.step == resume_step:
        return f"{first.name} is not restored to its value in the checkpoint of step {resume_step}"
    return (
        "all parts of the checkpoint were restored, so the cause is state outside it (an attribute "
        "of the model, a technique, a data set or a hook), or nondeterministic steps "
        "(try device.deterministic=true)"
    )
