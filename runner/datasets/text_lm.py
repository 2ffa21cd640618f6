"""data=text_lm: your own text for a language model, as bytes or as a tokenizer's ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runner.core.data.paths import check_link, existing_path
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.errors import ConfigError, DataError
from runner.core.interfaces.batch import TextCodec
from runner.core.schemas.data import DataConfig, TextLM
from runner.core.security.files.policy import FilePolicy
from runner.datasets.table_files import check_memory
from runner.datasets.tokens import TokenStream, TokenWindows, map_file, split_off_end

HEAD = 1 << 20  # bytes in which a file is judged to be text, and that a tokenizer is tried on
BYTES = 256
PATTERN = "*.txt"


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
        return np.concatenate([_with_newline(text.read_bytes()) for text in texts])

    train, validation = path / "train.txt", path / "val.txt"
    if not train.is_file():
        streams = split_off_end(config, path, opening, read(path))
    elif validation.is_file():
        parts = [TokenStream(read(part), str(part)) for part in (train, validation)]
        streams = (parts[0], parts[1])
    else:
        streams = split_off_end(config, train, opening, read(train))
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


def _with_newline(text: bytes) -> np.ndarray:
    """Return the bytes, ended by a newline, so that the texts of two files do not run together."""
    return np.frombuffer(text if text.endswith(b"\n") or not text else text + b"\n", np.uint8)
