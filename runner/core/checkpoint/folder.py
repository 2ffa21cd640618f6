"""The folder of a run's checkpoints: names, listing, links and pruning.

    checkpoints/step_00001200/{model.safetensors,state.pt,manifest.json}   last -> …   best -> …
    checkpoints/step_00001200/{shard_00000_of_00002.safetensors,…}         with fsdp
    checkpoints/inherited/step_00000400/                      in a fork: the best of its parent

The manifests are authoritative; the links `last` and `best` are for people. The newest checkpoint
is the one of the highest step, never by time.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.core.checkpoint import manifest
from runner.core.checkpoint.manifest import read_manifest
from runner.core.errors import CheckpointError
from runner.core.findings import Trust
from runner.core.record import storage

log = logging.getLogger("runner")

FOLDER = "checkpoints"
STEP = re.compile(r"step_(\d{8,})", re.ASCII)
TEMPORARY_PREFIX = ".tmp-"
INHERITED = "inherited"  # the parent's best checkpoint, until the fork has a better one
ABANDONED_PREFIX = "abandoned_"  # of checkpoints after the step from which the run continued

StateCheck = Callable[[Any, int, str], None]
"""Called with a state, its step and the file's name; raises CheckpointError if it is invalid."""


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint that was read and verified."""

    step: int
    model: dict[str, Any]
    state: dict[str, Any]
    path: Path  # its folder, or "memory" if it was not written
    warnings: list[str] = field(default_factory=list)  # on bad checkpoints that were skipped
    differences: list[str] = field(default_factory=list)  # of this machine to the writer's
    sha256: str = ""  # of the file with the model's tensors
    trust: Trust = Trust.CHECKED


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def steps(root: Path) -> dict[int, Path]:
    """Return all checkpoint folders by step, complete or not."""
    try:
        names = os.listdir(root)
    except OSError:
        return {}
    folders: dict[int, Path] = {}
    for name in sorted(names):  # replaced ones sort first, so that new ones win
        if match := STEP.fullmatch(name.removeprefix(storage.OLD_PREFIX)):
            folders[int(match[1])] = root / name
    return folders


def root_of(folder: Path) -> Path:
    """Return the folder of checkpoints, given it or its run's folder."""
    return folder if folder.name == FOLDER else folder / FOLDER


def holder_of(checkpoint: Path) -> Path:
    """Return the folder of checkpoints that holds this one, inherited or not."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == INHERITED else parent


def find_step(root: Path, step: int) -> Path | None:
    """Return the checkpoint of `step`, which may be inherited; None if there is none."""
    folders = (root / step_name(step), root / INHERITED / step_name(step))
    return next((folder for folder in folders if is_checkpoint(folder)), None)


def find_inherited(root: Path) -> Path | None:
    """Return the best checkpoint that a fork has from its parent; None if there is none."""
    inherited = steps(root / INHERITED).values()
    return next((folder for folder in inherited if is_checkpoint(folder)), None)


def inherit(root: Path, checkpoint: Path) -> None:
    """Give the run a copy of its parent's best checkpoint; files are hard-linked where possible.

    It is only ever the best: `steps` does not list it, so no resume and no rollback takes it.
    Raises OSError, and CheckpointError for a damaged manifest.
    """
    facts, temporary = read_manifest(checkpoint), root / (TEMPORARY_PREFIX + INHERITED)
    storage.remove_folder(temporary, ignore_errors=True)
    folder = temporary / step_name(facts.step)
    try:
        storage.make_folder(folder)
        for name in (*facts.files, manifest.NAME):
            storage.link_or_copy(checkpoint / name, folder / name)
        storage.sync_folder(folder)
        storage.replace_folder(temporary, root / INHERITED)
    finally:
        storage.remove_folder(temporary, ignore_errors=True)
    update_links(root)


def is_checkpoint(folder: Path) -> bool:
    """Whether the checkpoint is complete; it may still be damaged."""
    return os.path.isfile(folder / manifest.NAME)


def is_best(root: Path, step: int) -> bool:
    """Whether the checkpoint of `step` was the best when it was written."""
    with suppress(CheckpointError):
        return read_manifest(root / step_name(step)).best
    return False


def list_candidates(root: Path, best_first: bool = False) -> list[Path]:
    """Return the checkpoints, newest first, complete or not; with `best_first` after the best."""
    saved = steps(root)
    newest_first = sorted(saved, reverse=True)
    inherited: list[Path] = []
    if best_first:  # each was the best when written, so the newest of them is the best
        best = next((step for step in newest_first if is_best(root, step)), None)
        newest_first.sort(key=lambda step: step != best)
        found = find_inherited(root) if best is None else None
        inherited = [] if found is None else [found]
    return [*inherited, *(saved[step] for step in newest_first)]


def abandon_from(root: Path, step: int) -> None:
    """Rename checkpoints after `step`, from which the run continued; they may be wanted."""
    for later_step, folder in steps(root).items():
        if later_step > step:
            abandoned = root / (ABANDONED_PREFIX + folder.name)
            storage.remove_folder(abandoned, ignore_errors=True)
            storage.rename(folder, abandoned)
            message = "%s: the run resumed before this step; renamed to %s"
            log.warning(message, folder, abandoned.name)


def update_links(root: Path) -> int | None:
    """Update the links `last` and `best` from the manifests; return the best step."""
    newest = best = None
    for step, folder in sorted(steps(root).items()):
        with suppress(CheckpointError):
            best = step if read_manifest(folder).best else best
            newest = step
    found = {"last": newest, "best": best}
    targets = {name: step_name(step) for name, step in found.items() if step is not None}
    if best is None and (inherited := find_inherited(root)) is not None:
        targets["best"] = f"{INHERITED}/{inherited.name}"
    for name, target in targets.items():
        if storage.read_link(root / name) != target:
            storage.update_link(root / name, target)
    if best is not None:
        storage.remove_folder(root / INHERITED, ignore_errors=True)
    storage.sync_folder(root)
    return best


def link_target(root: Path, name: str) -> str | None:
    """Return the target of the link `last` or `best`, relative to the run's folder, or None."""
    target = storage.read_link(root / name)
    return f"{FOLDER}/{target}" if target and is_checkpoint(root / target) else None


def describe_links(checkpoint: Path) -> str:
    """Return which links of its folder lead to a checkpoint, as " (best, last)"; "" if none do."""
    target = f"{FOLDER}/{checkpoint.name}"
    names = [n for n in ("best", "last") if link_target(checkpoint.parent, n) == target]
    return f" ({', '.join(names)})" if names else ""


def prune(root: Path, keep: int, protected: set[int | None], extra: Collection[int] = ()) -> None:
    """Delete checkpoints but the `keep` newest complete ones, not `extra`, and `protected` ones."""
    folders = steps(root)
    complete = sorted(step for step in folders.keys() - extra if is_checkpoint(folders[step]))
    for step in sorted(folders.keys() - protected - set(complete[-keep:])):
        try:
            leftover = root / f"{TEMPORARY_PREFIX}old-{step_name(step)}"  # for `delete_leftovers`
            storage.rename(folders[step], leftover)
            storage.remove_folder(leftover)
        except OSError as error:
            log.warning("%s: old checkpoint not deleted: %s", folders[step], error.strerror)


def delete_leftovers(root: Path) -> None:
    """Delete remains of a crash; disk errors are left for the first save to report."""
    try:
        for leftover in root.glob(TEMPORARY_PREFIX + "*"):
            if leftover.is_dir():
                storage.remove_folder(leftover)
            else:
                storage.remove_file(leftover)
        storage.recover_folders(root)
        update_links(root)
    except OSError as error:
        log.warning("%s: leftovers of a crash not deleted: %s", root, error.strerror)
