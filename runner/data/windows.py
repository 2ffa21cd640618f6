"""Windows over one long row of token ids: language modelling, where the target is the next id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runner.batch import Batch, Sizes
from runner.data.source import Source
from runner.errors import ConfigError, DataError


@dataclass(frozen=True)
class Stream:
    """One part's ids; `name` is what a message calls it, `start` where in the file it begins."""

    ids: np.ndarray
    name: str
    start: int = 0


class Windows(Source):
    """Batches of (ids, next ids), int64 [batch, sequence].

    An epoch of training is consecutive windows, from an offset that is another one each epoch, so
    that a model does not see the same window borders again. Validation windows are fixed.
    """

    augments = True  # the epoch's offset comes with the seeds

    def __init__(
        self, train: Stream, validation: Stream, *, vocab: int, sequence: int, checked: bool
    ) -> None:
        if sequence < 1:
            raise ConfigError("data.sequence", f"{sequence} is no length", "use 1 or more")
        self.streams = (train, validation)
        self.vocab, self.sequence, self.checked = vocab, sequence, checked
        self.sizes = Sizes("language_modelling", classes=vocab, vocab=vocab, sequence=sequence)
        # up to `sequence - 1` ids before the first window are left out, for the offset
        counts = ((len(train.ids) - sequence) // sequence, (len(validation.ids) - 1) // sequence)
        for stream, count in zip(self.streams, counts, strict=True):
            if count < 1:
                raise DataError(
                    f"{stream.name}: {len(stream.ids):,} tokens hold no window of data.sequence="
                    f"{sequence}; use a shorter one (training needs twice its length)"
                )
        self.train = np.arange(counts[0])
        self.validation = np.arange(counts[0], sum(counts))

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """The windows with these numbers; numbers from both parts are not mixed."""
        held_out = bool(indices[0] >= len(self.train))
        stream = self.streams[held_out]
        starts = (indices - len(self.train) * held_out) * self.sequence
        if seeds is not None and not held_out:
            starts += int(seeds[0] >> np.uint64(32)) % self.sequence
        windows = stream.ids[starts[:, None] + np.arange(self.sequence + 1)].astype(np.int64)
        if not self.checked:
            self._check(windows, starts, stream)
        ids = torch.from_numpy(windows)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _check(self, windows: np.ndarray, starts: np.ndarray, stream: Stream) -> None:
        if windows.max() < self.vocab and windows.min() >= 0:
            return
        row, column = np.argwhere((windows >= self.vocab) | (windows < 0))[0]
        position = stream.start + int(starts[row] + column)
        raise DataError(
            f"{stream.name}: the id at position {position:,} is {windows[row, column]}, and "
            f"data.vocab={self.vocab}; is it the right data.vocab, and the right data.dtype?"
        )
