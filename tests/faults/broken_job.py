"""User code of a sweep: a hook that breaks the job of each seed listed in BROKEN."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path

import torch

from runner import Hook
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run


class Break(Hook):
    """Breaks the run at its second step in the way that BROKEN names for its seed."""

    def on_step(self, run: Run, step: Step) -> None:
        how = json.loads(os.environ.get("BROKEN", "{}")).get(str(run.seed))
        if how is not None and step.number >= 2:
            getattr(self, how)(run)

    def raise_error(self, run: Run) -> None:
        raise ValueError("planted")

    def segfault(self, run: Run) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def exit_at_once(self, run: Run) -> None:
        os._exit(9)

    def kill(self, run: Run) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, run: Run) -> None:
        time.sleep(3600)

    def no_memory(self, run: Run) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.ones(2**28)

    def missing_file(self, run: Run) -> None:
        Path("no-such-file").read_bytes()

    def nan_weights(self, run: Run) -> None:
        for weight in run.model.parameters():
            weight.data.fill_(float("nan"))

    def full_disk(self, run: Run) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


WAYS: dict[str, tuple[tuple[str, ...], str]] = {  # statuses of the job, and a part of its reason
    "raise_error": (("failed",), "ValueError: planted"),
    "segfault": (("killed",), "SIGSEGV"),
    "exit_at_once": (("failed",), "it exited with code 9"),
    "kill": (("killed",), "SIGKILL"),
    "hang": (("timeout",), "not done within"),
    "no_memory": (("oom", "failed"), "memory"),
    "missing_file": (("failed",), "no-such-file"),
    "nan_weights": (("failed",), "finite"),
    "full_disk": (("failed",), "not be written"),
}
