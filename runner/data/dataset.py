"""What a data set is to the loader: samples by index, and what it says about itself.

Samples that cannot be used (cells that are no number, files that are no image) are found when the
data are opened, before the split into training and validation, so that the set of samples never
changes during a run and is the same when it is resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from runner.data.batch import Batch, Sizes
from runner.data.config import BadSamples, DataConfig
from runner.errors import DataError
from runner.techniques.base import Choice

KEY = "data.bad_samples"
NAMED = 5


class Dataset(ABC):
    """Samples by index. `fetch` must depend on nothing but its arguments.

    `train` and `validation` are the indices of the two parts; `in_memory` says that a fetch
    is a copy and nothing more, so that worker processes would only add copies.
    """

    sizes: Sizes
    train: np.ndarray  # int64 indices
    validation: np.ndarray
    in_memory: bool = True
    augments: bool = False  # fetch reads the seeds it is given
    sample_seconds: float | None = None  # what one sample took to fetch, where it was measured
    choices: tuple[Choice, ...] = ()  # what was inferred about the data, and from what

    @abstractmethod
    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """A batch on the CPU. `seeds` (uint64, one per sample) drive augmentation; None: none.

        The upper 32 bits of the seeds are the same for a whole epoch (see `order.sample_seeds`).
        Raises DataError naming the file, row or key of a bad sample.
        """


def drops_bad_samples(config: DataConfig) -> bool:
    """Whether samples that cannot be used are left out, where else the first one is an error."""
    return config.bad_samples is BadSamples.drop


def usable_samples(
    problems: Mapping[int, str], total: int, config: DataConfig, what: str, fix: str = ""
) -> tuple[Choice, ...]:
    """What is said of the bad ones among `total` samples; `problems` names each and its fault.

    Raises DataError for the first one unless `data.bad_samples=drop`, and also where they are
    more than the share `data.most_bad`.
    """
    if not problems:
        return ()
    listed = [problems[number] for number in sorted(problems)]
    if not drops_bad_samples(config):
        raise DataError(
            f"{what}: {listed[0]}; correct it, leave such samples out with "
            f"data.bad_samples=drop{fix}"
        )
    more = f"; and {len(listed) - NAMED:,} more" if len(listed) > NAMED else ""
    named = "; ".join(listed[:NAMED]) + more
    if len(listed) / total > config.most_bad:
        raise DataError(
            f"{what}: {len(listed):,} of {total:,} samples cannot be used, more than "
            f"data.most_bad={config.most_bad:g}: {named}"
        )
    return (Choice(KEY, f"{len(listed):,} of {total:,} left out", named),)
