"""Texts as the ids of a tokenizer in Hugging Face's format, padded to the longest of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.data.batch import Batch, RowNames, Sizes
from runner.data.dataset import Dataset
from runner.data.paths import existing
from runner.data.preprocessing import Preprocessing
from runner.errors import ConfigError, DataError
from runner.security.hugging_face import import_transformers, load_from, vocabulary_digest
from runner.techniques.base import Choice

KEY = "data.tokenizer"
MULTIPLE = 8  # of a batch's length: few shapes to compile for, and what tensor cores take
CHUNK = 4096  # texts that are tokenized at a time
PIECE = 1 << 16  # characters of a long text at a time, up to the end of a line


class Tokenizer:
    """A tokenizer out of a local folder. Raises ConfigError for what is none."""

    def __init__(self, path: str, fitted: Preprocessing | None = None) -> None:
        folder = existing(path, KEY)
        if not folder.is_dir():
            raise ConfigError(KEY, f"{folder} is a file", "name the folder that it lies in")
        self.digest = vocabulary_digest(folder)
        if fitted is not None and fitted.tokenizer not in ("", self.digest):
            problem = f"{folder} has another vocabulary than the one that the model was trained on"
            raise ConfigError(KEY, problem, "name the folder of that one")
        auto = import_transformers(KEY).AutoTokenizer
        self.of: Any = load_from(folder, KEY, auto.from_pretrained, use_fast=True)
        self.vocab = max(len(self.of), max(self.of.get_vocab().values()) + 1)
        padding = (self.of.pad_token_id, self.of.eos_token_id, 0)
        self.padding = int(next(number for number in padding if number is not None))

    def length(self, sequence: int) -> tuple[int, tuple[Choice, ...]]:
        """The most tokens of a text: `sequence`, or what the tokenizer says of its model."""
        most = int(min(self.of.model_max_length, 1 << 30))
        if most >= sequence:
            return sequence, ()
        return most, (Choice("data.sequence", most, "the tokenizer's model takes no more tokens"),)

    def encode(self, texts: Sequence[bytes], sequence: int) -> Iterator[list[int]]:
        """The ids of each text with the model's special tokens, at most `sequence` of them."""
        for start in range(0, len(texts), CHUNK):
            part = [text.decode("utf-8", "replace") for text in texts[start : start + CHUNK]]
            yield from self._ids(part, truncation=True, max_length=sequence)

    def stream(self, path: Path) -> np.ndarray:
        """The ids of a whole text file, one row without special tokens but an end."""
        with path.open(encoding="utf-8", errors="replace") as file:
            pieces = iter(lambda: file.readlines(PIECE), [])
            parts = self._ids(["".join(lines) for lines in pieces], add_special_tokens=False)
        end = [] if self.of.eos_token_id is None else [[self.of.eos_token_id]]
        rows = [np.array(part, np.int32) for part in [*parts, *end]]
        return np.concatenate([np.zeros(0, np.int32), *rows])

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        ids: list[list[int]] = self.of(texts, **plain, **options)["input_ids"]
        return ids


class TokenizedTexts(Dataset):
    """Batches of {input_ids, attention_mask} and labels, all int64; the mask is 1 on text.

    A batch is as long as its longest text, rounded up to a multiple of 8: the same for the same
    samples, whatever else is drawn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[bytes],
        target: np.ndarray,
        sizes: Sizes,
        parts: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
        names: RowNames | None = None,
    ) -> None:
        self.rows, self.tokenizer = names or RowNames(), tokenizer.digest
        self.sizes, self.choices, (self.train, self.validation) = sizes, choices, parts
        self.most = sizes.sequence or 1
        rows = [np.array(ids, np.int32) for ids in tokenizer.encode(texts, self.most)]
        self.lengths = np.array([len(ids) for ids in rows], np.int64)
        if empty := np.flatnonzero(self.lengths == 0)[:1].tolist():
            raise DataError(f"data.path: {self.rows(empty[0])}: the tokenizer makes nothing of it")
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.concatenate(rows)
        self.target = torch.from_numpy(target)
        if full := int((self.lengths == self.most).sum()):
            reason = f"{full:,} of {len(rows):,} texts fill it; what is longer is cut off"
            self.choices = (*self.choices, Choice("data.sequence", self.most, reason))

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """The texts, each followed by padding."""
        lengths = self.lengths[indices][:, None]
        width = min(-(-int(lengths.max()) // MULTIPLE) * MULTIPLE, self.most)
        places = np.arange(width)
        mask = places < lengths
        at = np.where(mask, self.starts[indices][:, None] + places, 0)
        ids = np.where(mask, self.tokens[at], self.sizes.padding or 0).astype(np.int64)
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask * 1)}
        return inputs, self.target[torch.from_numpy(indices)]

    def labels(self) -> np.ndarray | None:
        """The class of each text."""
        return self.target.numpy() if self.sizes.task == "classification" else None
