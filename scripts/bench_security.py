"""What the gate costs on a large file, beside sha256 alone; what the limited process costs.

    python scripts/bench_security.py [--mb 256] [--rounds 7] [--json FILE]

Reading and hashing the file is the measure: it takes its turn before and after everything else in
each round, so that a drift of the machine hits all alike, and a ratio is to the mean of its two
neighbours. `own` is a file with a manifest of ours (structure and types), `known` a pinned one
(values as well), `foreign` one that a limited process, already started, looks at. `structure` is
scan.deep=false; what is `opened` is loaded too, which takes memory, and that takes time.
All files lie in the page cache, which flatters nobody: a disk would make every ratio smaller.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def sha256(path: Path) -> None:
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def plant(folder: Path, megabytes: int) -> list[Path]:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    side = 1024
    tensors = {f"layer{i}.weight": torch.randn(side, side // 4) for i in range(megabytes)}
    save_file(tensors, folder / "model.safetensors")
    torch.save(tensors, folder / "state.pt")
    np.save(folder / "array.npy", torch.cat(list(tensors.values())).numpy())
    return [folder / "model.safetensors", folder / "state.pt", folder / "array.npy"]


def subjects(path: Path) -> dict[str, Callable[[], object]]:
    """By name: what each is timed doing with the file."""
    from runner.security.gate.assessing import Assessor
    from runner.security.gate.door import open_file
    from runner.security.gate.folder import thing_of
    from runner.security.gate.held import digest, hold
    from runner.security.gate.policy import Policy

    found = digest(path)[0]
    pinned = replace(Policy(), pinned=(found,))

    def judged(policy: Policy, deep: bool = True) -> Callable[[], object]:
        assessor = Assessor(policy, deep)
        return lambda: assessor.assess(thing_of(path))

    def opened(sha256: str | None = None) -> Callable[[], object]:
        return lambda: open_file(path, pinned, sha256)

    return {
        "read (no gate)": lambda: path.read_bytes(),
        "held": lambda: hold(path).close(),
        "known, structure": judged(pinned, False),
        "known": judged(pinned),
        "foreign, structure": judged(Policy(), False),
        "foreign": judged(Policy()),
        "own, opened": opened(found),
        "known, opened": opened(),
    }


def child_start() -> float:
    from runner.security.gate.child import Child
    from runner.security.gate.held import hold
    from runner.security.gate.policy import Policy

    with tempfile.TemporaryDirectory() as folder, Child() as child:
        path = Path(folder, "a.npy")
        path.write_bytes(b"")
        with hold(path) as held:
            return seconds(lambda: child.examine(held, path.name, Policy()))


def spread(values: list[float]) -> tuple[float, float, float]:
    values = sorted(values)
    return statistics.median(values), values[len(values) // 4], values[3 * len(values) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    from runner.device.openmp import patience

    os.environ.update(patience(os.environ))  # as in any run; read when torch is loaded
    import torch

    print(f"# {platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
          f"{torch.__version__}, {wanted.mb} MB, {wanted.rounds} rounds")  # fmt: skip
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in plant(Path(folder), wanted.mb):
            works = {**subjects(path), "sha256 (control)": partial(sha256, path)}
            for work in works.values():  # one pass that does not count
                work()
            ratios: dict[str, list[float]] = {name: [] for name in works}
            alone = []
            hashed = partial(sha256, path)
            for _ in range(wanted.rounds):
                before = seconds(hashed)
                for name, work in works.items():
                    mine, after = seconds(work), seconds(hashed)
                    ratios[name].append(mine / ((before + after) / 2))
                    alone.append(after)
                    before = after
            rate = path.stat().st_size / statistics.median(alone) / 1e9
            print(f"{path.name}: sha256 alone {rate:.2f} GB/s")
            for name, values in ratios.items():
                median, low, high = spread(values)
                table[f"{path.name}, {name}"] = {"ratio": median, "q1": low, "q3": high}
                print(f"  {name:28s} x{median:.2f} [{low:.2f}..{high:.2f}]", flush=True)
    starts = [child_start() for _ in range(wanted.rounds)]
    median, low, high = spread(starts)
    table["limited process, started"] = {"seconds": median, "q1": low, "q3": high}
    print(f"limited process, started: {median:.2f} s [{low:.2f}..{high:.2f}]")
    if wanted.json:
        wanted.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
