"""Labelled texts as padded bytes: a csv with a text and a label column, or a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from runner.data.batch import Batch, RowNames, Sizes
from runner.data.cells import Texts
from runner.data.config import Text
from runner.data.dataset import Dataset
from runner.data.folders import labelled_files, relative_names
from runner.data.labels import check_classes, trained_labels
from runner.data.open import PLAIN, Opening
from runner.data.saved_dataset import is_saved
from runner.data.table import read_table, split_values
from runner.data.usable import lacks_resources, leave_out
from runner.errors import ConfigError
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
        names: RowNames | None = None,
    ) -> None:
        self.rows = names or RowNames()
        rows = np.full((len(texts), sequence), PADDING, np.int16)  # a quarter of int64
        lengths = np.empty(len(texts), np.int64)
        for row, text in enumerate(texts):
            ids = np.frombuffer(text, np.uint8)[:sequence]
            rows[row, : len(ids)] = ids
            lengths[row] = len(ids)
        self.tokens, self.lengths = torch.from_numpy(rows), torch.from_numpy(lengths)
        self.target = torch.from_numpy(labels.astype(np.int64))
        self.positions = torch.arange(sequence)
        self.train, self.validation = parts
        self.choices = choices
        known = {"classes": len(class_names), "vocab": PADDING + 1, "sequence": sequence}
        self.sizes = Sizes("classification", **known, class_names=class_names)

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """A copy of the rows."""
        rows = torch.from_numpy(indices)
        mask = self.positions < self.lengths[rows, None]
        inputs = {"input_ids": self.tokens[rows].long(), "attention_mask": mask.long()}
        return inputs, self.target[rows]

    def labels(self) -> np.ndarray:
        """The class of each passage."""
        return self.target.numpy()


def cut(text: bytes, sequence: int) -> list[np.ndarray]:
    """Consecutive pieces of `sequence` bytes; a last one under half of that is left out."""
    ids = np.frombuffer(text, np.uint8)
    pieces = [ids[start : start + sequence] for start in range(0, len(ids), sequence)]
    return [piece for piece in pieces if 2 * len(piece) >= sequence] or pieces[:1]


def text(config: Text, opening: Opening = PLAIN) -> Dataset:
    """The first `data.sequence` bytes or tokens of each text, padded, and its label."""
    path = opening.root(config)
    passages = (path.is_dir() and not is_saved(path)) or (
        path.suffix == ".txt" and not opening.labelled
    )
    if passages and config.split_by is not None and opening.divides(config):
        problem = f"is for a column of a table, and {path} is a folder"
        raise ConfigError("data.split", problem, "use data.split=stratified or random")
    read = _from_folders(path, config, opening) if passages else _from_table(config, opening)
    texts, labels, classes, rows, choices, by = read
    sequence = config.sequence
    if opening.fitted is None:
        check_classes(classes, str(path))
    else:
        classes = opening.fitted.sizes.class_names
        sequence = opening.fitted.sizes.sequence or sequence
    strata = labels if opening.labelled else None
    *parts, more = opening.split(len(texts), config, str(path), strata, by)
    choices = (*choices, *more)
    if config.tokenizer is not None:
        from runner.data.tokenizer import TokenizedTexts, Tokenizer

        tokenizer = Tokenizer(config.tokenizer, opening.fitted)
        sequence, limits = tokenizer.length(sequence)
        known = {"classes": len(classes), "vocab": tokenizer.vocab, "sequence": sequence}
        made = Sizes("classification", **known, class_names=classes, padding=tokenizer.padding)
        sizes = made if opening.fitted is None else opening.fitted.sizes
        about = sizes, (parts[0], parts[1]), (*choices, *limits), rows
        return TokenizedTexts(tokenizer, texts, labels.astype(np.int64), *about)
    if longer := sum(len(content) > sequence for content in texts):
        reason = f"{longer:,} of {len(texts):,} texts are longer; only their beginning is read"
        choices = (*choices, Choice("data.sequence", sequence, reason))
    about_bytes = (parts[0], parts[1]), choices, rows
    return TextClassificationDataset(texts, labels, classes, sequence, *about_bytes)


Labelled = tuple[
    list[bytes], np.ndarray, tuple[str, ...], RowNames, tuple[Choice, ...], np.ndarray | None
]
"""Texts, their labels, the names of the classes, those of the texts, what was left out, and the
column that the texts are divided by."""


def _from_table(config: Text, opening: Opening) -> Labelled:
    needed = {"data.text": config.text}
    if opening.labelled:
        needed["data.target"] = config.target
    divides = config.split_by if opening.divides(config) else None
    if divides is not None:
        needed["data.split_by"] = divides
    table = read_table(config, needed, folder=opening.folder)
    by = None if divides is None else split_values(table, divides, config.split)
    texts = cast("Texts", table.columns[config.text])
    encoded = [word.encode() for word in texts.words]
    contents = [encoded[code] for code in texts.codes.tolist()]
    if not opening.labelled:
        return contents, np.zeros(len(contents), np.int64), (), table.rows, table.choices, None
    target = cast("Texts", table.columns[config.target])
    labels = target.codes
    if opening.fitted is not None:
        what = f"{table.path}: column {config.target!r}"
        labels = trained_labels(target.words, labels, opening.fitted.sizes.class_names, what)
    return contents, labels, target.words, table.rows, table.choices, by


def _from_folders(root: Path, config: Text, opening: Opening) -> Labelled:
    files, labels, names, skipped = labelled_files(root, opening, lambda file: True, "files")
    texts, bad = list[bytes](), dict[int, str]()
    for number, file in enumerate(files):
        content = b""
        try:
            content, problem = file.read_bytes(), "the text is empty"
        except OSError as error:
            if lacks_resources(error):
                raise
            problem = f"cannot be read ({error.strerror})"
        if content.strip():
            texts.append(content)
        else:
            bad[number] = f"{file}: {problem}"
    kept, choices = leave_out(bad, len(files), config)
    rows = relative_names(root, [files[number] for number in kept])
    return texts, labels[kept], names, rows, (*skipped, *choices), None
