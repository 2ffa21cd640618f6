"""What a busy neighbour costs a training step, by how OpenMP's threads wait for each other.

    python scripts/bench_neighbour.py [--cores 4] [--rounds 5] [--only passive "spin 3000"]

The step is a GPT's (4 layers, width 256, sequence 256) in fp32, with a thread for each core, or
with one fewer, which is what the `system` technique takes beside such a neighbour. The neighbour
is one process that computes without pause, bound to one of the cores. Each measurement is a
process of its own, since OpenMP reads its settings once; all settings take turns, alone and beside
the neighbour. The table has the median and the fastest of the rounds. Where others work on the
machine as well, trust the fastest; the ratios are of those, to torch's own setting alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from time import perf_counter

OURS = {"GOMP_SPINCOUNT": "10000"}
SETTINGS: dict[str, tuple[dict[str, str], int]] = {  # environment, threads fewer than cores
    "torch's own": ({}, 0),
    "passive": ({"OMP_WAIT_POLICY": "passive"}, 0),
    "spin 1000": ({"GOMP_SPINCOUNT": "1000"}, 0),
    "spin 3000": ({"GOMP_SPINCOUNT": "3000"}, 0),
    "spin 10000": (OURS, 0),
    "spin 30000": ({"GOMP_SPINCOUNT": "30000"}, 0),
    "10000, fewer": (OURS, 1),
}
OPENMP = ("OMP_", "GOMP_", "KMP_", "MKL_")


def step_ms(threads: int, batch: int, seconds: float) -> float:
    """Median milliseconds of a step, over at least `seconds` of them."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        256, 4, 1024, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
    )
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    embedding, head = nn.Embedding(256, 256), nn.Linear(256, 256)
    parameters = [p for part in (embedding, body, head) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, 3e-4, fused=True)
    mask = nn.Transformer.generate_square_subsequent_mask(256)
    tokens = torch.randint(0, 256, (batch, 256))
    times: list[float] = []
    while sum(times) < seconds or len(times) < 6:
        start = perf_counter()
        optimizer.zero_grad()
        output = head(body(embedding(tokens), mask=mask, is_causal=True))
        nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        times.append(perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def measure(setting: tuple[dict[str, str], int], cores: list[int], busy: bool, batch: int) -> float:
    """One process's median step, beside a neighbour on the first of its cores or alone."""
    neighbour = None
    if busy:
        neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        os.sched_setaffinity(neighbour.pid, cores[:1])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(OPENMP)}
    threads = max(1, len(cores) - setting[1])
    command = [sys.executable, __file__, "--child", str(threads), "--batch", str(batch)]
    try:
        done = subprocess.run(
            command,
            env=environment | setting[0],
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    return float(done.stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cores", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[], help="these settings beside torch's own")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(step_ms(asked.child, asked.batch, 3.0))
        return
    cores = sorted(os.sched_getaffinity(0))[: asked.cores]
    chosen = {
        name: setting
        for name, setting in SETTINGS.items()
        if not asked.only or name == "torch's own" or name in asked.only
    }
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for _ in range(asked.rounds):
        for busy in (False, True):
            for name, setting in chosen.items():
                found[name, busy].append(measure(setting, cores, busy, asked.batch))
    print(f"{len(cores)} cores, ms a step: median (fastest) of {asked.rounds}")
    print(f"{'':14}{'quiet':>16}{'busy':>16}   busy/own    quiet/own")
    own = min(found["torch's own", False])
    for name in chosen:
        rows = [found[name, busy] for busy in (False, True)]
        quiet, busy_ms = (min(row) for row in rows)
        cells = [f"{statistics.median(row):.0f} ({min(row):.0f})" for row in rows]
        print(f"{name:14}{cells[0]:>16}{cells[1]:>16}{busy_ms / own:11.2f}{quiet / own:13.2f}")


if __name__ == "__main__":
    main()
