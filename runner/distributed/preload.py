"""Imports of a run's fork server, which ends with the process that started it."""

from runner.parent_death import die_with_parent

die_with_parent()  # each rank dies with it in turn

import torch._dynamo  # noqa: E402,F401  # which every optimizer of torch's imports

from runner.distributed import rank  # noqa: E402,F401
from runner.record import tensorboard  # noqa: E402,F401
from runner.report import run  # noqa: E402,F401
