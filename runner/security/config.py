"""The `security` config group: trusted code, readable files, resource limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError, SecurityError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)
"""A plain dotted name."""
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class SecurityLevel(Enum):
    """How much unknown code and files are trusted."""

    off = "off"  # nothing is checked, and a warning says so
    standard = "standard"  # unknown files are examined in a sandbox, with a warning
    strict = "strict"  # files are this run's own or pinned; no pickle; no foreign config


@dataclass
class LimitsConfig:
    """Resource limits of a run, which saves and stops when it reaches one; None: no limit."""

    memory_mb: float | None = bounded(None, above=0)  # of this process and its workers
    device_memory_mb: float | None = bounded(None, above=0)  # of the accelerator
    disk_mb: float | None = bounded(None, above=0)  # written to the run's folder
    hours: float | None = bounded(None, above=0)  # of wall time, since started or resumed

    def __post_init__(self) -> None:
        check_bounds(self, "security.limits")

    @property
    def any(self) -> bool:
        """Whether any limit is set."""
        return any(value is not None for value in vars(self).values())


@dataclass
class SecurityConfig:
    """Trusted packages, readable files and variables, and resource limits."""

    level: SecurityLevel = SecurityLevel.standard
    trusted: list[str] = field(default_factory=list)  # packages of yours, e.g. [my_package]
    environment: list[str] = field(default_factory=list)  # names that ${oc.env:…} may read
    allow_pickle: list[str] = field(default_factory=list)  # sha256 of files that may run code
    pinned: list[str] = field(default_factory=list)  # sha256 of files known to be good
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    @property
    def names(self) -> list[str]:
        """Packages from which a config may name classes; `*` if names are not checked."""
        return ["*"] if self.level is SecurityLevel.off else list(self.trusted)

    @property
    def readable(self) -> list[str] | None:
        """Environment variables that a config may read; None: any."""
        return None if self.level is SecurityLevel.off else list(self.environment)

    def __post_init__(self) -> None:
        if "*" in self.trusted:
            raise SecurityError(
                "security.trusted: '*' is not a package; list the packages that may run, or allow "
                "all code with security=off"
            )
        for name in ("allow_pickle", "pinned"):
            for digest in getattr(self, name):
                if not SHA256.fullmatch(digest):
                    fix = "use the 64 hexadecimal digits that job=scan shows"
                    raise ConfigError(f"security.{name}", f"{digest!r} is not a sha256", fix)
        if self.allow_pickle and self.level is SecurityLevel.strict:
            problem = "must be empty under security=strict: unpickling can run any code"
            fix = "use security=standard, or convert the file to safetensors on another machine"
            raise ConfigError("security.allow_pickle", problem, fix)
