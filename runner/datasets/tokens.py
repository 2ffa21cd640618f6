"""Windows over long token streams, and token ids in memory-mapped `.bin` files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from runner.core.data.dataset import Dataset
from runner.core.data.paths import check_link, existing_path
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.errors import BadSample, ConfigError, DataError
from runner.core.interfaces.batch import Batch, Sizes, TextCodec
from runner.core.schemas.data import TextLM, Tokens

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class TokenStream:
    """Token ids of one split: `name` is for messages, `start` the offset of ids[0] in the file."""

    ids: np.ndarray
    name: str
    start: int = 0


class TokenWindows(Dataset):
    """Batches of (ids, next ids), int64 [batch, sequence].

    A training epoch is consecutive windows from an offset that changes each epoch, so that window
    borders vary. Validation windows are fixed.
    """

    augments = True  # the epoch's offset comes with the seeds
    tokenizer = ""  # digest of the tokenizer that made the ids
    codec: TextCodec | None = None  # from text to the ids and back, if it is known

    def __init__(
        self, train: TokenStream, validation: TokenStream, *, vocab: int, sequence: int
    ) -> None:
        self.streams = (train, validation)
        self.vocab, self.sequence = vocab, sequence
        self.sizes = Sizes("language_modelling", classes=vocab, vocab=vocab, sequence=sequence)
        # up to `sequence - 1` ids before the first window are left out, for the offset
        counts = ((len(train.ids) - sequence) // sequence, (len(validation.ids) - 1) // sequence)
        for stream, count in zip(self.streams, counts, strict=True):
            if count < 1:
                problem = f"{len(stream.ids):,} tokens are too few for data.sequence={sequence}"
                fix = "use a shorter one (training needs twice its length)"
                raise DataError(f"{stream.name}: {problem}; {fix}")
        self.train = np.arange(counts[0])
        self.validation = np.arange(counts[0], sum(counts))

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return the windows `indices`, all of one split; raise BadSample for ids out of range."""
        held_out = bool(indices[0] >= len(self.train))
        stream = self.streams[held_out]
        starts = (indices - len(self.train) * held_out) * self.sequence
        if seeds is not None and not held_out:
            starts += int(seeds[0] >> np.uint64(32)) % self.sequence
        windows = stream.ids[starts[:, None] + np.arange(self.sequence + 1)].astype(np.int64)
        if windows.max() >= self.vocab or windows.min() < 0:
            row, column = np.argwhere((windows >= self.vocab) | (windows < 0))[0]
            position = stream.start + int(starts[row] + column)
            problem = f"the id at position {position:,} is {windows[row, column]}"
            fix = f", but data.vocab={self.vocab}; check it and data.dtype"
            raise BadSample(int(row), f"{stream.name}: {problem}", fix)
        ids = torch.from_numpy(windows)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def tokens(config: Tokens, opening: OpenOptions = DEFAULT_OPENING) -> TokenWindows:
    """Open windows of `data.sequence` ids, checked against `data.vocab` as they are read.

    The ids of text files are kept in memory, 4 bytes each.
    """
    path, tokenizer = existing_path(config.path), None
    is_text = path.suffix == ".txt" or (path / "train.txt").is_file()
    if config.tokenizer is not None and (is_text or config.vocab is None):
        from runner.datasets.tokenizer import TRIAL_BYTES, Tokenizer

        head = list[bytes]()
        if is_text:
            with (path if path.is_file() else path / "train.txt").open("rb") as file:
                head = [file.read(TRIAL_BYTES)]
        tokenizer = Tokenizer(config.tokenizer, opening.fitted, opening.policy, head)
    elif is_text:
        problem = f"{path} is text, but data=tokens takes ids"
        raise ConfigError("data.tokenizer", problem, "name the folder of a tokenizer")
    vocab = config.vocab if tokenizer is None else tokenizer.vocab
    if vocab is None:
        raise ConfigError("data.vocab", "is required by data=tokens", "data.vocab=…")
    if vocab < 2:
        raise ConfigError("data.vocab", f"must be ≥ 2, got {vocab}")
    if config.dtype not in DTYPES:
        raise ConfigError("data.dtype", f"must be one of {', '.join(DTYPES)}, got {config.dtype}")
    if tokenizer is not None and is_text:
        streams = _streams(config, path, opening, "txt", tokenizer.encode_file)
    else:
        read = partial(map_file, kind=np.dtype(config.dtype))
        streams = _streams(config, path, opening, "bin", read)
    windows = TokenWindows(*streams, vocab=vocab, sequence=config.sequence)
    if tokenizer is not None and is_text:
        windows.tokenizer, windows.codec = tokenizer.digest, tokenizer
    return windows


def _streams(
    config: Tokens, path: Path, opening: OpenOptions, kind: str, read: Callable[[Path], np.ndarray]
) -> tuple[TokenStream, TokenStream]:
    """Return training and validation ids: two files of a folder, or one file and its end."""
    if path.is_dir():
        paths = (existing_path(f"{path}/{name}.{kind}") for name in ("train", "val"))
        files = [check_link(file_path, path, opening.policy) for file_path in paths]
        train, validation = (TokenStream(read(file), str(file)) for file in files)
        return train, validation
    return split_off_end(config, path, opening, read(path))


def split_off_end(
    config: Tokens | TextLM, path: Path, opening: OpenOptions, ids: np.ndarray
) -> tuple[TokenStream, TokenStream]:
    """Return training ids and those at the end, for validation; all of both if nothing is split."""
    start = len(ids) - round(len(ids) * config.validation) if opening.splits_samples(config) else 0
    validation = TokenStream(ids[start:], str(path), start)
    return (TokenStream(ids[:start], str(path)) if start else validation), validation


def map_file(path: Path, kind: np.dtype) -> np.ndarray:
    """Return the ids of a file, memory-mapped to read. Raises DataError."""
    size = path.stat().st_size
    if not size or size % kind.itemsize:
        problem = f"{size:,} bytes are not a multiple of the {kind} size" if size else "is empty"
        raise DataError(f"{path}: {problem}; check data.dtype and the file")
    return np.memmap(path, dtype=kind, mode="r")
