"""job=replay: find the module, line and technique that caused a captured bad step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.core.captures.manifest import find_capture
from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError, NotVerified, StorageError, WorkerFailure
from runner.core.masking import mask_nested
from runner.core.record import provenance, storage
from runner.core.record.console import print_stdout
from runner.core.record.summary import Summary
from runner.core.security.child_process import ChildContext, RequestProcess
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders
from runner.core.security.secrets import environment_access, permitted_variables
from runner.diagnose.replay import page
from runner.diagnose.replay.attempt import make_attempt, one_line_error
from runner.diagnose.replay.capture_reader import open_capture
from runner.diagnose.replay.investigation import Investigation
from runner.diagnose.replay.reopen import config_of, reopen_run, with_weights
from runner.diagnose.replay.results import Attempt, Replay


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
        attempt = AttemptProcesses(capture.path, trusted, limit_s, Path(temporary) / "log")
        attribute, seconds = config.replay.attribute, 6 * limit_s
        replay = Investigation(
            capture, folder, attempt, trusted, attribute, seconds, capture_folder
        ).investigate()
    try:
        storage.write_json(folder / "replay.json", page.as_dict(replay))
        storage.replace_text(folder / "replay.md", page.markdown(replay))
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
    print_stdout(page.terminal_report(mask_nested(replay)))
    print_stdout("", f"as a page: {folder / 'replay.md'}", soft_wrap=True)
    if problem:
        raise NotVerified(
            f"{problem}: {page.describe_reproduction(replay)}; {folder / 'replay.md'}"
        )
    return replay


@dataclass(frozen=True)
class AttemptProcesses:
    """Repeats a captured step, each time in its own process with the time limit `limit_s`."""

    path: Path
    trusted: Sequence[str]
    limit_s: float
    log: Path

    def __call__(self, without: Collection[str]) -> Attempt:
        """Repeat the step without these techniques."""
        arguments = (self.path, list(self.trusted), sorted(without), permitted_variables())
        process = RequestProcess(_send_attempt, arguments, self.log)
        try:
            process.start()
            attempt: Attempt = process.answer(self.limit_s)
            return attempt
        except WorkerFailure as ended:
            problem = f"not done within replay.timeout_s={self.limit_s:g}"
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
