"""Samples that cannot be used: cells that are no number, files that are no image.

Which ones is found out when the data are opened, before the split into training and validation,
so that the set of samples never changes during a run and is the same when it is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.data.config import BadSamples, DataConfig
from runner.errors import DataError
from runner.technique import Choice

KEY = "data.bad_samples"
NAMED = 5


def dropping(config: DataConfig) -> bool:
    """Whether samples that cannot be used are left out, where else the first one is an error."""
    return config.bad_samples is BadSamples.drop


def left_out(
    problems: Sequence[str], total: int, config: DataConfig, what: str
) -> tuple[Choice, ...]:
    """What is said of the bad ones among `total` samples; `problems` has a line for each.

    Raises DataError where they are more than the share `data.most_bad`: something else is wrong.
    """
    if not problems:
        return ()
    more = len(problems) - NAMED
    named = "; ".join(problems[:NAMED]) + (f"; and {more:,} more" if more > 0 else "")
    share = len(problems) / total
    if share > config.most_bad:
        raise DataError(
            f"{what}: {len(problems):,} of {total:,} samples cannot be used, more than "
            f"data.most_bad={config.most_bad:g}: {named}"
        )
    return (Choice(KEY, f"{len(problems):,} of {total:,} left out", named),)
