"""Every benchmark once, and docs/measured/benchmarks.md with what each has printed.

    python scripts/bench_all.py [--only TITLE …] [--smoke] [--write]

Each is a command of its own, below `COMMANDS`; it holds a control, and its first line in the page
says what it compares. --smoke takes the smallest sizes, to see that all of them work. --write
replaces their sections in docs/measured/benchmarks.md, with the machine, the date and the commit.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "benchmarks.md"
HEAD = """# Benchmarks

Ratios of one run each, in turns, with a control: absolute times drift, ratios hold.
Written by `python scripts/bench_all.py --write`.
"""
COMMANDS: dict[str, tuple[str, str]] = {  # title: as measured, and the smallest
    "Whole commands": ("bench_wall.py --pairs 5", "bench_wall.py typo --pairs 1"),
    "Short runs under each level": ("bench_wall.py levels --pairs 3", ""),
    "A step beside a bare loop": (
        "bench_overhead.py tiny mlp gpt --levels none,basic,whole_step --threads 1 --rounds 5",
        "bench_overhead.py tiny --rounds 1 --steps 12 --levels none",
    ),
    "A step beside a loop that clips and checks": (
        "bench_overhead.py tiny mlp gpt --levels none,basic --threads 1 --clip --rounds 5",
        "bench_overhead.py tiny --rounds 1 --steps 12 --levels none --clip",
    ),
    "A data set of your own": (
        "bench_data.py --rounds 3",
        "bench_data.py --rounds 1 --steps 12 --only 'ours, no workers'",
    ),
    "What the levels buy": (
        "bench_techniques.py mlp cnn gpt --rounds 9",
        "bench_techniques.py tiny --rounds 3 --only 'none,none again'",
    ),
    "What optimization=auto chooses": (
        "bench_auto.py mlp gpt cnn --steps 40000 --each 5",
        "",  # compiles for minutes, whatever its size
    ),
    "Compiling, the first time and the second": ("bench_compile.py mlp gpt", ""),
    "Threads beside a busy neighbour": ("bench_neighbour.py", ""),
    "Guards and tools": (
        "bench_debug.py tiny gpt --threads 1 --rounds 5",
        "bench_debug.py tiny --only control --rounds 1 --steps 12",
    ),
    "Security": (
        "bench_security.py --files 20 --rounds 3",
        "bench_security.py --files 2 --tensors 10 --mb 1 --rounds 1",
    ),
    "How often an interval holds the truth": (
        "bench_statistics.py",
        "bench_statistics.py --runs 2 --blocks 10",
    ),
    "Reading a table": ("bench_tables.py --rounds 5", "bench_tables.py --rows 1000 --rounds 1"),
    "A step by two processes": (
        "bench_distributed.py gpt cnn --rounds 5 --steps 8",
        "bench_distributed.py tiny --rounds 1 --steps 12",
    ),
}


@functools.cache  # before a page that is written makes the tree differ from its commit
def machine() -> str:
    """Processor, cores, versions and commit, on one line."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"torch {version('torch')}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}, commit {commit}"
    )


def run(command: str) -> tuple[str, int]:
    """What a benchmark prints, and its exit code."""
    script, *arguments = shlex.split(command)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
    return done.stdout.strip(), done.returncode


def section(title: str, command: str, printed: str) -> str:
    """Of the page: the command, what its script says it is, and what it printed."""
    script = (ROOT / "scripts" / command.split()[0]).read_text()
    about = script.partition('"""')[2].partition("\n\n")[0]
    body = printed if printed.startswith("|") else f"```\n{printed}\n```"
    return f"## {title}\n\n{about}\n\n    python scripts/{command}\n\n{body}\n\n{machine()}.\n"


def write(sections: dict[str, str]) -> None:
    """Put them into the page, in the order of `COMMANDS`; other sections stay, after these."""
    parts = PAGE.read_text().split("\n## ")[1:] if PAGE.exists() else []
    old = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in parts}
    known = {**old, **sections}
    titles = [
        *(title for title in COMMANDS if title in known),
        *(title for title in old if title not in COMMANDS),
    ]
    kept = [known[title] for title in titles]
    PAGE.write_text("\n".join([HEAD, *kept]))


def main() -> int:
    """Run them one after the other; exit code 1 where one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[*COMMANDS], metavar="TITLE")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.write and asked.smoke:
        parser.error("--write takes them in their full size")
    failed = []
    print(machine(), flush=True)
    for title, (whole, smallest) in COMMANDS.items():
        command = smallest if asked.smoke else whole
        if not command or title not in (asked.only or COMMANDS):
            continue
        printed, code = run(command)
        print(f"\n{title}: python scripts/{command}\n{printed}", flush=True)
        if code or not printed:
            failed.append(title)
        elif asked.write:
            write({title: section(title, command, printed)})
    print(*(f"FAILED: {title}" for title in failed), sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
