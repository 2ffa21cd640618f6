"""What a user's own data set costs: the time of fetching its samples, the memory of its workers.

    python scripts/bench_data.py [--only LOOP …] [--rounds 5] [--steps 120]

The data set makes samples one by one: 784 features of an array that lies in memory, scaled by
NumPy; 256 of them a batch, for an MLP 784-1024-1024-10. Each row is a process of its own, the rows
take turns, and a ratio is to the process beside it. Time is the median of a step, memory the
proportional set size of all its processes together, largest at any step. All clip the gradients and
check that loss and norm are finite. By hand is a loop with torch's DataLoader and persistent
workers; a batch that is ready shows a step without fetching; `__getitems__` reads a batch at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

SAMPLES, FEATURES, WIDTH, BATCH = 60_000, 784, 1024, 256
WARMUP = 10  # steps


class Rows:
    """60,000 samples of 784 bytes, each made into floats when it is asked for."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.pixels = generator.integers(0, 256, (SAMPLES, FEATURES), dtype=np.uint8)
        self.labels = generator.integers(0, 10, SAMPLES)
        self.sizes = {"task": "classification", "in_features": FEATURES, "classes": 10}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.floats(index), int(self.labels[index])

    def floats(self, which: int | list[int]) -> Tensor:
        """As images are scaled."""
        return torch.from_numpy(self.pixels[which]).float().div_(255.0).sub_(0.13).div_(0.31)


class AtOnce(Rows):
    """The same, a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return list(zip(self.floats(indices), self.labels[indices].tolist(), strict=True))


def proportional_mib() -> float:
    """Memory of this process and its children, what they share counted once."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += int(text.partition("\nPss:")[2].split()[0])
    return total / 1024


class Readings:
    """When steps began and ended, and the memory at some of them."""

    def __init__(self) -> None:
        self.begun, self.ends, self.mib = [perf_counter()], list[float](), list[float]()

    def on_step(self, run: object = None, step: object = None) -> None:
        """Note the time, and the memory now and then, which takes time of no step."""
        self.ends.append(perf_counter())
        if len(self.ends) % WARMUP == 0:
            self.mib.append(proportional_mib())
        self.begun.append(perf_counter())

    def steps(self) -> list[float]:
        """Milliseconds of each step but the first ones."""
        pairs = zip(self.begun, self.ends, strict=False)
        return [1e3 * (end - begun) for begun, end in pairs][WARMUP:]


def ours(steps: int, *typed: str) -> Readings:
    """A run as the command line builds it."""
    from runner import Hook, build, compose, train

    class Note(Readings, Hook):  # the loop by hand does without our imports
        pass

    config = compose([
        *("model=mlp", f"model.width={WIDTH}", f"training.batch_size={BATCH}", "schedule=constant"),
        *(f"training.steps={steps}", "training.validate_every=1000000", "checkpoint=off"),
        *("optimization=none", "security.trusted=[bench_data]", *typed),
    ])  # fmt: skip
    readings = Note()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with build(config, Path(folder)) as run:
            run.hooks.append(readings)
            train(run)
    return readings


def by_hand(steps: int, workers: int) -> Readings:
    """A loop that clips and checks, with DataLoader; without workers its one batch is ready."""
    rows = Rows()
    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    first = next(iter(loader)) if not workers else None
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )  # fmt: skip
    optimizer, readings = torch.optim.AdamW(model.parameters()), Readings()
    batches = repeat(first) if first is not None else chain.from_iterable(repeat(loader))
    for inputs, target in islice(batches, steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            optimizer.step()
        readings.on_step()
    return readings


USER = "data._target_=bench_data.{}".format
LOOPS: dict[str, Callable[[int], Readings]] = {
    "by hand, DataLoader, 2 workers": lambda steps: by_hand(steps, 2),
    "by hand, one batch that is ready": lambda steps: by_hand(steps, 0),
    "ours, workers as it chooses": lambda steps: ours(steps, USER("Rows")),
    "ours, 2 workers": lambda steps: ours(steps, USER("Rows"), "data.workers=2"),
    "ours, no workers": lambda steps: ours(steps, USER("Rows"), "data.workers=0"),
    "ours, no workers, `__getitems__`": lambda steps: ours(steps, USER("AtOnce"), "data.workers=0"),
}


def measure(name: str, steps: int) -> tuple[float, float]:
    """Milliseconds and MiB of a loop in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    milliseconds, mib = map(float, done.stdout.split())
    return milliseconds, mib


def main() -> None:
    """Measure all in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[*LOOPS], metavar="LOOP")
    parser.add_argument("--one", choices=[*LOOPS], help=argparse.SUPPRESS)
    typed = parser.parse_args()
    if typed.one:
        readings = LOOPS[typed.one](typed.steps)
        print(statistics.median(readings.steps()), max(readings.mib))
        return
    reference, *others = LOOPS
    others = typed.only or others
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in (reference, *others)}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    for _ in range(typed.rounds):
        for name in others:
            (ms, mib), (ours_ms, ours_mib) = (
                measure(reference, typed.steps),
                measure(name, typed.steps),
            )
            rows[reference].append((ms, mib))
            rows[name].append((ours_ms, ours_mib))
            ratios[name].append((ours_ms / ms, ours_mib / mib))
    print("| | step | to the first | memory | to the first |\n|---|---:|---:|---:|---:|")
    for name, pairs in rows.items():
        ms, mib = (statistics.median(column) for column in zip(*pairs, strict=True))
        texts = ["1", "1"]
        if name in ratios:
            texts = [spread(column) for column in zip(*ratios[name], strict=True)]
        print(f"| {name} | {ms:.1f} ms | {texts[0]} | {mib:.0f} MiB | {texts[1]} |")


def spread(ratios: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"


if __name__ == "__main__":
    main()
