"""job=replay: what a captured bad step was due to, down to the module, the line and technique."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from runner.captures.manifest import FOLDER, find
from runner.captures.reader import open_capture
from runner.config import RunConfig
from runner.errors import ConfigError, NotVerified, StorageError
from runner.masking import masked, masked_all
from runner.record import provenance, storage
from runner.record.console import print_stdout
from runner.record.storage import HashedFile
from runner.replay import page
from runner.replay.findings import Replay
from runner.replay.investigation import Investigation
from runner.replay.reopen import config_of, with_weights
from runner.security.files.policy import FilePolicy
from runner.security.paths import own_trees
from runner.training.summary import Summary

log = logging.getLogger("runner")


def main(config: RunConfig, folder: Path) -> Replay:
    """Print what was found, and write replay.md (beside the capture too), replay.json and a script.

    Raises NotVerified where the step is good when it is made again: the page says what was tried.
    """
    if config.replay.path is None:
        raise ConfigError("replay.path", "is not there", "name a debug/captures/step_… folder")
    start = time.monotonic()
    where = find(Path(config.replay.path))
    capture = open_capture(where, FilePolicy.of(config.security, own_trees(folder)))
    trusted = config.security.trusted
    config_of(capture, trusted)  # refused before anything of it is used
    with tempfile.TemporaryDirectory(prefix="runner-replay-") as temporary:
        capture = with_weights(capture, Path(temporary), trusted=trusted)
        investigation = Investigation(
            capture, folder, trusted, config.replay.attribute, config.replay.timeout_s,
            origin=where.absolute(),
        )  # fmt: skip
        replay = investigation.investigate()
    named = Path(config.replay.path)
    named = named if named.is_dir() else named.absolute().parent
    _write(replay, folder, where, [*own_trees(folder), named])
    problem = "" if replay.reproduced else f"step {replay.step} does not reproduce"
    Summary(
        status="done", reason=problem or replay.verdict, command=provenance.command(),
        name=config.name, versions=provenance.versions(), faults={replay.kind: 1},
        wall_seconds=time.monotonic() - start,
    ).write(folder)  # fmt: skip
    print_stdout(page.screen(masked_all(replay)))
    print_stdout("", f"as a page: {folder / 'replay.md'}", soft_wrap=True)
    if problem:
        raise NotVerified(f"{problem}: {page.reproduced(replay)}; {folder / 'replay.md'}")
    return replay


def _write(replay: Replay, folder: Path, beside: Path, trees: Sequence[Path]) -> None:
    text = page.markdown(replay)
    data = json.dumps(page.as_dict(replay), indent=2) + "\n"
    try:
        storage.replace_text(folder / "replay.json", data)
        storage.replace_text(folder / "replay.md", text)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}") from error
    try:
        _put_beside(beside.absolute(), text, trees)
    except OSError as error:  # it may be on a disk that only reads
        log.info("no replay.md beside the capture: %s", error.strerror)


def _put_beside(capture: Path, text: str, trees: Sequence[Path]) -> None:
    """Write replay.md into a capture, which may come from anybody: through no link in it.

    It lies in one of `trees`; where the page of a replay only says so, it may lie anywhere.
    """
    if not any(capture.resolve().is_relative_to(tree.resolve()) for tree in trees):
        raise OSError(errno.EPERM, f"{capture} is not in what was named")
    if any(folder.is_symlink() for folder in _within_run(capture)):
        raise OSError(errno.ELOOP, f"{capture} is a link")
    temporary = capture / f".tmp-replay-{secrets.token_hex(8)}.md"

    def fill(file: HashedFile) -> None:
        file.write(masked(text).encode("utf-8", "replace"))

    try:
        storage.write_file(temporary, fill)  # fails where there is such a name, a link too
        os.replace(temporary, capture / "replay.md")  # the link itself, if it is one
    finally:
        temporary.unlink(missing_ok=True)


def _within_run(capture: Path) -> list[Path]:
    """The capture's folder, and those above it that a run has made."""
    above = [capture.parent, capture.parent.parent]
    made = tuple(folder.name for folder in reversed(above)) == Path(FOLDER).parts
    return [capture, *(above if made else [])]
