"""Windows over long token streams: ids in memory-mapped `.bin` files, and text (data=text_lm)."""

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
from runner.core.schemas.data import DataConfig, TextLM, Tokens
from runner.core.security.files.policy import FilePolicy
from runner.datasets.table_files import check_memory

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
HEAD = 1 << 20  # bytes in which a file is judged to be text, and that a tokenizer is tried on
BYTES = 256
PATTERN = "*.txt"


Read = Callable[[Path], np.ndarray]
"""Reads the ids of a file."""


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
    config: Tokens | TextLM, path: Path, opening: OpenOptions, kind: str, read: Read
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


# -- data=text_lm: text as bytes or as a tokenizer's ids -------------------------------------------


class ByteCodec:
    """Text as the bytes of its UTF-8."""

    vocab = BYTES

    def encode_text(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode("utf-8", "surrogateescape"))  # as typed in a terminal

    def decode(self, ids: list[int]) -> str:
        """Return the text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")


def text_lm(config: TextLM, opening: OpenOptions = DEFAULT_OPENING) -> TokenWindows:
    """Open windows of `data.sequence` tokens over a text, split as data=tokens is.

    The bytes of one file are memory-mapped; those of a folder, and ids, are kept in memory.
    """
    path = existing_path(config.path)
    files = text_files(path, opening.policy)
    head = _check_text(files)
    tokenizer = None
    if config.tokenizer is not None:
        from runner.datasets.tokenizer import Tokenizer

        tokenizer = Tokenizer(config.tokenizer, opening.fitted, opening.policy, [head])
    elif opening.fitted is not None and opening.fitted.tokenizer:
        problem = "the model was trained on the ids of a tokenizer"
        raise ConfigError("data.tokenizer", problem, "name its folder or file")

    def read(source: Path) -> np.ndarray:
        texts = text_files(source, opening.policy)
        if tokenizer is not None:
            return np.concatenate([tokenizer.encode_file(text) for text in texts])
        if len(texts) == 1:
            return map_file(texts[0], np.dtype(np.uint8))
        check_memory(source, sum(f.stat().st_size for f in texts), "its text", "use fewer files")
        contents = (text.read_bytes() for text in texts)  # the texts of two do not run together
        ended = (t if t.endswith(b"\n") or not t else t + b"\n" for t in contents)
        return np.concatenate([np.frombuffer(text, np.uint8) for text in ended])

    has_train, has_validation = ((path / name).is_file() for name in ("train.txt", "val.txt"))
    if has_train and has_validation:
        streams = _streams(config, path, opening, "txt", read)
    else:
        source = path / "train.txt" if has_train else path
        streams = split_off_end(config, source, opening, read(source))
    codec: TextCodec = tokenizer or ByteCodec()
    windows = TokenWindows(*streams, vocab=codec.vocab, sequence=config.sequence)
    windows.codec, windows.tokenizer = codec, tokenizer.digest if tokenizer is not None else ""
    return windows


def text_files(path: Path, policy: FilePolicy | None) -> list[Path]:
    """Return the file, or the .txt files below a folder in order of their paths."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob(PATTERN))
    visible = [f for f in found if not any(p.startswith(".") for p in f.relative_to(path).parts)]
    files = [check_link(file, path, policy) for file in visible if file.is_file()]
    if not files:
        raise ConfigError("data.path", f"{path} has no {PATTERN} file", "name a text file")
    return files


def find_codec(config: DataConfig, policy: FilePolicy, digest: str) -> TextCodec:
    """Return what turns text into the ids of a trained model, without opening its data.

    `digest` is that of the tokenizer it was trained with. Raises ConfigError.
    """
    tokenizer = getattr(config, "tokenizer", None)
    if tokenizer is not None:
        from runner.datasets.tokenizer import Tokenizer

        loaded = Tokenizer(tokenizer, None, policy)
        if digest not in ("", loaded.digest):
            problem = f"{tokenizer} has a different vocabulary from the trained model's"
            raise ConfigError("data.tokenizer", problem, "name its tokenizer")
        return loaded
    if config.kind in ("text_lm", "stdlib_text") and not digest:
        return ByteCodec()
    problem = f"is required to turn text into the ids of data={config.kind}"
    raise ConfigError("data.tokenizer", problem, "name a tokenizer's folder, or its tokenizer.json")


def _check_text(files: list[Path]) -> bytes:
    """Return the head of the first file; DataError for a file that is empty or no text."""
    for file in files:
        with file.open("rb") as opened:
            head = opened.read(HEAD)
        if not head and len(files) == 1:
            raise DataError(f"{file}: is empty; name a text file")
        if b"\0" in head:
            raise DataError(f"{file}: is no text in UTF-8; save it as UTF-8")
    with files[0].open("rb") as opened:
        return opened.read(HEAD)
