"""The `security` config group: trusted code, readable files, resource limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError, SecurityError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)
"""A plain dotted name."""
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class SecurityLevel(Enum):
    """The trust in unknown code and files."""

    off = "off"  # no checks, with a warning
    standard = "standard"  # unknown files are examined in a sandbox, with a warning
    strict = "strict"  # files are this run's own or pinned; no pickle; no foreign config


@dataclass
class LimitsConfig(Bounded, key="security.limits"):
    """Resource limits of a run, which saves and stops when it reaches one; null: no limit."""

    memory_mb: float | None = bounded(None, above=0)  # RAM, with data workers; null: no limit
    device_memory_mb: float | None = bounded(None, above=0)  # GPU memory; null: no limit
    disk_mb: float | None = bounded(None, above=0)  # growth of the run's folder; null: no limit
    hours: float | None = bounded(None, above=0)  # wall time since start or resume; null: no limit

    @property
    def has_limit(self) -> bool:
        """Whether any limit is set."""
        return any(value is not None for value in vars(self).values())


@dataclass
class SecurityConfig:
    """Trusted packages and files, readable variables, and limits at which a run saves and stops."""

    # off: no checks; standard: unknown files in a sandbox; strict: own or pinned files only
    level: SecurityLevel = SecurityLevel.standard
    trusted: list[str] = field(default_factory=list)  # packages allowed to run, e.g. [my_package]
    environment: list[str] = field(default_factory=list)  # variables that ${oc.env:NAME} may read
    allow_pickle: list[str] = field(default_factory=list)  # sha256 of files that may be unpickled
    pinned: list[str] = field(default_factory=list)  # sha256 of files known to be safe
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @property
    def trusted_packages(self) -> list[str]:
        """Packages from which a config may name classes; `*` if names are not checked."""
        return ["*"] if self.level is SecurityLevel.off else list(self.trusted)

    @property
    def readable_variables(self) -> list[str] | None:
        """Environment variables that a config may read; None: any."""
        return None if self.level is SecurityLevel.off else list(self.environment)

    def __post_init__(self) -> None:
        if "*" in self.trusted:
            fix = "list the packages that may run, or allow all code with security=off"
            raise SecurityError(f"security.trusted: '*' is not a package; {fix}")
        for name in ("allow_pickle", "pinned"):
            for digest in getattr(self, name):
                if not SHA256.fullmatch(digest):
                    fix = "use the 64 hexadecimal digits that job=scan shows"
                    raise ConfigError(f"security.{name}", f"{digest!r} is not a sha256", fix)
        if self.allow_pickle and self.level is SecurityLevel.strict:
            problem = "must be empty under security=strict: unpickling can run any code"
            fix = "use security=standard, or convert the file to safetensors on another machine"
            raise ConfigError("security.allow_pickle", problem, fix)
