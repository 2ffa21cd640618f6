"""Verify that a killed and resumed run is bit-equal to an uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.config import RunConfig
from runner.errors import CheckpointError, RunnerError, UsageError
from runner.verify.end_state import ValueKey, Values, differing, read_end_state, saved_steps
from runner.verify.processes import RunProbe, prepared, train_apart

STEPS = 20
OPTIONS = "optimizer.param_groups."  # set by the config and the next step


@dataclass(frozen=True)
class Continuation:
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


def verify_resume(config: RunConfig, folder: Path, steps: int = STEPS) -> Continuation:
    """Train `steps` steps, and again with a process killed in the second half.

    The resumed run saves its restored state, so that a part which was not restored is named even if
    no result depends on it. All runs are in a temporary folder.
    """
    cut, size = steps // 2, config.distributed.processes or 1
    killed, rank = cut + max(1, (steps - cut) // 3), size - 1
    short = prepared(config, steps, checkpoint_every=cut)
    short.monitoring.every = 3  # so that the checkpoint falls between two reports
    with TemporaryDirectory(dir=folder, prefix="verify-") as place:
        once, twice = Path(place) / "once", Path(place) / "twice"
        train_apart(short, twice, RunProbe(kill_at=killed, kill_rank=rank))
        start = max(saved_steps(twice), default=0)
        if not start:
            raise UsageError(f"the run killed after step {killed} left no checkpoint")
        # under ddp the remaining process saves when it has lost the other
        train_apart(short, once, RunProbe(save_at=start if start % cut else 0))
        return compare_resumed(short, once, twice, start, killed)


def compare_resumed(
    config: RunConfig, once: Path, twice: Path, start: int, killed: int
) -> Continuation:
    """Resume the run in `twice`, and compare it with the run in `once`."""
    config.checkpoint.resume = "auto"
    whole = read_end_state(once)
    try:
        train_apart(config, twice, RunProbe(save_again=True))
        names, cause = name_differences(whole.values, read_end_state(twice).values, start)
    except RunnerError as error:
        if error.exit_code != CheckpointError.exit_code:
            raise
        names, cause = [f"checkpoint of step {start}"], str(error)
    size = config.distributed.processes or 1
    return Continuation(
        steps=config.training.steps or 0,
        cut=start,
        killed=killed,
        compared=whole.count(),
        differing=names,
        techniques=list(whole.facts["techniques"]),
        cause=cause,
        processes=size,
        rank=size - 1,
    )


def name_differences(whole: Values, resumed: Values, start: int) -> tuple[list[str], str]:
    """Return the values that are not bit-equal, and the likely cause of the first."""
    items = [
        item
        for item in differing(whole, resumed)
        if item.step != start or not item.name.startswith(OPTIONS)
    ]
    return [str(item) for item in items], _likely_cause(items[0], start) if items else ""


def _likely_cause(first: ValueKey, start: int) -> str:
    if first.step < start or (first.step == start and first.kind == "metric"):
        return (
            f"the runs differ before step {start}, where one was resumed: the steps are "
            "nondeterministic; try device.deterministic=true"
        )
    if first.step == start:
        return f"{first.name} is not restored to its value in the checkpoint of step {start}"
    return (
        "all parts of the checkpoint were restored, so the cause is state outside it (an attribute "
        "of the model, a technique, a data set or a hook), or nondeterministic steps "
        "(try device.deterministic=true)"
    )
