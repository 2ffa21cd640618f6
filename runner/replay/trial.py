"""One try at a captured step in a process of its own: `python -m runner.replay.trial`.

What it is to do comes as a line of JSON on the standard input, and the answer goes to a file, so
that nothing that the user's code prints gets in between. A process that hangs is ended with all
that it started, and so is one whose parent is gone: the standard input then ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from runner.captures.opening import open_capture
from runner.config import RunConfig
from runner.replay.attempt import attempt, said
from runner.replay.findings import Attempt
from runner.replay.reopen import config_of, reopened
from runner.security.secrets import door, permitted

TAIL = 2000  # characters of what a process that ended without an answer had said


def tried(
    path: Path,
    trusted: Sequence[str],
    without: Collection[str],
    settings: Mapping[str, str],
    timeout_s: float,
) -> Attempt:
    """The step of the capture in `path`, made in a new process that lives `timeout_s` at most."""
    with tempfile.TemporaryDirectory(prefix="runner-replay-") as folder:
        answer = Path(folder) / "answer.json"
        asked = {
            "path": str(path.absolute()),
            "answer": str(answer),
            "trusted": list(trusted),
            "may_read": permitted(),
            "without": sorted(without),
            "settings": dict(settings),
        }
        ended = _run(json.dumps(asked), Path(folder) / "said.txt", timeout_s)
        with suppress(OSError, ValueError, TypeError):
            return Attempt(**json.loads(answer.read_text("utf-8")))
        return Attempt(failed=ended)


def _run(asked: str, output: Path, timeout_s: float) -> str:
    """Let it run; in what way it ended, should there be no answer."""
    # -P and the path as it is here: modules come from where they came from for this process
    paths = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runner.replay.trial"],
            stdin=subprocess.PIPE, stdout=sink, stderr=sink, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        try:
            if process.stdin is not None:
                process.stdin.write(asked.encode() + b"\n")
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
    """Answer what stands on the standard input."""
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = _answer(asked)
    except Exception as error:
        found = Attempt(failed=said(error))
    Path(asked["answer"]).write_text(json.dumps(asdict(found)), "utf-8")
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()  # waits
    os.killpg(0, signal.SIGKILL)


def _answer(asked: Mapping[str, object]) -> Attempt:
    trusted = [str(name) for name in _list(asked["trusted"])]
    without = [str(name) for name in _list(asked["without"])]
    capture = open_capture(Path(str(asked["path"])))
    names = asked["may_read"]
    with door(None if names is None else [str(name) for name in _list(names)]):
        config = config_of(capture, trusted)
    settings = asked["settings"]
    if isinstance(settings, dict) and settings:
        config = changed(config, settings)
    with reopened(capture, config, without=without) as (run, batch):
        return attempt(run, batch, capture)


def changed(config: RunConfig, settings: Mapping[str, str]) -> RunConfig:
    """The same config with some keys of techniques set otherwise."""
    for key, value in settings.items():
        group, name, field = key.split(".")
        part = getattr(getattr(config, group), name)
        merged = OmegaConf.merge(OmegaConf.structured(part), {field: value})
        setattr(getattr(config, group), name, OmegaConf.to_object(merged))
    return config


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


if __name__ == "__main__":
    sys.exit(main())
