"""What the file checks let through: the part of `security` that is about files, and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.security.config import SecurityConfig, SecurityLevel

GIB = 1 << 30


@dataclass(frozen=True)
class FileLimits:
    """How large a file's content may become, and what examining one file may cost."""

    expanded: int = GIB  # bytes of content that are allowed at any ratio
    ratio: float = 64.0  # of content to file, beyond that
    depth: int = 64  # of nested containers
    cpu_s: float = 30.0  # of the sandbox, plus a second per 32 MiB of file
    memory: int = 5 * GIB // 2  # bytes of the sandbox, plus three times the file

    def may_expand(self, size: int) -> int:
        """How many bytes the content of a file of `size` bytes may take in memory."""
        return max(self.expanded, int(size * self.ratio))


@dataclass(frozen=True)
class FilePolicy:
    """Which files are loaded, and how they are examined before."""

    level: SecurityLevel = SecurityLevel.standard
    allow_pickle: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    own: tuple[Path, ...] = ()  # folders of this run tree, whose manifests are believed
    limits: FileLimits = FileLimits()

    @classmethod
    def of(cls, config: SecurityConfig, own: Sequence[Path] = ()) -> FilePolicy:
        """The policy that a config asks for."""
        return cls(config.level, tuple(config.allow_pickle), tuple(config.pinned), tuple(own))

    def allows_pickle(self, sha256: str) -> bool:
        """Whether the file of this digest may be unpickled, and so run any code."""
        return self.level is not SecurityLevel.strict and sha256 in self.allow_pickle
