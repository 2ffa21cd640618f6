"""The folder of a run's checkpoints: which there are, which to keep, and reading one back.

    checkpoints/step_00001200/{model.safetensors,state.pt,manifest.json}   last -> …   best -> …
    checkpoints/step_00001200/{shard_00000_of_00002.safetensors,…}         in model's place: fsdp

The manifests are the record; the links `last` and `best` are there for people. What is newest is
decided by the step and never by a clock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint import manifest
from runner.checkpoint.manifest import read_manifest, shard_names
from runner.errors import CheckpointError
from runner.record import storage
from runner.security.files.policy import FilePolicy
from runner.security.trust import Trust

log = logging.getLogger("runner")

FOLDER = "checkpoints"
STEP = re.compile(r"step_(\d{8,})", re.ASCII)
TEMPORARY = ".tmp-"
ASIDE = "abandoned_"  # before the name of a checkpoint that the run went back behind

Check = Callable[[Any, int, str], None]
"""Given a state, its step and the file's name; raises CheckpointError where it is no state."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back, every byte of it verified."""

    step: int
    model: dict[str, Any]
    state: dict[str, Any]
    path: Path  # its folder; just "memory" for one that was never written
    warnings: list[str] = field(default_factory=list)  # bad ones that were passed over
    differences: list[str] = field(default_factory=list)  # of this machine from the one it is from
    sha256: str = ""  # of the file with the model's tensors
    trust: Trust = Trust.CHECKED


def step_name(step: int) -> str:
    """The folder's name."""
    return f"step_{step:08d}"


def steps(root: Path) -> dict[int, Path]:
    """Everything with the name of a checkpoint, complete or not."""
    try:
        names = os.listdir(root)
    except OSError:
        return {}
    found: dict[int, Path] = {}
    for name in sorted(names):  # one that was being replaced first, so that the new one wins
        if match := STEP.fullmatch(name.removeprefix(storage.OLD)):
            found[int(match[1])] = root / name
    return found


def root_of(where: Path) -> Path:
    """The folder of checkpoints, given that or the folder of a run."""
    return where if where.name == FOLDER else where / FOLDER


def is_checkpoint(folder: Path) -> bool:
    """Whether it was completed; not whether it is undamaged."""
    return os.path.isfile(folder / manifest.NAME)


def is_best(root: Path, step: int) -> bool:
    """Whether the checkpoint of that step was the best when it was written."""
    with suppress(CheckpointError):
        return read_manifest(root / step_name(step)).best
    return False


def load(folder: Path, policy: FilePolicy | None = None, check: Check | None = None) -> Restored:
    """One checkpoint, verified before use; CheckpointError says in what way it is not good.

    With a policy, one from outside this run tree is looked at as a foreign one first, since
    anybody can write a manifest that fits. Raises SecurityError for what is not let in. `check`
    says whether the state is one that can be gone on with.
    """
    # what reads foreign files is only imported where one is read
    from runner.security.files.loader import admit_folder, read_state, read_tensors
    from runner.security.files.provenance import is_own

    admitted = None if policy is None else admit_folder(folder, policy)
    facts = read_manifest(folder)
    for name, written in facts.files.items() if admitted is not None else ():
        examined = admitted.files.get(name) if admitted is not None else None
        if examined is None or examined.sha256 != written.sha256:
            raise CheckpointError(f"{folder / name}: changed while it was being checked")
    named = STEP.fullmatch(folder.resolve().name)
    if named and int(named[1]) != facts.step:
        raise CheckpointError(f"{folder / manifest.NAME}: is that of step {facts.step}")
    if manifest.PREPROCESSING in facts.files:
        read_preprocessing(folder, facts)
    names = shard_names(facts.files) or [manifest.MODEL]
    tensors = [read_tensors(folder / name, facts.files[name].sha256) for name in names]
    content = read_state(folder / manifest.STATE, facts.files[manifest.STATE].sha256)
    try:
        rest, state = dict(content["model"]), content["state"]
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(f"{folder / manifest.STATE}: not written by the runner") from None
    if check is not None:
        check(state, facts.step, str(folder / manifest.STATE))
    weights = tensors[0]
    if names != [manifest.MODEL]:
        from runner.checkpoint.shards import merge_shards  # only where there are some

        weights = merge_shards(tensors, state, str(folder))
    if admitted is not None:
        trust = admitted.trust
    else:
        trust = Trust.CHECKED if policy is None or is_own(folder, policy) else Trust.UNTRUSTED
    return Restored(
        facts.step,
        {**weights, **rest},
        state,
        folder,
        differences=_differences(folder, facts),
        sha256=_digest([facts.files[name].sha256 for name in names]),
        trust=trust,
    )


def _digest(digests: list[str]) -> str:
    """That of the file with the model's tensors, or one of those of its shards."""
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def read_preprocessing(folder: Path, facts: manifest.Manifest) -> bytes:
    """The checkpoint's preprocessing.json; CheckpointError where it is not what was written."""
    path = folder / manifest.PREPROCESSING
    data = storage.read_file(path)
    if hashlib.sha256(data).hexdigest() != facts.files[manifest.PREPROCESSING].sha256:
        raise CheckpointError(f"{path}: damaged: its sha256 is not the manifest's")
    return data


def _differences(folder: Path, facts: manifest.Manifest) -> list[str]:
    own = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    return [
        f"{folder}: written with {key} {then}, and here it is {now}; numbers may differ in their "
        "last digits from those of a run that was never stopped"
        for key, now in own.items()
        if (then := getattr(facts, key)) != now
    ]


def candidates(root: Path, best_first: bool = False) -> list[Path]:
    """The checkpoints from the newest on, complete or not; with `best_first` after the best."""
    saved = steps(root)
    newest_first = sorted(saved, reverse=True)
    if best_first:  # each was the best when it was written, so the newest of these is
        best = next((step for step in newest_first if is_best(root, step)), None)
        newest_first.sort(key=lambda step: step != best)
    return [saved[step] for step in newest_first]


def load_newest(
    root: Path,
    policy: FilePolicy | None = None,
    check: Check | None = None,
    best_first: bool = False,
) -> Restored | None:
    """The first good one of the candidates; bad ones are named in its warnings.

    None if there is none at all, and CheckpointError naming each if none is good.
    """
    bad: list[str] = []
    for folder in candidates(root, best_first):
        try:
            restored = load(folder, policy, check)
        except CheckpointError as error:
            bad.append(str(error))
        else:
            return replace(restored, warnings=bad)
    if bad:
        raise CheckpointError(f"{root}: no usable checkpoint: " + "; ".join(bad))
    return None


def abandon_from(root: Path, step: int) -> None:
    """Rename later checkpoints: the run went on from before them, so they are not its newest.

    They may be bad, or the user chose an earlier one; nothing good is deleted for that.
    """
    for later, folder in steps(root).items():
        if later > step:
            aside = root / (ASIDE + folder.name)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
            log.warning("%s: the run went on from before it; now %s", folder, aside.name)


def link(root: Path) -> int | None:
    """Point `last` and `best` where the manifests say; the best one's step."""
    newest = best = None
    for step, folder in sorted(steps(root).items()):
        with suppress(CheckpointError):
            best = step if read_manifest(folder).best else best
            newest = step
    for name, target in (("last", newest), ("best", best)):
        if target is not None and storage.read_link(root / name) != step_name(target):
            storage.update_link(root / name, step_name(target))
    storage.sync_folder(root)
    return best


def prune(root: Path, keep: int, always: set[int | None]) -> None:
    """Delete all but the `keep` newest complete ones and those in `always`."""
    found = steps(root)
    complete = sorted(step for step, folder in found.items() if is_checkpoint(folder))
    for step in sorted(found.keys() - always - set(complete[-keep:])):
        try:
            going = root / (TEMPORARY + "old-" + step_name(step))  # which a start would remove
            os.rename(found[step], going)
            storage.remove_folder(going)
        except OSError as error:
            log.warning("%s: an old checkpoint stays: %s", found[step], error.strerror)


def sweep(root: Path) -> None:
    """Tidy what a crash left; trouble with the disk is left for the first save to report."""
    try:
        for leftover in root.glob(TEMPORARY + "*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        storage.recover(root)
        link(root)
    except OSError as error:
        log.warning("%s: leftovers of a crash stay: %s", root, error.strerror)
