"""job=replay: what a captured bad step was due to, down to the module, the line and technique."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from runner.captures.manifest import find
from runner.captures.opening import open_capture
from runner.config import RunConfig
from runner.errors import ConfigError, NotVerified, StorageError
from runner.record import provenance
from runner.replay import page
from runner.replay.findings import Replay
from runner.replay.look import Look
from runner.replay.reopen import settled
from runner.summary import Summary

log = logging.getLogger("runner")


def main(config: RunConfig, folder: Path) -> Replay:
    """Print what was found, and write replay.md (beside the capture too), replay.json and a script.

    Raises NotVerified where the step is good when it is made again: the page says what was tried.
    """
    if config.replay.path is None:
        raise ConfigError("replay.path", "is not there", "name a debug/captures/step_… folder")
    start = time.monotonic()
    where = find(Path(config.replay.path))
    capture = open_capture(where)
    trusted = config.security.trusted
    with tempfile.TemporaryDirectory(prefix="runner-replay-") as temporary:
        capture = settled(capture, Path(temporary), trusted=trusted)
        look = Look(capture, folder, trusted, config.replay.attribute, config.replay.timeout_s)
        replay = look.all()
    replay.capture = str(where)
    _write(replay, folder, where)
    problem = "" if replay.reproduced else f"step {replay.step} does not reproduce"
    Summary(
        status="done", reason=problem or replay.verdict, command=provenance.command(),
        name=config.name, versions=provenance.versions(), faults={replay.kind: 1},
        wall_seconds=time.monotonic() - start,
    ).write(folder)  # fmt: skip
    console = Console(highlight=False)
    console.print(page.screen(replay))
    console.print(Text(f"\nas a page: {folder / 'replay.md'}"), soft_wrap=True)
    if problem:
        raise NotVerified(f"{problem}: {page.reproduced(replay)}; {folder / 'replay.md'}")
    return replay


def _write(replay: Replay, folder: Path, beside: Path) -> None:
    text = page.markdown(replay)
    data = json.dumps(page.as_dict(replay), indent=2) + "\n"
    try:
        (folder / "replay.json").write_text(data, "utf-8")
        (folder / "replay.md").write_text(text, "utf-8")
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    try:
        (beside / "replay.md").write_text(text, "utf-8")
    except OSError as error:  # it may be on a disk that only reads
        log.info("no replay.md beside the capture: %s", error.strerror)
