"""Reading of checkpoints, with every byte verified; imported only if used."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from runner.core.checkpoint import manifest
from runner.core.checkpoint.folder import STEP, RestoredCheckpoint, StateCheck, list_candidates
from runner.core.checkpoint.manifest import read_manifest, shard_names
from runner.core.checkpoint.shards import merge_shards
from runner.core.errors import CheckpointError
from runner.core.findings import Trust
from runner.core.record import storage
from runner.core.security.files.file_bytes import hash_file
from runner.core.security.files.loader import (
    check_foreign_folder,
    damage_error,
    read_state,
    read_tensors,
)
from runner.core.security.files.policy import FilePolicy
from runner.core.security.files.provenance import is_in_run_tree


def load_checkpoint(
    folder: Path, policy: FilePolicy | None = None, check: StateCheck | None = None
) -> RestoredCheckpoint:
    """Load and verify one checkpoint; CheckpointError names the problem.

    With a policy, a checkpoint from outside this run tree is first checked as a foreign file, since
    its manifest proves nothing about its origin; SecurityError if it is refused. Damage is noticed
    before that. `check` raises CheckpointError for a state that cannot be restored.
    """
    facts = read_manifest(folder)
    admitted, is_foreign = None, policy is not None and not is_in_run_tree(folder, policy)
    if policy is not None and is_foreign:
        for name, written in facts.files.items():
            sha256, size = hash_file(folder / name)
            if sha256 != written.sha256:
                raise damage_error(folder / name, size)
        admitted = check_foreign_folder(folder, policy)
    checked_files = facts.files if admitted is None else admitted.files
    for name, written in facts.files.items():
        if name not in checked_files or checked_files[name].sha256 != written.sha256:
            raise CheckpointError(f"{folder / name}: changed while it was being checked")
    # the given name first: a link may be named like another checkpoint than its target
    match = STEP.fullmatch(folder.name) or STEP.fullmatch(folder.resolve().name)
    if match and int(match[1]) != facts.step:
        raise CheckpointError(f"{folder / manifest.NAME}: belongs to step {facts.step}")
    if manifest.PREPROCESSING in facts.files:
        read_preprocessing(folder, facts)
    names = shard_names(facts.files) or [manifest.MODEL]
    tensors = [read_tensors(folder / name, facts.files[name].sha256) for name in names]
    content = read_state(folder / manifest.STATE, facts.files[manifest.STATE].sha256)
    try:
        other_entries, state = dict(content["model"]), content["state"]
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(f"{folder / manifest.STATE}: not written by the runner") from None
    if check is not None:
        check(state, facts.step, str(folder / manifest.STATE))
    weights, digest = tensors[0], facts.files[names[0]].sha256
    if names != [manifest.MODEL]:
        weights = merge_shards(tensors, state, str(folder))
        digests = "".join(facts.files[name].sha256 for name in names)
        digest = hashlib.sha256(digests.encode()).hexdigest()
    trust = Trust.UNTRUSTED if is_foreign else Trust.CHECKED
    if admitted is not None:
        trust = admitted.trust
    model, differences = {**weights, **other_entries}, _differences(folder, facts)
    return RestoredCheckpoint(
        facts.step, model, state, folder, differences=differences, sha256=digest, trust=trust
    )


def read_preprocessing(folder: Path, facts: manifest.Manifest) -> bytes:
    """Return the checkpoint's preprocessing.json; CheckpointError if its digest differs."""
    path = folder / manifest.PREPROCESSING
    data = storage.read_file(path)
    if hashlib.sha256(data).hexdigest() != facts.files[manifest.PREPROCESSING].sha256:
        raise CheckpointError(f"{path}: damaged: sha256 differs from the manifest")
    return data


def _differences(folder: Path, facts: manifest.Manifest) -> list[str]:
    own = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    return [
        f"{folder}: written with {key} {then}, now {now}; results may differ in the last digits"
        for key, now in own.items()
        if (then := getattr(facts, key)) != now
    ]


def load_newest(
    root: Path,
    policy: FilePolicy | None = None,
    check: StateCheck | None = None,
    best_first: bool = False,
) -> RestoredCheckpoint | None:
    """Load the first good candidate and list bad ones; None without any, CheckpointError if bad."""
    bad: list[str] = []
    for folder in list_candidates(root, best_first):
        try:
            restored = load_checkpoint(folder, policy, check)
        except CheckpointError as error:
            bad.append(str(error))
        else:
            return replace(restored, warnings=bad)
    if bad:
        raise CheckpointError(f"{root}: no usable checkpoint: " + "; ".join(bad))
    return None
