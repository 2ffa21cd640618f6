"""Labelled texts as padded bytes: a csv with a text and a label column, or a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from runner.data.batch import Batch, Sizes
from runner.data.config import Text
from runner.data.dataset import Dataset
from runner.data.labels import check_classes
from runner.data.order import split
from runner.data.paths import class_files, existing
from runner.data.table import Texts, read_table
from runner.errors import DataError
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice

PADDING = 256  # after the 256 bytes


class TextClassificationDataset(Dataset):
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
        known = {"classes": len(class_names), "vocab": PADDING + 1, "sequence": sequence}
        self.sizes = Sizes("classification", **known, class_names=class_names)

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


def text(config: Text, policy: FilePolicy | None = None) -> TextClassificationDataset:
    """The first `data.sequence` bytes of each text, padded, and its label."""
    path = existing(config.path)
    read = _from_folders(path, policy) if path.is_dir() else _from_table(config)
    texts, labels, classes, choices = read
    check_classes(classes, str(path))
    if longer := sum(len(content) > config.sequence for content in texts):
        reason = f"{longer:,} of {len(texts):,} texts are longer; only their beginning is read"
        choices = (*choices, Choice("data.sequence", config.sequence, reason))
    parts = split(len(texts), config.validation, config.split_seed, str(path))
    return TextClassificationDataset(texts, labels, classes, config.sequence, parts, choices)


Labelled = tuple[list[bytes], np.ndarray, tuple[str, ...], tuple[Choice, ...]]
"""Texts, their labels, the names of the classes, and what was left out."""


def _from_table(config: Text) -> Labelled:
    table = read_table(config, {"data.text": config.text, "data.target": config.target})
    texts, labels = (cast("Texts", table.columns[name]) for name in (config.text, config.target))
    encoded = [word.encode() for word in texts.words]
    contents = [encoded[code] for code in texts.codes.tolist()]
    return contents, labels.codes, labels.words, table.choices


def _from_folders(root: Path, policy: FilePolicy | None) -> Labelled:
    folders = class_files(root, policy)
    texts, labels = [], []
    for label, (folder, files) in enumerate(folders.items()):
        if not files:
            raise DataError(f"{folder}: the class has no files")
        for file in files:
            texts.append(file.read_bytes())
            labels.append(label)
            if not texts[-1].strip():
                raise DataError(f"{file}: the text is empty; fill or remove the file")
    return texts, np.array(labels), tuple(folder.name for folder in folders), ()
