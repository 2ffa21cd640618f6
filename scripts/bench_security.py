"""What checking files costs: many small tensors beside torch.load, large files beside sha256.

    python scripts/bench_security.py [--files 100] [--tensors 6000] [--mb 256] [--rounds 5]

Prints ratios of wall time, median and quartiles over the rounds; the reference takes its turn
before and after each measurement. `scanned` are foreign files that one sandbox examines, `opened`
a file that was pinned or recorded by a manifest. The sandbox is started before the clock.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

Work = Callable[[], object]


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratios(reference: Work, work: Work, rounds: int) -> dict[str, float]:
    """Quartiles of the ratio to the mean of the two neighbouring references."""
    work()
    before, found = seconds(reference), []
    for _ in range(rounds):
        mine, after = seconds(work), seconds(reference)
        found.append(mine / ((before + after) / 2))
        before = after
    found.sort()
    return {
        "ratio": statistics.median(found),
        "q1": found[len(found) // 4],
        "q3": found[3 * len(found) // 4],
    }


def small_files(folder: Path, files: int, tensors: int, rounds: int) -> dict[str, dict[str, float]]:
    import torch

    from runner.core.security.files.policy import FilePolicy
    from runner.scan.scan import Scanner, list_folder

    content = {f"layer{i}.weight": torch.randn(64) for i in range(tensors)}
    paths = [folder / f"small{i}.pt" for i in range(files)]
    for path in paths:
        torch.save(content, path)

    def load() -> None:
        for path in paths:
            torch.load(path, weights_only=True)  # noqa: TID251

    with Scanner(FilePolicy()) as scanner:
        scanner.scan(list_folder(paths[0]))
        scan = lambda: [scanner.scan(list_folder(path)) for path in paths]  # noqa: E731
        return {
            f"{files} files of {tensors} tensors, scanned, to torch.load": ratios(
                load, scan, rounds
            )
        }


def large_files(folder: Path, megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    import torch
    from safetensors.torch import save_file

    from runner.core.security.files.file_bytes import hash_file
    from runner.core.security.files.loader import open_file
    from runner.core.security.files.policy import FilePolicy
    from runner.scan.scan import Scanner, list_folder

    content = {f"layer{i}.weight": torch.randn(1024, 256) for i in range(megabytes)}
    save_file(content, folder / "large.safetensors")
    torch.save(content, folder / "large.pt")
    table = {}
    for path in (folder / "large.safetensors", folder / "large.pt"):

        def reference(path: Path = path) -> None:
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")

        digest = hash_file(path)[0]
        pinned = FilePolicy(pinned=(digest,))
        with Scanner(FilePolicy()) as scanner:
            works: dict[str, Work] = {
                "scanned": lambda path=path, scanner=scanner: scanner.scan(list_folder(path)),
                "pinned, opened": lambda path=path, pinned=pinned: open_file(path, pinned),
                "own, opened": lambda path=path, digest=digest: open_file(
                    path, FilePolicy(), digest
                ),
            }
            for name, work in works.items():
                table[f"{path.name}, {name}, to sha256"] = ratios(reference, work, rounds)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--tensors", type=int, default=6000)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as name:
        table = small_files(Path(name), wanted.files, wanted.tensors, wanted.rounds)
        table |= large_files(Path(name), wanted.mb, wanted.rounds)
    for key, row in table.items():
        print(f"{key:60s} x{row['ratio']:.2f} [{row['q1']:.2f}..{row['q3']:.2f}]")


if __name__ == "__main__":
    main()
