"""A tokenizer in Hugging Face's format: texts as ids."""

from __future__ import annotations

import logging
import string
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from runner import rooms
from runner.core.data.paths import existing_path
from runner.core.data.preprocessing import Preprocessing
from runner.core.errors import ConfigError, SecurityError
from runner.core.findings import Choice, Trust
from runner.core.record.text import escape_control_chars, shorten
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.file_bytes import FileBytes
from runner.core.security.files.policy import FilePolicy
from runner.core.security.files.provenance import trust_by_digest
from runner.datasets.hugging_face_files import (
    TOKENIZER_FILE,
    import_transformers,
    load_pretrained,
    vocabulary_digest,
)
from runner.datasets.table_files import check_memory

log = logging.getLogger("runner")
KEY = "data.tokenizer"
LARGE_UNKNOWN_SHARE = 0.05  # of the tokens, from which they are named
CHUNK = 4096  # texts that are tokenized at a time
PIECE = 1 << 16  # characters of a long text at a time, up to the end of a line
PIECES = 256  # of a long text that are tokenized at a time
TRIAL_BYTES = 1 << 20  # of texts that are tokenized in the sandbox first
PROBE = string.printable + "a" * 64 + "0" * 64 + " " * 64  # a text with common characters


class Tokenizer:
    """A tokenizer loaded from a local folder, or its tokenizer.json alone.

    Raises ConfigError for anything else.

    A foreign tokenizer.json has to pass the sandbox first, with some of the `texts` to encode;
    SecurityError if it is refused.
    """

    def __init__(
        self,
        path: str,
        fitted: Preprocessing | None = None,
        policy: FilePolicy | None = None,
        texts: Sequence[bytes] = (),
    ) -> None:
        folder = existing_path(path, KEY)
        file = folder / TOKENIZER_FILE if folder.is_dir() else folder
        if file == folder and file.suffix != ".json":
            raise ConfigError(KEY, f"{folder} is a file", "name its folder, or a tokenizer.json")
        self.path, self.digest = path, vocabulary_digest(folder)
        if fitted is not None and fitted.tokenizer not in ("", self.digest):
            problem = f"{folder} has a different vocabulary from the trained model's"
            raise ConfigError(KEY, problem, "name the folder of its tokenizer")
        transformers = import_transformers(KEY)
        if file.is_file():
            _try_tokenizer(file, policy or FilePolicy(), texts)
        self.hf_tokenizer: Any
        if file == folder:
            self.hf_tokenizer = _load_file(transformers, file)
        else:
            auto = transformers.AutoTokenizer
            self.hf_tokenizer = load_pretrained(folder, KEY, auto.from_pretrained, use_fast=True)
        self.vocab = max(len(self.hf_tokenizer), max(self.hf_tokenizer.get_vocab().values()) + 1)
        padding = (self.hf_tokenizer.pad_token_id, self.hf_tokenizer.eos_token_id, 0)
        self.padding = int(next(number for number in padding if number is not None))

    def limit_length(self, sequence: int) -> tuple[int, tuple[Choice, ...]]:
        """Return the maximum tokens per text: `sequence`, limited by model_max_length."""
        model_limit = int(min(self.hf_tokenizer.model_max_length, 1 << 30))
        if model_limit >= sequence:
            return sequence, ()
        reason = "maximum length of the tokenizer's model"
        return model_limit, (Choice("data.sequence", model_limit, reason),)

    def encode(self, texts: Sequence[bytes], sequence: int) -> Iterator[np.ndarray]:
        """Yield the ids of each text, with special tokens, truncated to `sequence`."""
        for start in range(0, len(texts), CHUNK):
            part = [text.decode("utf-8", "replace") for text in texts[start : start + CHUNK]]
            for ids in self._ids(part, truncation=True, max_length=sequence):
                yield np.array(ids, np.int32)

    def name_unknown(self, ids: np.ndarray) -> tuple[Choice, ...]:
        """Return and log which share of the tokens is unknown, if it is a large one."""
        unknown = self.hf_tokenizer.unk_token_id
        share = 0.0 if unknown is None or not ids.size else float((ids == unknown).mean())
        if share < LARGE_UNKNOWN_SHARE:
            return ()
        reason = f"{share:.0%} of the tokens are unknown to it ({self.hf_tokenizer.unk_token})"
        log.warning("%s: %s: %s; name one of their language", KEY, self.path, reason)
        return (Choice(KEY, self.path, reason),)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._ids([text], add_special_tokens=False)[0]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self.hf_tokenizer.decode(ids, skip_special_tokens=True))

    def encode_file(self, path: Path) -> np.ndarray:
        """Return the ids of a text file, 1-d, without special tokens except a final EOS."""
        check_memory(path, path.stat().st_size, "its ids", "use a shorter text")
        rows = [np.zeros(0, np.int32)]
        with path.open(encoding="utf-8", errors="replace") as file:
            pieces = iter(partial(_read_piece, file), "")
            while batch := [*islice(pieces, PIECES)]:
                parts = self._ids(batch, add_special_tokens=False)
                rows += [np.array(part, np.int32) for part in parts]
        if self.hf_tokenizer.eos_token_id is not None:
            rows.append(np.array([self.hf_tokenizer.eos_token_id], np.int32))
        return np.concatenate(rows)

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        try:
            ids: list[list[int]] = self.hf_tokenizer(texts, **plain, **options)["input_ids"]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of tokenizers; it is no Exception
                raise
            problem = f"{self.path}: it fails on a text: {shorten(str(error), 200)}"
            raise ConfigError(KEY, problem, "use another tokenizer") from None
        return ids


def _load_file(transformers: Any, path: Path) -> Any:
    try:
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # tokenizers may raise any type
        problem = f"{path} cannot be read ({shorten(' '.join(str(error).split()), 200)})"
        raise ConfigError(KEY, problem, "name a tokenizer.json of Hugging Face") from error


def _read_piece(file: TextIO) -> str:
    """Return the next piece of a text, up to the end of a line if one is near; "" at its end."""
    text = file.read(PIECE)
    return text if text.endswith("\n") else text + file.readline(PIECE)


def _try_tokenizer(path: Path, policy: FilePolicy, texts: Sequence[bytes]) -> None:
    """Encode some of the texts in the sandbox. Raises SecurityError if it fails."""
    if policy.level is SecurityLevel.off:
        return
    step = max(1, sum(map(len, texts)) // TRIAL_BYTES)
    sample = [*texts[::step], max(texts, key=len, default=b"")[:TRIAL_BYTES]]
    decoded = [PROBE, *(text[:TRIAL_BYTES].decode("utf-8", "replace") for text in sample)]
    make_sandbox = rooms.find("files", "sandbox", KEY)
    with FileBytes.open_copy(path) as data, make_sandbox() as sandbox:
        if trust_by_digest(path, data, policy) is Trust.UNTRUSTED:
            for reason in sandbox.try_tokenizer(data, path.name, decoded):
                raise SecurityError(escape_control_chars(f"{path}: refused: {reason}"))
