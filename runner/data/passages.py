"""Labelled pieces of text as padded bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runner.batch import Batch, Sizes
from runner.data.source import Source
from runner.technique import Choice

PADDING = 256  # after the 256 bytes


class Passages(Source):
    """Batches of {input_ids, attention_mask} and labels, all int64; the mask is 1 on text.

    Ids are bytes, and 256 where a passage is shorter than `sequence`; longer ones are cut off.
    """

    def __init__(
        self,
        texts: Sequence[bytes | np.ndarray],
        labels: np.ndarray,
        class_names: tuple[str, ...],
        sequence: int,
        parts: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
    ) -> None:
        rows = np.full((len(texts), sequence), PADDING, np.int16)  # a quarter of int64
        lengths = np.empty(len(texts), np.int64)
        for row, text in enumerate(texts):
            ids = np.frombuffer(text, np.uint8)[:sequence]
            rows[row, : len(ids)] = ids
            lengths[row] = len(ids)
        self.ids, self.lengths = torch.from_numpy(rows), torch.from_numpy(lengths)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.positions = torch.arange(sequence)
        self.train, self.validation = parts
        self.choices = choices
        self.sizes = Sizes(
            "classification",
            classes=len(class_names),
            vocab=PADDING + 1,
            sequence=sequence,
            class_names=class_names,
        )

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """A copy of the rows."""
        rows = torch.from_numpy(indices)
        mask = self.positions < self.lengths[rows, None]
        inputs = {"input_ids": self.ids[rows].long(), "attention_mask": mask.long()}
        return inputs, self.labels[rows]


def cut(text: bytes, sequence: int) -> list[np.ndarray]:
    """Consecutive pieces of `sequence` bytes; a last one under half of that is left out."""
    ids = np.frombuffer(text, np.uint8)
    pieces = [ids[start : start + sequence] for start in range(0, len(ids), sequence)]
    return [piece for piece in pieces if 2 * len(piece) >= sequence] or pieces[:1]
