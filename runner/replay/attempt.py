"""The bad step made once more, here or in a process of its own, and whether it is bad again.

`python -m runner.replay.attempt` makes it: the request comes as a line of JSON on the standard
input, and the answer goes to a file, so that nothing that the user's code prints gets in between. A
process that hangs is ended with all that it started, and so is one whose parent is gone: the
standard input then ends.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.captures.reader import Capture, open_capture
from runner.config import RunConfig
from runner.data.batch import Batch
from runner.record.text import shorten
from runner.replay.findings import Attempt
from runner.replay.reopen import config_of, reopened
from runner.replay.statistics import bad_state
from runner.security.secrets import environment_access, permitted
from runner.training.run import Run
from runner.training.step import make_step

OF_STATE = ("weights", "buffers")  # kinds whose loss may well be finite
STILL = 0.5  # of what was recorded: a spike that is larger is one still
SAME = 1e-3  # relative: another order of summation
TAIL = 2000  # characters of the output of a process that ended without an answer


def make_attempt(run: Run, batch: Batch, capture: Capture) -> Attempt:
    """Make the step as the run does, compiled where that is; its update is made too.

    What the step raises becomes part of the answer. The host waits for the device.
    """
    attempt = Attempt()
    run.model.train()
    start, undone = time.perf_counter(), False
    try:
        step, _ = make_step(run, batch)
    except Exception as error:
        attempt.error = _error_line(error)
    else:
        attempt.loss, attempt.grad_norm = float(step.loss), float(step.grad_norm)
        undone = bool(step.skipped)  # buffers too are then what they were before
    attempt.seconds = time.perf_counter() - start
    if attempt.error and not _is_exception(capture):
        attempt.failed, attempt.error = f"the step raised {attempt.error}", ""
    attempt.bad = not attempt.failed and _is_bad(attempt, capture)
    if capture.manifest.kind in OF_STATE:
        attempt.bad = attempt.bad or undone or bool(bad_state(run.model))
    attempt.techniques = [name for name, _ in run.techniques if name not in run.fallen]
    attempt.fallen = dict(run.fallen)
    attempt.notes = _technique_choices(run)
    return attempt


def is_spike(capture: Capture) -> bool:
    """Whether it was captured for being large."""
    numbers = (capture.loss, capture.grad_norm)
    other = _is_exception(capture) or capture.manifest.kind in OF_STATE
    return not other and None not in numbers and _are_finite(*numbers)


def is_same(attempt: Attempt, capture: Capture) -> bool:
    """Whether the numbers are those that the run recorded, to the last digits but three."""
    if _is_exception(capture):
        kind = attempt.error.partition(":")[0]
        return bool(kind) and kind in capture.manifest.message
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(_is_close(now, then) for now, then in pairs)


def _is_bad(attempt: Attempt, capture: Capture) -> bool:
    """Whether it went wrong in the way that the captured step did."""
    if _is_exception(capture):
        return bool(attempt.error)
    if not is_spike(capture):
        return not _are_finite(attempt.loss, attempt.grad_norm)
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(
        now is None or then is None or not math.isfinite(now) or now >= STILL * then
        for now, then in pairs
    )


def _is_exception(capture: Capture) -> bool:
    return capture.manifest.kind == "exception"


def _are_finite(*numbers: float | None) -> bool:
    """Whether all that are known are."""
    return all(number is None or math.isfinite(number) for number in numbers)


def _is_close(now: float | None, then: float | None) -> bool:
    if now is None or then is None:
        return now is then
    if not _are_finite(now, then):
        return str(now) == str(then)
    return math.isclose(now, then, rel_tol=SAME, abs_tol=1e-12)


def _error_line(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return shorten(f"{type(error).__name__}: {first}".rstrip(": "), 300)


def _technique_choices(run: Run) -> dict[str, str]:
    """The type, kernel or mode of each technique, which a verdict names."""
    choices: Mapping[str, Any] = {choice.key: choice.value for choice in run.choices}
    notes: dict[str, str] = {}
    for name, technique in run.techniques:
        for field in ("mode", "kernel", "dtype"):
            value = choices.get(f"optimization.{name}.{field}", vars(technique).get(field))
            if value is not None:
                notes[name] = str(getattr(value, "value", value))
    return notes


# -- in a process of its own ------------------------------------------------------------------


def attempt_apart(
    path: Path,
    trusted: Sequence[str],
    without: Collection[str],
    settings: Mapping[str, str],
    timeout_s: float,
) -> Attempt:
    """The step of the capture in `path`, made in a new process that lives `timeout_s` at most."""
    with tempfile.TemporaryDirectory(prefix="runner-replay-") as folder:
        answer = Path(folder) / "answer.json"
        request = {
            "path": str(path.absolute()),
            "answer": str(answer),
            "trusted": list(trusted),
            "may_read": permitted(),
            "without": sorted(without),
            "settings": dict(settings),
        }
        ended = _run_process(json.dumps(request), Path(folder) / "output.txt", timeout_s)
        with suppress(OSError, ValueError, TypeError):
            return Attempt(**json.loads(answer.read_text("utf-8")))
        return Attempt(failed=ended)


def _run_process(request: str, output: Path, timeout_s: float) -> str:
    """Let it run; the way in which it ended, should there be no answer."""
    # -P and the path as it is here: modules come from where they came from for this process
    paths = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runner.replay.attempt"],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        try:
            if process.stdin is not None:
                process.stdin.write(request.encode() + b"\n")
                process.stdin.flush()  # and not closed: that is how it would learn of our end
            process.wait(timeout_s)
            ended = f"the process ended with {process.returncode}"
        except BrokenPipeError:
            ended = "the process did not start"
        except subprocess.TimeoutExpired:
            return f"not done within replay.timeout_s={timeout_s:g}"
        finally:  # also on Ctrl-C: a compiler's workers are in the same group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    last = output.read_text("utf-8", "replace")[-TAIL:].strip().splitlines()
    return f"{ended}: {last[-1]}" if last else ended


def main() -> int:
    """Answer the request on the standard input."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        attempt = _answer(request)
    except Exception as error:
        attempt = Attempt(failed=_error_line(error))
    Path(request["answer"]).write_text(json.dumps(asdict(attempt)), "utf-8")
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()  # waits
    os.killpg(0, signal.SIGKILL)


def _answer(request: Mapping[str, Any]) -> Attempt:
    capture = open_capture(Path(request["path"]))
    with environment_access(request["may_read"]):
        config = config_of(capture, request["trusted"])
    config = with_settings(config, request["settings"])
    with reopened(capture, config, without=request["without"]) as (run, batch):
        return make_attempt(run, batch, capture)


def with_settings(config: RunConfig, settings: Mapping[str, str]) -> RunConfig:
    """The same config with some keys of techniques set otherwise."""
    for key, value in settings.items():
        group, name, field = key.split(".")
        part = getattr(getattr(config, group), name)
        merged = OmegaConf.merge(OmegaConf.structured(part), {field: value})
        setattr(getattr(config, group), name, OmegaConf.to_object(merged))
    return config


if __name__ == "__main__":
    sys.exit(main())
