"""Labelled texts: a csv with text and label columns, a folder per class, or Python's library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import cast

import numpy as np
import torch

from runner.core.data.dataset import Dataset, class_labels
from runner.core.data.labels import (
    check_classes,
    labelled_files,
    relative_names,
    remap_labels,
    similar_labels,
)
from runner.core.data.paths import existing_path, suggestion
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.split import split_samples
from runner.core.data.usable import lacks_resources, usable_indices
from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice, notice
from runner.core.format import join_names
from runner.core.interfaces.batch import Batch, RowNames, Sizes
from runner.core.schemas.data import TEXT_HEAD_BYTES, StdlibParts, StdlibText, Text
from runner.datasets.cells import TextColumn
from runner.datasets.saved_dataset import is_saved
from runner.datasets.table import read_table, split_values
from runner.datasets.tokens import ByteCodec, TokenStream, TokenWindows

PADDING = 256  # after the 256 bytes
SYSTEM_SUFFIXES = {".db", ".ini", ".lnk", ".url"}  # files of file browsers, among texts
SIGNATURES = (
    *(b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"ID3"),
    *(b"%PDF-", b"PK\3\4", b"\x1f\x8b"),
)
"""First bytes of images, sound, PDF and archives."""
TEXT_BYTES = bytes({*range(7, 14), 27, *range(32, 127), *range(128, 256)})
LENGTH_MULTIPLE = 8  # of a batch's length: few shapes to compile for, and what tensor cores take
# Packages installed beside the library, and tests, which some systems omit.
EXCLUDED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


class TextDataset(Dataset):
    """Batches of {input_ids, attention_mask} and labels, all int64; the mask is 1 on text.

    Ids are bytes, padded with 256 to `sizes.sequence`; or those of a tokenizer, padded to the
    longest text of the batch, rounded up to a multiple of 8. Longer texts are truncated.
    """

    def __init__(
        self,
        texts: Iterable[np.ndarray],  # ids
        labels: np.ndarray,
        sizes: Sizes,
        parts: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
        names: RowNames | None = None,
        tokenizer: str = "",  # the digest of its vocabulary
    ) -> None:
        self.rows, self.sizes, self.choices = names or RowNames(), sizes, choices
        self.tokenizer, (self.train, self.validation) = tokenizer, parts
        self.max_length, self.padding = sizes.sequence or 1, sizes.padding or 0
        if not tokenizer:
            self.padding = PADDING
        ids = [text[: self.max_length] for text in texts]
        self.lengths = np.array([len(text) for text in ids], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.tokens, self.target = np.concatenate(ids), torch.from_numpy(labels.astype(np.int64))

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return the padded ids with their mask, and the labels."""
        lengths, width = self.lengths[indices][:, None], self.max_length
        if self.tokenizer:
            width = min(-(-int(lengths.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, width)
        positions = np.arange(width)
        mask = positions < lengths
        ids = self.tokens[np.where(mask, self.starts[indices][:, None] + positions, 0)]
        ids = np.where(mask, ids.astype(np.int64), self.padding)
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask * 1)}
        return inputs, self.target[torch.from_numpy(indices)]

    def labels(self) -> np.ndarray | None:
        """Return the class index of each text, or None if the task has none."""
        return class_labels(self.target, self.sizes)


def cut_passages(text: bytes, sequence: int) -> list[np.ndarray]:
    """Cut text into pieces of `sequence` bytes; a last piece under half of that is dropped."""
    ids = np.frombuffer(text, np.uint8)
    pieces = [ids[start : start + sequence] for start in range(0, len(ids), sequence)]
    return [piece for piece in pieces if 2 * len(piece) >= sequence] or pieces[:1]


def text(config: Text, opening: OpenOptions = DEFAULT_OPENING) -> TextDataset:
    """Open labelled texts: the first `data.sequence` bytes or tokens of each, and its label."""
    path, fitted = existing_path(config.path) / opening.folder, opening.fitted
    if fitted is not None and fitted.sizes.sequence:
        config = replace(config, sequence=fitted.sizes.sequence)
    folder = path.is_dir() and not is_saved(path)
    if folder and config.split_by is not None and opening.splits_samples(config):
        problem = f"needs a table column, but {path} is a folder"
        raise ConfigError("data.split", problem, "use data.split=stratified or random")
    from_folder = folder or (path.suffix == ".txt" and not opening.labelled)
    content = _from_folders(path, config, opening) if from_folder else _from_table(config, opening)
    texts, labels, classes, rows, choices, by = content
    sequence = config.sequence
    if fitted is None:
        check_classes(classes, str(path))
        if similar := similar_labels(classes):
            key = "data.path" if folder else "data.target"
            choices = (*choices, notice(key, "labels", similar))
    else:
        classes = fitted.sizes.class_names
    strata = labels if opening.labelled else None
    train, validation, chosen = split_samples(opening, len(texts), config, str(path), strata, by)
    choices = (*choices, *chosen)
    ids: Iterable[np.ndarray] = (np.frombuffer(encoded, np.uint8) for encoded in texts)
    vocab, padding, digest, tokenizer = PADDING + 1, None, "", None
    if config.tokenizer is not None:
        from runner.datasets.tokenizer import Tokenizer

        tokenizer = Tokenizer(config.tokenizer, fitted, opening.policy, texts)
        sequence, limits = tokenizer.limit_length(sequence)
        ids, choices = tokenizer.encode(texts, sequence), (*choices, *limits)
        vocab, padding, digest = tokenizer.vocab, tokenizer.padding, tokenizer.digest
    sizes = byte_sizes(classes, sequence, vocab, padding) if fitted is None else fitted.sizes
    data = TextDataset(ids, labels, sizes, (train, validation), choices, rows, digest)
    if tokenizer is not None:
        data.choices = choices = (*choices, *tokenizer.name_unknown(data.tokens))
    if (empty := np.flatnonzero(data.lengths == 0)).size:
        raise DataError(f"data.path: {rows(int(empty[0]))}: the tokenizer returns no tokens")
    if at_limit := int((data.lengths == sequence).sum()):
        reason = f"{at_limit:,} of {len(texts):,} texts reach it; longer ones are truncated"
        data.choices = (*choices, Choice("data.sequence", sequence, reason))
    return data


def byte_sizes(
    classes: tuple[str, ...], sequence: int, vocab: int = PADDING + 1, padding: int | None = None
) -> Sizes:
    """Return the sizes of labelled texts; by default ids are bytes."""
    sizes = Sizes("classification", classes=len(classes), class_names=classes)
    return replace(sizes, vocab=vocab, sequence=sequence, padding=padding)


def is_binary(content: bytes) -> bool:
    """Whether it begins like a binary format, or has control characters in its first 8 KiB."""
    head = content[:TEXT_HEAD_BYTES]
    control = len(head.translate(None, TEXT_BYTES))
    return head.startswith(SIGNATURES) or b"\0" in head or 100 * control > len(head)


LabelledTexts = tuple[
    list[bytes], np.ndarray, tuple[str, ...], RowNames, tuple[Choice, ...], np.ndarray | None
]
"""Texts, labels, class names, row names, choices, and the values of `data.split_by`."""


def _from_table(config: Text, opening: OpenOptions) -> LabelledTexts:
    needed = {"data.text": config.text}
    if opening.labelled:
        needed["data.target"] = config.target
    by = config.split_by if opening.splits_samples(config) else None
    if by is not None:
        needed["data.split_by"] = by
    table = read_table(config, needed, folder=opening.folder)
    values = None if by is None else split_values(table, by, config.split)
    texts = cast("TextColumn", table.columns[config.text])
    encoded = [word.encode() for word in texts.words]
    contents = [encoded[code] for code in texts.codes.tolist()]
    if not opening.labelled:
        return contents, np.zeros(len(contents), np.int64), (), table.rows, table.choices, None
    target = cast("TextColumn", table.columns[config.target])
    labels = target.codes
    if opening.fitted is not None:
        what = f"{table.path}: column {config.target!r}"
        labels = remap_labels(target.words, labels, opening.fitted.sizes.class_names, what)
    return contents, labels, target.words, table.rows, table.choices, values


def _from_folders(root: Path, config: Text, opening: OpenOptions) -> LabelledTexts:
    contents, problems, others = dict[Path, bytes](), dict[Path, str](), list[Path]()
    most = 2 * config.text_bytes + len(BOM_UTF8) + 1  # UTF-16 has two bytes for a letter

    def is_text(file: Path) -> bool:
        content = b""
        if file.suffix.lower() not in SYSTEM_SUFFIXES:
            try:
                with file.open("rb") as stream:
                    content, problems[file] = stream.read(most), "the text is empty"
            except OSError as error:
                if lacks_resources(error):
                    raise
                problems[file] = f"cannot be read ({error.strerror})"
        if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            content = content.decode("utf-16", "replace").encode()
        if file not in problems or is_binary(content):
            others.append(file)
            return False
        contents[file] = content.removeprefix(BOM_UTF8)[: config.text_bytes]
        return True

    files, labels, names, skipped = labelled_files(root, opening, is_text, "texts")
    if others:
        examples = join_names(relative_names(root, others).names)
        reason = f"left out: files that are not texts: {len(others):,}, {examples}"
        skipped = (Choice("data.path", str(root), reason), *skipped)
    texts, bad = list[bytes](), dict[int, str]()
    for number, file in enumerate(files):
        if contents[file].strip():
            texts.append(contents[file])
        else:
            bad[number] = f"{file}: {problems[file]}"
    usable, choices = usable_indices(bad, len(files), config)
    rows = relative_names(root, [files[number] for number in usable])
    return texts, labels[usable], names, rows, (*skipped, *choices), None


# -- the Python standard library's own source: about 11 MB of text, found on every machine ---------


def stdlib_text(config: StdlibText) -> TokenWindows:
    """Open the concatenated bytes of all files; a file is wholly in one split."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path, text in read_stdlib():
        parts[_rank(path, config.split_seed) < config.validation].append(text)
    streams = [
        TokenStream(np.frombuffer(b"".join(part), np.uint8), f"the standard library's {name} files")
        for part, name in zip(parts, ("training", "validation"), strict=True)
    ]
    windows = TokenWindows(*streams, vocab=256, sequence=config.sequence)
    windows.codec = ByteCodec()
    return windows


def stdlib_parts(config: StdlibParts) -> TextDataset:
    """Open passages of `config.sequence` bytes, labelled by the package they are from."""
    if len(config.parts) < 2 or len(set(config.parts)) < len(config.parts):
        raise ConfigError("data.parts", f"must be two or more different parts, got {config.parts}")
    files: dict[str, list[tuple[str, bytes]]] = {}
    for path, text in read_stdlib():
        files.setdefault(PurePosixPath(path).parts[0].removesuffix(".py"), []).append((path, text))
    texts: list[np.ndarray] = []
    labels: list[int] = []
    held_out: list[bool] = []
    for label, part in enumerate(config.parts):
        ranked = sorted(files.get(part, []), key=lambda f: _rank(f[0], config.split_seed))
        if len(ranked) < 2:
            near = suggestion(part, [n for n, sources in files.items() if len(sources) > 1], "e.g.")
            problem = f"{part!r} has {len(ranked)} files in the standard library; 2 are needed"
            raise ConfigError("data.parts", problem, near)
        validation = min(max(round(len(ranked) * config.validation), 1), len(ranked) - 1)
        for number, (_, text) in enumerate(ranked):
            passages = cut_passages(text, config.sequence)
            texts += passages
            labels += [label] * len(passages)
            held_out += [number < validation] * len(passages)
    is_held_out = np.array(held_out)
    parts, names = (np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)), tuple(config.parts)
    return TextDataset(texts, np.array(labels), byte_sizes(names, config.sequence), parts)


def read_stdlib() -> list[tuple[str, bytes]]:
    """Return the relative path and content of each non-empty .py file, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]  # not entered
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    sources = sorted((p.relative_to(root).as_posix(), p) for p in paths if p.is_file())
    texts = [(name, text) for name, path in sources if (text := path.read_bytes())]
    if not texts:
        raise DataError(f"{root}: this Python has no library source; use data=text or data=tokens")
    return texts


def _rank(path: str, split_seed: int) -> float:
    """Return a hash in [0, 1) of seed and path, independent of other files."""
    digest = hashlib.blake2b(f"{split_seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
