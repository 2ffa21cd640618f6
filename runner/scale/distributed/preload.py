"""Imported by a run's fork server, which then ends with the process that started it."""

from runner.core.process_wait import die_with_parent

die_with_parent()  # each rank dies with the fork server

import torch._dynamo  # noqa: E402,F401  # which every optimizer of torch's imports

from runner.core.jobs import run_report as run  # noqa: E402,F401
from runner.core.record import tensorboard  # noqa: E402,F401
from runner.scale.distributed import rank  # noqa: E402,F401
