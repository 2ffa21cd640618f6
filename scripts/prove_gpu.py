"""Shows on a GPU what no test without one can show; fourteen checks in a limited time.

    python scripts/prove_gpu.py --limit 440 --out gpu.json [--resume gpu.json] [--dry-run]

Each check (gpu_checks/table.py) is a process of its own with its own time-out. Three run side by
side, the one that measures times alone. The JSON file has the machine and, for each check, its
seconds, verdict (ok, failed, skipped, not started), facts and last lines of output; it is
rewritten after each check. `--resume` takes over the checks that are `ok` in an earlier file.
`--dry-run` prints every command and composes every config, which needs no GPU.

Exit code 0: all checks that ran hold; 1: one failed, or none ran; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import psutil  # noqa: E402
from gpu_checks.base import (  # noqa: E402
    FACTS_FILE,
    ROOT,
    Check,
    child_environment,
    last_lines,
)
from gpu_checks.table import CHECKS  # noqa: E402

FOLDER = ROOT / "outputs" / "gpu"
SIDE_BY_SIDE = 3
RESERVE_S = 10.0  # of the limit, for ending processes and the last record
LEAST_S = 5.0  # a check is not started with less time than this
GRACE_S = 3.0  # between SIGTERM and SIGKILL
MACHINE_S = 60.0  # until the machine has named its GPU
OUTPUT_LINES = 20
VERDICTS = {0: "ok", 3: "skipped"}  # by exit code; others: failed
NOT_STARTED = "not started"
NO_GPU = 2

Record = dict[str, Any]


@dataclass
class RunningCheck:
    """A check that was started: its process, the leader of a group."""

    check: Check
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    ends: float  # when its time is up


@dataclass
class Prover:
    """Runs checks, three side by side, within a limit; `write` is called after each."""

    checks: Sequence[Check]
    device: str
    folder: Path
    deadline: float  # of time.monotonic
    records: dict[str, Record]
    write: Callable[[], None]
    running: list[RunningCheck] = field(default_factory=list)

    def run(self) -> None:
        """Run all checks that are not ok yet; processes are ended whatever happens."""
        waiting = [c for c in self.checks if self.records.get(c.name, {}).get("verdict") != "ok"]
        try:
            while waiting or self.running:
                while waiting and self._may_start(waiting[0]):
                    self._start(waiting.pop(0))
                self._collect()
                time.sleep(0.05)
        finally:
            for running in self.running:
                end_group(running.process)

    def _may_start(self, check: Check) -> bool:
        if any(running.check.alone for running in self.running):
            return False
        return not self.running if check.alone else len(self.running) < SIDE_BY_SIDE

    def _start(self, check: Check) -> None:
        now = time.monotonic()
        left = self.deadline - now - RESERVE_S
        if left < LEAST_S:
            self._record(check, NOT_STARTED, 0.0, {}, "")
            return
        log = self.folder / f"{check.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / check.name / FACTS_FILE).unlink(missing_ok=True)  # of an earlier call
        cache = self.folder / "compiled"  # of the compiler, for all checks
        with log.open("wb") as output:
            process = subprocess.Popen(
                check.argv(self.device, self.folder), cwd=ROOT, start_new_session=True,
                env={**child_environment(), "TORCHINDUCTOR_CACHE_DIR": str(cache)},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        limit = min(check.limit_s, left)
        print(f"{check.name}: started, at most {limit:.0f} s", flush=True)
        self.running.append(RunningCheck(check, process, log, now, now + limit))

    def _collect(self) -> None:
        """Record the checks that have ended, and end those whose time is up."""
        for running in list(self.running):
            code, now = running.process.poll(), time.monotonic()
            if code is None and now < running.ends:
                continue
            self.running.remove(running)
            end_group(running.process)  # also what an ended check has left behind
            facts = _read_facts(self.folder / running.check.name)
            if code is None:
                facts["problem"] = f"it was ended after {now - running.started:.0f} s"
            verdict = "failed" if code is None else VERDICTS.get(code, "failed")
            output = last_lines(running.log, OUTPUT_LINES)
            self._record(running.check, verdict, now - running.started, facts, output)

    def _record(
        self, check: Check, verdict: str, seconds: float, facts: Record, output: str
    ) -> None:
        self.records[check.name] = {
            "seconds": round(seconds, 1),
            "verdict": verdict,
            "claim": check.claim,
            "facts": facts,
            "output": output.splitlines(),
        }
        self.write()
        problem = output.splitlines()[-3:] if verdict in ("failed", "skipped") else []
        print("\n    ".join([f"{check.name}: {verdict}, {seconds:.0f} s", *problem]), flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a check's process with all its descendants, also those in groups of their own."""
    descendants = []
    with suppress(psutil.Error):
        descendants = psutil.Process(process.pid).children(recursive=True)
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.Error):  # compares the time of its start, so no other process is hit
            descendant.kill()
    psutil.wait_procs(descendants, timeout=GRACE_S)
    process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _read_facts(folder: Path) -> Record:
    try:
        facts: Record = json.loads((folder / FACTS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return facts


def write_json(path: Path, contents: Record) -> None:
    """Replace a JSON file at once, so that it is whole whenever it is read."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(contents, indent=2) + "\n")
    temporary.replace(path)


def read_machine() -> Record:
    """Return the facts of the machine, from a process of its own; `problem` if there are none."""
    argv = [sys.executable, "-m", "gpu_checks", "machine"]
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=child_environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=MACHINE_S, check=True,
        )  # fmt: skip
        facts: Record = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        return {"gpu": None, "problem": error.stderr.strip().splitlines()[-1:]}
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"gpu": None, "problem": str(error)}
    return facts


def dry_run(checks: Sequence[Check], device: str, folder: Path) -> None:
    """Print every command, and compose every config; raises the error of one that does not."""
    from runner import compose
    from runner.core.config.run_config import validate_config

    configs = 0
    for check in checks:
        print(f"# {check.name}: {check.claim} (at most {check.limit_s:g} s)")
        print(" ".join(check.argv(device, folder)))
        for line in check.shell_lines(device, folder):
            print(f"    {line}")
        for overrides in check.configs(device, folder):
            validate_config(compose(overrides))
            configs += 1
    print(f"{len(checks)} checks, {configs} configs composed")


def exit_code(records: dict[str, Record]) -> int:
    """Return 0 if all checks that ran hold, 1 if one failed or none was made."""
    verdicts = [record["verdict"] for record in records.values()]
    return 0 if "ok" in verdicts and "failed" not in verdicts else 1


def summarize(records: dict[str, Record]) -> str:
    """Return the number of checks by verdict as text."""
    verdicts = [record["verdict"] for record in records.values()]
    names = ("ok", "failed", "skipped", NOT_STARTED)
    return ", ".join(f"{verdicts.count(name)} {name}" for name in names)


def main() -> int:
    """Parse, find the GPU, run the checks; return an exit code."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=440.0, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON file")
    parser.add_argument("--resume", type=Path, help="a JSON file with checks not to repeat")
    parser.add_argument("--dry-run", action="store_true", help="print and compose, run nothing")
    arguments = parser.parse_args()
    if arguments.dry_run:
        dry_run(CHECKS, "cuda", FOLDER)
        return 0
    try:
        earlier = json.loads(arguments.resume.read_text())["checks"] if arguments.resume else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--resume {arguments.resume} is not a file written by --out: {error}")
    machine = read_machine()
    if machine["gpu"] is None:
        reason = machine.get("problem") or f"torch {machine['torch']} sees no CUDA device"
        print(f"no GPU: {reason}", file=sys.stderr)
        return NO_GPU
    print(f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}", flush=True)
    known = {check.name for check in CHECKS}
    records = {n: r for n, r in earlier.items() if r["verdict"] == "ok" and n in known}
    out = arguments.out.absolute()

    def write() -> None:
        seconds = round(time.monotonic() - started, 1)
        ordered = {check.name: records[check.name] for check in CHECKS if check.name in records}
        facts = {"limit_s": arguments.limit, "seconds": seconds, "summary": summarize(records)}
        write_json(out, {"machine": machine, **facts, "checks": ordered})

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the checks, as Ctrl-C does
    write()
    Prover(CHECKS, "cuda", FOLDER, started + arguments.limit, records, write).run()
    print(f"{summarize(records)}; {out}")
    return exit_code(records)


if __name__ == "__main__":
    sys.exit(main())
