"""How fast tar shards are read: the runner's batches beside those of torch's DataLoader.

    python scripts/bench_streams.py [--workers 0 2] [--turns 24] [--batches 25] [--mb 40]

Samples are JPEG files of 160 by 160 pixels, decoded when they are read, 32 of them a batch. Both
read the same files by the same class, with as many workers, and take turns of some batches; a
ratio is that of the rates in one turn: by the clock, which others on the machine disturb, and by
the time of the processors, of this process and the workers. `checks` are those of `checks.inputs`,
which DataLoader does not have.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

SIDE, BATCH, CLASSES = 160, 32, 10
WARMUP = 8  # batches


class Shards(IterableDataset):
    """Samples of the tar files in a folder, each file read by one worker."""

    classes = CLASSES

    def __init__(self, folder: str, split: str = "train") -> None:
        self.files = sorted(Path(folder).glob("*.tar"))

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for file in self.files[first::every]:
            with tarfile.open(file, "r|") as members:
                for member in members:
                    content: Any = members.extractfile(member)
                    yield decode(content.read()), int(member.name.partition(".")[0])


def decode(content: bytes) -> Tensor:
    """As images are scaled."""
    pixels = np.asarray(Image.open(io.BytesIO(content)), np.float32).transpose(2, 0, 1)
    return torch.from_numpy((pixels / 255.0 - 0.45) / 0.22)


def write_shards(folder: Path, mb: float, shards: int) -> None:
    """Write tar files of together so many MB."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(coarse).resize((SIDE, SIDE)).save(jpeg, "JPEG", quality=90)
    content = jpeg.getvalue()
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as archive:
            for number in range(int(mb * 1e6 / shards / len(content))):
                member = tarfile.TarInfo(f"{number % CLASSES}.{number}.bin")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


class Reading:
    """An open loader and its worker processes."""

    def __init__(self, batches: Iterator[Any]) -> None:
        others = {process.pid for process in psutil.Process().children()}
        self.batches = batches
        next(batches)
        started = psutil.Process().children()
        self.workers = [process for process in started if process.pid not in others]

    def seconds(self, count: int) -> tuple[float, float]:
        """Seconds per sample of the next batches, by the clock and by the processors."""
        start, cpu, samples = perf_counter(), self.cpu(), 0
        for _, target in islice(self.batches, count):
            samples += len(target)
        return (perf_counter() - start) / samples, (self.cpu() - cpu) / samples

    def cpu(self) -> float:
        """Seconds that the processors have worked for it."""
        times = [process.cpu_times() for process in self.workers]
        return process_time() + sum(time.user + time.system for time in times)


def compare(
    folder: Path, workers: int, turns: int, batches: int, checks: str
) -> list[tuple[float, ...]]:
    """Seconds per sample of DataLoader and of the runner in each turn; both stay open."""
    from runner import build, compose

    config = compose([
        *("data._target_=bench_streams.Shards", f"+data.folder={folder}", "model=mlp"),
        *("security.trusted=[bench_streams]", f"training.batch_size={BATCH}", "device=cpu"),
        *("training.steps=1000", "training.validate_every=0", f"data.workers={workers}"),
        *("optimization=none", f"checks.inputs.enabled={checks}"),
    ])  # fmt: skip
    loader = DataLoader(
        Shards(str(folder)), BATCH, num_workers=workers, persistent_workers=workers > 0
    )
    rows = []
    with build(config) as run:
        theirs = Reading(chain.from_iterable(repeat(loader)))
        ours = Reading(run.train.batches(0))
        theirs.seconds(WARMUP), ours.seconds(WARMUP)
        for turn in range(turns):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            taken = {one: one.seconds(batches) for one in order}
            rows.append((*taken[theirs], *taken[ours]))
    return rows


def main() -> None:
    """Measure in turns, and print a row for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--mb", type=float, default=40.0)
    typed = parser.parse_args()
    print("| workers | checks | DataLoader | runner | ratio | ratio by processors |")
    print("|---:|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), typed.mb, 8)
        for workers in typed.workers:
            for checks in ("false", "true"):
                rows = compare(Path(name), workers, typed.turns, typed.batches, checks)
                rates = [1 / statistics.median(column) for column in zip(*rows, strict=True)]
                texts = [f"{rates[0]:,.0f}/s", f"{rates[2]:,.0f}/s"]
                texts += [spread([row[at] / row[at + 2] for row in rows]) for at in (0, 1)]
                print(f"| {workers} | {checks} | {' | '.join(texts)} |", flush=True)


def spread(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
