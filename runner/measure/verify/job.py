"""job=verify: check that techniques, several processes or a resume do not change results."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.core.config.run_config import RunConfig, config_hash
from runner.core.config.variants import without_techniques
from runner.core.errors import CheckpointError, NotVerified, RunnerError, UsageError
from runner.core.format import count_noun
from runner.core.record.console import facts_table, plain_text, print_stdout
from runner.core.record.storage import write_json
from runner.core.record.text import json_safe
from runner.core.schemas.jobs import VerifyKind
from runner.measure.parity.distance import Parity, ParityRow
from runner.measure.parity.reference import check_parity
from runner.measure.verify import distributed
from runner.measure.verify.distributed import (
    FP64,
    DistributedEquality,
    verify_distributed,
)
from runner.measure.verify.end_state import (
    ValueKey,
    Values,
    differing_keys,
    read_end_state,
    saved_steps,
)
from runner.measure.verify.processes import RunProbe, prepare_config, train_in_processes
from runner.measure.verify.rerun import RerunEquality, verify_rerun

RESUME_STEPS = 20
Lines = list[tuple[str, str]]


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


VerificationResult = Parity | ResumeEquality | DistributedEquality | RerunEquality


def main(config: RunConfig, folder: Path) -> VerificationResult:
    """Run the check, print it, write `verify.json`; raises NotVerified if it fails."""
    what, verify, requested_hash = config.verify.what, config.verify, config_hash(config)
    if config.optimization.level == "auto":
        from runner.measure.auto.resolve import resolve_config

        config = resolve_config(config, folder)
    result: VerificationResult
    if what is VerifyKind.parity:
        baseline = without_techniques(config)
        result = check_parity(config, baseline, verify.steps, attribute=verify.attribute)
    elif what is VerifyKind.distributed:
        result = verify_distributed(config, folder, verify.steps or distributed.STEPS)
    elif what is VerifyKind.run:
        result = verify_rerun(config, folder, requested_hash)
    else:
        result = verify_resume(config, folder, verify.steps or RESUME_STEPS)
    path = folder / "verify.json"
    # JSON has no Inf and NaN, so they become text
    report = {"what": what.value, "verdict": verdict_text(result), **json_safe(asdict(result), str)}
    write_json(path, report)
    print_stdout(format_result(result))
    print_stdout("", f"as JSON: {path}", soft_wrap=True)
    if verdict_text(result) == "FAIL":
        raise NotVerified(_failure_message(result))
    return result


def verdict_text(result: VerificationResult) -> str:
    """Return FAIL, or the degree of agreement."""
    if isinstance(result, Parity):
        return result.verdict.value
    if isinstance(result, DistributedEquality):
        return "explained by rounding" if result.equal else "FAIL"
    return "exact" if result.exact else "FAIL"


def _failure_message(result: VerificationResult) -> str:
    if isinstance(result, DistributedEquality):
        return f"distributed: {result.first}: {result.cause}"
    if isinstance(result, RerunEquality):
        return f"run: not reproduced: {result.differing[0]}: {result.cause}"
    if isinstance(result, ResumeEquality):
        return f"resume: not exact: {', '.join(result.differing[:3])}: {result.cause}"
    culprits = " with ".join(f"optimization.{name}" for name in result.culprits) or "optimization"
    return f"parity: {culprits}: {result.first}"


# -- display, for 80 columns -----------------------------------------------------------------------


def format_result(result: VerificationResult) -> RenderableType:
    """Return the verdict with its evidence, and the worst value of each kind."""
    tables: list[RenderableType] = []
    if isinstance(result, Parity):
        (heading, lines), tables = _describe_parity(result), [Text(), _parity_table(result.rows)]
    elif isinstance(result, DistributedEquality):
        (heading, lines), tables = _describe_equality(result), [Text(), _distance_table(result)]
    elif isinstance(result, RerunEquality):
        heading, lines = _describe_rerun(result)
    else:
        heading, lines = _describe_resume(result)
    text = verdict_text(result)
    rows = [("verdict", text, "bold red" if text == "FAIL" else "green")]
    rows += [(name, value, "bold red" if name == "culprit" else "") for name, value in lines]
    return Group(Text(heading, style="bold cyan"), facts_table(rows, 12), *tables)


def _describe_parity(result: Parity) -> tuple[str, Lines]:
    lines = [("first", str(result.first))] if result.first is not None else []
    if result.culprits:
        pass_alone = result.alone and "FAIL" not in result.alone.values()
        suffix = " (each passes alone)" if pass_alone and len(result.culprits) > 1 else ""
        lines.append(("culprit", " + ".join(result.culprits) + suffix))
    lines.append(("techniques", ", ".join(result.techniques) or "none took"))
    lines += [("", f"not {name}: {reason}") for name, reason in result.refused.items()]
    lines += [("", f"{name} alone: {outcome}") for name, outcome in result.alone.items()]
    lines.append(("precision", f"{result.precision}, compared with {result.reference}"))
    lines += [("note", note) for note in result.notes]
    lines += [("not judged", omission) for omission in result.not_judged]
    return f"parity over {count_noun(result.steps, 'step')}", lines


def _compared(result: ResumeEquality | RerunEquality) -> tuple[str, str]:
    counts = (f"{count} {kind} values" for kind, count in result.compared.items())
    return "compared", ", ".join(counts)


def _describe_resume(result: ResumeEquality) -> tuple[str, Lines]:
    process = f"process {result.rank} of {result.processes}" if result.processes > 1 else "it"
    often = "twice" if len(result.cuts) > 1 else f"after step {result.killed}"
    starts = " and ".join(map(str, result.cuts or [result.cut]))
    lines = [_compared(result), ("techniques", ", ".join(result.techniques) or "none")]
    lines += [("differs", name) for name in result.differing[:10]]
    lines += [("likely cause", result.cause)] if result.cause else []
    steps = f"{result.steps} uninterrupted steps"
    return f"{steps}, compared with {process} killed {often} and resumed from {starts}", lines


def _describe_rerun(result: RerunEquality) -> tuple[str, Lines]:
    lines = [_compared(result)]
    if result.differing:
        first = f"{result.differing[0]}: was {result.was}, now {result.now}"
        lines += [("first", first), ("differ", f"{len(result.differing)} values")]
        lines.append(("likely cause", result.cause))
    lines += [("changed", change) for change in result.changes]
    lines += [("note", note) for note in result.notes]
    return f"{result.run}: {result.steps} steps, trained again", lines


def _describe_equality(result: DistributedEquality) -> tuple[str, Lines]:
    lines = [("note", note) for note in result.notes]
    if result.first:
        off = f"off by {result.distance:.1e} of its size, rounding explains {result.limit:.1e}"
        lines[:0] = [("first", f"{result.first}: {off}"), ("likely cause", result.cause)]
    how = f"by {result.processes} processes ({result.how}) and by one"
    return f"{result.steps} steps {how}", lines


def _parity_table(rows: list[ParityRow]) -> Table:
    table = []
    for kind in dict.fromkeys(row.kind for row in rows):
        group = [row for row in rows if row.kind == kind]
        worst = max(group, key=lambda row: row.excess)
        numbers = f"{worst.step}", f"{worst.error:.1e}", f"{worst.bound:.1e}"
        within = all(row.within for row in group)
        table.append((within, (kind, f"{len(group)}", *numbers, worst.name)))
    return _kinds_table(("tensors", "step", "worst error", "allowed", "in tensor"), table)


def _distance_table(result: DistributedEquality) -> Table:
    table = []
    for row in result.rows:
        kind = row.kind if row.precision == FP64 else f"{row.kind}, own precision"
        numbers = f"{row.compared}", f"{row.step}", f"{row.distance:.1e}", f"{row.limit:.1e}"
        table.append((row.distance <= row.limit, (kind, *numbers, row.name)))
    return _kinds_table(("values", "step", "worst distance", "limit", "of"), table)


def _kinds_table(headings: tuple[str, ...], rows: Iterable[tuple[bool, tuple[str, ...]]]) -> Table:
    table = Table("kind", box=None, padding=(0, 1), pad_edge=False)
    for heading in headings:
        is_number = heading != headings[-1]
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for within, cells in rows:
        table.add_row(*(plain_text(cell, "" if within else "bold red") for cell in cells))
    return table


# -- a run that is killed and resumed --------------------------------------------------------------


def verify_resume(config: RunConfig, folder: Path, steps: int = RESUME_STEPS) -> ResumeEquality:
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
        names, cause = name_differences(expected.values, read_end_state(resumed).values, cuts)
    except RunnerError as error:
        if error.exit_code != CheckpointError.exit_code:
            raise
        names, cause = [f"checkpoint of step {resume_step}"], str(error)
    size = config.distributed.processes or 1
    steps, techniques = config.training.steps or 0, list(expected.facts["techniques"])
    found = expected.count(), names, techniques, cause, size
    return ResumeEquality(steps, resume_step, kill_step, *found, size - 1, cuts=list(cuts))


def name_differences(
    expected: Values, resumed: Values, cuts: Sequence[int]
) -> tuple[list[str], str]:
    """Return the values that are not bit-equal, and the likely cause of the first.

    The run was resumed at each of `cuts`.
    """
    keys = differing_keys(expected, resumed)
    keys = [x for x in keys if x.step not in cuts or not x.is_option]
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
    outside = "state outside it (an attribute of the model, a technique, a data set or a hook)"
    restored = "all parts of the checkpoint were restored, so the cause is"
    return f"{restored} {outside}, or nondeterministic steps ({fix})"
