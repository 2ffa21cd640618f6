"""Damage to the newest checkpoint of a run: is each refused and named, and the one before used?"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.errors import RunnerError
from tests import runs
from tests.core.checkpoint.test_checkpoint_damage import forge
from tests.faults.end_state import digest

BLOCK = 512  # bytes


@dataclass(frozen=True)
class Target:
    """The checkpoint that is damaged, the one before it, and what is drawn."""

    newest: Path
    before: Path
    draw: random.Random

    def file(self) -> Path:
        return self.draw.choice(sorted(self.newest.iterdir()))

    def changed_file(self) -> tuple[Path, Path]:
        """A file that differs from the one of the checkpoint before, and that one."""
        while True:
            path = self.file()
            older = self.before / path.name
            if older.read_bytes() != path.read_bytes():
                return path, older

    def change(self, edit: Callable[[bytearray, random.Random], object]) -> None:
        """Edit the bytes of one of its files, so that they differ."""
        path = self.file()
        whole = path.read_bytes()
        data = bytearray(whole)
        while data == whole:
            edit(data, self.draw)
        path.write_bytes(data)


def flip_bits(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice([1, 1, 1, 2, 8, 64])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.choice([0, len(data) - 1, draw.randrange(len(data))]) :]


def extend(data: bytearray, draw: random.Random) -> None:
    data.extend(bytes(draw.randint(1, BLOCK)))


def zero_block(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start : start + BLOCK] = bytes(len(data[start : start + BLOCK]))


def swap_blocks(data: bytearray, draw: random.Random) -> None:
    size = min(BLOCK, len(data) // 2)
    one, other = sorted(draw.sample(range(len(data) - size + 1), 2))
    first, second = data[one : one + size], data[other : other + size]
    data[one : one + size], data[other : other + size] = second, first


def duplicate_block(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start:start] = data[start : start + BLOCK]


def swap_files(target: Target) -> None:
    one, other = target.draw.sample(sorted(target.newest.iterdir()), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def take_older_file(target: Target) -> None:
    path, older = target.changed_file()
    path.write_bytes(older.read_bytes())


def remove_file(target: Target) -> None:
    target.file().unlink()


def edit_manifest(target: Target) -> None:
    """Change, add or remove a value; its digest stays."""
    path = target.newest / "manifest.json"
    before = path.read_text()
    body = json.loads(before)
    where = target.draw.choice([body, body["files"], *body["files"].values()])
    key = target.draw.choice(sorted(where))
    how = target.draw.randrange(3)
    if how == 0:
        where[key] = target.draw.choice([None, -1, "", [], {}, 1e308, "../../state.pt"])
    elif how == 1:
        del where[key]
    else:
        where[f"{key}{target.draw.randrange(10)}"] = where[key]
    path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
    if body == json.loads(before):  # the value was that already
        edit_manifest(target)


def link_file(target: Target) -> None:
    """A link to the older checkpoint's file, to nothing, or to itself."""
    path, older = target.changed_file()
    path.unlink()
    path.symlink_to(target.draw.choice([older, target.newest / "nothing", path]))


def link_folder(target: Target) -> None:
    shutil.rmtree(target.newest)
    target.newest.symlink_to(target.draw.choice([target.before, target.newest]))


def replace_by_no_file(target: Target) -> None:
    path = target.file()
    path.unlink()
    target.draw.choice([os.mkdir, os.mkfifo])(path)


Kind = Callable[..., None]
BYTES: dict[Kind, int] = {  # edits of one file's bytes, with how often each is drawn
    flip_bits: 30, truncate: 15, extend: 5, zero_block: 15, swap_blocks: 5, duplicate_block: 5,
}  # fmt: skip
KINDS: dict[Kind, int] = {
    **BYTES, swap_files: 3, take_older_file: 3, remove_file: 2, edit_manifest: 10, link_file: 3,
    link_folder: 1, replace_by_no_file: 3,
}  # fmt: skip


def forge_manifest(target: Target) -> None:
    """A changed weight with a manifest that fits: no damage, and no check can tell."""
    path = target.newest / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    files = json.loads((target.newest / "manifest.json").read_text())["files"]
    files[path.name]["sha256"] = hashlib.sha256(data).hexdigest()
    forge(target.newest, files=files)


def content(folder: Path) -> str:
    """A digest of what that checkpoint restores."""
    restored = Checkpointer(None, keep=1).restore(folder)
    assert restored is not None
    return digest([restored.model, restored.state])


class Prover:
    """A run with three checkpoints, of which the newest is damaged and put back."""

    def __init__(self, place: Path, seed: int) -> None:
        self.folder, self.draw = place / "run", random.Random(seed)
        typed = ["training.steps=9", "checkpoint.every=3", "optimizer.ema=0.9"]
        runs.trained("data=cancer", "model.width=8", *typed, folder=self.folder)
        root = self.folder / "checkpoints"
        self.newest, self.before = root / "step_00000009", root / "step_00000006"
        self.sound = place / "sound"
        shutil.copytree(self.newest, self.sound)
        self.expected = content(self.before)

    def problem(self, damage: Kind) -> str:
        """What is wrong about what becomes of a checkpoint with that damage; empty: nothing."""
        target = Target(self.newest, self.before, self.draw)
        if damage in BYTES:
            target.change(damage)
        else:
            damage(target)
        try:
            restored = Checkpointer(None, keep=1).restore(self.folder)
        except RunnerError as error:
            return f"nothing is restored: {error}"
        finally:
            self._mend()
        assert restored is not None
        if restored.step != 6:
            return f"the checkpoint of step {restored.step} is used"
        if len(restored.warnings) != 1 or str(self.newest) not in restored.warnings[0]:
            return f"it is not named: {restored.warnings}"
        same = digest([restored.model, restored.state]) == self.expected
        return "" if same else "what is restored is not the one of before"

    def _mend(self) -> None:
        if self.newest.is_symlink():
            self.newest.unlink()
        shutil.rmtree(self.newest, ignore_errors=True)
        shutil.copytree(self.sound, self.newest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where a damage is not refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="60 mutants")
    asked = parser.parse_args(arguments)
    mutants = 60 if asked.smoke else asked.mutants
    logging.disable()  # each warning is looked at
    place, start = Path(tempfile.mkdtemp(prefix="prove_corruption_")), time.monotonic()
    prover = Prover(place, asked.seed)
    made, refused, problems = Counter[str](), Counter[str](), []
    drawn = prover.draw.choices([*KINDS], [*KINDS.values()], k=mutants)
    for number, damage in enumerate(sorted(drawn, key=[*KINDS].index)):
        name = damage.__name__
        made[name] += 1
        if problem := prover.problem(damage):
            problems.append(f"{number} {name}: {problem}")
        else:
            refused[name] += 1
    for name, total in made.items():
        print(f"{name:20} {refused[name]:6,} / {total:,} refused, named, the one before used")
    total = sum(refused.values())
    print(*problems[:20], sep="\n", end="\n" if problems else "")
    print(f"{total:,} / {mutants:,} refused, {time.monotonic() - start:.0f} s")
    control = prover.problem(forge_manifest)
    print(f"planted: a manifest that fits the damage: {'noticed' if control else 'MISSED'}")
    shutil.rmtree(place)
    return not (total == mutants and control)
