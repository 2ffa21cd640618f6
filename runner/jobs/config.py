"""What can be done with a run: the `job` group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class JobKind(Enum):
    """What to do with the run."""

    train = "train"
    evaluate = "evaluate"
    doctor = "doctor"


@dataclass
class JobConfig:
    """Which job."""

    kind: JobKind = JobKind.train
