"""The Python standard library's own source: about 11 MB of real text, found on every machine."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path, PurePosixPath

import numpy as np

from runner.core.data.paths import suggestion
from runner.core.errors import ConfigError, DataError
from runner.core.schemas.data import StdlibParts, StdlibText
from runner.datasets.text import TextDataset, byte_sizes, cut_passages
from runner.datasets.tokens import ByteCodec, TokenStream, TokenWindows

# Packages installed beside the library, and tests, which some systems omit.
EXCLUDED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


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
