"""What compiling takes the first time and the second, each in a process of its own.

    python scripts/bench_compile.py [mlp gpt cnn …]

The cache starts empty for each row. `seconds` are what the compiler itself took, from the evidence
in summary.json; `wall` is the whole command, with 20 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_techniques import MODELS, ON

WAYS = {
    "compile": ["optimization=basic", ON.format("compile"), ON.format("amp")],
    "compile, regional": ["optimization=basic", ON.format("compile"), ON.format("amp"),
                          "optimization.compile.regional=true"],
    "whole_step": ["optimization=basic", ON.format("whole_step"), ON.format("amp")],
}  # fmt: skip


def once(overrides: list[str], cache: str) -> tuple[float, dict[str, Any]]:
    """Wall seconds of a short run, and the evidence of what was compiled."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "runner", *overrides, "training.steps=20", "monitoring=quiet",
            # generated code depends on it, and beside busy neighbours `system` takes fewer
            f"device.threads={len(os.sched_getaffinity(0))}",
            "checkpoint.enabled=false", f"hydra.run.dir={folder}",
            "optimization.measure=false",  # so short a run would leave it out
        ]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        )
        wall = time.perf_counter() - start
        summary = json.loads((Path(folder) / "summary.json").read_text())
    rows = [t["evidence"] for t in summary["techniques"] if "seconds" in t["evidence"]]
    if not rows:
        raise SystemExit(f"nothing was compiled: {summary['techniques']}")
    return wall, rows[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["mlp", "cnn", "gpt"])
    arguments = parser.parse_args()
    print("| model | | first: seconds (wall) | second: seconds (wall) | second / first |")
    print("|---|---|---|---|---|")
    for model in arguments.models:
        samples = next(int(o.rpartition("=")[2]) for o in MODELS[model] if "batch_size" in o)
        size = [f"data.samples={samples * 6}"] if "data=synthetic" in MODELS[model] else []
        for way, overrides in WAYS.items():
            with tempfile.TemporaryDirectory() as cache:
                (wall, cold), (again, warm) = (
                    once([*MODELS[model], *size, *overrides], cache) for _ in range(2)
                )
            ratio = warm["seconds"] / cold["seconds"]
            print(
                f"| {model} | {way} | {cold['seconds']:.1f} ({wall:.1f}) "
                f"| {warm['seconds']:.1f} ({again:.1f}), {warm['cache']} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
