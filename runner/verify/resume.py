"""Whether a run that is killed and resumed is bit-equal to one that never stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.config import RunConfig
from runner.errors import CheckpointError, RunnerError, UsageError
from runner.verify.end_state import ValueKey, Values, differing, read_end_state, saved_steps
from runner.verify.processes import RunProbe, prepared, train_apart

STEPS = 20
OPTIONS = "optimizer.param_groups."  # set by the config, the rate by the next step


@dataclass(frozen=True)
class Continuation:
    """The comparison of an uninterrupted run with one that was killed and resumed."""

    steps: int
    cut: int  # the step of the checkpoint that the resumed run started from
    killed: int  # the step after which a process was killed
    compared: dict[str, int]  # values by kind
    differing: list[str]  # names of values that are not bit-equal, in order of computation
    techniques: list[str]
    cause: str = ""  # likely cause of the first
    processes: int = 1
    rank: int = 0  # the process that was killed
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every bit is the same."""
        return not self.differing


def verify_resume(config: RunConfig, folder: Path, steps: int = STEPS) -> Continuation:
    """Compare a run of `steps` steps with one whose process is killed in the second half.

    The resumed run saves its restored state, so that a part that was not restored is named even if
    no number depends on it. All runs are in a temporary folder.
    """
    cut, size = steps // 2, config.distributed.processes or 1
    killed, rank = cut + max(1, (steps - cut) // 3), size - 1
    short = prepared(config, steps, checkpoint_every=cut)
    short.monitoring.every = 3  # the checkpoint falls between two rows of metrics
    with TemporaryDirectory(dir=folder, prefix="verify-") as place:
        once, twice = Path(place) / "once", Path(place) / "twice"
        train_apart(short, twice, RunProbe(kill_at=killed, kill_rank=rank))
        start = max(saved_steps(twice), default=0)
        if not start:
            raise UsageError(f"the run that was killed after step {killed} has left no checkpoint")
        # under ddp the surviving process saves the step at which it lost the other
        train_apart(short, once, RunProbe(save_at=start if start % cut else 0))
        return compare_resumed(short, once, twice, start, killed)


def compare_resumed(
    config: RunConfig, once: Path, twice: Path, start: int, killed: int
) -> Continuation:
    """Resume the run in `twice`, and compare it with the one in `once`."""
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
    """Return the names of values that are not bit-equal, and the likely cause of the first."""
    items = [
        item
        for item in differing(whole, resumed)
        if item.step != start or not item.name.startswith(OPTIONS)
    ]
    return [str(item) for item in items], _likely_cause(items[0], start) if items else ""


def _likely_cause(first: ValueKey, start: int) -> str:
    if first.step < start or (first.step == start and first.kind == "metric"):
        return (
            f"the runs differ before step {start}, from which one was resumed: the same steps do "
            "not give the same numbers twice; try device.deterministic=true"
        )
    if first.step == start:
        return f"{first.name} is not restored as the checkpoint of step {start} has it"
    return (
        "all parts of the checkpoint were restored, so it is state that none holds (an attribute "
        "of the model, a technique, a data set or a hook), or steps that do not give the same "
        "numbers twice (device.deterministic=true)"
    )
