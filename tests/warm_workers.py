"""Workers of benchmarks and replays are forked from a process that has imported torch.

They start as `spawn` starts them but for that: from the pickled question, with this environment.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import context
from pathlib import Path
from types import SimpleNamespace

from runner.core.security import child_process as process

ROOT = Path(__file__).parents[1]


class WarmProcess(context.ForkServerProcess):
    """Starts with the variables of its parent, not with those of the server."""

    def start(self) -> None:
        self.variables = dict(os.environ)
        os.environ["PYTHONPATH"] = str(ROOT)  # of a server that is started by this
        try:
            super().start()
        finally:
            os.environ.clear()
            os.environ.update(self.variables)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.variables)
        super().run()


def install() -> None:
    """From here on, in this process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo", "runner.core.build.build"])
    changed = {"get_context": lambda _: SimpleNamespace(Pipe=server.Pipe, Process=WarmProcess)}
    process.multiprocessing = SimpleNamespace(**vars(multiprocessing) | changed)  # type: ignore
