"""job=replay: find the module, line and technique that caused a captured bad step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from runner.core.captures.manifest import find_capture
from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError, NotVerified, StorageError, WorkerFailure
from runner.core.format import join_names, metric
from runner.core.masking import mask_nested
from runner.core.record import markdown, provenance, storage
from runner.core.record.console import facts_table, plain_text, print_stdout
from runner.core.record.summary import Summary
from runner.core.record.text import json_safe
from runner.core.security.child_process import ChildContext, RequestProcess
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders
from runner.core.security.secrets import environment_access, permitted_variables
from runner.diagnose.replay.investigation import Investigation
from runner.diagnose.replay.reopen import (
    config_of,
    make_attempt,
    one_line_error,
    open_capture,
    reopen_run,
    with_weights,
)
from runner.diagnose.replay.results import Attempt, Replay, StepPhase


def main(config: RunConfig, folder: Path) -> Replay:
    """Print the findings, and write replay.md, replay.json and reproduce.py.

    Raises NotVerified if the repeated step is good; replay.md says what was tried.
    """
    if config.replay.path is None:
        raise ConfigError("replay.path", "must be set", "name a debug/captures/step_… folder")
    start = time.monotonic()
    capture_folder = find_capture(Path(config.replay.path))
    capture = open_capture(capture_folder, FilePolicy.of(config.security, run_tree_folders(folder)))
    trusted, limit_s = config.security.trusted, config.replay.timeout_s
    config_of(capture, trusted)  # check it before using the capture
    with tempfile.TemporaryDirectory(prefix="runner-replay-") as temporary:
        capture = with_weights(capture, Path(temporary), trusted)
        log = Path(temporary) / "log"
        attempt = partial(attempt_in_process, capture.path, trusted, limit_s, log)
        attribute, seconds = config.replay.attribute, 6 * limit_s
        settings = attempt, trusted, attribute, seconds, capture_folder
        replay = Investigation(capture, folder, *settings).investigate()
    try:
        # NaN and Inf become text
        record = {"verdict": replay.verdict, **json_safe(asdict(replay), str)}
        storage.write_json(folder / "replay.json", record)
        storage.replace_text(folder / "replay.md", markdown_report(replay))
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    problem = "" if replay.reproduced else f"step {replay.step} does not reproduce"
    Summary(
        status="done",
        reason=problem or replay.verdict,
        ended_by="done",
        command=provenance.command(),
        name=config.name,
        versions=provenance.versions(),
        faults={replay.kind: 1},
        wall_seconds=time.monotonic() - start,
    ).write(folder)
    print_stdout(terminal_report(mask_nested(replay)))
    print_stdout("", f"as a page: {folder / 'replay.md'}", soft_wrap=True)
    if problem:
        raise NotVerified(f"{problem}: {_describe_reproduction(replay)}; {folder / 'replay.md'}")
    return replay


def attempt_in_process(
    path: Path, trusted: Sequence[str], limit_s: float, log: Path, without: Collection[str]
) -> Attempt:
    """Repeat a captured step without these techniques, in a process of its own."""
    arguments = (path, list(trusted), sorted(without), permitted_variables())
    process = RequestProcess(_send_attempt, arguments, log)
    try:
        process.start()
        attempt: Attempt = process.answer(limit_s)
        return attempt
    except WorkerFailure as ended:
        problem = f"not done within replay.timeout_s={limit_s:g}"
        return Attempt(failed=problem if ended.status == "timeout" else ended.reason)
    finally:
        process.end()


def make_captured_attempt(path: Path, trusted: Sequence[str], without: Collection[str]) -> Attempt:
    """Repeat the step in this process; an error becomes part of the result."""
    try:
        capture = open_capture(path)
        with reopen_run(capture, trusted=trusted, without=without) as (run, batch):
            return make_attempt(run, batch, capture)
    except Exception as error:
        return Attempt(failed=one_line_error(error))


def _send_attempt(
    child: ChildContext,
    path: Path,
    trusted: list[str],
    without: list[str],
    readable: Sequence[str] | None,
) -> None:
    with environment_access(readable):
        child.pipe.send(make_captured_attempt(path, trusted, without))


# -- the report: for the terminal (80 columns), and as replay.md ----------------------------------


def _facts(replay: Replay) -> list[tuple[str, str]]:
    cause, blame = replay.found, replay.blame
    numbers = f"loss {metric(replay.loss)}, gradient norm {metric(replay.grad_norm)}"
    gradients = join_names(cause.parameters, 1)
    samples = ", ".join(map(str, replay.samples[:10])) + " …" * (len(replay.samples) > 10)
    technique = "not searched" if blame is None else blame.verdict
    if cause.phase is StepPhase.weights and blame is None:
        technique += ": the fault is older than this step"
    lines = [
        ("step", f"{replay.step} of {replay.run} ({replay.kind.replace('_', ' ')})"),
        ("recorded", replay.message if replay.kind == "exception" else numbers),
        ("reproduced", _describe_reproduction(replay)),
        ("where", cause.cause or "not found"),
        ("module", f"{cause.module or 'the model itself'} ({cause.kind})" if cause.kind else ""),
        ("weights", cause.grown),
        ("operation", cause.operation),
        ("line", f"{cause.line}  {cause.line.source.strip()}" if cause.line else ""),
        ("gradients", f"not finite, in this order: {gradients}" if gradients else ""),
        ("samples", f"{samples} of the data set" if replay.samples else ""),
        ("looked at", replay.seen),
        ("technique", technique),
        *(("note", note) for note in cause.notes),
    ]
    if replay.script:
        lines.append(("script", f"{replay.script} repeats the step; exit code 3: it is bad"))
    return [line for line in lines if line[1]]


def terminal_report(replay: Replay) -> RenderableType:
    """Return the report for a terminal, without tables; names are escaped."""
    cause = "bold red" if replay.reproduced else ""
    about = facts_table(((*row, cause if row[0] == "where" else "") for row in _facts(replay)), 11)
    parts: list[RenderableType] = [Text("replay of a bad step", style="bold cyan"), about]
    for step in replay.advice:
        parts += [Text(), plain_text(step)]
    return Group(*parts)


def markdown_report(replay: Replay) -> str:
    """Return the same as Markdown, for replay.md; replay.json has all numbers."""
    cause = markdown.escape(replay.found.cause or "Not found.")
    parts = [f"# Step {replay.step} of {markdown.escape(replay.run)}", f"**{cause}**"]
    parts.append(markdown.table(("", ""), _facts(replay)))
    if replay.advice:
        steps = "\n".join(f"- {markdown.escape(step)}" for step in replay.advice)
        parts += ["## What to do next", steps]
    if replay.script:
        parts += ["To repeat the step:", markdown.code(f"python {replay.script}", "sh")]
    return "\n\n".join(parts) + "\n"


def _describe_reproduction(replay: Replay) -> str:
    attempt = replay.attempt
    if attempt.failed:
        return f"not known: {attempt.failed}"
    numbers = f"loss {metric(attempt.loss)}, gradient norm {metric(attempt.grad_norm)}"
    answer = f"yes{', in the same numbers' * replay.same}" if replay.reproduced else "no"
    return f"{answer}: {attempt.error or numbers}"
