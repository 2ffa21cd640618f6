"""A user's token ids in `.bin` files, memory-mapped: no more of them is read than is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runner.data.config import Tokens
from runner.data.paths import check_link, existing, suggestion
from runner.data.windows import Stream, Windows
from runner.errors import ConfigError, DataError
from runner.security.files.policy import Policy


def tokens(config: Tokens, policy: Policy | None = None) -> Windows:
    """Windows of `data.sequence` ids; ids are checked against `data.vocab` as they are read."""
    if config.vocab < 2:
        raise ConfigError("data.vocab", f"{config.vocab} ids are too few", "use 2 or more")
    try:
        kind = np.dtype(config.dtype)
    except TypeError:
        kind = np.dtype(np.float32)
    if kind.kind not in "iu":
        raise ConfigError(
            "data.dtype", f"{config.dtype!r} is no integer type", "e.g. uint16 or int32"
        )
    path = existing(config.path)
    if path.is_dir():
        files = [_inside(path, name) for name in ("train.bin", "val.bin")]
        parts = tuple(_map(check_link(file, path, policy), kind) for file in files)
        train, validation = (
            Stream(ids, str(path / n))
            for ids, n in zip(parts, ("train.bin", "val.bin"), strict=True)
        )
    else:
        ids = _map(path, kind)
        cut = len(ids) - round(len(ids) * config.validation)
        train, validation = Stream(ids[:cut], str(path)), Stream(ids[cut:], str(path), cut)
    return Windows(train, validation, vocab=config.vocab, sequence=config.sequence, checked=False)


def _inside(folder: Path, name: str) -> Path:
    file = folder / name
    if not file.is_file():
        near = suggestion(name, (p.name for p in folder.iterdir()), "the folder has")
        raise ConfigError("data.path", f"{folder} has no {name}", near)
    return file


def _map(path: Path, kind: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if not size:
        raise DataError(f"{path}: the file is empty")
    if size % kind.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes are no whole number of {kind} ids; is data.dtype right, and "
            "the file complete?"
        )
    return np.memmap(path, dtype=kind, mode="r")
