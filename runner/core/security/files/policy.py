"""The part of the `security` config that concerns files, with resource limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.core.schemas.security import SecurityConfig, SecurityLevel

GIB = 1 << 30


@dataclass(frozen=True)
class FileLimits:
    """Limits on a file's expanded size, and on the cost of examining it."""

    expanded: int = GIB  # content bytes allowed regardless of the ratio
    ratio: float = 64.0  # of content to file, above that
    depth: int = 64  # of nested containers
    cpu_s: float = 9.0  # sandbox CPU time, plus a second per MiB up to 32 MiB, then per 32 MiB
    memory: int = 5 * GIB // 2  # bytes for the sandbox, plus three times the file

    def may_expand(self, size: int) -> int:
        """Return how many bytes the content of a file of `size` bytes may take."""
        return max(self.expanded, int(size * self.ratio))


@dataclass(frozen=True)
class FilePolicy:
    """Which files are loaded, and how they are examined first."""

    level: SecurityLevel = SecurityLevel.standard
    allow_pickle: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    run_tree: tuple[Path, ...] = ()  # folders of this run tree, with trusted manifests
    limits: FileLimits = FileLimits()

    @classmethod
    def of(cls, config: SecurityConfig, run_tree: Sequence[Path] = ()) -> FilePolicy:
        """Create the policy of a config."""
        return cls(config.level, tuple(config.allow_pickle), tuple(config.pinned), tuple(run_tree))

    def allows_pickle(self, sha256: str) -> bool:
        """Whether a file with this digest may be unpickled, which can run any code."""
        return self.level is not SecurityLevel.strict and sha256 in self.allow_pickle
