"""Labelled texts as padded bytes: a csv with a text and a label column, or a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from runner.data.batch import Batch, Sizes
from runner.data.config import Text
from runner.data.dataset import Dataset, drops_bad_samples, report_bad_samples
from runner.data.labels import check_classes, encode
from runner.data.order import split
from runner.data.paths import class_files, class_folders, existing
from runner.data.table import read_table
from runner.errors import ConfigError, DataError
from runner.security.files.policy import Policy
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


def text(config: Text, policy: Policy | None = None) -> TextClassificationDataset:
    """The first `data.sequence` bytes of each text, padded, and its label."""
    if config.sequence < 1:
        raise ConfigError("data.sequence", f"{config.sequence} is no length", "use 1 or more")
    path = existing(config.path)
    problems: list[str] = []
    found = _from_folders(path, policy) if path.is_dir() else _from_table(config, problems)
    for name, content, _ in found:
        if not content.strip():
            if not drops_bad_samples(config):
                raise DataError(f"{name}: the text is empty")
            problems.append(f"{name}: the text is empty")
    found = [sample for sample in found if sample[1].strip()]
    choices = report_bad_samples(problems, len(found) + len(problems), config, str(path))
    texts = [content for _, content, _ in found]
    labels, classes = encode([label for _, _, label in found])
    check_classes(classes, str(path))
    longer = sum(len(content) > config.sequence for content in texts)
    if longer:
        reason = f"{longer:,} of {len(texts):,} texts are longer; only their beginning is read"
        choices = (*choices, Choice("data.sequence", config.sequence, reason))
    parts = split(len(texts), config.validation, config.split_seed, str(path))
    return TextClassificationDataset(texts, labels, classes, config.sequence, parts, choices)


Sample = tuple[str, bytes, str]
"""What a message calls a text, its bytes, and its label."""


def _from_table(config: Text, problems: list[str]) -> list[Sample]:
    """The rows of a table; where bad ones are dropped, `problems` has a line for each."""
    used = (config.text, config.target)
    table = read_table(config.path, drops_bad_samples(config), texts=used)
    table.column(config.text, "data.text")
    table.column(config.target, "data.target")
    columns = {name: table.columns[name].to_pylist() for name in used}
    empty = {
        row: f", column {name!r}: the value is missing"
        for name in used
        for row, value in enumerate(columns[name])
        if value is None or value == ""
    }
    if drops_bad_samples(config):
        table = table.without(empty)
        problems += table.problems
    elif empty:
        row = min(empty)
        raise table.missing(next(n for n in used if columns[n][row] in (None, "")), row)
    texts, labels = (
        [value for row, value in enumerate(columns[name]) if row not in empty] for name in used
    )
    return [
        (f"{table.path}: {table.where(row)}", str(content).encode(), str(label))
        for row, (content, label) in enumerate(zip(texts, labels, strict=True))
    ]


def _from_folders(root: Path, policy: Policy | None) -> list[Sample]:
    found: list[Sample] = []
    for folder in class_folders(root, policy):
        files = class_files(folder, root, policy)
        if not files:
            raise DataError(f"{folder}: the class has no files")
        found += [(str(file), file.read_bytes(), folder.name) for file in files]
    return found
