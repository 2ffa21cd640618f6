"""What each optimisation level and technique buys, against `optimization=none`.

    python scripts/bench_techniques.py [mlp cnn gpt tiny …] [--only NAME,NAME] [--threads N]
                                       [--rounds N]

Every variant is a run of its own in a process of its own, built as the command line builds it. They
take turns, a fraction of a second each, so a drift of the machine hits all alike; a ratio is to the
mean of the two turns of `none` around it. Printed are the median of the ratios, its 95 % interval
(by order statistics of the rounds), the first step with what was compiled, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from runner.core.schemas.device import SPIN_COUNT
from runner.measure.benchmark.statistics import median_interval

MODELS = {
    # the model, and how many samples its validation part must leave for one batch
    "tiny": ["data=synthetic", "data.form=tabular", "data.features=64", "model=mlp",
             "model.width=64", "model.depth=1", "training.batch_size=32"],
    "mlp": ["data=synthetic", "data.form=tabular", "data.features=784", "model=mlp",
            "model.width=1024", "model.depth=2", "training.batch_size=256"],
    "cnn": ["data=synthetic", "data.form=images", "data.image_size=32", "model=cnn",
            "model.width=32", "training.batch_size=128"],
    "gpt": ["data=synthetic", "data.form=tokens", "data.sequence=256", "model=gpt",
            "model.width=256", "model.depth=4", "model.heads=4", "training.batch_size=8"],
    "classifier": ["data=stdlib_parts", "model=classifier", "training.batch_size=32"],
}  # fmt: skip
ON = "optimization.{}.enabled=true"
VARIANTS = {
    "none": ["optimization=none"],
    "none again": ["optimization=none"],
    "basic": ["optimization=basic"],
    "advanced": ["optimization=advanced"],
    "ultra": ["optimization=ultra"],
    "maximum": ["optimization=maximum"],
    "full": ["optimization=full"],
    "system": ["optimization=none", ON.format("system")],
    "fused_optimizer": ["optimization=none", ON.format("fused_optimizer")],
    "channels_last": ["optimization=none", ON.format("channels_last")],
    "attention": ["optimization=none", ON.format("attention")],
    "amp": ["optimization=amp"],
    "compile": ["optimization=compile"],
    "compile + amp": ["optimization=compile", ON.format("amp")],
    "whole_step": ["optimization=none", ON.format("whole_step"), ON.format("fused_optimizer")],
    "whole_step + amp": ["optimization=amp", ON.format("whole_step"), ON.format("fused_optimizer")],
    "recompute": ["optimization=none", ON.format("recompute"), "optimization.recompute.what=full"],
    "memory_efficient": ["optimization=memory_efficient"],
}
TURN_S = 0.4  # seconds of steps that a turn should take


def child(overrides: list[str]) -> None:
    """Build a run, then make as many steps as each line of stdin says and answer with seconds."""
    from runner import build, compose
    from runner.core.device import memory
    from runner.core.train.evidence import collect_evidence, technique_statuses
    from runner.core.train.step import make_step

    samples = next(int(o.rpartition("=")[2]) for o in overrides if "batch_size" in o)
    config = compose([
        *overrides, "monitoring.progress=false", "training.steps=100000", "schedule=constant",
            # a model that has learned everything has denormal gradients, and those are slow
            "optimizer.lr=1e-6",
        "checkpoint.enabled=false", f"device.threads={os.environ['THREADS']}",
        *([f"data.samples={samples * 6}"] if "data=synthetic" in overrides else []),
    ])  # fmt: skip
    with build(config) as run:
        run.model.train()
        source = run.train.batches(0)
        batches = [b for b in (next(source) for _ in range(8)) if b[1].shape[0] == samples][:4]
        memory.reset_peak(run.device)
        for line in sys.stdin:
            steps = int(line)
            if not steps:
                break
            start = time.perf_counter()
            for i in range(steps):
                step, _ = make_step(run, batches[i % len(batches)])
                run.progress.step += 1
            run.device.synchronize()
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "loss": float(step.loss)}), flush=True)
        peak = memory.peak_device_bytes(run.device) or memory.peak_process_bytes()
        collect_evidence(run)
        rows = [vars(row) for row in technique_statuses(run) if row.requested]
        print(json.dumps({"peak": peak, "techniques": rows}, default=str), flush=True)


class Variant:
    """One run in a process of its own."""

    def __init__(self, name: str, overrides: Sequence[str]) -> None:
        self.name = name
        command = [sys.executable, __file__, "--child", json.dumps(list(overrides))]
        # as the command line has it
        environment = {"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.PIPE, env=environment,
        )  # fmt: skip
        self.laps: list[float] = []  # seconds a step
        self.first = 0.0
        self.end: dict[str, Any] = {}

    def make(self, steps: int) -> float:
        """Seconds a step over so many steps."""
        answer = self._ask(steps)
        return float(answer["seconds"]) / steps

    def finish(self) -> None:
        """The evidence and the peak, and the end of the process."""
        self.end = self._ask(0)
        self.process.wait(60)

    def _ask(self, steps: int) -> dict[str, Any]:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("no pipes")
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            error = self.process.stderr.read()[-600:] if self.process.stderr else ""
            raise RuntimeError(f"{self.name} ended: {error}")
        return dict(json.loads(line))


def measure(model: str, names: list[str], rounds: int) -> dict[str, Any]:
    """All variants on one model, taking turns."""
    variants = []
    for name in names:
        variant = Variant(name, [*MODELS[model], *VARIANTS[name]])
        try:
            variant.first = variant.make(1)
            variant.make(3)
            variants.append(variant)
        except RuntimeError as error:
            print(f"  {name}: {error}", file=sys.stderr)
    base = variants[0]
    turns = {v.name: max(1, round(TURN_S / v.make(3))) for v in variants}
    ratios: dict[str, list[float]] = {v.name: [] for v in variants}
    for _ in range(rounds):
        before = base.make(turns[base.name])
        for variant in variants[1:]:
            lap = variant.make(turns[variant.name])
            after = base.make(turns[base.name])
            ratios[variant.name].append((before + after) / 2 / lap)
            variant.laps.append(lap)
            base.laps.append(after)
            before = after
    rows = {}
    for variant in variants:
        variant.finish()
        speed = ratios[variant.name] or [1.0]  # of the reference there are none
        low, high = median_interval(speed, 0.05) if len(speed) > 1 else (1.0, 1.0)
        rows[variant.name] = {
            "speed": statistics.median(speed),
            "low": low,
            "high": high,
            "step_ms": 1e3 * statistics.median(variant.laps),
            "first_s": variant.first,
            **variant.end,
        }
    return rows


def show(model: str, rows: dict[str, Any]) -> None:
    print(f"\n## {model}\n")
    print("| variant | speed | 95 % interval | step | first step | peak memory | engaged |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        took = [t["name"] for t in row["techniques"] if t["engaged"]]
        print(
            f"| {name} | **{row['speed']:.2f}×** | {row['low']:.2f} to {row['high']:.2f} "
            f"| {row['step_ms']:.3g} ms | {row['first_s']:.1f} s | {row['peak'] / 2**20:,.0f} MiB "
            f"| {' '.join(took) or '–'} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["mlp", "cnn", "gpt"])
    parser.add_argument("--only", default="none,none again,basic,advanced,ultra")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="the same for all")
    arguments = parser.parse_args()
    os.environ.setdefault("THREADS", str(arguments.threads))
    if arguments.child:
        child(json.loads(arguments.child))
        return
    for model in arguments.models:
        show(model, measure(model, arguments.only.split(","), arguments.rounds))


if __name__ == "__main__":
    main()
