"""A user's labelled text: a csv with a text and a label column, or a folder per class."""

from __future__ import annotations

from pathlib import Path

from runner.data.config import Text
from runner.data.labels import check_classes, encode
from runner.data.order import split
from runner.data.passages import Passages
from runner.data.paths import class_folders, existing
from runner.data.table import read_table
from runner.errors import ConfigError, DataError
from runner.technique import Choice


def text(config: Text) -> Passages:
    """The first `data.sequence` bytes of each text, padded, and its label."""
    if config.sequence < 1:
        raise ConfigError("data.sequence", f"{config.sequence} is no length", "use 1 or more")
    path = existing(config.path)
    names, texts, values = _from_folders(path) if path.is_dir() else _from_table(config)
    for name, content in zip(names, texts, strict=True):
        if not content.strip():
            raise DataError(f"{name}: the text is empty")
    labels, classes = encode(values)
    check_classes(classes, str(path))
    longer = sum(len(content) > config.sequence for content in texts)
    choices: tuple[Choice, ...] = ()
    if longer:
        reason = f"{longer:,} of {len(texts):,} texts are longer; only their beginning is read"
        choices = (Choice("data.sequence", config.sequence, reason),)
    parts = split(len(texts), config.validation, config.split_seed, str(path))
    return Passages(texts, labels, classes, config.sequence, parts, choices)


def _from_table(config: Text) -> tuple[list[str], list[bytes], list[str]]:
    """What a message calls each text, its bytes, and its label."""
    table = read_table(config.path)
    texts = table.column(config.text, "data.text")
    labels = table.column(config.target, "data.target")
    for name, column in ((config.text, texts), (config.target, labels)):
        for row, value in enumerate(column):
            if value is None or value == "":
                raise table.missing(name, row)
    names = [f"{table.path}: {table.where(row)}" for row in range(len(table))]
    return names, [str(t).encode() for t in texts], [str(v) for v in labels]


def _from_folders(root: Path) -> tuple[list[str], list[bytes], list[str]]:
    names: list[str] = []
    texts: list[bytes] = []
    labels: list[str] = []
    for folder in class_folders(root):
        files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        if not files:
            raise DataError(f"{folder}: the class has no files")
        for file in files:
            names.append(str(file))
            texts.append(file.read_bytes())
            labels.append(folder.name)
    return names, texts, labels
