"""What the gate lets through: the part of `security` that is about files, and its bounds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from runner.security.config import SecurityConfig, SecurityLevel


class Whose(IntEnum):
    """Who says that a file is what it should be; the order is that of what is believed."""

    FOREIGN = 0  # nobody
    PINNED = 1  # the user, by its digest: it is not damaged
    OWN = 2  # a manifest of this run tree, by its digest: and we wrote it


@dataclass(frozen=True)
class Bounds:
    """How large and how deep a file may be; what goes beyond is refused."""

    members: int = 100_000  # of an archive
    tensors: int = 100_000  # of a safetensors file
    ratio: float = 4.0  # of bytes in memory to bytes in the file
    inflated: float = 32.0  # of bytes in memory to bytes in a compressed .npz or .parquet
    sparse: float = 256.0  # the same of a small one: arrays of almost only zeros are honest
    small: int = 1 << 28  # bytes in memory that are small
    free: int = 1 << 24  # bytes in memory that are nobody's concern, whatever the ratio
    depth: int = 64  # of containers within containers
    # of containers together, tensors counted as one; twice as many opcodes, of which a parameter
    # takes 119 with its state in Adam: 16,000 parameters, and GPT-2 has 148
    items: int = 1_000_000
    text: int = 1 << 24  # characters of all text together
    header: int = 100 << 20  # bytes, of a safetensors file
    seconds: float = 300.0  # of the limited process
    memory_mb: float = 1024.0  # of the limited process, besides twice the file

    def may_inflate(self, size: int) -> float:
        """How many bytes so many compressed ones may become in memory."""
        return max(size * self.inflated, min(size * self.sparse, self.small)) + self.free


@dataclass(frozen=True)
class Policy:
    """Who decides about a file, and how."""

    level: SecurityLevel = SecurityLevel.standard
    allow_pickle: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    own: tuple[Path, ...] = ()  # folders of this run tree: what lies there was written by us
    bounds: Bounds = Bounds()

    @classmethod
    def of(cls, config: SecurityConfig, own: Sequence[Path] = ()) -> Policy:
        """The policy that a config asks for."""
        return cls(
            config.level,
            tuple(config.allow_pickle),
            tuple(config.pinned),
            tuple(own),
        )

    @property
    def digest(self) -> str:
        """One sha256 of what decides, so that two verdicts can be compared."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
