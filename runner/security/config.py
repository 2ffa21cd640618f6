"""What is trusted: the `security` group."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SecurityConfig:
    """Whose code may run: torch's own classes, ours, and the packages named here."""

    trusted: list[str] = field(default_factory=list)  # e.g. [my_package]
