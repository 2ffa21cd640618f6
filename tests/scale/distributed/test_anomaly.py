"""Anomaly mode in several processes: each names the module of what is not finite in its part."""

from __future__ import annotations

import os
from pathlib import Path

from tests import runs
from tests.scale.distributed.runs import PATH

NET = """
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return (x - 1e4).sqrt()

class Net(nn.Module):
    def __init__(self, in_features, classes):
        super().__init__()
        self.first, self.root, self.last = nn.Linear(in_features, 8), Root(), nn.Linear(8, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(self.root(x) if self.training else x)
"""


def test_each_process_names_the_module_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    (tmp_path / "root_net.py").write_text(NET)
    typed = ["distributed=ddp", "distributed.processes=2", "data=cancer", "training.steps=2"]
    typed += ["model._target_=root_net.Net", "security.trusted=[root_net]", "debug=anomaly"]
    path = os.pathsep.join([str(tmp_path), PATH])
    ended = runs.command(tmp_path, *typed, *runs.QUICK, "hydra.run.dir=run", PYTHONPATH=path)
    assert ended.returncode == 4, ended.stderr  # all steps were skipped
    for folder in (tmp_path / "run", tmp_path / "run/ranks/1"):
        (fault,) = runs.faults(folder, "anomaly")
        assert fault["steps"] == [1, 2] and fault["action"] == "skipped"
        assert "root (Root)" in fault["message"]
