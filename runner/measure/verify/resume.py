"""Verify that a killed and resumed run is bit-equal to an uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.core.config.run_config import RunConfig
from runner.core.errors import CheckpointError, RunnerError, UsageError
from runner.measure.verify.end_state import (
    ValueKey,
    Values,
    differing_keys,
    read_end_state,
    saved_steps,
)
from runner.measure.verify.processes import RunProbe, prepare_config, train_in_processes

STEPS = 20
OPTIMIZER_OPTIONS = "optimizer.param_groups."  # set by the config and the next step


@dataclass(frozen=True)
class ResumeEquality:
    """The comparison of an uninterrupted run with a killed and resumed one."""

    steps: int
    cut: int  # step of the last checkpoint that was resumed
    killed: int  # the step after which a process was killed, the last time
    compared: dict[str, int]  # number of values by kind
    differing: list[str]  # values that are not bit-equal, in order of computation
    techniques: list[str]
    cause: str = ""  # likely cause of the first one
    processes: int = 1
    rank: int = 0  # the process that was killed
    notes: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # steps of all checkpoints that were resumed

    @property
    def exact(self) -> bool:
        """Whether all values are bit-equal."""
        return not self.differing


def verify_resume(config: RunConfig, folder: Path, steps: int = STEPS) -> ResumeEquality:
    """Train `steps` steps, and again with a process killed twice, after checkpoints at drawn steps.

    The resumed run saves its restored state, so that a part which was not restored is named even if
    no result depends on it. All runs are in a temporary folder.
    """
    planned, rank = draw_cuts(config.seed, steps), (config.distributed.processes or 1) - 1
    short_config = prepare_config(config, steps, checkpoint_every=steps)
    validate_every = short_config.training.validate_every or steps
    short_config.monitoring.every = 3  # so that checkpoints fall between two reports
    cuts: list[int] = []
    with TemporaryDirectory(dir=folder, prefix="verify-") as temporary:
        uninterrupted, resumed = Path(temporary) / "uninterrupted", Path(temporary) / "resumed"
        for cut in planned:
            # before the next validation, which may write a checkpoint, and before the next cut
            next_validation = cut + validate_every - cut % validate_every
            kill_step = min(cut + 3, next_validation, steps, *(x for x in planned if x > cut))
            probe = RunProbe(kill_at=kill_step, kill_rank=rank, save_at=(*planned, *cuts))
            purpose = f"a run to be killed after step {kill_step} of {steps}"
            again = replace(probe, save_again=bool(cuts))
            train_in_processes(short_config, resumed, again, purpose=purpose)
            short_config.checkpoint.resume = "auto"
            # under ddp the remaining process saves when it has lost the other
            cuts.append(max(saved_steps(resumed), default=0))
            if not cuts[-1]:
                raise UsageError(f"the run killed after step {kill_step} left no checkpoint")
        short_config.checkpoint.resume = "none"
        probe = RunProbe(save_at=(*planned, *cuts))
        purpose = f"the {steps} steps without an interruption"
        train_in_processes(short_config, uninterrupted, probe, purpose=purpose)
        return compare_resumed(short_config, uninterrupted, resumed, cuts, kill_step, planned)


def draw_cuts(seed: int, steps: int) -> list[int]:
    """Return one or two steps without a common divisor, in ascending order.

    With both, a lost counter of any period up to `steps` shows: one of them is no multiple of the
    period, and at least as many steps follow the second as precede the first.
    """
    numbers = random.Random(seed)  # noqa: S311
    last = numbers.randint(max(1, steps // 2), max(1, steps * 3 // 4 - 1))
    firsts = [n for n in range(2, min(last, steps - last + 1)) if gcd(n, last) == 1]
    return [numbers.choice(firsts), last] if firsts else [*range(1, min(last, 2)), last]


def compare_resumed(
    config: RunConfig,
    uninterrupted: Path,
    resumed: Path,
    cuts: Sequence[int],
    kill_step: int,
    planned: Sequence[int] | None = None,
) -> ResumeEquality:
    """Resume the run in `resumed` from the last cut; compare it with the one in `uninterrupted`.

    `planned` are the steps of scheduled checkpoints; None: those of the config.
    """
    config.checkpoint.resume = "auto"
    expected, resume_step = read_end_state(uninterrupted), cuts[-1]
    save_at = None if planned is None else (*planned, *cuts)
    try:
        purpose = f"the killed run, resumed from step {resume_step}"
        probe = RunProbe(save_again=True, save_at=save_at)
        train_in_processes(config, resumed, probe, purpose=purpose)
        values = read_end_state(resumed).values
        names, cause = name_differences(expected.values, values, cuts)
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
        cuts=list(cuts),
    )


def name_differences(
    expected: Values, resumed: Values, cuts: Sequence[int]
) -> tuple[list[str], str]:
    """Return the values that are not bit-equal, and the likely cause of the first.

    The run was resumed at each of `cuts`.
    """
    keys = differing_keys(expected, resumed)
    keys = [x for x in keys if x.step not in cuts or not x.name.startswith(OPTIMIZER_OPTIONS)]
    if not keys:
        return [], ""
    before = [cut for cut in cuts if cut <= keys[0].step]
    return [str(key) for key in keys], _likely_cause(keys[0], before[-1] if before else cuts[0])


def _likely_cause(first: ValueKey, resume_step: int) -> str:
    fix = "try device.deterministic=true"
    if first.step < resume_step or (first.step == resume_step and first.kind == "metric"):
        where = f"before step {resume_step}, where one was resumed"
        return f"the runs differ {where}: the steps are nondeterministic; {fix}"
    if first.step == resume_step:
        return f"{first.name} is not restored to its value in the checkpoint of step {resume_step}"
    return (
        "all parts of the checkpoint were restored, so the cause is state outside it (an attribute "
        f"of the model, a technique, a data set or a hook), or nondeterministic steps ({fix})"
    )
