"""Checkpoints of ours, and files that would leave a mark if anything unpickled them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from runner.core.checkpoint.manifest import Manifest
from runner.core.record.storage import FileDigest
from runner.core.security.checksummed_json import to_checksummed_json
from runner.core.security.files.file_bytes import hash_file


class Mark:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def checkpoint(folder: Path, step: int = 7) -> Path:
    """As a run writes them; anybody can make a manifest that fits."""
    folder.mkdir(parents=True)
    save_file({"w": torch.arange(6.0)}, folder / "model.safetensors")
    torch.save({"model": {}, "state": {"step": step}}, folder / "state.pt")
    paths = (folder / name for name in ("model.safetensors", "state.pt"))
    files = {path.name: FileDigest(path.stat().st_size, hash_file(path)[0]) for path in paths}
    body = Manifest(step, False, files, "c0ffee" * 8, "0.1", "2.13.0", 1, "AVX2")
    (folder / "manifest.json").write_bytes(to_checksummed_json(asdict(body)))
    return folder
