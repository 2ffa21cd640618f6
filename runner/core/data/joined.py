"""A training and a validation set, given as two map-style data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

import numpy as np
from torch.utils.data import ConcatDataset

from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.user_dataset import UserDataset, find_collate
from runner.core.schemas.data import DataConfig

ATTRIBUTES = ("classes", "vocab", "sizes")
"""Of the training set; they describe both."""


@final
class JoinedDataset(UserDataset):
    """Samples of a training set and then of a validation set, each read and collated as its own."""

    def __init__(
        self,
        data: Any,
        validation: Any,
        name: str,
        config: DataConfig,
        opening: OpenOptions = DEFAULT_OPENING,
    ) -> None:
        joined: Any = ConcatDataset([data, validation])
        attributes = {name: getattr(data, name, None) for name in ATTRIBUTES}
        with suppress(TypeError, ValueError):  # none, or of another type
            targets = [np.asarray(getattr(part, "targets", None)) for part in (data, validation)]
            attributes["targets"] = np.concatenate(targets)
        vars(joined).update({k: value for k, value in attributes.items() if value is not None})
        self.parts, self.first_held_out = (data, validation), len(data)
        self.collates = find_collate(data), find_collate(validation)
        super().__init__(joined, name, config, replace(opening, trains_on_all=True))
        self.train, self.validation = np.split(self.train, [self.first_held_out])

    def part(self, rows: Sequence[int]) -> tuple[Any, int]:
        """Return the data set that has these samples, and the index of its first one."""
        held_out = rows[0] >= self.first_held_out
        if any((row >= self.first_held_out) != held_out for row in rows):
            raise IndexError("a batch has samples of both data sets")
        return self.parts[held_out], self.first_held_out if held_out else 0

    def collate_of(self, rows: Sequence[int]) -> Callable[[list[Any]], Any] | None:
        """Return the `collate_fn` for these samples; None without one."""
        return self.collates[rows[0] >= self.first_held_out]
